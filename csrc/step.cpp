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

constexpr int64_t kRowsAhead = 2;  // how far prefetching runs before the work

struct Span {
  int64_t begin, end;
};

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

template <int32_t P>
void prefetch(const void* data, int64_t at, Span columns) {
  const char* begin = static_cast<const char*>(data) + (at + columns.begin) * bytes_of(P);
  const char* end = static_cast<const char*>(data) + (at + columns.end) * bytes_of(P);
  for (const char* line = begin; line < end; line += 64) __builtin_prefetch(line);
}

// The summed gradient of a row that reaches the moments. Columns of a lone float32 entry are used
// where they are; `buffer` holds every other case.
template <int32_t P>
const float* gradient_of(const Step& s, int64_t r, Span columns, float* buffer) {
  const Gradient& g = s.gradient;
  const int64_t entry = first_entry(g, r) * s.dim;
  const int64_t entries = g.starts ? g.starts[r + 1] - g.starts[r] : 1;
  if (P == kFloat32 && entries == 1 && !s.is_maximizing && s.weight_decay == 0.0f)
    return static_cast<const float*>(g.values) + entry;
  for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
    store(buffer, kFloat32, c, count, load(g.values, P, entry + c, count));
  });
  for (int64_t i = 1; i < entries; ++i) {
    const int64_t more = g.order[g.starts[r] + i] * s.dim;
    if (i + 1 < entries) prefetch<P>(g.values, g.order[g.starts[r] + i + 1] * s.dim, columns);
    for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
      const Lanes sum = load(buffer, kFloat32, c, count) + load(g.values, P, more + c, count);
      store(buffer, kFloat32, c, count, sum);
    });
  }
  if (s.is_maximizing || s.weight_decay != 0.0f) {
    const int64_t row_at = id_of(s, r) * s.dim;
    for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
      Lanes x = load(buffer, kFloat32, c, count);
      if (s.is_maximizing) x = -x;
      if (s.weight_decay != 0.0f) x += load(s.parameter, P, row_at + c, count) * s.weight_decay;
      store(buffer, kFloat32, c, count, x);
    });
  }
  return buffer;
}

template <int32_t P>
void prefetch_row(const Step& s, int64_t r, Span columns) {
  prefetch<P>(s.gradient.values, first_entry(s.gradient, r) * s.dim, columns);
  const int64_t row_at = id_of(s, r) * s.dim;
  prefetch<P>(s.parameter, row_at, columns);
  for (const Moment* m : {&s.first, &s.second})
    if (m->kind == kExact) prefetch<P>(m->data, row_at, columns);
}

void prefetch_buckets(const Moment& m, const Place& place, Span columns) {
  for (int32_t j = 0; j < m.depth; ++j) {
    if (m.dtype == kFloat32)
      prefetch<kFloat32>(m.data, place.at[j], columns);
    else
      prefetch<kBFloat16>(m.data, place.at[j], columns);
  }
}

// A row's places in both sketches, found one row ahead so that their buckets are on the way.
struct Places {
  Place first, second;

  void find(const Step& s, int64_t r, Span columns) {
    const int64_t id = id_of(s, r);
    if (is_element_sketch(s.first)) {
      locate(s.first, id, s.dim, first);
      prefetch_buckets(s.first, first, columns);
    }
    if (is_element_sketch(s.second)) {
      locate(s.second, id, s.dim, second);
      prefetch_buckets(s.second, second, columns);
    }
  }
};

template <int32_t P, typename Visit>
void for_rows(const Step& s, Span rows, Span columns, Visit visit) {
  Places places[2];
  if (rows.begin < rows.end) places[0].find(s, rows.begin, columns);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    if (r + kRowsAhead < rows.end) prefetch_row<P>(s, r + kRowsAhead, columns);
    if (r + 1 < rows.end) places[(r - rows.begin + 1) % 2].find(s, r + 1, columns);
    visit(r, places[(r - rows.begin) % 2]);
  }
}

