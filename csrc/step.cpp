// One step of one parameter, from its raw gradient to its updated rows.
//
// Rows are independent of each other but for what they share in a sketch. A sketch by row is moved
// first, from mean squares, as a list of numbers. A sketch by element has columns that never meet,
// so threads take columns where rows must take their turn, and rows everywhere else: either way
// each number is computed by one thread in one order, and the number of threads changes no bit.
#include <algorithm>
#include <cmath>
#include <memory>

#include "by_row.h"
#include "moment.h"

namespace {

constexpr int32_t kCommonDepth = 3;
constexpr int64_t kStreams = 8;
constexpr int64_t kPrefetchBytes = 512;  // the hardware goes on from there by itself
constexpr int64_t kEntriesAhead = 4;     // two to eight are alike

Span share(int64_t total, int64_t part, int64_t parts) {
  return {total * part / parts, total * (part + 1) / parts};
}

// Calls visit(rows, columns) on every thread with its share of one of the two.
template <typename Visit>
void in_parallel(const Step& s, bool by_column, Visit visit) {
  const int64_t parts = std::max(1, s.threads), rows = s.gradient.rows;
  const int64_t blocks = (s.dim + kLanes - 1) / kLanes;
#pragma omp parallel for schedule(static, 1) num_threads(s.threads) if (parts > 1)
  for (int64_t part = 0; part < parts; ++part) {
    if (by_column) {
      const Span span = share(blocks, part, parts);
      visit(Span{0, rows}, Span{span.begin * kLanes, std::min(s.dim, span.end * kLanes)});
    } else {
      visit(share(rows, part, parts), Span{0, s.dim});
    }
  }
}

INLINE int64_t id_of(const Step& s, int64_t r) { return s.gradient.ids ? s.gradient.ids[r] : r; }

INLINE int64_t first_entry(const Gradient& g, int64_t r) {
  return g.starts ? g.order[g.starts[r]] : r;
}

INLINE void prefetch(const void* data, int32_t dtype, int64_t at, Span columns) {
  const char* begin = static_cast<const char*>(data) + (at + columns.begin) * bytes_of(dtype);
  const int64_t bytes = (columns.end - columns.begin) * bytes_of(dtype);
  for (int64_t offset = 0; offset < std::min(bytes, kPrefetchBytes); offset += 64)
    __builtin_prefetch(begin + offset);
}

INLINE bool is_alone(const Gradient& g, int64_t r) {
  return !g.starts || g.starts[r + 1] - g.starts[r] == 1;
}

// Adds an entry to its row's sum, of which the first is the beginning.
template <int32_t P>
INLINE void add_entry(const Step& s, int64_t entry, bool is_first, Span columns, float* sum) {
  const void* values = s.gradient.values;
  const int32_t dtype = known_dtype<P>(s.dtype);
  const int64_t at = entry * s.dim;
  for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
    const Lanes x = load(values, dtype, at + c, count);
    store(sum, kFloat32, c, count, is_first ? x : load(sum, kFloat32, c, count) + x);
  });
}

// From the sum of a row's entries to the gradient that reaches the moments.
template <int32_t P>
INLINE void finish(const Step& s, int64_t r, Span columns, float* sum) {
  if (!s.is_maximizing && s.weight_decay == 0.0f) return;
  const float sign = s.is_maximizing ? -1.0f : 1.0f, decay = s.weight_decay;
  const void* rows = s.parameter;
  const int64_t row_at = id_of(s, r) * s.dim;
  for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
    Lanes x = load(sum, kFloat32, c, count) * sign;
    // Not where nothing decays: a weight that is not finite, times zero, would be NaN.
    if (decay != 0.0f) x += load(rows, known_dtype<P>(s.dtype), row_at + c, count) * decay;
    store(sum, kFloat32, c, count, x);
  });
}

// Sends for the entry that will be added a few entries later, in this row or in one behind it.
INLINE void expect_entry(const Step& s, int64_t i, Span columns) {
  const Gradient& g = s.gradient;
  const int64_t last = g.starts[g.rows] - 1;
  prefetch(g.values, s.dtype, g.order[std::min(i + kEntriesAhead, last)] * s.dim, columns);
}

