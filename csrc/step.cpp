// One step of one parameter, from its raw gradient to its updated rows.
//
// Rows are independent of each other but for what they share in a sketch. A sketch by row is moved
// first, from mean squares, as a list of numbers. A sketch by element has columns that never meet,
// so threads take columns where rows must take their turn, and rows everywhere else: either way
// each number is computed by one thread in one order, and the number of threads changes no bit.
#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>

#include "by_row.h"
#include "moment.h"

namespace {

constexpr int64_t kRowsAhead = 4;        // how far prefetching runs before the work
constexpr int64_t kPrefetchBytes = 256;  // the hardware goes on from there by itself

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

// The summed gradient of a row, as it reaches the moments, in a buffer.
template <int32_t P>
const float* gathered(const Step& s, int64_t r, Span columns, float* buffer) {
  const Gradient& g = s.gradient;
  const int64_t entry = first_entry(g, r) * s.dim;
  const int64_t entries = g.starts ? g.starts[r + 1] - g.starts[r] : 1;
  const void* values = g.values;
  for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
    store(buffer, kFloat32, c, count, load(values, P, entry + c, count));
  });
  for (int64_t i = 1; i < entries; ++i) {
    const int64_t* order = g.order + g.starts[r] + i;
    if (i + 1 < entries) prefetch(values, P, order[1] * s.dim, columns);
    const int64_t more = order[0] * s.dim;
    for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
      const Lanes sum = load(buffer, kFloat32, c, count) + load(values, P, more + c, count);
      store(buffer, kFloat32, c, count, sum);
    });
  }
  if (s.is_maximizing || s.weight_decay != 0.0f) {
    const float sign = s.is_maximizing ? -1.0f : 1.0f, decay = s.weight_decay;
    const void* rows = s.parameter;
    const int64_t row_at = id_of(s, r) * s.dim;
    for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
      Lanes x = load(buffer, kFloat32, c, count) * sign;
      // Not where nothing decays: a weight that is not finite, times zero, would be NaN.
      if (decay != 0.0f) x += load(rows, P, row_at + c, count) * decay;
      store(buffer, kFloat32, c, count, x);
    });
  }
  return buffer;
}

// The same, where it already is if it is anywhere: a lone float32 entry that is all there is to it,
// or the sum that inspect() left.
template <int32_t P>
INLINE const float* gradient_of(const Step& s, int64_t r, Span columns, float* buffer) {
  const Gradient& g = s.gradient;
  const bool is_alone = !g.starts || g.starts[r + 1] - g.starts[r] == 1;
  if (P == kFloat32 && is_alone && !s.is_maximizing && s.weight_decay == 0.0f)
    return static_cast<const float*>(g.values) + first_entry(g, r) * s.dim;
  if (!is_alone && g.sums) return g.sums + g.slots[r] * s.dim;
  return gathered<P>(s, r, columns, buffer);
}

// Everything of a row that is known before its turn: found one row ahead, so that its buckets are
// on their way when they are needed.
struct Places {
  Place first, second;

  void find(const Step& s, int64_t r, Span columns) {
    find_in(s.first, id_of(s, r), s.dim, columns, first);
    find_in(s.second, id_of(s, r), s.dim, columns, second);
  }

  static void find_in(const Moment& m, int64_t id, int64_t dim, Span columns, Place& place) {
    if (!is_element_sketch(m)) return;
    locate(m, id, dim, place);
    for (int32_t j = 0; j < m.depth; ++j) prefetch(m.data, m.dtype, place.at[j], columns);
  }
};

template <int32_t P>
INLINE void prefetch_row(const Step& s, int64_t r, Span columns) {
  const int64_t row_at = id_of(s, r) * s.dim;
  // Entries in their own order are a stream, which the hardware sees by itself.
  if (s.gradient.starts)
    prefetch(s.gradient.values, P, first_entry(s.gradient, r) * s.dim, columns);
  prefetch(s.parameter, P, row_at, columns);
  if (s.first.kind == kExact) prefetch(s.first.data, P, row_at, columns);
  if (s.second.kind == kExact) prefetch(s.second.data, P, row_at, columns);
}

template <int32_t P, typename Visit>
INLINE void for_rows(const Step& s, Span rows, Span columns, Visit visit) {
  const bool has_places = is_element_sketch(s.first) || is_element_sketch(s.second);
  Places places[2];
  if (has_places && rows.begin < rows.end) places[0].find(s, rows.begin, columns);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    if (r + kRowsAhead < rows.end) prefetch_row<P>(s, r + kRowsAhead, columns);
    if (has_places && r + 1 < rows.end) places[(r - rows.begin + 1) % 2].find(s, r + 1, columns);
    visit(r, places[(r - rows.begin) % 2]);
  }
}

// Linear sketches by element: every row is added before any is read.
template <int32_t P>
void add_rows(const Step& s, MoveRow add_first, MoveRow add_second) {
  in_parallel(s, true, [&](Span rows, Span columns) {
    std::unique_ptr<float[]> buffer(new float[s.dim]);
    for_rows<P>(s, rows, columns, [&](int64_t r, const Places& places) ALWAYS {
      const float* g = gradient_of<P>(s, r, columns, buffer.get());
      const int64_t row_at = id_of(s, r) * s.dim;
      if (add_first) add_first(s.first, places.first, row_at, columns, g, nullptr);
      if (add_second) add_second(s.second, places.second, row_at, columns, g, nullptr);
    });
  });
}

// A NaN stays one, as in torch.clamp: of two numbers that do not compare, the first is taken.
INLINE Lanes clipped(Lanes x, float clip) { return larger(smaller(x, all(clip)), all(-clip)); }

