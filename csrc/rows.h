// The rows of a step: their distribution among threads, their order, and their gradients.
#pragma once

#include <algorithm>
#include <type_traits>

#include "largest.h"
#include "moment.h"

constexpr int64_t kLine = 16;  // numbers in a cache line, of which a thread takes all or none
constexpr int64_t kGroupedRows = 16;  // whose roots are computed together
constexpr int64_t kPrefetchBytes = 512;  // from there on the hardware prefetches
constexpr int64_t kEntriesAhead = 4;     // two to eight take the same time
constexpr int64_t kLookupsAhead = 32;    // whose outputs' gradients are far apart

// What a sweep does: its rows are divided among threads by this, and not by their number alone. The
// rows of a text's frequent words come first and have most of the entries.
struct RowWork {
  int64_t of_entry, of_row;
};

inline Span share_of_rows(const Gradient& g, RowWork unit, int64_t part, int64_t parts) {
  if (!g.starts || parts == 1) return share(g.rows, part, parts);
  auto work = [&](int64_t rows) { return g.starts[rows] * unit.of_entry + rows * unit.of_row; };
  auto first_row = [&](int64_t of) {
    int64_t low = 0, high = g.rows;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (work(middle) * parts < work(g.rows) * of)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  };
  return {first_row(part), first_row(part + 1)};
}

// Of the workspace, in numbers of 32 bits: each thread has a buffer for the gradients of a group of
// rows, and behind them for its shares.
INLINE int64_t gradients_size(const Step& s) {
  const int64_t most = s.gradient.starts ? kGroupedRows : kStreams;
  return (std::min(most, s.gradient.rows) * s.dim + kLine - 1) / kLine * kLine;
}

// The sums of shares, 64 bits for each column if there are factors of columns.
INLINE int64_t shares_size(const Step& s) {
  return s.columns ? (2 * s.dim + kLine - 1) / kLine * kLine : 0;
}

INLINE int64_t buffer_size(const Step& s) { return gradients_size(s) + shares_size(s); }

// Calls visit(rows, columns, buffer) on every thread, with its share of the columns or of the rows.
template <typename Visit>
void in_parallel(const Step& s, bool by_column, RowWork unit, Visit visit) {
  const int64_t parts = std::max(1, s.threads), rows = s.gradient.rows;
  const int64_t lines = (s.dim + kLine - 1) / kLine, size = buffer_size(s);
  for_parts(parts, [&](int64_t part) {
    float* buffer = static_cast<float*>(s.workspace) + part * size;
    if (by_column) {
      const Span span = share(lines, part, parts);
      visit(Span{0, rows}, Span{span.begin * kLine, std::min(s.dim, span.end * kLine)}, buffer);
    } else {
      visit(share_of_rows(s.gradient, unit, part, parts), Span{0, s.dim}, buffer);
    }
  });
}

INLINE int64_t id_of(const Step& s, int64_t r) {
  return s.gradient.ids ? s.gradient.ids[r] : s.gradient.first_id + r;
}

// The number that a row is hashed and rounded by: it keeps it wherever its table is divided.
INLINE int64_t hashed_id_of(const Step& s, int64_t r) { return s.first_row + id_of(s, r); }

INLINE void enter(const Step& s, int64_t r, Row& row) {
  row.number = r;
  row.at = id_of(s, r) * s.dim;
  if (s.is_stochastic) row.rounding_row_key = rounding_row_key(s.rounding_key, hashed_id_of(s, r));
}

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

