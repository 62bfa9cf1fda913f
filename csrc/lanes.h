// Lanes: one SIMD register of float32. Vectors wider than a register compile too, but GCC compares
// and selects those lane by lane, which takes up to ten times as long.
//
// What is computed for a column does not depend on other columns, and sums over a row keep a fixed
// number of partial sums in a fixed order. So every level and every number of threads gives the
// same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "abi.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Functions that take a number of lanes are inlined, so that a constant kLanes is one load.
#define ALWAYS __attribute__((always_inline))
#define INLINE inline ALWAYS

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#else  // SSE2, NEON
constexpr int64_t kLanes = 4;
#define LANE_NUMBERS {0, 1, 2, 3}
#endif

typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t WordLanes __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfLanes __attribute__((vector_size(2 * kLanes)));

INLINE Lanes all(float x) { return Lanes{} + x; }
INLINE WordLanes bits_of(Lanes x) { return (WordLanes)x; }
INLINE Lanes lanes_of(WordLanes x) { return (Lanes)x; }

INLINE Lanes smaller(Lanes a, Lanes b) { return b < a ? b : a; }
INLINE Lanes larger(Lanes a, Lanes b) { return a < b ? b : a; }

INLINE Lanes root(Lanes x) {
  Lanes y;
  for (int64_t i = 0; i < kLanes; ++i) y[i] = __builtin_sqrtf(x[i]);
  return y;
}

INLINE WordLanes widened(HalfLanes h) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (WordLanes)_mm256_cvtepu16_epi32((__m128i)h);  // GCC makes five instructions of this one
#else
  return __builtin_convertvector(h, WordLanes);
#endif
}

// Whether a lane of a comparison's result is all ones.
INLINE bool is_any(WordLanes mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  uint32_t bits = 0;
  for (int64_t i = 0; i < kLanes; ++i) bits |= mask[i];
  return bits != 0;
#endif
}

// Half-precision numbers, in integer arithmetic so that no level needs an instruction of its own.
INLINE Lanes from_bfloat16(HalfLanes h) { return lanes_of(widened(h) << 16); }

// All ones in the lanes where a > b; both are below 2^31, and signed numbers compare faster.
INLINE WordLanes is_above(WordLanes a, uint32_t b) {
  return (WordLanes)((IntLanes)a > static_cast<int32_t>(b));
}

// What nearest rounding, ties to even, adds to bits of which it drops some.
INLINE WordLanes nearest(WordLanes bits, int dropped) {
  return ((bits >> dropped) & 1) + ((1u << (dropped - 1)) - 1);
}

// Adds `up` to the 16 bits that are dropped: nearest() rounds as torch does.
INLINE HalfLanes to_bfloat16(WordLanes bits, WordLanes up) {
  const WordLanes rounded = (bits + up) >> 16, is_nan = is_above(bits & 0x7fffffffu, 0x7f800000u);
  return __builtin_convertvector((rounded & ~is_nan) | (0x7fc0u & is_nan), HalfLanes);
}

INLINE Lanes from_float16(HalfLanes h) {
  const WordLanes bits = widened(h);
  const WordLanes sign = (bits & 0x8000u) << 16, magnitude = (bits & 0x7fffu) << 13;
  // Shift the exponent's bias by multiplying: this is right for subnormals too.
  const Lanes normal = lanes_of(magnitude) * lanes_of(WordLanes{} + 0x77800000u);  // 2^112
  const WordLanes is_special = (WordLanes)(magnitude >= 0x0f800000u);
  const WordLanes special = magnitude | 0x7f800000u;
  return lanes_of(sign | (special & is_special) | (bits_of(normal) & ~is_special));
}

// Adds `up` to the 13 bits that are dropped; `small` is what a subnormal is rounded to.
INLINE HalfLanes to_float16(WordLanes bits, WordLanes up, WordLanes small) {
  const WordLanes sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  const WordLanes is_nan = is_above(magnitude, 0x7f800000u);
  const WordLanes overflows = is_above(magnitude, 0x477fffffu);    // 65536 and above
  const WordLanes is_normal = is_above(magnitude, 0x387fffffu);    // 2^-14 and above
  const WordLanes normal = (magnitude - 0x38000000u + up) >> 13;
  const WordLanes finite = (normal & is_normal) | (small & ~is_normal);
  const WordLanes special = (0x7e00u & is_nan) | (0x7c00u & ~is_nan);
  const WordLanes half = (special & overflows) | (finite & ~overflows);
  return __builtin_convertvector(sign | half, HalfLanes);
}

// To nearest, ties to even.
INLINE HalfLanes to_half(int32_t dtype, Lanes x) {
  const WordLanes bits = bits_of(x), magnitude = bits & 0x7fffffffu;
  if (dtype == kBFloat16) return to_bfloat16(bits, nearest(bits, 16));
  // Adding 0.5 makes float32 round where a float16 subnormal ends.
  const WordLanes small = bits_of(lanes_of(magnitude) + all(0.5f)) - 0x3f000000u;
  return to_float16(bits, nearest(magnitude, 13), small);
}

// `count` numbers of a dtype at an element offset; lanes past the count are zero.
INLINE Lanes load(const void* data, int32_t dtype, int64_t at, int64_t count) {
  if (dtype == kFloat32) {
    Lanes x{};
    std::memcpy(&x, static_cast<const float*>(data) + at, count * sizeof(float));
    return x;
  }
  HalfLanes h{};
  std::memcpy(&h, static_cast<const uint16_t*>(data) + at, count * sizeof(uint16_t));
  return dtype == kBFloat16 ? from_bfloat16(h) : from_float16(h);
}

INLINE void store_half(void* data, int64_t at, int64_t count, HalfLanes h) {
  std::memcpy(static_cast<uint16_t*>(data) + at, &h, count * sizeof(uint16_t));
}

INLINE void store(void* data, int32_t dtype, int64_t at, int64_t count, Lanes x) {
  if (dtype == kFloat32) {
    std::memcpy(static_cast<float*>(data) + at, &x, count * sizeof(float));
    return;
  }
  store_half(data, at, count, to_half(dtype, x));
}

// As a template's argument: a dtype that is known only at run time.
constexpr int32_t kAny = -1;

template <int32_t T>
INLINE int32_t known_dtype(int32_t running) {
  return T == kAny ? running : T;
}

INLINE int64_t bytes_of(int32_t dtype) { return dtype == kFloat32 ? 4 : 2; }

// Calls visit(column, count) for runs of kLanes columns, and once for what is left over. The
// count of full runs is a constant, so that loads and stores become single instructions.
template <typename Visit>
INLINE void for_columns(int64_t begin, int64_t end, Visit visit) {
  int64_t column = begin;
  for (; column + kLanes <= end; column += kLanes) visit(column, kLanes);
  if (column < end) visit(column, end - column);
}