// The summed gradient of a row, as it reaches the moments, in a buffer.
template <int32_t P>
const float* gathered(const Step& s, int64_t r, Span columns, float* buffer) {
  const Gradient& g = s.gradient;
  if (g.starts) {
    for (int64_t i = g.starts[r]; i < g.starts[r + 1]; ++i) {
      expect_entry(s, i, columns);
      add_entry<P>(s, g.order[i], i == g.starts[r], columns, buffer);
    }
  } else {
    add_entry<P>(s, r, true, columns, buffer);
  }
  finish<P>(s, r, columns, buffer);
  return buffer;
}

// The same, where it already is if it is anywhere: a lone float32 entry that is all there is to it,
// or the sum that inspect() left.
template <int32_t P>
INLINE const float* gradient_of(const Step& s, int64_t r, Span columns, float* buffer) {
  const Gradient& g = s.gradient;
  const bool alone = is_alone(g, r);
  if (known_dtype<P>(s.dtype) == kFloat32 && alone && !s.is_maximizing && s.weight_decay == 0.0f) {
    if (g.starts) expect_entry(s, g.starts[r], columns);
    return static_cast<const float*>(g.values) + first_entry(g, r) * s.dim;
  }
  if (!alone && g.sums) return g.sums + g.slots[r] * s.dim;
  return gathered<P>(s, r, columns, buffer);
}

// Calls visit(row, next). Rows whose gradients lie one after another come from several places at
// once: a processor runs ahead of each place that is being read, but only so far, and one alone does
// not fill the memory's bandwidth. Others come in order, which is that of their entries.
template <typename Visit>
INLINE void in_streams(const Step& s, Span rows, Visit visit) {
  const int64_t streams = s.gradient.starts ? 1 : kStreams;
  const int64_t length = (rows.end - rows.begin + streams - 1) / streams;
  for (int64_t at = 0; at < length; ++at)
    for (int64_t r = rows.begin + at; r < rows.end; r += length)
      visit(r, std::min(r + 1, rows.end - 1));
}

// Finds a row, in sketches by element too.
INLINE void find(const Step& s, int64_t r, Row& row) {
  row.number = r;
  row.at = id_of(s, r) * s.dim;
  if (is_element_sketch(s.first)) locate(s.first, id_of(s, r), s.dim, row.first);
  if (is_element_sketch(s.second)) locate(s.second, id_of(s, r), s.dim, row.second);
}

INLINE void prefetch_row(const Step& s, int64_t r, Span columns) {
  const int64_t row_at = id_of(s, r) * s.dim;
  if (!s.gradient.starts) prefetch(s.gradient.values, s.dtype, r * s.dim, columns);
  prefetch(s.parameter, s.dtype, row_at, columns);
  if (s.first.kind == kExact) prefetch(s.first.data, s.dtype, row_at, columns);
  if (s.second.kind == kExact) prefetch(s.second.data, s.dtype, row_at, columns);
}

// Calls visit(row, next). With sketches by element rows come in ascending order, and what `next`
// needs is best sent for a little at a time, while the work goes on: it is more than a processor
// can have under way at once. Without them the order is free.
template <bool kHasSketches, typename Visit>
INLINE void for_rows(const Step& s, Span rows, Span columns, Visit visit) {
  if constexpr (kHasSketches) {
    Row pair[2];
    if (rows.begin < rows.end) find(s, rows.begin, pair[0]);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      Row &row = pair[(r - rows.begin) % 2], &next = pair[(r - rows.begin + 1) % 2];
      find(s, std::min(r + 1, rows.end - 1), next);
      visit(row, next);
    }
  } else {
    Row row;
    in_streams(s, rows, [&](int64_t r, int64_t next) ALWAYS {
      prefetch_row(s, next, columns);
      row.number = r;
      row.at = id_of(s, r) * s.dim;
      visit(row, row);
    });
  }
}

// First of two sweeps, for sketches that are linear.
template <int32_t P, typename First, typename Second>
void add_rows(const Step& s) {
  in_parallel(s, true, [&](Span rows, Span columns) {
    std::unique_ptr<float[]> buffer(new float[s.dim]);
    for_rows<true>(s, rows, columns, [&](const Row& row, const Row& next) ALWAYS {
      const float* g = gradient_of<P>(s, row.number, columns, buffer.get());
      const First first(s.first, row.first, row.at);
      const Second second(s.second, row.second, row.at);
      for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
        first.expect(next.first, next.at, c);
        second.expect(next.second, next.at, c);
        const Lanes x = load(g, kFloat32, c, count);
        first.add(c, count, x);
        second.add(c, count, x * x);
      });
    });
  });
}