// Leaves the sum of a row's entries in some columns: several registers of them at a time, so that a
// sum goes to memory once.
template <int32_t P>
INLINE void add_entries(const Step& s, Span entries, Span columns, float* sum) {
  const Gradient& g = s.gradient;
  const int32_t dtype = known_dtype<P>(s.dtype);
  auto entry = [&](int64_t i, int64_t c, int64_t count) ALWAYS {
    Lanes x = load(g.values, dtype, g.order[i] * g.stride + c, count);
    if (g.factors) x *= g.factors[i];
    return g.is_of_lookups ? x * g.scale : x;
  };
  int64_t c = columns.begin;
  auto add_blocks = [&](auto registers) ALWAYS {
    constexpr int64_t kBlock = decltype(registers)::value;
    for (; c + kBlock * kLanes <= columns.end; c += kBlock * kLanes) {
      Lanes sums[kBlock];
      for (int64_t k = 0; k < kBlock; ++k) sums[k] = entry(entries.begin, c + k * kLanes, kLanes);
      for (int64_t i = entries.begin + 1; i < entries.end; ++i)
        for (int64_t k = 0; k < kBlock; ++k) sums[k] += entry(i, c + k * kLanes, kLanes);
      for (int64_t k = 0; k < kBlock; ++k) store(sum, kFloat32, c + k * kLanes, kLanes, sums[k]);
    }
  };
  add_blocks(std::integral_constant<int64_t, 8>{});
  add_blocks(std::integral_constant<int64_t, 4>{});
  for_columns(c, columns.end, [&](int64_t column, int64_t count) ALWAYS {
    Lanes x = entry(entries.begin, column, count);
    for (int64_t i = entries.begin + 1; i < entries.end; ++i) x += entry(i, column, count);
    store(sum, kFloat32, column, count, x);
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
    // Skipped without decay: a weight that is not finite would become NaN when multiplied by 0.
    if (decay != 0.0f) x += load(rows, known_dtype<P>(s.dtype), row_at + c, count) * decay;
    store(sum, kFloat32, c, count, x);
  });
}

// Prefetches the entry that will be added a few entries later, in this row or in one behind it.
INLINE void prefetch_entry(const Step& s, int64_t i, Span columns) {
  const Gradient& g = s.gradient;
  const int64_t last = g.starts[g.rows] - 1, ahead = g.is_of_lookups ? kLookupsAhead : kEntriesAhead;
  prefetch(g.values, s.dtype, g.order[std::min(i + ahead, last)] * g.stride, columns);
}

// The summed gradient of a row, as it reaches the moments, in a buffer.
template <int32_t P>
const float* gathered(const Step& s, int64_t r, Span columns, float* buffer) {
  const Gradient& g = s.gradient;
  if (g.starts) {
    const Span entries{g.starts[r], g.starts[r + 1]};
    for (int64_t i = entries.begin; i < entries.end; ++i) prefetch_entry(s, i, columns);
    add_entries<P>(s, entries, columns, buffer);
  } else {
    for_columns(columns.begin, columns.end, [&](int64_t c, int64_t count) ALWAYS {
      const Lanes x = load(g.values, known_dtype<P>(s.dtype), r * s.dim + c, count);
      store(buffer, kFloat32, c, count, x);
    });
  }
  finish<P>(s, r, columns, buffer);
  return buffer;
}

// The same without a copy where possible: a single float32 entry is the gradient already, and
// inspect() may have left the sum of several.
template <int32_t P>
INLINE const float* gradient_of(const Step& s, int64_t r, Span columns, float* buffer) {
  const Gradient& g = s.gradient;
  const bool alone = is_alone(g, r), is_as_it_is = !g.factors && g.scale == 1.0f;
  if (known_dtype<P>(s.dtype) == kFloat32 && alone && is_as_it_is && !s.is_maximizing &&
      s.weight_decay == 0.0f) {
    if (g.starts) prefetch_entry(s, g.starts[r], columns);
    return static_cast<const float*>(g.values) + first_entry(g, r) * g.stride;
  }
  if (!alone && g.sums) return g.sums + g.slots[r] * s.dim;
  return gathered<P>(s, r, columns, buffer);
}

// Calls visit(first, stride, count) for groups of up to kStreams rows: first, first + stride and so
// on. Rows whose gradients lie one after another are read from several places at once: the hardware
// prefetches from each place, but only so far, and one alone does not fill the memory's bandwidth.
// Others come in order, which is that of their entries.
template <typename Visit>
INLINE void in_groups(const Step& s, Span rows, Visit visit) {
  const int64_t all = rows.end - rows.begin, groups = (all + kStreams - 1) / kStreams;
  const bool is_ordered = s.gradient.starts;
  const int64_t step = is_ordered ? kStreams : 1, stride = is_ordered ? 1 : groups;
  for (int64_t at = 0; at < groups * step; at += step)
    visit(rows.begin + at, stride, std::min(kStreams, (all - at + stride - 1) / stride));
}

// The row that the next group has in the same place.
INLINE int64_t next_of(const Step& s, int64_t r, Span rows) {
  return std::min(r + (s.gradient.starts ? kStreams : 1), rows.end - 1);
}
