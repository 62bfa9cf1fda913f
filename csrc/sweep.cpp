// The sweeps of a step over its rows: the loops over columns, compiled for each kind of moment.
#include "sweep.h"

#include <type_traits>

#include "by_row.h"
#include "columns.h"
#include "update.h"

namespace {

constexpr int32_t kCommonDepth = 3;
// Whether sketches of that depth have loops of their own, which take half of the time to compile.
#ifdef SKETCHOPTIM_FEW_LOOPS
constexpr bool kHasCommonLoops = false;
#else
constexpr bool kHasCommonLoops = true;
#endif

// A row is read and written; its entries are read if their sum was not kept.
RowWork work_of(const Step& s) { return {s.gradient.sums ? 0 : 1, 2}; }

// Finds rows in ascending order, in sketches by element too, sixteen at a time. The row before a
// block of sixteen is still in use when the block is found, so there are two of them.
struct Finder {
  const Step& s;
  const Span rows;
  Places first[2], second[2];

  Finder(const Step& step, Span all) : s(step), rows(all) {}

  void find_block(int64_t begin, int64_t block) {
    int64_t ids[kPlaces];
    for (int64_t i = 0; i < kPlaces; ++i)
      ids[i] = hashed_id_of(s, std::min(begin + i, rows.end - 1));
    if (is_element_sketch(s.first)) locate(s.first, ids, s.dim, first[block]);
    if (is_element_sketch(s.second)) locate(s.second, ids, s.dim, second[block]);
  }

  INLINE void find(int64_t r, Row& row) {
    const int64_t offset = r - rows.begin, lane = offset % kPlaces, block = offset / kPlaces % 2;
    if (lane == 0) find_block(r, block);
    enter(s, r, row);
    row.first = {&first[block], lane};
    row.second = {&second[block], lane};
  }
};

INLINE void prefetch_row(const Step& s, int64_t r, Span columns) {
  const int64_t row_at = id_of(s, r) * s.dim;
  if (!s.gradient.starts) prefetch(s.gradient.values, s.dtype, r * s.dim, columns);
  prefetch(s.parameter, s.dtype, row_at, columns);
  if (s.first.kind == kExact) prefetch(s.first.data, s.dtype, row_at, columns);
  if (s.second.kind == kExact) prefetch(s.second.data, s.dtype, row_at, columns);
}

// Calls visit(row, next) for rows in ascending order. What `next` needs is prefetched a few columns
// at a time between the arithmetic: all of it at once is more cache misses than a processor can
// have in flight.
template <typename Visit>
INLINE void for_ordered_rows(const Step& s, Span rows, Visit visit) {
  Row pair[2] = {};
  Finder finder(s, rows);
  if (rows.begin < rows.end) finder.find(rows.begin, pair[0]);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    Row &row = pair[(r - rows.begin) % 2], &next = pair[(r - rows.begin + 1) % 2];
    finder.find(std::min(r + 1, rows.end - 1), next);
    visit(row, next);
  }
}

// Without sketches by element the order is free. Calls look(r, i) and visit(row, i) for each row:
// if looks are long, first all looks of a group, which then wait for memory and for square roots
// together.
template <typename Look, typename Visit>
INLINE void for_free_rows(const Step& s, Span rows, Span columns, bool are_looks_long, Look look,
                          Visit visit) {
  in_groups(s, rows, [&](int64_t first, int64_t stride, int64_t count) ALWAYS {
    for (int64_t i = 0; are_looks_long && i < count; ++i) look(first + i * stride, i);
    for (int64_t i = 0; i < count; ++i) {
      Row row{};
      enter(s, first + i * stride, row);
      prefetch_row(s, next_of(s, row.number, rows), columns);
      if (!are_looks_long) look(row.number, i);
      visit(row, i);
    }
  });
}

// First of two sweeps, for sketches by element that are linear.
template <int32_t P, typename First, typename Second>
void add_rows(const Step& s) {
  in_parallel(s, true, work_of(s), [&](Span rows, Span columns, float* buffer) {
    for_ordered_rows(s, rows, [&](const Row& row, const Row& next) ALWAYS {
      const float* g = gradient_of<P>(s, row.number, columns, buffer);
      const First first(s.first, row.first, row.at);
      const Second second(s.second, row.second, row.at);
      for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
        first.prefetch_next(next.first, next.at, c);
        second.prefetch_next(next.second, next.at, c);
        const Lanes x = load(g, kFloat32, c, count);
        first.add(c, count, x);
        second.add(c, count, x * x);
      });
    });
  });
}

// The sweep with sketches by element; a moment by row has left its estimates in row_values.
template <int32_t P, typename First, typename Second>
void update_ordered_rows(const Step& s) {
  const bool by_column = is_item_wise(s.first) || is_item_wise(s.second);
  const bool has_row_values = is_by_row(s.second);
  in_parallel(s, by_column, work_of(s), [&](Span rows, Span columns, float* buffer) {
    const Update<P, First, Second> update(s, columns);
    for_ordered_rows(s, rows, [&](const Row& row, const Row& next) ALWAYS {
      const float* g = gradient_of<P>(s, row.number, columns, buffer);
      update(row, &next, InMemory{g},
             has_row_values ? update.of_row(s.row_values[row.number]) : 1.0f);
    });
  });
}

// Inlined into every sweep it would make the library 5 % larger.
__attribute__((noinline)) float mean_square_of(const float* g, int64_t hashed_id, MeanSquares& means) {
  return means(InMemory{g}, hashed_id);
}