// A NaN stays one, as in torch.clamp: of two numbers that do not compare, the first is taken.
INLINE Lanes clipped(Lanes x, float clip) { return larger(smaller(x, all(clip)), all(-clip)); }

// The last part of a step: where a row goes, and the row moved there.
template <int32_t P>
struct Applied {
  void* const rows;
  const int32_t dtype;
  const float shrink, step_size, clip;
  const bool has_clip;

  explicit Applied(const Step& s)
      : rows(s.parameter), dtype(s.dtype), shrink(s.shrink), step_size(s.step_size), clip(s.clip),
        has_clip(s.has_clip && !s.is_ratio) {}

  INLINE void expect(int64_t at) const { prefetch_one(rows, known_dtype<P>(dtype), at); }

  INLINE void operator()(int64_t at, int64_t count, Lanes direction) const {
    if (has_clip) direction = clipped(direction, clip);
    const Lanes old = load(rows, known_dtype<P>(dtype), at, count);
    store(rows, known_dtype<P>(dtype), at, count, old * shrink - direction * step_size);
  }
};

// The sweep in which rows move; a sketch by row has left its estimates in row_values.
template <int32_t P, typename First, typename Second>
void update_rows(const Step& s) {
  constexpr bool kHasSketches = First::kIsSketch || Second::kIsSketch;
  const bool by_column = is_item_wise(s.first) || is_item_wise(s.second);
  const bool has_row_values = is_by_row(s.second);
  const float eps = s.eps, second_root = s.second_root;
  const float nesterov = s.nesterov;
  const bool has_nesterov = First::kIsKept && s.has_nesterov;
  in_parallel(s, by_column, [&](Span rows, Span columns) {
    std::unique_ptr<float[]> buffer(new float[s.dim]);
    const Applied<P> apply(s);
    for_rows<kHasSketches>(s, rows, columns, [&](const Row& row, const Row& next) ALWAYS {
      const float* g = gradient_of<P>(s, row.number, columns, buffer.get());
      const First first(s.first, row.first, row.at);
      const Second second(s.second, row.second, row.at);
      const float inverse =
          has_row_values ? 1.0f / (std::sqrt(s.row_values[row.number]) / second_root + eps) : 1.0f;
      for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
        if constexpr (kHasSketches) {
          first.expect(next.first, next.at, c);
          second.expect(next.second, next.at, c);
          apply.expect(next.at + c);
        }
        const Lanes x = load(g, kFloat32, c, count);
        Lanes direction = first.move(c, count, x);
        if (has_nesterov) direction = x + direction * nesterov;
        if (Second::kIsKept) {
          const Lanes size = root(second.move(c, count, x * x));
          direction /= (second_root == 1.0f ? size : size / second_root) + eps;
        } else {
          direction *= inverse;
        }
        apply(row.at + c, count, direction);
      });
    });
  });
}

// The same for the ratio form: a quotient in each hash row, and the median of the quotients.
template <int32_t P, typename First, typename Second>
void update_rows_by_ratio(const Step& s) {
  const float second_root = s.second_root, eps = s.eps, clip = s.has_clip ? s.clip : INFINITY;
  in_parallel(s, false, [&](Span rows, Span columns) {
    const Applied<P> apply(s);
    for_rows<true>(s, rows, columns, [&](const Row& row, const Row& next) ALWAYS {
      const First first(s.first, row.first, row.at);
      const Second second(s.second, row.second, row.at);
      for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
        first.expect(next.first, next.at, c);
        second.expect(next.second, next.at, c);
        apply.expect(next.at + c);
        Lanes quotients[kMaxDepth], squares[kMaxDepth];
        first.read(c, count, quotients);
        second.read(c, count, squares);
        for (int32_t j = 0; j < first.depth(); ++j)
          quotients[j] = clipped(quotients[j] / (root(squares[j]) / second_root + eps), clip);
        apply(row.at + c, count, first.combine(quotients));
      });
    });
  });
}

