// Checks a gradient before a step along it changes anything.
#include <cmath>
#include <memory>

#include "rows.h"

namespace {

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

// The sum of a row's squares.
INLINE float square_sum(const float* g, int64_t dim) {
  constexpr int64_t kSums = kPartialSums / kLanes, kQuarter = kSums / 4;
  Lanes sums[kSums] = {};
  auto take = [&](int64_t c, int64_t count, Lanes& sum) ALWAYS {
    const Lanes x = load(g, kFloat32, c, count);
    sum += x * x;
  };
  int64_t c = 0;
  for (; c + kPartialSums <= dim; c += kPartialSums)
    for (int64_t i = 0; i < kSums; ++i) take(c + i * kLanes, kLanes, sums[i]);
  for (int64_t i = 0; i < kSums; ++i)
    if (c + i * kLanes < dim)
      take(c + i * kLanes, std::min(kLanes, dim - c - i * kLanes), sums[i]);
  Lanes sixteen[kQuarter];
  for (int64_t i = 0; i < kQuarter; ++i)
    sixteen[i] = (sums[i] + sums[i + kQuarter]) + (sums[i + 2 * kQuarter] + sums[i + 3 * kQuarter]);
  const Four four = folded<Four>(folded<Eight>(sixteen));
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// Whether a row has a NaN, or a number above the largest one allowed.
bool is_refused(const float* g, int64_t dim, float largest) {
  return !std::all_of(g, g + dim, [&](float x) { return std::fabs(x) <= largest; });
}

template <int32_t P>
int32_t inspect_rows(const Step& s) {
  const Gradient& g = s.gradient;
  int64_t refused = 0;
  in_parallel(s, false, [&](Span rows, Span columns) {
    std::unique_ptr<float[]> buffer(new float[s.dim]);
    int64_t mine = 0;
    in_streams(s, rows, [&](int64_t r, int64_t next) ALWAYS {
      if (!g.starts) prefetch(g.values, P, next * s.dim, columns);
      const float* x = g.sums && !is_alone(g, r)
                           ? gathered<P>(s, r, columns, g.sums + g.slots[r] * s.dim)
                           : gradient_of<P>(s, r, columns, buffer.get());
      const float squares = square_sum(x, s.dim);
      // If the sum of squares is within the bound of one square, every number is within its own.
      if (!(squares <= s.largest_gradient * s.largest_gradient))
        mine += is_refused(x, s.dim, s.largest_gradient);
      if (s.row_values) s.row_values[r] = squares / static_cast<float>(s.dim);
    });
#pragma omp atomic
    refused += mine;
  });
  return refused == 0;
}

}  // namespace

extern "C" int32_t sketchoptim_inspect(const Step* step) {
  switch (step->dtype) {
    case kBFloat16: return inspect_rows<kBFloat16>(*step);
    case kFloat16: return inspect_rows<kFloat16>(*step);
    default: return inspect_rows<kFloat32>(*step);
  }
}
