// Second moments with one number a row, moved from the mean squares of rows.
#pragma once

#include "moment.h"

inline float load_one(const Moment& m, int64_t at) {
  if (m.dtype == kFloat32) return static_cast<const float*>(m.data)[at];
  const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(m.data)[at]) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// A row's number as the counters hold it, rounded by the same bits in every hash row.
inline float rounded_one(const Moment& m, float x, uint32_t rounding_row_key) {
  return m.dtype == kFloat32 ? x : rounded_to_bfloat16(x, noise_of_one(rounding_row_key, 0));
}

// The bfloat16 that a number is, if rounded_one() returned it.
inline uint16_t upper_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

inline void store_one(const Moment& m, int64_t at, float x) {
  if (m.dtype == kFloat32)
    static_cast<float*>(m.data)[at] = x;
  else
    static_cast<uint16_t*>(m.data)[at] = upper_half(x);
}

// Some rows of a step: their ids, and for each the mean square of its gradient.
struct Squares {
  const int64_t* ids;  // without them the ids ascend by one from first_id
  int64_t first_id;
  int64_t rows;
  int64_t first_row;
  float* values;

  int64_t id(int64_t r) const { return ids ? ids[r] : first_id + r; }
  int64_t hashed_id(int64_t r) const { return first_row + id(r); }
};

// Adds rows to a linear sketch, which no row may read before all rows of the step are in it.
void add_by_row(const Moment& m, const Squares& squares, int32_t threads);

// Moves all others, and leaves the second moment of each row in place of its mean square, in a
// linear sketch too. A conservative sketch is read as it was before the step: `before` is m, or has
// a copy of its counters where these are not all rows of the step.
void move_by_row(const Moment& m, const Moment& before, const Squares& squares, int32_t threads);

// The same in three parts, for a row-wise moment or a conservative sketch. read_by_row() leaves
// what is kept of each row; then each number has to become moved_by_row() of itself and the mean
// square of its row; write_by_row() takes what is then there.
void read_by_row(const Moment& before, const Squares& squares, int32_t threads);
void write_by_row(const Moment& m, const Squares& squares, int32_t threads);

INLINE float moved_by_row(const Moment& m, float old, float square) {
  return old + (m.kind == kRowWise ? delta(m, old, square) : square * m.weight);
}
