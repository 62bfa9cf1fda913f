// Steps along grouped gradients whose only moment has one number for each row: sixteen rows at a
// time, whose roots and quotients are computed together.
#include "grouped.h"

#include "columns.h"
#include "update.h"

namespace {

static_assert(kGroupedRows % kLanes == 0);

// From second moments to what the gradients of their rows are multiplied by, or divided by for each
// column if these have factors; see Update::of_row().
INLINE void find_factors(const Step& s, float* numbers) {
  for (int64_t at = 0; at < kGroupedRows; at += kLanes) {
    const Lanes size = root(load(numbers, kFloat32, at, kLanes)) / s.second_root;
    store(numbers, kFloat32, at, kLanes, s.columns ? size : 1.0f / (size + s.eps));
  }
}

template <int32_t P>
void move(const Step& s) {
  in_parallel(s, false, RowWork{1, 2}, [&](Span rows, Span columns, float* buffer) {
    const Update<P, NoMoment, NoMoment> update(s, columns);
    MeanSquares means(s, buffer + gradients_size(s));
    auto prefetch_row = [&](int64_t r) ALWAYS {
      prefetch(s.parameter, P, id_of(s, std::min(r, rows.end - 1)) * s.dim, columns);
    };
    for (int64_t r = rows.begin; r < std::min(rows.begin + kGroupedRows, rows.end); ++r)
      prefetch_row(r);
    for (int64_t begin = rows.begin; begin < rows.end; begin += kGroupedRows) {
      const int64_t count = std::min(kGroupedRows, rows.end - begin);
      const float* gradients[kGroupedRows];
      float numbers[kGroupedRows] = {};
      for (int64_t i = 0; i < count; ++i) {
        prefetch_row(begin + i + kGroupedRows);
        const float* g = gradients[i] = gradient_of<P>(s, begin + i, columns, buffer + i * s.dim);
        float& number = s.row_values[begin + i];
        const float square = means(InMemory{g}, hashed_id_of(s, begin + i));
        numbers[i] = number = moved_by_row(s.second, number, square);
      }
      find_factors(s, numbers);
      for (int64_t i = 0; i < count; ++i) {
        Row row{};
        enter(s, begin + i, row);
        update(row, nullptr, InMemory{gradients[i]}, numbers[i]);
      }
    }
  });
}

}  // namespace

bool are_rows_grouped(const Step& s) {
  return s.gradient.starts && is_by_row(s.second) && s.first.kind == kNone && !s.is_inspected;
}

void move_grouped_rows(const Step& s) {
  switch (s.dtype) {
    case kBFloat16: return move<kBFloat16>(s);
    case kFloat16: return move<kFloat16>(s);
    default: return move<kFloat32>(s);
  }
}
