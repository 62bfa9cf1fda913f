// A moment's part of a step, for one row or one run of columns of it.
#pragma once

#include "abi.h"
#include "hash.h"
#include "lanes.h"

// What a moment has to move by. A sum that has overflowed stays as it is: inf * 0 would spoil it.
template <typename Number>
INLINE Number delta(const Moment& m, Number old, Number x) {
  if (m.is_average) return (x - old) * m.weight;
  return m.decay_less_one == 0.0f ? x * m.weight : old * m.decay_less_one + x * m.weight;
}

INLINE bool is_element_sketch(const Moment& m) { return m.kind == kSketch && !m.is_by_row; }
INLINE bool is_linear(const Moment& m) { return is_element_sketch(m) && m.form == kLinear; }
INLINE bool is_item_wise(const Moment& m) { return is_element_sketch(m) && m.form != kLinear; }

// Where a row lives in a sketch: the first element of its bucket in each hash row, and its signs.
struct Place {
  int64_t at[kMaxDepth];
  float sign[kMaxDepth];
};

INLINE void locate(const Moment& m, int64_t id, int64_t dim, Place& place) {
  for (int32_t j = 0; j < m.depth; ++j) {
    const int64_t* words = m.words + 4 * j;
    place.at[j] = (j * m.width + bucket_of(words, id, m.width)) * dim;
    place.sign[j] = m.is_signed ? sign_of(words, id) : 1.0f;
  }
}

// The minimum of readings, or their median: the mean of the middle two when the depth is even.
INLINE Lanes combine(const Moment& m, Lanes* readings) {
  if (m.depth < 1) __builtin_unreachable();
  if (!m.is_signed) {
    Lanes least = readings[0];
    for (int32_t j = 1; j < m.depth; ++j) least = smaller(least, readings[j]);
    return least;
  }
  if (m.depth == 3) {
    const Lanes a = readings[0], b = readings[1], c = readings[2];
    return larger(smaller(a, b), smaller(larger(a, b), c));
  }
  Lanes sorted[kMaxDepth];
  for (int32_t j = 0; j < m.depth; ++j) {
    sorted[j] = readings[j];
    for (int32_t i = j; i > 0; --i) {
      const Lanes low = smaller(sorted[i - 1], sorted[i]);
      sorted[i] = larger(sorted[i - 1], sorted[i]);
      sorted[i - 1] = low;
    }
  }
  const Lanes middle = sorted[m.depth / 2];
  return m.depth % 2 ? middle : (sorted[m.depth / 2 - 1] + middle) * 0.5f;
}

INLINE void read(const Moment& m, const Place& place, int64_t column, int64_t count,
                 Lanes* readings) {
  for (int32_t j = 0; j < m.depth; ++j) {
    readings[j] = load(m.data, m.dtype, place.at[j] + column, count) * m.scale;
    if (m.is_signed) readings[j] *= place.sign[j];
  }
}

// The bits by which a row's numbers are rounded: the same in every hash row. Readings that were
// rounded each for itself would drift apart, and their minimum would be too small in the mean.
INLINE WordLanes rounding_bits(const Moment& m, int64_t position) {
  return m.dtype == kBFloat16 ? noise(m.rounding_key, static_cast<uint64_t>(position))
                              : WordLanes{};
}

INLINE void write(const Moment& m, const Place& place, int64_t row_at, int64_t column,
                  int64_t count, const Lanes* readings) {
  const WordLanes up = rounding_bits(m, row_at + column);
  for (int32_t j = 0; j < m.depth; ++j)
    store(m.data, m.dtype, place.at[j] + column, count,
          rounded(m.dtype, readings[j] * place.sign[j] * m.inverse_scale, up));
}

// Linear form, first pass: add x to every bucket of the row.
INLINE void add(const Moment& m, const Place& place, int64_t row_at, int64_t column,
                int64_t count, Lanes x) {
  const WordLanes up = rounding_bits(m, row_at + column);
  for (int32_t j = 0; j < m.depth; ++j) {
    const int64_t at = place.at[j] + column;
    const Lanes stored = load(m.data, m.dtype, at, count);
    const Lanes sum = stored + x * m.weight * place.sign[j] * m.inverse_scale;
    store(m.data, m.dtype, at, count, rounded(m.dtype, sum, up));
  }
}

// The row's estimate after the step; item-wise forms and exact storage move here.
INLINE Lanes update(const Moment& m, const Place& place, int64_t row_at, int64_t column,
                    int64_t count, Lanes x) {
  if (m.kind == kExact) {
    const Lanes old = load(m.data, m.dtype, row_at + column, count);
    const Lanes moved = old + delta(m, old, x);
    store(m.data, m.dtype, row_at + column, count, moved);
    return moved;
  }
  Lanes readings[kMaxDepth];
  read(m, place, column, count, readings);
  if (m.form == kLinear) return combine(m, readings);
  if (m.form == kBucket) {
    for (int32_t j = 0; j < m.depth; ++j) readings[j] += delta(m, readings[j], x);
    write(m, place, row_at, column, count, readings);
    return combine(m, readings);
  }
  const Lanes estimate = combine(m, readings);
  const Lanes moved = delta(m, estimate, x);
  for (int32_t j = 0; j < m.depth; ++j) readings[j] += moved;
  write(m, place, row_at, column, count, readings);
  return estimate + moved;
}