// The ratio form: a quotient in each hash row, and the median of the quotients.
template <int32_t T>
void ratio_row(const Step& s, const Places& places, Span columns, float* direction) {
  const Table<true, T, 0> first(s.first, places.first, 0);
  const Table<false, T, 0> second(s.second, places.second, 0);
  const float second_root = s.second_root, eps = s.eps, clip = s.has_clip ? s.clip : INFINITY;
  for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
    Lanes quotients[kMaxDepth], squares[kMaxDepth];
    first.read(c, count, quotients);
    second.read(c, count, squares);
    for (int32_t j = 0; j < first.depth(); ++j)
      quotients[j] = clipped(quotients[j] / (root(squares[j]) / second_root + eps), clip);
    store(direction, kFloat32, c, count, first.combine(quotients));
  });
}

// The last part of a step: where the row goes, and the row moved there. `square` is a null pointer
// where one number stands for the row (then `inverse` is what to multiply with), or none does.
template <int32_t P, bool kHasSquare>
INLINE void apply_row(const Step& s, int64_t row_at, Span columns, const float* gradient,
               const float* numerator, const float* square, float inverse) {
  void* rows = s.parameter;
  const float shrink = s.shrink, step_size = s.step_size, eps = s.eps, root_of = s.second_root;
  const float nesterov = s.has_nesterov ? s.nesterov : 0.0f, clip = s.clip;
  const bool has_nesterov = s.has_nesterov, has_clip = s.has_clip && !s.is_ratio;
  auto loop = [&](auto is_plain) ALWAYS {
    for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
      Lanes x = load(numerator, kFloat32, c, count);
      if (!is_plain && has_nesterov) x = load(gradient, kFloat32, c, count) + x * nesterov;
      if (kHasSquare) {
        const Lanes size = root(load(square, kFloat32, c, count));
        x /= (is_plain ? size : size / root_of) + eps;
      } else {
        x *= inverse;
      }
      if (!is_plain && has_clip) x = clipped(x, clip);
      const Lanes old = load(rows, P, row_at + c, count);
      store(rows, P, row_at + c, count, old * shrink - x * step_size);
    });
  };
  if (has_nesterov || has_clip || (kHasSquare && root_of != 1.0f))
    loop(std::false_type{});
  else
    loop(std::true_type{});
}

template <int32_t P>
void update_rows(const Step& s, MoveRow move_first, MoveRow move_second) {
  const bool by_column = is_item_wise(s.first) || is_item_wise(s.second);
  in_parallel(s, by_column, [&](Span rows, Span columns) {
    std::unique_ptr<float[]> buffers(new float[3 * s.dim]);
    float *summed = buffers.get(), *mean = summed + s.dim, *square = mean + s.dim;
    for_rows<P>(s, rows, columns, [&](int64_t r, const Places& places) ALWAYS {
      const int64_t row_at = id_of(s, r) * s.dim;
      const float* g = gradient_of<P>(s, r, columns, summed);
      const float* numerator = g;
      if (s.is_ratio) {
        const auto ratio = s.first.dtype == kBFloat16 ? ratio_row<kBFloat16> : ratio_row<kFloat32>;
        ratio(s, places, columns, mean);
        apply_row<P, false>(s, row_at, columns, g, mean, nullptr, 1.0f);
        return;
      }
      if (move_first) {
        move_first(s.first, places.first, row_at, columns, g, mean);
        numerator = mean;
      }
      if (move_second) {
        move_second(s.second, places.second, row_at, columns, g, square);
        apply_row<P, true>(s, row_at, columns, g, numerator, square, 1.0f);
      } else {
        const float inverse =
            is_by_row(s.second) ? 1.0f / (std::sqrt(s.row_values[r]) / s.second_root + s.eps) : 1.0f;
        apply_row<P, false>(s, row_at, columns, g, numerator, nullptr, inverse);
      }
    });
  });
}

template <int32_t P>
void run(const Step& s) {
  if (is_by_row(s.second))
    move_by_row(s.second, s.gradient.ids, s.gradient.rows, s.threads, s.row_values);
  const Moves first = moves_of<true>(s.first), second = moves_of<false>(s.second);
  if (first.add || second.add) add_rows<P>(s, first.add, second.add);
  update_rows<P>(s, first.move, second.move);
}

template <int32_t P>
int32_t inspect(const Step& s) {
  const bool wants_squares = is_by_row(s.second);
  int64_t refused = 0;
  in_parallel(s, false, [&](Span rows, Span columns) {
    std::unique_ptr<float[]> buffer(new float[s.dim]);
    const float largest = s.largest_gradient;
    IntLanes beyond{};
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      if (r + kRowsAhead < rows.end)
        prefetch(s.gradient.values, P, first_entry(s.gradient, r + kRowsAhead) * s.dim, columns);
      const Gradient& given = s.gradient;
      const bool keeps = given.sums && given.starts[r + 1] - given.starts[r] > 1;
      const float* g = keeps ? gathered<P>(s, r, columns, given.sums + given.slots[r] * s.dim)
                             : gradient_of<P>(s, r, columns, buffer.get());
      Lanes sums[4] = {};
      for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
        const Lanes x = load(g, kFloat32, c, count);
        const Lanes size = x < 0.0f ? -x : x;
        beyond |= ~(size <= largest);  // a NaN is not within either
        sums[c / kLanes % 4] += x * x;
      });
      if (wants_squares)
        s.row_values[r] = sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(s.dim);
    }
    int64_t mine = 0;
    for (int64_t i = 0; i < kLanes; ++i) mine += beyond[i] != 0;
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
  switch (step->dtype) {
    case kBFloat16: return run<kBFloat16>(*step);
    case kFloat16: return run<kFloat16>(*step);
    default: return run<kFloat32>(*step);
  }
}
