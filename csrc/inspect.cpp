// Checks a gradient before a step along it changes anything.
#include <cmath>

#include "dense.h"
#include "largest.h"
#include "rows.h"
#include "columns.h"

namespace {

// Whether a row has a NaN, or a number above the largest one allowed.
bool is_refused(const float* g, int64_t dim, float largest) {
  return !std::all_of(g, g + dim, [&](float x) { return std::fabs(x) <= largest; });
}

template <int32_t P>
int32_t inspect_rows(const Step& s) {
  const Gradient& g = s.gradient;
  // A square is at most so many means, since a factor is at most the number of columns.
  const auto dim = static_cast<float>(s.dim), most_squares = s.columns ? dim * dim : dim;
  int64_t refused = 0;
  in_parallel(s, false, RowWork{1, 0}, [&](Span rows, Span columns, float* buffer) {
    int64_t mine = 0;
    MeanSquares mean_square(s, buffer + gradients_size(s));
    auto inspect = [&](int64_t r) ALWAYS {
      if (!g.starts) prefetch(g.values, P, next_of(s, r, rows) * s.dim, columns);
      const float* x = g.sums && !is_alone(g, r)
                           ? gathered<P>(s, r, columns, g.sums + g.slots[r] * s.dim)
                           : gradient_of<P>(s, r, columns, buffer);
      const float mean = mean_square(InMemory{x}, hashed_id_of(s, r));
      // Each number is within its bound if the sum of squares is within that of one square.
      if (!(mean * most_squares <= 0.5f * s.largest_gradient * s.largest_gradient))
        mine += is_refused(x, s.dim, s.largest_gradient);
      if (s.row_values) s.row_values[r] = mean;
    };
    in_groups(s, rows, [&](int64_t first, int64_t stride, int64_t count) ALWAYS {
      for (int64_t i = 0; i < count; ++i) inspect(first + i * stride);
    });
#pragma omp atomic
    refused += mine;
  });
  return refused == 0;
}

// Whether a dense gradient is refused whose mean squares the step finds itself.
bool is_dense_refused(const Step& s) {
  const int64_t parts = std::max(1, s.threads);
  int32_t refused = 0;
  with_dense_rows(s, [&](auto kind) {
    using Columns = typename decltype(kind)::type;
    for_parts(parts, [&](int64_t part) {
      const Span rows = share(s.gradient.rows, part, parts);
      Largest largest;
      if (Columns::kIsPlain)
        largest = largest_of<Columns::kValues>(s.gradient.values,
                                              {rows.begin * s.dim, rows.end * s.dim});
      for (int64_t r = rows.begin; !Columns::kIsPlain && r < rows.end; ++r) {
        const Columns g(s, r);
        for_columns(0, s.dim, [&](int64_t c, int64_t count) ALWAYS { largest.take(g(c, count)); });
      }
#pragma omp atomic
      refused |= !(largest.value() <= s.largest_gradient);
    });
  });
  return refused;
}

}  // namespace

extern "C" int32_t sketchoptim_inspect(const Step* step) {
  if (is_taken_row_by_row(*step)) return !is_dense_refused(*step);
  switch (step->dtype) {
    case kBFloat16: return inspect_rows<kBFloat16>(*step);
    case kFloat16: return inspect_rows<kFloat16>(*step);
    default: return inspect_rows<kFloat32>(*step);
  }
}
