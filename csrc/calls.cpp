// The steps of several parameters in one call. Parameters are independent of each other, so threads
// divide them among themselves; one that is more than a thread's share of all is divided instead.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "columns.h"
#include "dense.h"
#include "lanes.h"
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

int64_t work_of(const Call& call) { return call.entries * call.step->dim; }

// Calls visit(call, threads) for all calls, with the number of threads that it has for itself.
template <typename Visit>
void for_calls(const Calls& calls, Visit visit) {
  int64_t total = 0;
  for (int64_t i = 0; i < calls.count; ++i) total += work_of(calls.call[i]);
  const int threads = total < calls.elements_for_threads ? 1 : std::max(1, calls.threads);
  auto is_divided = [&](const Call& call) {
    return work_of(call) * threads > total && work_of(call) >= calls.elements_for_threads;
  };
  for (int64_t i = 0; i < calls.count; ++i)
    if (is_divided(calls.call[i])) visit(calls.call[i], threads);
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads) if (threads > 1 && calls.count > 1)
  for (int64_t i = next++; i < calls.count; i = next++)
    if (!is_divided(calls.call[i])) visit(calls.call[i], 1);
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
  s.gradient.ids = call.ids;
  s.gradient.rows = call.entries;
  s.gradient.stride = call.lookups ? call.lookups->stride : s.dim;
  s.gradient.scale = call.lookups ? static_cast<float>(call.lookups->scale) : 1.0f;
  s.gradient.is_of_lookups = call.lookups != nullptr;
  s.gradient.dtype = s.dtype;
  s.is_stochastic = call.rounding_key >= 0;
  s.rounding_key = static_cast<uint32_t>(call.rounding_key);
  s.row_values = nullptr;
  s.workspace = nullptr;
}

// Whether offsets divide all ids among the outputs.
bool are_bags(const Call& call) {
  const Lookups& l = *call.lookups;
  if (!l.offsets) return l.ids_a_bag * l.outputs == call.entries;
  int64_t wrong = l.outputs == 0 ? call.entries : l.offsets[0] - l.first_offset;
  for (int64_t b = 0; b < l.outputs; ++b) {
    const int64_t end = b + 1 < l.outputs ? l.offsets[b + 1] - l.first_offset : call.entries;
    wrong |= end < l.offsets[b] - l.first_offset;
  }
  return wrong == 0;
}

// Words that the grouping of a call needs: with lookups, also the output and the factor of each.
int64_t words_of_room(const Call& call) { return (call.lookups ? 4 : 3) * call.entries + 1; }

// From positions of lookups, in order, to the numbers of their outputs and to their factors.
void find_outputs(const Call& call, int64_t* rest) {
  const Lookups& l = *call.lookups;
  Gradient& g = call.step->gradient;
  if (!l.offsets && l.ids_a_bag == 1 && !l.weights) return;
  auto* output_of = reinterpret_cast<uint32_t*>(rest);
  auto* factors = reinterpret_cast<float*>(output_of + call.entries);
  auto begin_of = [&](int64_t b) {
    if (b == l.outputs) return call.entries;
    return l.offsets ? l.offsets[b] - l.first_offset : b * l.ids_a_bag;
  };
  for (int64_t b = 0; b < l.outputs; ++b)
    for (int64_t i = begin_of(b); i < begin_of(b + 1); ++i) output_of[i] = static_cast<uint32_t>(b);
  auto* order = const_cast<uint32_t*>(g.order);
  for (int64_t i = 0; i < call.entries; ++i) {
    const uint32_t at = order[i], output = output_of[at];
    order[i] = output;
    float factor = l.weights ? l.weights[at] : 1.0f;
    if (l.is_mean) factor *= 1.0f / static_cast<float>(begin_of(output + 1) - begin_of(output));
    factors[i] = factor;
  }
  if (l.weights || l.is_mean) g.factors = factors;
}

// The largest of several magnitudes, which is NaN if one of them is: bits of numbers without a sign
// ascend as the numbers do, with NaN above all.
struct Largest {
  WordLanes most{};

  INLINE void take(const float* values, int64_t count) {
    for_columns(0, count, [&](int64_t c, int64_t lanes) ALWAYS {
      const WordLanes x = bits_of(load(values, kFloat32, c, lanes)) & 0x7fffffffu;
      most = (IntLanes)most > (IntLanes)x ? most : x;
    });
  }

