// The sum of a row's squares, the same bits at every SIMD level.
#pragma once

#include "lanes.h"

constexpr int64_t kPartialSums = 64;  // of a row's squares, at every SIMD level

typedef float Eight __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16)));

// Each lane of the first half plus the lane at the same place of the second.
template <typename Half, typename Whole>
INLINE Half folded(const Whole& x) {
  static_assert(sizeof(Whole) == 2 * sizeof(Half));
  Half halves[2];
  std::memcpy(halves, &x, sizeof(x));
  return halves[0] + halves[1];
}

// A row in a buffer, column by column.
struct InMemory {
  const float* numbers;
  INLINE Lanes operator()(int64_t column, int64_t count) const {
    return load(numbers, kFloat32, column, count);
  }
};

// Of a row whose columns are g(column, count).
template <typename Columns>
INLINE float square_sum(const Columns& g, int64_t dim) {
  constexpr int64_t kSums = kPartialSums / kLanes, kQuarter = kSums / 4;
  Lanes sums[kSums];
  for (int64_t i = 0; i < kSums; ++i) sums[i] = Lanes{};
  auto take = [&](const auto& columns, int64_t c) ALWAYS {
    for (int64_t i = 0; i < kSums; ++i) {
      const Lanes x = columns(c + i * kLanes, kLanes);
      sums[i] += x * x;
    }
  };
  int64_t c = 0;
  for (; c + kPartialSums <= dim; c += kPartialSums) take(g, c);
  if (c < dim) {  // padded by zeros, so that the sums stay in registers
    float rest[kPartialSums];
    for (int64_t i = 0; i < kPartialSums; ++i) rest[i] = 0.0f;
    for_columns(c, dim, [&](int64_t at, int64_t count) ALWAYS {
      store(rest, kFloat32, at - c, count, g(at, count));
    });
    take(InMemory{rest}, 0);
  }
  Lanes sixteen[kQuarter];
  for (int64_t i = 0; i < kQuarter; ++i)
    sixteen[i] = (sums[i] + sums[i + kQuarter]) + (sums[i + 2 * kQuarter] + sums[i + 3 * kQuarter]);
  const Four four = folded<Four>(folded<Eight>(sixteen));
  return (four[0] + four[2]) + (four[1] + four[3]);
}
