// The last part of a step: from gradient and moments of a row to its new weights.
#pragma once

#include <cmath>

#include "rows.h"

// Keeps a NaN, as torch.clamp does: if a comparison is false, the first number is taken.
INLINE Lanes clipped(Lanes x, float clip) { return larger(smaller(x, all(clip)), all(-clip)); }

// The last part of a step: clips the direction and moves the row.
template <int32_t P>
struct Applied {
  void* const rows;
  const int32_t dtype;
  const float shrink, step_size, clip;
  const bool has_clip, is_stochastic;

  explicit Applied(const Step& s)
      : rows(s.parameter), dtype(s.dtype), shrink(s.shrink), step_size(s.step_size), clip(s.clip),
        has_clip(s.has_clip && !s.is_ratio), is_stochastic(s.is_stochastic) {}

  INLINE void prefetch_next(int64_t at) const { prefetch_one(rows, known_dtype<P>(dtype), at); }

  INLINE void operator()(const Row& row, int64_t column, int64_t count, Lanes direction) const {
    const int32_t stored = known_dtype<P>(dtype);
    const int64_t at = row.at + column;
    if (has_clip) direction = clipped(direction, clip);
    const Lanes moved = load(rows, stored, at, count) * shrink - direction * step_size;
    if (stored == kFloat32 || !is_stochastic) return store(rows, stored, at, count, moved);
    const WordLanes bits = noise(row.rounding_row_key, column);
    store_half(rows, at, count, to_half_by_chance(stored, moved, bits));
  }
};

// One row of the sweep in which rows move: g(column, count) is its gradient, row_factor comes
// from of_row() if its second moment is one number, else it is one.
template <int32_t P, typename First, typename Second>
struct Update {
  const Step& s;
  const Span columns;
  const Applied<P> apply;
  const float eps, second_root, nesterov;
  const float* const column_roots;
  const bool has_nesterov;

  Update(const Step& step, Span part)
      : s(step), columns(part), apply(s), eps(s.eps), second_root(s.second_root),
        nesterov(s.nesterov), column_roots(s.columns ? s.column_roots : nullptr), has_nesterov(First::kIsKept && s.has_nesterov) {}

  // What a row with one second moment is multiplied by; divided by for each column, if these have
  // factors.
  INLINE float of_row(float second) const {
    const float size = std::sqrt(second) / second_root;
    return column_roots ? size : 1.0f / (size + eps);
  }

  template <typename Columns>
  INLINE void operator()(const Row& row, const Row* next, const Columns& g, float row_factor) const {
    const First first(s.first, row.first, row.at);
    const Second second(s.second, row.second, row.at);
    for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
      if (next) {
        first.prefetch_next(next->first, next->at, c);
        second.prefetch_next(next->second, next->at, c);
        apply.prefetch_next(next->at + c);
      }
      const Lanes x = g(c, count);
      Lanes direction = first.move(c, count, x);
      if (has_nesterov) direction = x + direction * nesterov;
      if (Second::kIsKept) {
        const Lanes size = root(second.move(c, count, x * x));
        direction /= (second_root == 1.0f ? size : size / second_root) + eps;
      } else if (column_roots) {
        direction /= load(column_roots, kFloat32, c, count) * row_factor + eps;
      } else {
        direction *= row_factor;
      }
      apply(row, c, count, direction);
    });
  }
};
