// A moment's part of a step, row by row. Each way of storing it is a function of its own, chosen
// once a step, so that the loop over columns knows its dtype, form and depth.
#pragma once

#include "abi.h"
#include "hash.h"
#include "lanes.h"

struct Span {
  int64_t begin, end;
};

// What a moment has to move by. A sum that has overflowed stays as it is: inf * 0 would spoil it.
template <typename Number>
INLINE Number delta(const Moment& m, Number old, Number x) {
  if (m.is_average) return (x - old) * m.weight;
  return m.decay_less_one == 0.0f ? x * m.weight : old * m.decay_less_one + x * m.weight;
}

// The bits by which a row's numbers are rounded: the same in every hash row. Readings that were
// rounded each for itself would drift apart, and their minimum would be too small in the mean.
INLINE WordLanes rounding_bits(const Moment& m, int64_t position) {
  return m.dtype == kBFloat16 ? noise(m.rounding_key, static_cast<uint64_t>(position))
                              : WordLanes{};
}

inline bool is_element_sketch(const Moment& m) { return m.kind == kSketch && !m.is_by_row; }
inline bool is_linear(const Moment& m) { return is_element_sketch(m) && m.form == kLinear; }
inline bool is_item_wise(const Moment& m) { return is_element_sketch(m) && m.form != kLinear; }
inline bool is_by_row(const Moment& m) { return m.kind != kNone && m.is_by_row; }

// Where a row lives in a sketch: the first element of its bucket in each hash row, and its signs.
struct Place {
  int64_t at[kMaxDepth];
  float sign[kMaxDepth];
};

inline void locate(const Moment& m, int64_t id, int64_t dim, Place& place) {
  for (int32_t j = 0; j < m.depth; ++j) {
    const int64_t* words = m.words + 4 * j;
    place.at[j] = (j * m.width + bucket_of(words, id, m.width)) * dim;
    place.sign[j] = m.is_signed ? sign_of(words, id) : 1.0f;
  }
}

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

// A sketch by element, with what is known when compiling: whether it holds a first moment (signed,
// of gradients) or a second (of their squares), the table's dtype, and the depth or 0.
template <bool kIsFirst, int32_t T, int32_t kDepth>
struct Table {
  const Moment m;
  const Place& place;
  const int64_t row_at;

  Table(const Moment& moment, const Place& where, int64_t row)
      : m(moment), place(where), row_at(row) {}

  INLINE int32_t depth() const {
    if (m.depth < 1) __builtin_unreachable();
    return kDepth ? kDepth : m.depth;
  }
  INLINE Lanes value(Lanes gradient) const { return kIsFirst ? gradient : gradient * gradient; }

  INLINE Lanes combine(const Lanes* readings) const {
    return kIsFirst ? median(readings, depth()) : least(readings, depth());
  }

  INLINE void read(int64_t column, int64_t count, Lanes* readings) const {
    for (int32_t j = 0; j < depth(); ++j) {
      readings[j] = load(m.data, T, place.at[j] + column, count) * m.scale;
      if (kIsFirst) readings[j] *= place.sign[j];
    }
  }

  INLINE WordLanes rounding(int64_t column) const {
    return T == kBFloat16 ? rounding_bits(m, row_at + column) : WordLanes{};
  }

  INLINE void write(int64_t column, int64_t count, const Lanes* readings) const {
    const WordLanes up = rounding(column);
    for (int32_t j = 0; j < depth(); ++j) {
      const Lanes x = kIsFirst ? readings[j] * place.sign[j] : readings[j];
      store_rounded(m.data, T, place.at[j] + column, count, x * m.inverse_scale, up);
    }
  }

  INLINE void add(int64_t column, int64_t count, Lanes x) const {
    const WordLanes up = rounding(column);
    for (int32_t j = 0; j < depth(); ++j) {
      const int64_t at = place.at[j] + column;
      const Lanes share = kIsFirst ? x * m.weight * place.sign[j] : x * m.weight;
      const Lanes sum = load(m.data, T, at, count) + share * m.inverse_scale;
      store_rounded(m.data, T, at, count, sum, up);
    }
  }
};

