// Checks a gradient before a step along it changes anything.
#include <cmath>
#include <memory>

#include "rows.h"

namespace {

// The sum of a row's squares, in sixteen times four lanes whatever the SIMD level.
INLINE float square_sum(const float* g, int64_t dim) {
  Lanes sums[4] = {};
  auto take = [&](int64_t c, int64_t count, Lanes& sum) ALWAYS {
    const Lanes x = load(g, kFloat32, c, count);
    sum += x * x;
  };
  int64_t c = 0;
  for (; c + 4 * kLanes <= dim; c += 4 * kLanes)
    for (int64_t i = 0; i < 4; ++i) take(c + i * kLanes, kLanes, sums[i]);
  for (int64_t i = 0; i < 4; ++i)
    if (c + i * kLanes < dim)
      take(c + i * kLanes, std::min(kLanes, dim - c - i * kLanes), sums[i]);
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
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