// Linear sketches by element: every row is added before any is read.
template <int32_t P>
void add_rows(const Step& s) {
  in_parallel(s, true, [&](Span rows, Span columns) {
    std::unique_ptr<float[]> buffer(new float[s.dim]);
    for_rows<P>(s, rows, columns, [&](int64_t r, const Places& places) {
      const float* g = gradient_of<P>(s, r, columns, buffer.get());
      const int64_t row_at = id_of(s, r) * s.dim;
      for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
        const Lanes x = load(g, kFloat32, c, count);
        if (is_linear(s.first)) add(s.first, places.first, row_at, c, count, x);
        if (is_linear(s.second)) add(s.second, places.second, row_at, c, count, x * x);
      });
    });
  });
}

INLINE Lanes quotient(const Step& s, Lanes numerator, Lanes square) {
  Lanes denominator = root(square);
  if (s.second_root != 1.0f) denominator /= s.second_root;
  return numerator / (denominator + s.eps);
}

INLINE Lanes clipped(const Step& s, Lanes direction) {
  return s.has_clip ? larger(all(-s.clip), smaller(all(s.clip), direction)) : direction;
}

INLINE Lanes median_of_quotients(const Step& s, const Places& places, int64_t c, int64_t count) {
  Lanes quotients[kMaxDepth], squares[kMaxDepth];
  read(s.first, places.first, c, count, quotients);
  read(s.second, places.second, c, count, squares);
  for (int32_t j = 0; j < s.first.depth; ++j)
    quotients[j] = clipped(s, quotient(s, quotients[j], squares[j]));
  return combine(s.first, quotients);
}

template <int32_t P>
void update_rows(const Step& s) {
  const bool by_column = is_item_wise(s.first) || is_item_wise(s.second);
  const bool is_by_row = s.second.kind != kNone && s.second.is_by_row;
  in_parallel(s, by_column, [&](Span rows, Span columns) {
    std::unique_ptr<float[]> buffer(new float[s.dim]);
    for_rows<P>(s, rows, columns, [&](int64_t r, const Places& places) {
      const float* g = gradient_of<P>(s, r, columns, buffer.get());
      const int64_t row_at = id_of(s, r) * s.dim;
      const float inverse =
          is_by_row ? 1.0f / (std::sqrt(s.row_values[r]) / s.second_root + s.eps) : 1.0f;
      for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
        const Lanes x = load(g, kFloat32, c, count);
        Lanes direction = x;
        if (s.is_ratio) {
          direction = median_of_quotients(s, places, c, count);
        } else {
          if (s.first.kind != kNone)
            direction = update(s.first, places.first, row_at, c, count, x);
          if (s.has_nesterov) direction = x + direction * s.nesterov;
          if (is_by_row)
            direction *= inverse;
          else if (s.second.kind != kNone)
            direction = quotient(
                s, direction, update(s.second, places.second, row_at, c, count, x * x));
          direction = clipped(s, direction);
        }
        const Lanes old = load(s.parameter, P, row_at + c, count);
        store(s.parameter, P, row_at + c, count, old * s.shrink - direction * s.step_size);
      });
    });
  });
}

template <int32_t P>
void run(const Step& s) {
  if (s.second.kind != kNone && s.second.is_by_row)
    move_by_row(s.second, s.gradient.ids, s.gradient.rows, s.threads, s.row_values);
  if (is_linear(s.first) || is_linear(s.second)) add_rows<P>(s);
  update_rows<P>(s);
}

template <int32_t P>
int32_t inspect(const Step& s) {
  const bool wants_squares = s.second.kind != kNone && s.second.is_by_row;
  int64_t refused = 0;
  in_parallel(s, false, [&](Span rows, Span columns) {
    std::unique_ptr<float[]> buffer(new float[s.dim]);
    IntLanes beyond{};
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      if (r + kRowsAhead < rows.end)
        prefetch<P>(s.gradient.values, first_entry(s.gradient, r + kRowsAhead) * s.dim, columns);
      const float* g = gradient_of<P>(s, r, columns, buffer.get());
      Lanes sums[4] = {};
      for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
        const Lanes x = load(g, kFloat32, c, count);
        const Lanes size = x < 0.0f ? -x : x;
        beyond |= ~(size <= s.largest_gradient);  // a NaN is not within either
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
