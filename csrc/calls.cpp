// The steps of several parameters in one call. Parameters are independent of each other, so threads
// divide them among themselves; one that is more than a thread's share of all is divided instead.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "columns.h"
#include "dense.h"
#include "lanes.h"
#include "largest.h"
#include "lookups.h"
#include "moment.h"

namespace {

constexpr int64_t kAlignment = 64;
const void* const kNowhere = reinterpret_cast<const void*>(kAlignment);
// The lazily applied scale stays within these bounds; see sketchoptim/_sketch_base.py.
constexpr double kSmallestScale = 0x1p-24, kLargestScale = 1.0;

// Parts of memory, one after the other. Before there is memory, pointers only count the bytes.
struct Memory {
  const uintptr_t begin;
  int64_t bytes = 0;

  explicit Memory(const void* start) : begin(reinterpret_cast<uintptr_t>(start)) {}

  template <typename T>
  T* take(int64_t count) {
    T* part = reinterpret_cast<T*>(begin + static_cast<uintptr_t>(bytes));
    bytes += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return part;
  }
};

// The ids of a call that has any: all of a sparse gradient, or those of one table of lookups.
Span ids_of(const Call& call) {
  return call.lookups ? ids_of_table(*call.lookups, call.table) : Span{0, call.entries};
}

int64_t entries_of(const Call& call) {
  const Span ids = ids_of(call);
  return ids.end - ids.begin;
}

bool has_ids(const Call& call) { return call.ids || call.lookups; }

int64_t work_of(const Call& call) { return entries_of(call) * call.step->dim; }

// Calls visit(call, threads, slot) for all calls: with the number of threads that it has for itself,
// and a number below calls.threads that no other call has at the same time.
template <typename Visit>
void for_calls(const Calls& calls, Visit visit) {
  int64_t total = 0;
  for (int64_t i = 0; i < calls.count; ++i) total += work_of(calls.call[i]);
  const int threads = total < calls.elements_for_threads ? 1 : std::max(1, calls.threads);
  auto is_divided = [&](const Call& call) {
    return work_of(call) * threads > total && work_of(call) >= calls.elements_for_threads;
  };
  for (int64_t i = 0; i < calls.count; ++i)
    if (is_divided(calls.call[i])) visit(calls.call[i], threads, 0);
  std::atomic<int64_t> next{0}, slots{0};
#pragma omp parallel num_threads(threads) if (threads > 1 && calls.count > 1)
  {
    const int64_t slot = slots++;
    for (int64_t i = next++; i < calls.count; i = next++)
      if (!is_divided(calls.call[i])) visit(calls.call[i], 1, slot);
  }
}

void set_average(Moment& m, double decay, double weight) {
  m.weight = static_cast<float>(weight);
  m.decay_less_one = static_cast<float>(decay - 1);
  m.is_average = weight == 1 - decay;
}

void set_rule(Step& s, const Rule& r) {
  s.step_size = static_cast<float>(r.step_size);
  s.second_root = static_cast<float>(r.second_root);
  s.eps = static_cast<float>(r.eps);
  s.weight_decay = static_cast<float>(r.weight_decay);
  s.shrink = static_cast<float>(r.shrink);
  s.has_nesterov = !std::isnan(r.nesterov);
  s.nesterov = s.has_nesterov ? static_cast<float>(r.nesterov) : 0.0f;
  s.has_clip = !std::isnan(r.clip);
  s.clip = s.has_clip ? static_cast<float>(r.clip) : 0.0f;
  s.is_maximizing = r.is_maximizing != 0;
  s.is_ratio = r.is_ratio != 0;
  if (!std::isnan(r.first_decay)) set_average(s.first, r.first_decay, r.first_weight);
  if (!std::isnan(r.second_decay)) set_average(s.second, r.second_decay, r.second_weight);
}

void fill_in(const Call& call) {
  Step& s = *call.step;
  set_rule(s, *call.rule);
  s.gradient = Gradient{};
  s.gradient.values = call.values;
  s.gradient.ids = call.lookups ? call.lookups->ids + ids_of(call).begin : call.ids;
  s.gradient.rows = entries_of(call);
  s.gradient.stride = call.lookups ? call.lookups->stride : s.dim;
  s.gradient.scale = call.lookups ? static_cast<float>(call.scale) : 1.0f;
  s.gradient.is_of_lookups = call.lookups != nullptr;
  s.gradient.dtype = s.dtype;
  s.is_stochastic = call.rounding_key >= 0;
  s.rounding_key = static_cast<uint32_t>(call.rounding_key);
  s.row_values = nullptr;
  s.workspace = nullptr;
}

// Words that the grouping of a call needs: with lookups, also the output and the factor of each.
int64_t words_of_room(const Call& call) { return (call.lookups ? 4 : 3) * entries_of(call) + 1; }

// Groups the ids of lookups, whose entries are then the numbers of their outputs, with a factor each.
int64_t group_lookups(const Call& call, uint64_t* room) {
  const Lookups& l = *call.lookups;
  Gradient& g = call.step->gradient;
  const Span span = ids_of(call);
  const int64_t entries = span.end - span.begin, first = call.table * l.outputs;
  auto* output_of = reinterpret_cast<uint32_t*>(room + 3 * entries + 1);
  auto* factors = reinterpret_cast<float*>(output_of + entries);
  auto bag = [&](int64_t output) { return ids_of_bag(l, first + output); };
  for (int64_t b = 0; !l.is_single && b < l.outputs; ++b)
    for (int64_t i = bag(b).begin; i < bag(b).end; ++i)
      output_of[i - span.begin] = static_cast<uint32_t>(b);
  const bool has_positions = l.is_single || l.weights;
  const int64_t shared =
      sketchoptim_group(l.ids + span.begin, has_positions ? nullptr : output_of, entries, room, &g);
  if (!l.weights && (l.is_single || !l.is_mean)) return shared;
  auto* order = const_cast<uint32_t*>(g.order);
  for (int64_t i = 0; i < entries; ++i) {
    float factor = 1.0f;
    if (l.weights) {
      factor = l.weights[span.begin + order[i]];
      if (!l.is_single) order[i] = output_of[order[i]];
    }
    const Span ids_of_it = bag(order[i]);
    if (l.is_mean) factor *= 1.0f / static_cast<float>(ids_of_it.end - ids_of_it.begin);
    factors[i] = factor;
  }
  g.factors = factors;
  return shared;
}

// Groups the ids of a call in a room of words_of_room() words.
void group(const Call& call, int64_t* ids) {
  auto* room = reinterpret_cast<uint64_t*>(ids);
  call.step->shared =
      call.lookups ? group_lookups(call, room)
                   : sketchoptim_group(call.ids, nullptr, call.entries, room, &call.step->gradient);
}

// Whether a look at the gradients of the outputs may show that none of a row is refused: it is less
// than a look at the rows.
bool may_be_bounded(const Call& call) {
  const Step& s = *call.step;
  return call.is_checked && call.lookups && s.weight_decay == 0.0f && s.dtype == kFloat32;
}

constexpr float kUnknown = -1.0f;

// The largest magnitude of a matrix of outputs' gradients.
float largest_of_outputs(const Lookups& l, int64_t elements_for_threads, int32_t threads) {
  std::atomic<uint32_t> largest{0};  // the bits, which ascend as magnitudes do
  const int64_t parts = l.outputs * l.columns < elements_for_threads ? 1 : std::max(1, threads);
  for_parts(parts, [&](int64_t part) {
    const Span outputs = share(l.outputs, part, parts);
    const int64_t together = l.columns == l.stride ? outputs.end - outputs.begin : 1;
    Largest own;
    for (int64_t i = outputs.begin; i < outputs.end; i += together) {
      const int64_t begin = i * l.stride;
      own.take(largest_of<kFloat32>(l.values, {begin, begin + together * l.columns}));
    }
    uint32_t before = largest;
    const uint32_t found = own.bits();
    while (before < found && !largest.compare_exchange_weak(before, found)) {
    }
  });
  const uint32_t bits = largest;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// Whether the gradients of other outputs lie to the right of these in one matrix.
bool are_beside(const Lookups& l, const Lookups& others) {
  return others.values == static_cast<const float*>(l.values) + l.columns &&
         others.outputs == l.outputs && others.stride == l.stride &&
         l.columns + others.columns <= l.stride;
}

// Finds the largest magnitudes of the lookups that have none: of several tables at once, if the
// gradients of their outputs are columns of one matrix.
void find_largest(const Calls& calls) {
  auto is_new = [&](int64_t i) {
    return may_be_bounded(calls.call[i]) && calls.call[i].lookups->largest == kUnknown;
  };
  for (int64_t i = 0; i < calls.count; ++i) {
    if (!is_new(i)) continue;
    Lookups all = *calls.call[i].lookups;
    int64_t end = i + 1;
    for (; end < calls.count && is_new(end) && are_beside(all, *calls.call[end].lookups); ++end)
      all.columns += calls.call[end].lookups->columns;
    const float largest = largest_of_outputs(all, calls.elements_for_threads, calls.threads);
    for (int64_t j = i; j < end; ++j) {
      Lookups& l = *calls.call[j].lookups;
      l.largest = largest;
      if (l.weights) l.largest *= largest_of<kFloat32>(l.weights, {0, l.count}).value();
    }
  }
}

// Whether the gradient of no row is refused, whichever rows were looked up.
bool is_bounded(const Call& call) {
  if (!may_be_bounded(call)) return false;
  const float most = call.lookups->largest * std::fabs(call.step->gradient.scale);
  return most * static_cast<float>(entries_of(call)) <= call.step->largest_gradient;
}

// What inspect() and step() need of a step whose ids are grouped.
void place(const Call& call, Memory& memory) {
  Step& s = *call.step;
  const int64_t rows = s.gradient.rows;
  // Sums that inspect() finds are kept for the step, unless they take more than one copy of the
  // touched rows: they are float32 where rows may be half as wide.
  if (s.is_inspected && s.shared > 0 && s.shared * 4 <= rows * bytes_of(s.dtype))
    s.gradient.sums = memory.take<float>(s.shared * s.dim);
  // Mean squares by row become second moments. Those of a dense gradient with many rows are found
  // by the step, a few at a time.
  const bool is_small = has_ids(call) || rows <= s.most_row_values;
  if (is_by_row(s.second) && is_small && !is_taken_row_by_row(s))
    s.row_values = memory.take<float>(std::max<int64_t>(1, rows));
  s.workspace = memory.take<char>(sketchoptim_workspace(&s));
}

// Whether the ids of a call are grouped when it is run, in memory that other calls use after it. Its
// gradient is not looked at before.
bool is_grouped_late(const Call& call) {
  return call.lookups && call.step->finding == kIsUnordered && !call.step->is_inspected;
}

// What such a call needs, however many rows it has.
int64_t bytes_of_late(const Call& call) {
  Memory needed(kNowhere);
  needed.take<int64_t>(words_of_room(call));
  // Without lookups there are no ids to point at, but such a step is no step along a dense gradient.
  call.step->gradient.ids = static_cast<const int64_t*>(kNowhere);
  call.step->gradient.starts = static_cast<const uint32_t*>(kNowhere);
  place(call, needed);
  return needed.bytes;
}

// The most that such a call needs.
int64_t most_bytes_of_late(const Calls& calls) {
  int64_t most = 0;
  for (int64_t i = 0; i < calls.count; ++i)
    if (is_grouped_late(calls.call[i])) most = std::max(most, bytes_of_late(calls.call[i]));
  return most;
}

// splitmix64, as sketchoptim/_hashing.py specifies it.
uint64_t splitmix64(uint64_t state) {
  return mix_id(static_cast<int64_t>(state + 0x9e3779b97f4a7c15u));
}

// Multiplies the counters by 2^exponent, in three steps since that itself may not be a float32.
void shift(const Moment& m, int64_t counters, int exponent) {
  for (int part = 0; part < 3; ++part) {
    const float factor = std::ldexp(1.0f, static_cast<int>(std::floor((exponent + part) / 3.0)));
    for (int64_t at = 0; at < counters; at += kLanes) {
      const int64_t count = std::min(kLanes, counters - at);
      store(m.data, m.dtype, at, count, load(m.data, m.dtype, at, count) * factor);
    }
    if (m.stored_start) *m.stored_start *= factor;
  }
}

// Decays a sketch as a whole, and describes it for the step.
void begin(Moment& m, double decay, int64_t dim) {
  if (m.kind != kSketch || std::isnan(decay)) return;
  if (m.form == kLinear || m.form == kConservative) {
    const int64_t counters = m.depth * m.width * (m.is_by_row ? 1 : dim);
    double scale = *m.stored_scale * decay;
    if (scale == 0.0) {
      std::memset(m.data, 0, counters * bytes_of(m.dtype));
      if (m.stored_start) *m.stored_start = 0.0f;
      scale = 1.0;
    } else if (!(kSmallestScale <= std::fabs(scale) && std::fabs(scale) <= kLargestScale)) {
      int exponent;
      scale = std::frexp(scale, &exponent);
      shift(m, counters, exponent);
    }
    *m.stored_scale = static_cast<float>(scale);
  }
  m.scale = *m.stored_scale;
  m.inverse_scale = static_cast<float>(1.0 / static_cast<double>(m.scale));
  if (!m.writes) return;
  m.rounding_key = static_cast<uint32_t>(splitmix64(static_cast<uint64_t>(++*m.writes)));
}

void begin_moments(const Call& call) {
  begin(call.step->first, call.rule->first_decay, call.step->dim);
  begin(call.step->second, call.rule->second_decay, call.step->dim);
}

}  // namespace

extern "C" int64_t sketchoptim_check_ids(const Calls* calls) {
  const Lookups* before = nullptr;
  for (int64_t i = 0; i < calls->count; ++i) {
    const Call& call = calls->call[i];
    call.step->finding = kAscends;
    if (!call.lookups || call.lookups == before) continue;
    before = call.lookups;
    call.lookups->largest = kUnknown;
    if (are_bags(*call.lookups)) continue;
    call.step->finding = kIsOutside;
    return -(i + 1);
  }
  for_calls(*calls, [](const Call& call, int32_t threads, int64_t) {
    fill_in(call);
    call.step->threads = threads;
    call.step->shared = 0;
    if (!has_ids(call)) return;
    const Gradient& g = call.step->gradient;
    const int32_t ascend = sketchoptim_ascend(g.ids, g.rows, call.step->n);
    if (ascend < 0)
      call.step->finding = kIsOutside;
    else if (!ascend || call.lookups)
      call.step->finding = kIsUnordered;
  });
  for (int64_t i = 0; i < calls->count; ++i)
    if (calls->call[i].step->finding == kIsOutside) return -(i + 1);
  find_largest(*calls);
  Memory needed(kNowhere);
  for (int64_t i = 0; i < calls->count; ++i) {
    const Call& call = calls->call[i];
    call.step->is_inspected = call.is_checked && !is_bounded(call);
    if (call.step->finding == kIsUnordered && !is_grouped_late(call))
      needed.take<int64_t>(words_of_room(call));
  }
  return needed.bytes;
}

extern "C" int64_t sketchoptim_group_ids(const Calls* calls, void* room) {
  Memory memory(room);
  for (int64_t i = 0; i < calls->count; ++i) {
    const Call& call = calls->call[i];  // its ids are those of its rows from now on: the room, at first
    if (call.step->finding == kIsUnordered && !is_grouped_late(call))
      call.step->gradient.ids = memory.take<int64_t>(words_of_room(call));
  }
  for_calls(*calls, [](const Call& call, int32_t, int64_t) {
    if (call.step->finding == kIsUnordered && !is_grouped_late(call))
      group(call, const_cast<int64_t*>(call.step->gradient.ids));
  });
  Memory needed(kNowhere);
  for (int64_t i = 0; i < calls->count; ++i)
    if (!is_grouped_late(calls->call[i])) place(calls->call[i], needed);
  needed.take<char>(std::max(1, calls->threads) * most_bytes_of_late(*calls));
  return needed.bytes;
}

extern "C" int64_t sketchoptim_check_values(const Calls* calls, void* memory) {
  Memory parts(memory);
  for (int64_t i = 0; i < calls->count; ++i)
    if (!is_grouped_late(calls->call[i])) place(calls->call[i], parts);
  const int64_t late_bytes = most_bytes_of_late(*calls);
  char* late = parts.take<char>(std::max(1, calls->threads) * late_bytes);
  for (int64_t i = 0; i < calls->count; ++i)
    if (is_grouped_late(calls->call[i])) calls->call[i].step->workspace = late;
  for_calls(*calls, [](const Call& call, int32_t, int64_t) {
    if (is_grouped_late(call)) return;
    begin_columns(*call.step, *call.step->step_count + 1);
    if (call.step->is_inspected && !sketchoptim_inspect(call.step))
      call.step->finding = kIsNotFinite;
  });
  int64_t refused = 0;
  for (int64_t i = 0; i < calls->count; ++i) refused += calls->call[i].step->finding == kIsNotFinite;
  return refused;
}

extern "C" void sketchoptim_run(const Calls* calls) {
  const char* late = nullptr;
  for (int64_t i = 0; i < calls->count; ++i)
    if (is_grouped_late(calls->call[i]))
      late = static_cast<const char*>(calls->call[i].step->workspace);
  const int64_t late_bytes = most_bytes_of_late(*calls);
  for_calls(*calls, [&](const Call& call, int32_t, int64_t slot) {
    Step& s = *call.step;
    if (s.finding == kIsNotFinite) return;
    if (is_grouped_late(call)) {
      Memory own(late + slot * late_bytes);
      group(call, own.take<int64_t>(words_of_room(call)));
      place(call, own);
      begin_columns(*call.step, *call.step->step_count + 1);
    }
    ++*s.step_count;
    if (s.dim == 0) return;
    begin_moments(call);
    if (s.n == 0) return;  // of a table that processes divide, whose counters decay here too
    sketchoptim_step(&s);
    end_columns(s, *call.rule);
  });
}

extern "C" void sketchoptim_begin_rows(const Call* call, void* workspace) {
  fill_in(*call);
  call->step->workspace = workspace;
  begin_moments(*call);
  begin_columns(*call->step, *call->step->step_count);
  unpack_counters(*call->step);
}
