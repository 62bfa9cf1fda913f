// Steps along grouped gradients whose only moment has one number for each row: sixteen rows at a
// time, whose roots and quotients are computed together.
#include "grouped.h"

#include "columns.h"
#include "update.h"

namespace {

static_assert(kGroupedRows % kLanes == 0);
constexpr int64_t kMostRegisters = 8;  // that a sum is in

// From second moments to what the gradients of their rows are multiplied by, or divided by for each
// column if these have factors; see Update::of_row().
INLINE void find_factors(const Step& s, float* numbers) {
  for (int64_t at = 0; at < kGroupedRows; at += kLanes) {
    const Lanes size = root(load(numbers, kFloat32, at, kLanes)) / s.second_root;
    store(numbers, kFloat32, at, kLanes, s.columns ? size : 1.0f / (size + s.eps));
  }
}

// Gradients of rows of any number of columns.
template <int32_t P>
struct AnyGradient {
  static constexpr int64_t kDim = 0;
  const Step& s;

  explicit AnyGradient(const Step& step) : s(step) {}
  INLINE const float* operator()(int64_t r, float* buffer) const {
    return gradient_of<P>(s, r, Span{0, s.dim}, buffer);
  }
};

// The same for a number of columns that has its own loops, of the sum of entries as it is or, with
// factors, as gradient_of() has it.
template <int32_t P, int64_t kColumns, bool kHasFactors>
struct KnownGradient {
  static constexpr int64_t kDim = kColumns;
  static constexpr int64_t kBlock = std::min(kDim / kLanes, kMostRegisters);
  static_assert(kDim % (kBlock * kLanes) == 0);
  const uint32_t *const starts, *const order;
  const void* const values;
  const float* const factors;
  const int64_t stride, last;
  const float scale;

  explicit KnownGradient(const Step& s)
      : starts(s.gradient.starts), order(s.gradient.order), values(s.gradient.values),
        factors(s.gradient.factors), stride(s.gradient.stride), last(starts[s.gradient.rows] - 1),
        scale(s.gradient.scale) {}

  INLINE void prefetch_ahead(int64_t i) const {
    prefetch(values, P, order[std::min(i + kLookupsAhead, last)] * stride, Span{0, kDim});
  }

  INLINE Lanes entry(int64_t i, int64_t column) const {
    const Lanes x = load(values, P, order[i] * stride + column, kLanes);
    if (!kHasFactors) return x;
    return (factors ? x * factors[i] : x) * scale;
  }

  INLINE const float* operator()(int64_t r, float* buffer) const {
    const int64_t begin = starts[r], end = starts[r + 1];
    prefetch_ahead(begin);
    if (P == kFloat32 && !kHasFactors && end - begin == 1)
      return static_cast<const float*>(values) + order[begin] * stride;
    for (int64_t i = begin + 1; i < end; ++i) prefetch_ahead(i);
    for (int64_t column = 0; column < kDim; column += kBlock * kLanes) {
      Lanes sums[kBlock];
      for (int64_t k = 0; k < kBlock; ++k) sums[k] = entry(begin, column + k * kLanes);
      for (int64_t i = begin + 1; i < end; ++i)
        for (int64_t k = 0; k < kBlock; ++k) sums[k] += entry(i, column + k * kLanes);
      for (int64_t k = 0; k < kBlock; ++k)
        store(buffer, kFloat32, column + k * kLanes, kLanes, sums[k]);
    }
    return buffer;
  }
};

template <int32_t P, typename Gradients>
void move(const Step& s) {
  in_parallel(s, false, RowWork{1, 2}, [&](Span rows, Span, float* buffer) {
    const int64_t dim = Gradients::kDim ? Gradients::kDim : s.dim;
    const Update<P, NoMoment, NoMoment> update(s, Span{0, dim});
    const Gradients gradient(s);
    MeanSquares means(s, buffer + gradients_size(s));
    auto prefetch_row = [&](int64_t r) ALWAYS {
      prefetch(s.parameter, P, id_of(s, std::min(r, rows.end - 1)) * dim, Span{0, dim});
    };
    for (int64_t r = rows.begin; r < std::min(rows.begin + kGroupedRows, rows.end); ++r)
      prefetch_row(r);
    for (int64_t begin = rows.begin; begin < rows.end; begin += kGroupedRows) {
      const int64_t count = std::min(kGroupedRows, rows.end - begin);
      const float* gradients[kGroupedRows];
      float numbers[kGroupedRows] = {};
      for (int64_t i = 0; i < count; ++i) {
        prefetch_row(begin + i + kGroupedRows);
        gradients[i] = gradient(begin + i, buffer + i * dim);
        float& number = s.row_values[begin + i];
        const float square = means(InMemory{gradients[i]}, hashed_id_of(s, begin + i));
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

template <int32_t P>
void move_by_columns(const Step& s) {
  const Gradient& g = s.gradient;
  const bool is_plain = g.is_of_lookups && !s.is_maximizing && s.weight_decay == 0.0f;
  auto move_known = [&](auto columns) {
    constexpr int64_t kDim = decltype(columns)::value;
    if (g.factors || g.scale != 1.0f) return move<P, KnownGradient<P, kDim, true>>(s);
    return move<P, KnownGradient<P, kDim, false>>(s);
  };
  if (is_plain && s.dim == 64) return move_known(std::integral_constant<int64_t, 64>{});
  if (is_plain && s.dim == 128) return move_known(std::integral_constant<int64_t, 128>{});
  move<P, AnyGradient<P>>(s);
}

}  // namespace

bool are_rows_grouped(const Step& s) {
  return s.gradient.starts && is_by_row(s.second) && s.first.kind == kNone && !s.is_inspected;
}

void move_grouped_rows(const Step& s) {
  switch (s.dtype) {
    case kBFloat16: return move_by_columns<kBFloat16>(s);
    case kFloat16: return move<kFloat16, AnyGradient<kFloat16>>(s);
    default: return move_by_columns<kFloat32>(s);
  }
}