  float value() const {
    uint32_t bits = 0;
    for (int64_t i = 0; i < kLanes; ++i) bits = std::max<uint32_t>(bits, most[i]);
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
  }
};

// Whether the outputs' gradients are so small that the gradient of no row is refused, whichever rows
// were looked up: a look at the outputs is less than a look at the rows.
bool is_bounded(const Call& call) {
  const Step& s = *call.step;
  const Lookups& l = *call.lookups;
  if (s.weight_decay != 0.0f || s.dtype != kFloat32) return false;
  Largest gradient, weight;
  for (int64_t b = 0; b < l.outputs; ++b)
    gradient.take(static_cast<const float*>(call.values) + b * l.stride, s.dim);
  if (l.weights) weight.take(l.weights, call.entries);
  const float factor = (l.weights ? weight.value() : 1.0f) * std::fabs(s.gradient.scale);
  return gradient.value() * factor * static_cast<float>(call.entries) <= s.largest_gradient;
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
  const bool is_small = call.ids || rows <= s.most_row_values;
  if (is_by_row(s.second) && is_small && !is_taken_row_by_row(s))
    s.row_values = memory.take<float>(std::max<int64_t>(1, rows));
  s.workspace = memory.take<char>(sketchoptim_workspace(&s));
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
  for_calls(*calls, [](const Call& call, int32_t) {
    fill_in(call);
    call.step->shared = 0;
    call.step->finding = kAscends;
    if (!call.ids) return;
    const int32_t ascend = sketchoptim_ascend(call.ids, call.entries, call.step->n);
    call.step->finding = ascend < 0 ? kIsOutside : ascend ? kAscends : kIsUnordered;
    if (call.lookups && ascend >= 0)
      call.step->finding = are_bags(call) ? kIsUnordered : kIsOutside;
  });
  Memory needed(kNowhere);
  for (int64_t i = 0; i < calls->count; ++i) {
    const Call& call = calls->call[i];
    if (call.step->finding == kIsOutside) return -(i + 1);
    if (call.step->finding == kIsUnordered) needed.take<int64_t>(words_of_room(call));
  }
  return needed.bytes;
}

extern "C" int64_t sketchoptim_group_ids(const Calls* calls, void* room) {
  Memory memory(room);
  for (int64_t i = 0; i < calls->count; ++i) {
    const Call& call = calls->call[i];  // its ids are those of its rows from now on: the room, at first
    if (call.step->finding == kIsUnordered)
      call.step->gradient.ids = memory.take<int64_t>(words_of_room(call));
  }
  for_calls(*calls, [](const Call& call, int32_t threads) {
    call.step->threads = threads;
    call.step->is_inspected = call.is_checked && !(call.lookups && is_bounded(call));
    if (call.step->finding != kIsUnordered) return;
    auto* own = const_cast<int64_t*>(call.step->gradient.ids);
    call.step->shared = sketchoptim_group(call.ids, call.entries, reinterpret_cast<uint64_t*>(own),
                                          &call.step->gradient);
    if (call.lookups) find_outputs(call, own + 3 * call.entries + 1);
  });
  Memory needed(kNowhere);
  for (int64_t i = 0; i < calls->count; ++i) place(calls->call[i], needed);
  return needed.bytes;
}

extern "C" int64_t sketchoptim_check_values(const Calls* calls, void* memory) {
  Memory parts(memory);
  for (int64_t i = 0; i < calls->count; ++i) place(calls->call[i], parts);
  for_calls(*calls, [](const Call& call, int32_t) {
    begin_columns(*call.step, *call.step->step_count + 1);
    if (call.step->is_inspected && !sketchoptim_inspect(call.step))
      call.step->finding = kIsNotFinite;
  });
  int64_t refused = 0;
  for (int64_t i = 0; i < calls->count; ++i) refused += calls->call[i].step->finding == kIsNotFinite;
  return refused;
}

extern "C" void sketchoptim_run(const Calls* calls) {
  for_calls(*calls, [](const Call& call, int32_t) {
    Step& s = *call.step;
    if (call.step->finding == kIsNotFinite) return;
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
