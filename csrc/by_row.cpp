#include "by_row.h"

#include <algorithm>

namespace {

constexpr int64_t kCacheLine = 64;

float load_one(const Moment& m, int64_t at) {
  if (m.dtype == kFloat32) return static_cast<const float*>(m.data)[at];
  return load(m.data, m.dtype, at, 1)[0];
}

// As the table holds it: a row's number is rounded alike in every hash row.
float rounded_one(const Moment& m, float x, int64_t id) {
  return m.dtype == kFloat32 ? x : rounded(m.dtype, all(x), rounding_bits(m, id))[0];
}

void store_one(const Moment& m, int64_t at, float x) {
  if (m.dtype == kFloat32)
    static_cast<float*>(m.data)[at] = x;
  else
    store(m.data, m.dtype, at, 1, all(x));
}

int64_t address(const Moment& m, int32_t hash_row, int64_t id) {
  return hash_row * m.width + bucket_of(m.words + 4 * hash_row, id, m.width);
}

float least_reading(const Moment& m, int64_t id) {
  float least = load_one(m, address(m, 0, id)) * m.scale;
  for (int32_t j = 1; j < m.depth; ++j)
    least = std::min(least, load_one(m, address(m, j, id)) * m.scale);
  return least;
}

// Each hash row is a table of its own, so that the threads can share them out.
template <typename Visit>
void for_hash_rows(const Moment& m, int32_t threads, Visit visit) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int32_t j = 0; j < m.depth; ++j) visit(j);
}

template <typename Visit>
void for_rows(int64_t rows, int32_t threads, Visit visit) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; ++r) visit(r);
}

// Sends for the table from one end to the other, where most of it is about to be read: a processor
// that meets its buckets in the order of rows waits for one after the other.
void prefetch_table(const Moment& m, int64_t rows) {
  const int64_t bytes = m.depth * m.width * bytes_of(m.dtype);
  if (rows * m.depth * kCacheLine < bytes / 2) return;
  for (int64_t at = 0; at < bytes; at += kCacheLine)
    __builtin_prefetch(static_cast<const char*>(m.data) + at);
}

// Rows take their turn, in ascending order.
void move_item_wise(const Moment& m, const Squares& squares) {
  for (int64_t r = 0; r < squares.rows; ++r) {
    const int64_t id = squares.id(r);
    const float x = squares.values[r];
    float estimate = least_reading(m, id);
    const float moved = delta(m, estimate, x);
    float least = 0.0f;
    for (int32_t j = 0; j < m.depth; ++j) {
      const int64_t at = address(m, j, id);
      const float old = load_one(m, at) * m.scale;
      const float reading = old + (m.form == kBucket ? delta(m, old, x) : moved);
      store_one(m, at, rounded_one(m, reading * m.inverse_scale, id));
      least = j == 0 ? reading : std::min(least, reading);
    }
    squares.values[r] = m.form == kBucket ? least : estimate + moved;
  }
}

}  // namespace

void add_by_row(const Moment& m, const Squares& squares, int32_t threads) {
  prefetch_table(m, squares.rows);
  for_hash_rows(m, threads, [&](int32_t j) {
    for (int64_t r = 0; r < squares.rows; ++r) {
      const int64_t at = address(m, j, squares.id(r));
      const float share = squares.values[r] * m.weight * m.inverse_scale;
      store_one(m, at, rounded_one(m, load_one(m, at) + share, squares.id(r)));
    }
  });
}

void move_by_row(const Moment& m, const Moment& before, const Squares& squares, int32_t threads) {
  float* values = squares.values;
  if (m.kind == kRowWise) {
    for_rows(squares.rows, threads, [&](int64_t r) {
      float* value = static_cast<float*>(m.data) + squares.id(r);
      values[r] = *value += delta(m, *value, values[r]);
    });
    return;
  }
  switch (m.form) {
    case kConservative:
      prefetch_table(m, squares.rows);
      for_rows(squares.rows, threads, [&](int64_t r) {
        values[r] = least_reading(before, squares.id(r)) + values[r] * m.weight;
      });
      for_hash_rows(m, threads, [&](int32_t j) {
        for (int64_t r = 0; r < squares.rows; ++r) {
          const int64_t at = address(m, j, squares.id(r));
          const float target = rounded_one(m, values[r] * m.inverse_scale, squares.id(r));
          // Written either way: which of the two it is, a processor cannot guess.
          const float old = load_one(m, at);
          store_one(m, at, target > old ? target : old);
        }
      });
      return;
    case kLinear:
      for_rows(squares.rows, threads,
               [&](int64_t r) { values[r] = least_reading(m, squares.id(r)); });
      return;
    default:
      prefetch_table(m, squares.rows);
      move_item_wise(m, squares);
  }
}
