// A moment's part of a step, column by column of a row.
#pragma once

#include "abi.h"
#include "hash.h"
#include "rounding.h"

struct Span {
  int64_t begin, end;
};

inline Span share(int64_t total, int64_t part, int64_t parts) {
  return {total * part / parts, total * (part + 1) / parts};
}

// Calls visit(part) for every part, each on a thread of its own. One part alone does without OpenMP,
// which takes as long to begin as a small table takes in all.
template <typename Visit>
void for_parts(int64_t parts, Visit visit) {
  if (parts == 1) return visit(0);
#pragma omp parallel for schedule(static, 1) num_threads(parts)
  for (int64_t part = 0; part < parts; ++part) visit(part);
}

// What a moment has to move by. A sum that has overflowed stays inf: inf * 0 would be NaN.
template <typename Number>
INLINE Number delta(const Moment& m, Number old, Number x) {
  if (m.is_average) return (x - old) * m.weight;
  return m.decay_less_one == 0.0f ? x * m.weight : old * m.decay_less_one + x * m.weight;
}

inline bool is_element_sketch(const Moment& m) { return m.kind == kSketch && !m.is_by_row; }
inline bool is_linear(const Moment& m) { return m.kind == kSketch && m.form == kLinear; }
inline bool is_item_wise(const Moment& m) { return is_element_sketch(m) && m.form != kLinear; }
inline bool is_conservative(const Moment& m) {
  return m.kind == kSketch && m.form == kConservative;
}
inline bool is_by_row(const Moment& m) { return m.kind != kNone && m.is_by_row; }

// Rows that are hashed together, in SIMD registers.
constexpr int64_t kPlaces = 16;

// Where sixteen rows are in a sketch: the first element of their buckets in each hash row, their
// signs, and their rounding keys. All hash rows of a row are rounded by the same bits: readings
// rounded independently would drift apart, and their minimum would be biased towards zero.
struct Places {
  int64_t at[kMaxDepth][kPlaces];
  float signs[kMaxDepth][kPlaces];
  uint32_t rounding_row_keys[kPlaces];
};

inline void locate(const Moment& m, const int64_t* ids, int64_t dim, Places& places) {
  uint64_t mixed[kPlaces];
  for (int64_t i = 0; i < kPlaces; ++i) mixed[i] = mix_id(ids[i]);
  for (int32_t j = 0; j < m.depth; ++j) {
    const int64_t* words = m.words + 4 * j;
    for (int64_t i = 0; i < kPlaces; ++i)
      places.at[j][i] = (j * m.width + bucket_of(words, mixed[i], m.width)) * dim;
    if (!m.is_signed) continue;
    for (int64_t i = 0; i < kPlaces; ++i) places.signs[j][i] = sign_of(words, mixed[i]);
  }
  if (m.dtype != kBFloat16) return;
  for (int64_t i = 0; i < kPlaces; ++i)
    places.rounding_row_keys[i] = rounding_row_key(m.rounding_key, ids[i]);
}

// The place of one of the sixteen rows.
struct Place {
  const Places* places;
  int64_t lane;

  INLINE int64_t at(int32_t hash_row) const { return places->at[hash_row][lane]; }
  INLINE float sign(int32_t hash_row) const { return places->signs[hash_row][lane]; }
  INLINE uint32_t rounding_row_key() const { return places->rounding_row_keys[lane]; }
};

INLINE Lanes least(const Lanes* readings, int32_t depth) {
  Lanes x = readings[0];
  for (int32_t j = 1; j < depth; ++j) x = smaller(x, readings[j]);
  return x;
}

// The mean of the middle two when the depth is even.
INLINE Lanes median(const Lanes* readings, int32_t depth) {
  if (depth == 3) {
    const Lanes a = readings[0], b = readings[1], c = readings[2];
    return larger(smaller(a, b), smaller(larger(a, b), c));
  }
  Lanes sorted[kMaxDepth];
  for (int32_t j = 0; j < depth; ++j) {
    sorted[j] = readings[j];
    for (int32_t i = j; i > 0; --i) {
      const Lanes low = smaller(sorted[i - 1], sorted[i]);
      sorted[i] = larger(sorted[i - 1], sorted[i]);
      sorted[i - 1] = low;
    }
  }
  const Lanes middle = sorted[depth / 2];
  return depth % 2 ? middle : (sorted[depth / 2 - 1] + middle) * 0.5f;
}

// A row of a step and where it is: at, its first element in the parameter and in moments that
// are exact; first and second, its places in sketches by element. Its rounding key is for weights.
struct Row {
  int64_t number, at;
  uint32_t rounding_row_key;
  Place first, second;
};

INLINE void prefetch_one(const void* data, int32_t dtype, int64_t at) {
  __builtin_prefetch(static_cast<const char*>(data) + at * bytes_of(dtype));
}