// One step whose moments are kept in these ways.
template <int32_t P, typename First, typename Second>
void run(const Step& s) {
  if constexpr (First::kIsSketch || Second::kIsSketch)
    if (is_linear(s.first) || is_linear(s.second)) add_rows<P, First, Second>(s);
  if constexpr (First::kIsSketch && Second::kIsSketch)
    if (s.is_ratio) return update_rows_by_ratio<P, First, Second>(s);
  update_rows<P, First, Second>(s);
}

template <int32_t P>
void run_without_sketches(const Step& s) {
  const bool is_first = s.first.kind == kExact, is_second = s.second.kind == kExact;
  if (is_first && is_second) return run<P, ExactMoment<P>, ExactMoment<P>>(s);
  if (is_first) return run<P, ExactMoment<P>, NoMoment>(s);
  if (is_second) return run<P, NoMoment, ExactMoment<P>>(s);
  run<P, NoMoment, NoMoment>(s);
}

// With one sketch by element at least; where there are two, they are of the same dtype and depth
// unless those are known only when running.
template <int32_t P, int32_t T, int32_t kDepth>
void run_with_sketches(const Step& s) {
  using First = SketchMoment<true, T, kDepth>;
  using Second = SketchMoment<false, T, kDepth>;
  if (!is_element_sketch(s.first)) {
    if (s.first.kind == kExact) return run<P, ExactMoment<P>, Second>(s);
    return run<P, NoMoment, Second>(s);
  }
  if (is_element_sketch(s.second)) return run<P, First, Second>(s);
  if (s.second.kind == kExact) return run<P, First, ExactMoment<P>>(s);
  run<P, First, NoMoment>(s);
}

// Whether all sketches by element are of a dtype, and of the depth that has loops of its own.
bool are_common(const Step& s, int32_t dtype) {
  auto is_common = [&](const Moment& m) {
    return !is_element_sketch(m) || (m.dtype == dtype && m.depth == kCommonDepth);
  };
  return s.dtype == kFloat32 && is_common(s.first) && is_common(s.second);
}

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

// Whether a number of a row is larger than any may be, or NaN.
bool is_refused(const float* g, int64_t dim, float largest) {
  return !std::all_of(g, g + dim, [&](float x) { return std::fabs(x) <= largest; });
}

template <int32_t P>
int32_t inspect(const Step& s) {
  const Gradient& g = s.gradient;
  const bool wants_squares = is_by_row(s.second);
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
      // As long as the sum is within what one of them may be, none of them is beyond.
      if (!(squares <= s.largest_gradient * s.largest_gradient))
        mine += is_refused(x, s.dim, s.largest_gradient);
      if (wants_squares) s.row_values[r] = squares / static_cast<float>(s.dim);
    });
#pragma omp atomic
    refused += mine;
  });
  return refused == 0;
}

}  // namespace

extern "C" int32_t sketchoptim_abi() { return SKETCHOPTIM_ABI; }

extern "C" void sketchoptim_hash(const int64_t* words, int32_t depth, int64_t width,
                                 const int64_t* ids, int64_t count, int64_t* buckets,
                                 float* signs) {
  for (int32_t j = 0; j < depth; ++j)
    for (int64_t i = 0; i < count; ++i) {
      buckets[j * count + i] = bucket_of(words + 4 * j, ids[i], width);
      signs[j * count + i] = sign_of(words + 4 * j, ids[i]);
    }
}

extern "C" int32_t sketchoptim_inspect(const Step* step) {
  switch (step->dtype) {
    case kBFloat16: return inspect<kBFloat16>(*step);
    case kFloat16: return inspect<kFloat16>(*step);
    default: return inspect<kFloat32>(*step);
  }
}

extern "C" void sketchoptim_step(const Step* step) {
  const Step& s = *step;
  if (is_by_row(s.second))
    move_by_row(s.second, s.gradient.ids, s.gradient.rows, s.threads, s.row_values);
  if (is_element_sketch(s.first) || is_element_sketch(s.second)) {
    if (are_common(s, kFloat32)) return run_with_sketches<kFloat32, kFloat32, kCommonDepth>(s);
    if (are_common(s, kBFloat16)) return run_with_sketches<kFloat32, kBFloat16, kCommonDepth>(s);
    return run_with_sketches<kAny, kAny, 0>(s);
  }
  switch (s.dtype) {
    case kBFloat16: return run_without_sketches<kBFloat16>(s);
    case kFloat16: return run_without_sketches<kFloat16>(s);
    default: return run_without_sketches<kFloat32>(s);
  }
}
