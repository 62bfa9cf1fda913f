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

// Weights of half precision, rounded by chance: the larger of its two neighbours with a probability
// equal to the distance from the smaller one. Beyond the largest finite number, to nearest.
INLINE HalfLanes to_half_by_chance(int32_t dtype, Lanes x, WordLanes noise) {
  const WordLanes bits = bits_of(x), magnitude = bits & 0x7fffffffu;
  const bool is_bfloat16 = dtype == kBFloat16;
  const WordLanes is_beyond = is_above(magnitude, is_bfloat16 ? 0x7f7f0000u : 0x477fe000u);
  if (is_bfloat16 && !is_any(is_beyond))
    return __builtin_convertvector((bits + noise) >> 16, HalfLanes);
  auto up = [&](int dropped) ALWAYS {
    return (nearest(bits, dropped) & is_beyond) | ((noise >> (16 - dropped)) & ~is_beyond);
  };
  if (is_bfloat16) return to_bfloat16(bits, up(16));
  // In units of 2^-40; the subnormals of float16 are 2^16 of them apart.
  const Lanes units = smaller(lanes_of(magnitude), all(0x1p-14f)) * 0x1p40f;
  const WordLanes small = ((WordLanes)__builtin_convertvector(units, IntLanes) + noise) >> 16;
  return to_float16(bits, up(13), small);
}

// Stores counters; bfloat16 ones go up or down with the probabilities that make them unbiased.
INLINE void store_rounded(void* data, int32_t dtype, int64_t at, int64_t count, Lanes x,
                          WordLanes noise) {
  if (dtype != kBFloat16) return store(data, dtype, at, count, x);
  store_half(data, at, count, __builtin_convertvector((bits_of(x) + noise) >> 16, HalfLanes));
}

// The bfloat16 that a number is rounded to, as a float32.
INLINE float rounded_to_bfloat16(float x, uint32_t noise) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits = (bits + noise) & 0xffff0000u;
  std::memcpy(&x, &bits, sizeof(bits));
  return x;
}
