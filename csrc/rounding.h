// Stochastic rounding, as sketchoptim/_rounding.py specifies it: 16 pseudo-random bits for each
// column of a row, from a counter-based generator of 32-bit words.
#pragma once

#include "lanes.h"

// MurmurHash3's finaliser, of one word or of several.
template <typename Word>
INLINE Word finalise(Word x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// Computed once for a row, from the key of the step and the row's id.
INLINE uint32_t rounding_row_key(uint32_t key, int64_t id) {
  return finalise(finalise(static_cast<uint32_t>(id)) + key);
}

// The noise of kLanes columns, and that of one.
INLINE WordLanes noise(uint32_t row_key, int64_t column) {
  const WordLanes lanes = LANE_NUMBERS;
  return finalise((lanes + static_cast<uint32_t>(column)) * 0x9e3779b1u + row_key) & 0xffffu;
}

INLINE uint32_t noise_of_one(uint32_t row_key, int64_t column) {
  return finalise(static_cast<uint32_t>(column) * 0x9e3779b1u + row_key) & 0xffffu;
}

// Stores numbers; bfloat16 ones go up or down with the probabilities that make them unbiased.
INLINE void store_rounded(void* data, int32_t dtype, int64_t at, int64_t count, Lanes x,
                          WordLanes noise) {
  if (dtype != kBFloat16) return store(data, dtype, at, count, x);
  const HalfLanes h = __builtin_convertvector((bits_of(x) + noise) >> 16, HalfLanes);
  std::memcpy(static_cast<uint16_t*>(data) + at, &h, count * sizeof(uint16_t));
}

// The bfloat16 that a number is rounded to, as a float32.
INLINE float rounded_to_bfloat16(float x, uint32_t noise) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits = (bits + noise) & 0xffff0000u;
  std::memcpy(&x, &bits, sizeof(bits));
  return x;
}