// The sweep without; rows that were not inspected have in row_values what moved_by_row() takes.
template <int32_t P, typename First, typename Second>
void update_free_rows(const Step& s) {
  const bool has_row_values = is_by_row(s.second);
  const bool finds_squares = has_row_values && !s.is_inspected;
  in_parallel(s, false, work_of(s), [&](Span rows, Span columns, float* buffer) {
    const Update<P, First, Second> update(s, columns);
    const float* gradients[kStreams];
    float inverses[kStreams];
    MeanSquares means(s, buffer + gradients_size(s));
    auto look = [&](int64_t r, int64_t i) ALWAYS {
      gradients[i] = gradient_of<P>(s, r, columns, buffer + i * s.dim);
      if (finds_squares)
        s.row_values[r] =
            moved_by_row(s.second, s.row_values[r],
                         mean_square_of(gradients[i], hashed_id_of(s, r), means));
      inverses[i] = has_row_values ? update.of_row(s.row_values[r]) : 1.0f;
    };
    for_free_rows(s, rows, columns, finds_squares, look, [&](const Row& row, int64_t i) ALWAYS {
      update(row, nullptr, InMemory{gradients[i]}, inverses[i]);
    });
  });
}

// The same for the ratio form: a quotient in each hash row, and the median of the quotients.
template <int32_t P, typename First, typename Second>
void update_rows_by_ratio(const Step& s) {
  const float second_root = s.second_root, eps = s.eps, clip = s.has_clip ? s.clip : INFINITY;
  in_parallel(s, false, work_of(s), [&](Span rows, Span columns, float*) {
    const Applied<P> apply(s);
    for_ordered_rows(s, rows, [&](const Row& row, const Row& next) ALWAYS {
      const First first(s.first, row.first, row.at);
      const Second second(s.second, row.second, row.at);
      for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
        first.prefetch_next(next.first, next.at, c);
        second.prefetch_next(next.second, next.at, c);
        apply.prefetch_next(next.at + c);
        Lanes quotients[kMaxDepth], squares[kMaxDepth];
        first.read(c, count, quotients);
        second.read(c, count, squares);
        for (int32_t j = 0; j < first.depth(); ++j)
          quotients[j] = clipped(quotients[j] / (root(squares[j]) / second_root + eps), clip);
        apply(row, c, count, first.combine(quotients));
      });
    });
  });
}

// One sweep over rows whose moments are kept in these ways.
template <int32_t P, typename First, typename Second>
void run(const Step& s, Sweep sweep) {
  if (sweep == Sweep::kAdd) {
    // Nothing is added to a moment without a sketch, so one function serves all of those.
    using AddedFirst = std::conditional_t<First::kIsSketch, First, NoMoment>;
    using AddedSecond = std::conditional_t<Second::kIsSketch, Second, NoMoment>;
    if constexpr (First::kIsSketch || Second::kIsSketch) add_rows<P, AddedFirst, AddedSecond>(s);
    return;
  }
  if constexpr (First::kIsSketch && Second::kIsSketch)
    if (s.is_ratio) return update_rows_by_ratio<P, First, Second>(s);
  if constexpr (First::kIsSketch || Second::kIsSketch)
    update_ordered_rows<P, First, Second>(s);
  else
    update_free_rows<P, First, Second>(s);
}

template <int32_t P>
void run_without_sketches(const Step& s, Sweep sweep) {
  const bool is_first = s.first.kind == kExact, is_second = s.second.kind == kExact;
  if (is_first && is_second) return run<P, ExactMoment<P>, ExactMoment<P>>(s, sweep);
  if (is_first) return run<P, ExactMoment<P>, NoMoment>(s, sweep);
  if (is_second) return run<P, NoMoment, ExactMoment<P>>(s, sweep);
  run<P, NoMoment, NoMoment>(s, sweep);
}

// With one sketch by element at least; where there are two, they are of the same dtype and depth
// unless those are known only at run time.
template <int32_t P, int32_t T, int32_t kDepth>
void run_with_sketches(const Step& s, Sweep sweep) {
  using First = SketchMoment<true, T, kDepth>;
  using Second = SketchMoment<false, T, kDepth>;
  if (!is_element_sketch(s.first)) {
    if (s.first.kind == kExact) return run<P, ExactMoment<P>, Second>(s, sweep);
    return run<P, NoMoment, Second>(s, sweep);
  }
  if (is_element_sketch(s.second)) return run<P, First, Second>(s, sweep);
  if (s.second.kind == kExact) return run<P, First, ExactMoment<P>>(s, sweep);
  run<P, First, NoMoment>(s, sweep);
}

// Whether all sketches by element have this dtype, and the depth that has its own loops.
bool are_common(const Step& s, int32_t dtype) {
  auto is_common = [&](const Moment& m) {
    return !is_element_sketch(m) || (m.dtype == dtype && m.depth == kCommonDepth);
  };
  return s.dtype == kFloat32 && is_common(s.first) && is_common(s.second);
}

}  // namespace

void sweep_rows(const Step& s, Sweep sweep) {
  if (is_element_sketch(s.first) || is_element_sketch(s.second)) {
    if constexpr (kHasCommonLoops) {
      if (are_common(s, kFloat32))
        return run_with_sketches<kFloat32, kFloat32, kCommonDepth>(s, sweep);
      if (are_common(s, kBFloat16))
        return run_with_sketches<kFloat32, kBFloat16, kCommonDepth>(s, sweep);
    }
    return run_with_sketches<kAny, kAny, 0>(s, sweep);
  }
  switch (s.dtype) {
    case kBFloat16: return run_without_sketches<kBFloat16>(s, sweep);
    case kFloat16: return run_without_sketches<kFloat16>(s, sweep);
    default: return run_without_sketches<kFloat32>(s, sweep);
  }
}