// Each way of keeping a moment by element is a type, so that a row's loop over columns is compiled
// for the two it moves: it holds everything of them in registers and writes no estimate to memory.
// add() and move() take what a moment averages, a gradient or its square: add() is for sketches
// whose form is linear, to which every row is added before any is read; move() moves the moment and
// returns the estimate. prefetch_next() prefetches what move() will need of another row.
struct NoMoment {
  static constexpr bool kIsKept = false, kIsSketch = false;
  NoMoment(const Moment&, const Place&, int64_t) {}
  INLINE void prefetch_next(const Place&, int64_t, int64_t) const {}
  INLINE void add(int64_t, int64_t, Lanes) const {}
  INLINE Lanes move(int64_t, int64_t, Lanes x) const { return x; }
};

template <int32_t T>
struct ExactMoment {
  static constexpr bool kIsKept = true, kIsSketch = false;
  const Moment m;
  const int64_t row_at;

  ExactMoment(const Moment& moment, const Place&, int64_t row) : m(moment), row_at(row) {}
  INLINE void add(int64_t, int64_t, Lanes) const {}

  INLINE void prefetch_next(const Place&, int64_t row, int64_t column) const {
    prefetch_one(m.data, known_dtype<T>(m.dtype), row + column);
  }

  INLINE Lanes move(int64_t column, int64_t count, Lanes x) const {
    const int32_t dtype = known_dtype<T>(m.dtype);
    const Lanes old = load(m.data, dtype, row_at + column, count);
    const Lanes moved = old + delta(m, old, x);
    store(m.data, dtype, row_at + column, count, moved);
    return moved;
  }
};

// A sketch by element: a first moment is signed, a second one is not. T is the counters' dtype, and
// kDepth the depth, or kAny and 0 where they are known only at run time.
template <bool kIsFirst, int32_t T, int32_t kDepth>
struct SketchMoment {
  static constexpr bool kIsKept = true, kIsSketch = true;
  static constexpr int32_t kMost = kDepth ? kDepth : kMaxDepth;
  const Moment m;
  const uint32_t rounding_row_key;
  int64_t at[kMost];  // copies, which stay in registers
  float sign[kMost];

  SketchMoment(const Moment& moment, const Place& place, int64_t)
      : m(moment), rounding_row_key(m.dtype == kBFloat16 ? place.rounding_row_key() : 0) {
    for (int32_t j = 0; j < depth(); ++j) {
      at[j] = place.at(j);
      if (kIsFirst) sign[j] = place.sign(j);
    }
  }

  INLINE int32_t depth() const {
    if (m.depth < 1) __builtin_unreachable();
    return kDepth ? kDepth : m.depth;
  }

  INLINE int32_t dtype() const { return known_dtype<T>(m.dtype); }

  INLINE void prefetch_next(const Place& next, int64_t, int64_t column) const {
    for (int32_t j = 0; j < depth(); ++j) prefetch_one(m.data, dtype(), next.at(j) + column);
  }

  INLINE Lanes combine(const Lanes* readings) const {
    return kIsFirst ? median(readings, depth()) : least(readings, depth());
  }

  INLINE void read(int64_t column, int64_t count, Lanes* readings) const {
    for (int32_t j = 0; j < depth(); ++j) {
      readings[j] = load(m.data, dtype(), at[j] + column, count) * m.scale;
      if (kIsFirst) readings[j] *= sign[j];
    }
  }

  INLINE WordLanes rounding(int64_t column) const {
    return dtype() == kBFloat16 ? noise(rounding_row_key, column) : WordLanes{};
  }

  INLINE void write(int64_t column, int64_t count, const Lanes* readings) const {
    const WordLanes up = rounding(column);
    for (int32_t j = 0; j < depth(); ++j) {
      const Lanes x = kIsFirst ? readings[j] * sign[j] : readings[j];
      store_rounded(m.data, dtype(), at[j] + column, count, x * m.inverse_scale, up);
    }
  }

  INLINE void add(int64_t column, int64_t count, Lanes x) const {
    if (m.form != kLinear) return;
    const WordLanes up = rounding(column);
    for (int32_t j = 0; j < depth(); ++j) {
      const Lanes share = kIsFirst ? x * m.weight * sign[j] : x * m.weight;
      const Lanes sum = load(m.data, dtype(), at[j] + column, count) + share * m.inverse_scale;
      store_rounded(m.data, dtype(), at[j] + column, count, sum, up);
    }
  }

  INLINE Lanes move(int64_t column, int64_t count, Lanes x) const {
    Lanes readings[kMost];
    read(column, count, readings);
    if (m.form == kLinear) return combine(readings);
    if (m.form == kBucket) {
      for (int32_t j = 0; j < depth(); ++j) readings[j] += delta(m, readings[j], x);
      write(column, count, readings);
      return combine(readings);
    }
    const Lanes estimate = combine(readings), moved = delta(m, estimate, x);
    for (int32_t j = 0; j < depth(); ++j) readings[j] += moved;
    write(column, count, readings);
    return estimate + moved;
  }
};
