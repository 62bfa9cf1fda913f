// Checks a gradient before a step along it changes anything.
#include <cmath>

#include "rows.h"
#include "square_sum.h"

namespace {

// Whether a row has a NaN, or a number above the largest one allowed.
bool is_refused(const float* g, int64_t dim, float largest) {
  return !std::all_of(g, g + dim, [&](float x) { return std::fabs(x) <= largest; });
}

template <int32_t P>
int32_t inspect_rows(const Step& s) {
  const Gradient& g = s.gradient;
  int64_t refused = 0;
  in_parallel(s, false, RowWork{1, 0}, [&](Span rows, Span columns, float* buffer) {
    int64_t mine = 0;
    auto inspect = [&](int64_t r) ALWAYS {
      if (!g.starts) prefetch(g.values, P, next_of(s, r, rows) * s.dim, columns);
      const float* x = g.sums && !is_alone(g, r)
                           ? gathered<P>(s, r, columns, g.sums + g.slots[r] * s.dim)
                           : gradient_of<P>(s, r, columns, buffer);
      const float squares = square_sum(x, s.dim);
      // If the sum of squares is within the bound of one square, every number is within its own.
      if (!(squares <= s.largest_gradient * s.largest_gradient))
        mine += is_refused(x, s.dim, s.largest_gradient);
      if (s.row_values) s.row_values[r] = squares / static_cast<float>(s.dim);
    };
    in_groups(s, rows, [&](int64_t first, int64_t stride, int64_t count) ALWAYS {
      for (int64_t i = 0; i < count; ++i) inspect(first + i * stride);
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