// Moves one row and leaves its estimates in `out`, given its gradients.
using MoveRow = void (*)(const Moment&, const Place&, int64_t row_at, Span,
                         const float* gradient, float* out);

template <bool kIsFirst, int32_t T>
void move_exact(const Moment& moment, const Place&, int64_t row_at, Span columns,
                const float* gradient, float* out) {
  const Moment m = moment;
  for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
    const Lanes g = load(gradient, kFloat32, c, count);
    const Lanes old = load(m.data, T, row_at + c, count);
    const Lanes moved = old + delta(m, old, kIsFirst ? g : g * g);
    store(m.data, T, row_at + c, count, moved);
    store(out, kFloat32, c, count, moved);
  });
}

template <bool kIsFirst, int32_t kForm, int32_t T, int32_t kDepth>
void move_sketch(const Moment& moment, const Place& place, int64_t row_at, Span columns,
                 const float* gradient, float* out) {
  const Table<kIsFirst, T, kDepth> table(moment, place, row_at);
  for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
    const Lanes x = table.value(load(gradient, kFloat32, c, count));
    Lanes readings[kDepth ? kDepth : kMaxDepth];
    table.read(c, count, readings);
    Lanes estimate;
    if (kForm == kBucket) {
      for (int32_t j = 0; j < table.depth(); ++j) readings[j] += delta(table.m, readings[j], x);
      estimate = table.combine(readings);
    } else {
      estimate = table.combine(readings);
    }
    if (kForm == kPaper) {
      const Lanes moved = delta(table.m, estimate, x);
      for (int32_t j = 0; j < table.depth(); ++j) readings[j] += moved;
      estimate += moved;
    }
    if (kForm != kLinear) table.write(c, count, readings);
    store(out, kFloat32, c, count, estimate);
  });
}

// Linear form, first pass: adds one row to its buckets; `out` is not used.
template <bool kIsFirst, int32_t T, int32_t kDepth>
void add_row(const Moment& moment, const Place& place, int64_t row_at, Span columns,
             const float* gradient, float*) {
  const Table<kIsFirst, T, kDepth> table(moment, place, row_at);
  for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
    table.add(c, count, table.value(load(gradient, kFloat32, c, count)));
  });
}

// The functions for a moment; nothing to call is a null pointer.
struct Moves {
  MoveRow add, move;
};

template <bool kIsFirst, int32_t T, int32_t kDepth>
Moves sketch_moves(int32_t form) {
  if (form == kPaper) return {nullptr, move_sketch<kIsFirst, kPaper, T, kDepth>};
  if (form == kBucket) return {nullptr, move_sketch<kIsFirst, kBucket, T, kDepth>};
  return {add_row<kIsFirst, T, kDepth>, move_sketch<kIsFirst, kLinear, T, kDepth>};
}

template <bool kIsFirst>
Moves moves_of(const Moment& m) {
  if (m.kind == kExact) {
    if (m.dtype == kBFloat16) return {nullptr, move_exact<kIsFirst, kBFloat16>};
    if (m.dtype == kFloat16) return {nullptr, move_exact<kIsFirst, kFloat16>};
    return {nullptr, move_exact<kIsFirst, kFloat32>};
  }
  if (!is_element_sketch(m)) return {nullptr, nullptr};
  if (m.dtype == kBFloat16)
    return m.depth == 3 ? sketch_moves<kIsFirst, kBFloat16, 3>(m.form)
                        : sketch_moves<kIsFirst, kBFloat16, 0>(m.form);
  return m.depth == 3 ? sketch_moves<kIsFirst, kFloat32, 3>(m.form)
                      : sketch_moves<kIsFirst, kFloat32, 0>(m.form);
}
