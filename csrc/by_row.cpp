#include "by_row.h"

#include <algorithm>

namespace {

constexpr int64_t kCacheLine = 64;
// Rows that are hashed together, in SIMD registers, before any of their counters is touched.
constexpr int64_t kBlockRows = 128;

float rounded_one_of(const Moment& m, float x, int64_t id) {
  return m.dtype == kFloat32 ? x : rounded_one(m, x, rounding_row_key(m.rounding_key, id));
}

// The counters of some rows, one hash row after the other.
struct Block {
  uint64_t mixed[kBlockRows];
  int64_t at[kBlockRows];

  void mix(const Squares& squares, Span rows) {
    const int64_t count = rows.end - rows.begin;
    for (int64_t i = 0; i < count; ++i) mixed[i] = mix_id(squares.hashed_id(rows.begin + i));
  }

  void find(const Moment& m, int64_t hash_row, int64_t count) {
    const int64_t* words = m.words + 4 * hash_row;
    for (int64_t i = 0; i < count; ++i)
      at[i] = hash_row * m.width + bucket_of(words, mixed[i], m.width);
  }
};

// Calls visit(block, rows) for all rows of a span in ascending order.
template <typename Visit>
void for_blocks(const Squares& squares, Span rows, Visit visit) {
  Block block;
  for (int64_t begin = rows.begin; begin < rows.end; begin += kBlockRows) {
    const Span part{begin, std::min(begin + kBlockRows, rows.end)};
    block.mix(squares, part);
    visit(block, part);
  }
}

// Calls visit(r, at) for every row r in ascending order, with its counter in each hash row. Hash
// rows share no counters, so different threads may take them.
template <typename Visit>
void for_counters(const Moment& m, const Squares& squares, int32_t threads, Visit visit) {
  const int64_t parts = std::min(std::max(1, threads), m.depth);
  for_parts(parts, [&](int64_t part) {
    const Span hash_rows = share(m.depth, part, parts);
    for_blocks(squares, Span{0, squares.rows}, [&](Block& block, Span rows) {
      for (int64_t j = hash_rows.begin; j < hash_rows.end; ++j) {
        block.find(m, j, rows.end - rows.begin);
        for (int64_t r = rows.begin; r < rows.end; ++r) visit(r, block.at[r - rows.begin]);
      }
    });
  });
}

// Calls visit(r, least) for every row r, with the least of its readings.
template <typename Visit>
void for_estimates(const Moment& m, const Squares& squares, int32_t threads, Visit visit) {
  const int64_t parts = std::max(1, threads);
  for_parts(parts, [&](int64_t part) {
    for_blocks(squares, share(squares.rows, part, parts), [&](Block& block, Span rows) {
      float least[kBlockRows];
      const int64_t count = rows.end - rows.begin;
      for (int32_t j = 0; j < m.depth; ++j) {
        block.find(m, j, count);
        for (int64_t i = 0; i < count; ++i) {
          const float reading = load_one(m, block.at[i]) * m.scale;
          least[i] = j == 0 ? reading : std::min(least[i], reading);
        }
      }
      for (int64_t i = 0; i < count; ++i) visit(rows.begin + i, least[i]);
    });
  });
}

// Prefetches all counters in the order of memory, if most of them are about to be read. In the
// order of rows, one cache miss would wait for the other.
void prefetch_counters(const Moment& m, int64_t rows) {
  const int64_t bytes = m.depth * m.width * bytes_of(m.dtype);
  if (rows * m.depth * kCacheLine < bytes / 2) return;
  for (int64_t at = 0; at < bytes; at += kCacheLine)
    __builtin_prefetch(static_cast<const char*>(m.data) + at);
}

// Calls visit(r, number) for every row r, with its own number of a row-wise moment.
template <typename Visit>
void for_numbers(const Moment& m, const Squares& squares, int32_t threads, Visit visit) {
  const int64_t parts = std::max(1, threads);
  for_parts(parts, [&](int64_t part) {
    const Span rows = share(squares.rows, part, parts);
    for (int64_t r = rows.begin; r < rows.end; ++r)
      visit(r, static_cast<float*>(m.data)[squares.id(r)]);
  });
}

// Rows one after the other, in ascending order.
void move_item_wise(const Moment& m, const Squares& squares) {
  Places places;
  int64_t ids[kPlaces];
  for (int64_t r = 0; r < squares.rows; ++r) {
    const Place place{&places, r % kPlaces};
    if (place.lane == 0) {
      for (int64_t i = 0; i < kPlaces; ++i)
        ids[i] = squares.hashed_id(std::min(r + i, squares.rows - 1));
      locate(m, ids, 1, places);
    }
    const float x = squares.values[r];
    float readings[kMaxDepth], least = 0.0f;
    for (int32_t j = 0; j < m.depth; ++j) {
      readings[j] = load_one(m, place.at(j)) * m.scale;
      least = j == 0 ? readings[j] : std::min(least, readings[j]);
    }
    const float moved = delta(m, least, x);
    squares.values[r] = least + moved;
    for (int32_t j = 0; j < m.depth; ++j) {
      const float reading = readings[j] + (m.form == kBucket ? delta(m, readings[j], x) : moved);
      store_one(m, place.at(j), rounded_one(m, reading * m.inverse_scale, place.rounding_row_key()));
      least = j == 0 ? reading : std::min(least, reading);
    }
    if (m.form == kBucket) squares.values[r] = least;
  }
}

}  // namespace

void add_by_row(const Moment& m, const Squares& squares, int32_t threads) {
  prefetch_counters(m, squares.rows);
  for_counters(m, squares, threads, [&](int64_t r, int64_t at) {
    const float share = squares.values[r] * m.weight * m.inverse_scale;
    store_one(m, at, rounded_one_of(m, load_one(m, at) + share, squares.hashed_id(r)));
  });
}

void read_by_row(const Moment& before, const Squares& squares, int32_t threads) {
  float* values = squares.values;
  if (before.kind == kRowWise)
    return for_numbers(before, squares, threads, [&](int64_t r, float& x) { values[r] = x; });
  prefetch_counters(before, squares.rows);
  for_estimates(before, squares, threads, [&](int64_t r, float least) { values[r] = least; });
}

void write_by_row(const Moment& m, const Squares& squares, int32_t threads) {
  const float* values = squares.values;
  if (m.kind == kRowWise)
    return for_numbers(m, squares, threads, [&](int64_t r, float& x) { x = values[r]; });
  for_counters(m, squares, threads, [&](int64_t r, int64_t at) {
    const float target = rounded_one_of(m, values[r] * m.inverse_scale, squares.hashed_id(r));
    // Written in both cases: a branch would often be predicted wrongly.
    const float old = load_one(m, at);
    store_one(m, at, target > old ? target : old);
  });
}

void move_by_row(const Moment& m, const Moment& before, const Squares& squares, int32_t threads) {
  float* values = squares.values;
  if (m.kind == kRowWise)
    return for_numbers(m, squares, threads,
                       [&](int64_t r, float& x) { values[r] = x = moved_by_row(m, x, values[r]); });
  switch (m.form) {
    case kConservative:
      prefetch_counters(m, squares.rows);
      for_estimates(before, squares, threads, [&](int64_t r, float least) {
        values[r] = moved_by_row(m, least, values[r]);
      });
      return write_by_row(m, squares, threads);
    case kLinear:
      return for_estimates(m, squares, threads,
                           [&](int64_t r, float least) { values[r] = least; });
    default:
      prefetch_counters(m, squares.rows);
      move_item_wise(m, squares);
  }
}
