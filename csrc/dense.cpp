// Steps along dense gradients, one row after the other: its mean square, its second moment, its new
// weights and its counters. So the memory is read at an even pace, which hides the arithmetic.
//
// All rows read the counters of a conservative sketch as they were before the step, while the
// targets of rows raise others. Both lie in the workspace, in pairs, so that they share cache lines.
#include "dense.h"

#include "by_row.h"
#include "columns.h"
#include "update.h"

namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kBytesAhead = 8192;

int64_t counters_of(const Moment& m) { return is_conservative(m) ? m.depth * m.width : 0; }

// What all threads share of the workspace, and behind it what each has for the shares of columns.
int64_t bytes_of_pairs(const Step& s) {
  const int64_t bytes = 2 * counters_of(s.second) * bytes_of(s.second.dtype);
  return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

int64_t bytes_of_shares(const Step& s) { return shares_size(s) * static_cast<int64_t>(sizeof(float)); }

// Calls visit(counters) with their type.
template <typename Visit>
void with_counters(const Moment& m, Visit visit) {
  if (m.dtype == kFloat32)
    visit(static_cast<uint32_t*>(m.data));
  else
    visit(static_cast<uint16_t*>(m.data));
}

// Raises a number in memory that other threads may raise too.
template <typename Bits>
void raise_together(Bits* number, Bits target) {
  // Numbers that are not negative ascend as their bits do.
  Bits old = __atomic_load_n(number, __ATOMIC_RELAXED);
  while (old < target && !__atomic_compare_exchange_n(number, &old, target, true,
                                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// The second moments by row of rows that one thread takes in ascending order.
class SecondByRow {
 public:
  SecondByRow(const Step& s, Span rows) : s_(s), m_(s.second), rows_(rows), pairs_(s.second) {
    pairs_.data = s.workspace;
  }

  INLINE float move(int64_t r, float square) {
    if (m_.kind == kRowWise) {
      float& number = static_cast<float*>(m_.data)[id_of(s_, r)];
      return number = moved_by_row(m_, number, square);
    }
    const int64_t lane = (r - rows_.begin) % kPlaces;
    if (lane == 0) find(r);
    float least = INFINITY;
    for (int32_t j = 0; j < m_.depth; ++j)
      least = std::min(least, load_one(pairs_, 2 * places_.at[j][lane]));
    const float moved = moved_by_row(m_, least * m_.scale, square);
    const float target =
        rounded_one(m_, moved * m_.inverse_scale, places_.rounding_row_keys[lane]);
    for (int32_t j = 0; j < m_.depth; ++j) raise(2 * places_.at[j][lane] + 1, target);
    return moved;
  }

 private:
  __attribute__((noinline)) void find(int64_t begin) {
    int64_t ids[kPlaces];
    for (int64_t i = 0; i < kPlaces; ++i)
      ids[i] = hashed_id_of(s_, std::min(begin + i, rows_.end - 1));
    locate(m_, ids, 1, places_);
  }

  INLINE void raise(int64_t at, float target) const {
    if (s_.threads > 1) return raise_together_with_others(at, target);
    // Written in both cases: a branch would often be predicted wrongly.
    const float old = load_one(pairs_, at);
    store_one(pairs_, at, target > old ? target : old);
  }

  void raise_together_with_others(int64_t at, float target) const {
    if (!(target > 0.0f)) return;  // NaN raises nothing
    uint32_t bits;
    std::memcpy(&bits, &target, sizeof(bits));
    if (m_.dtype == kFloat32)
      raise_together(static_cast<uint32_t*>(pairs_.data) + at, bits);
    else
      raise_together(static_cast<uint16_t*>(pairs_.data) + at, upper_half(target));
  }

  const Step& s_;
  const Moment m_;
  const Span rows_;
  Moment pairs_;
  Places places_;
};

// The gradient of a row some rows later; moments and weights are prefetched as the row moves.
template <int32_t P>
INLINE void prefetch_ahead(const Step& s, int64_t r) {
  const char* row = static_cast<const char*>(s.gradient.values) + r * s.dim * bytes_of(P);
  for (int64_t at = 0; at < s.dim * bytes_of(P); at += kCacheLine)
    __builtin_prefetch(row + kBytesAhead + at);
}

template <typename Columns, typename First, typename Second, bool kIsByRow>
void move_rows(const Step& s, Span rows, void* room) {
  const Update<Columns::kWeights, First, Second> update(s, Span{0, s.dim});
  SecondByRow second(s, rows);
  MeanSquares mean_square(s, room);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const Columns g(s, r);
    float inverse = 1.0f;
    if (kIsByRow)
      inverse = update.of_row(second.move(r, mean_square(g, hashed_id_of(s, r))));
    prefetch_ahead<Columns::kValues>(s, r);
    Row row{}, next{};
    enter(s, r, row);
    next.at = row.at + kBytesAhead / bytes_of(Columns::kWeights);
    update(row, &next, g, inverse);
  }
}

template <typename Columns, typename First>
void move_rows(const Step& s, Span rows, void* room) {
  using Exact = ExactMoment<Columns::kWeights>;
  if (is_by_row(s.second)) return move_rows<Columns, First, NoMoment, true>(s, rows, room);
  if (s.second.kind == kExact) return move_rows<Columns, First, Exact, false>(s, rows, room);
  move_rows<Columns, First, NoMoment, false>(s, rows, room);
}

}  // namespace

bool is_taken_row_by_row(const Step& s) {
  const bool is_free = s.second.kind == kNone || s.second.kind == kExact ||
                       s.second.kind == kRowWise ||
                       (s.second.is_by_row && s.second.form == kConservative);
  return !s.gradient.ids && s.first.kind != kSketch && is_free;
}

int64_t workspace_row_by_row(const Step& s) {
  return bytes_of_pairs(s) + std::max(1, s.threads) * bytes_of_shares(s);
}

void unpack_counters(const Step& s) {
  with_counters(s.second, [&](auto* counters) {
    auto* pairs = static_cast<decltype(counters)>(s.workspace);
    for (int64_t i = 0; i < counters_of(s.second); ++i) pairs[2 * i] = pairs[2 * i + 1] = counters[i];
  });
}

void pack_counters(const Step& s) {
  with_counters(s.second, [&](auto* counters) {
    const auto* pairs = static_cast<decltype(counters)>(s.workspace);
    for (int64_t i = 0; i < counters_of(s.second); ++i) counters[i] = pairs[2 * i + 1];
  });
}

void move_rows(const Step& s) {
  const int64_t parts = std::max(1, s.threads);
  with_dense_rows(s, [&](auto kind) {
    using Columns = typename decltype(kind)::type;
    for_parts(parts, [&](int64_t part) {
      const Span rows = share(s.gradient.rows, part, parts);
      void* room = static_cast<char*>(s.workspace) + bytes_of_pairs(s) + part * bytes_of_shares(s);
      if (s.first.kind == kExact)
        move_rows<Columns, ExactMoment<Columns::kWeights>>(s, rows, room);
      else
        move_rows<Columns, NoMoment>(s, rows, room);
    });
  });
}

extern "C" int32_t sketchoptim_takes_rows(const Step* step) {
  return is_taken_row_by_row(*step);
}

extern "C" void sketchoptim_move_rows(Step* step, const void* values, int32_t dtype,
                                      int64_t first_id, int64_t rows, int32_t threads) {
  step->gradient.values = values;
  step->gradient.dtype = dtype;
  step->gradient.first_id = first_id;
  step->gradient.rows = rows;
  step->threads = threads;
  move_rows(*step);
}

extern "C" void sketchoptim_end_rows(const Call* call) {
  pack_counters(*call->step);
  end_columns(*call->step, *call->rule);
}
