// Calls the C interface with random steps, for the sanitizers to watch: every kind of moment, form,
// dtype and gradient, sizes at their ends, and buffers of exactly the size that abi.h asks for.
//
// Each step is taken by one thread and again by several, inspected or not, and has to leave the same
// bytes.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "../../csrc/columns.h"
#include "../../csrc/dense.h"

namespace {

#define REQUIRE(condition)                                                      \
  do {                                                                          \
    if (!(condition)) {                                                         \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);      \
      std::abort();                                                             \
    }                                                                           \
  } while (false)

std::mt19937_64 generator;

int64_t below(int64_t n) { return static_cast<int64_t>(generator() % static_cast<uint64_t>(n)); }
bool chance(int64_t one_in) { return below(one_in) == 0; }

template <typename T>
T one_of(std::initializer_list<T> choices) {
  return choices.begin()[below(static_cast<int64_t>(choices.size()))];
}

// Memory of exactly so many bytes, so that one byte more is found out; what is in it is anything.
class Bytes {
 public:
  explicit Bytes(int64_t size) : size_(size), data_(new char[size]) {}
  Bytes& operator=(const Bytes&) = delete;
  Bytes(const Bytes& other) : Bytes(other.size_) {
    std::memcpy(data_.get(), other.data_.get(), size_);
  }
  bool operator==(const Bytes& other) const {
    return size_ == other.size_ && std::memcmp(data_.get(), other.data_.get(), size_) == 0;
  }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_.get());
  }

 private:
  int64_t size_;
  std::unique_ptr<char[]> data_;
};

// Numbers of both signs and many sizes, zeros among them; as bits of a half they are ones too.
void fill(const Bytes& bytes, int32_t dtype, int64_t count, bool is_positive) {
  for (int64_t i = 0; i < count; ++i) {
    const double size = std::pow(10.0, static_cast<double>(below(5000)) / 1000.0 - 3.0);
    const double signed_size = is_positive || chance(2) ? size : -size;
    const float x = chance(10) ? 0.0f : static_cast<float>(signed_size);
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (dtype == kFloat32)
      bytes.as<float>()[i] = x;
    else if (dtype == kBFloat16)
      bytes.as<uint16_t>()[i] = static_cast<uint16_t>(bits >> 16);
    else  // a float16 has five bits of exponent: any that are not all ones
      bytes.as<uint16_t>()[i] = static_cast<uint16_t>((bits >> 16 & 0x8000u) | below(0x5000));
  }
}

// One moment with the memory behind it.
struct State {
  Moment moment{};
  Bytes data{0};
  Bytes words{0};

  State() = default;
  State(const State& other)
      : moment(other.moment), data(other.data), words(other.words) { point(); }

  void point() {
    moment.data = data.as<void>();
    moment.words = words.as<int64_t>();
  }
};

void random_average(Moment& m) {
  const float decay = one_of({0.0f, 0.5f, 0.9f, 0.999f, 1.0f});
  m.is_average = chance(2);
  m.weight = m.is_average ? 1.0f - decay : 1.0f;
  m.decay_less_one = decay - 1.0f;
}

void replace(Bytes& bytes, int64_t size) {
  bytes.~Bytes();
  new (&bytes) Bytes(size);
}

// Any moment that cpu.py would describe for a table of [n, dim].
void random_moment(State& state, bool is_first, int32_t dtype, int64_t n, int64_t dim) {
  Moment& m = state.moment;
  m.kind = is_first ? one_of<int32_t>({kNone, kExact, kSketch, kSketch})
                    : one_of<int32_t>({kNone, kExact, kRowWise, kSketch, kSketch, kSketch});
  random_average(m);
  int64_t count = 0;
  if (m.kind == kExact) {
    m.dtype = dtype;
    count = n * dim;
  } else if (m.kind == kRowWise) {
    m.is_by_row = 1;
    count = n;
  } else if (m.kind == kSketch) {
    m.is_by_row = !is_first && chance(2);
    m.is_signed = is_first;
    m.form = m.is_by_row ? one_of<int32_t>({kLinear, kPaper, kBucket, kConservative})
                         : one_of<int32_t>({kLinear, kPaper, kBucket});
    m.dtype = one_of<int32_t>({kFloat32, kBFloat16});
    m.depth = one_of<int32_t>({1, 2, 3, 3, 3, 4, 5, kMaxDepth});
    m.width = one_of<int64_t>({1, 2, 7, 64});
    m.scale = m.form == kLinear || m.form == kConservative ? 0.37f : 1.0f;
    m.inverse_scale = 1.0f / m.scale;
    m.rounding_key = static_cast<uint32_t>(generator());
    count = m.depth * m.width * (m.is_by_row ? 1 : dim);
    replace(state.words, 8 * 4 * m.depth);
    for (int32_t i = 0; i < 4 * m.depth; ++i)
      state.words.as<int64_t>()[i] = static_cast<int64_t>(generator());
  }
  replace(state.data, count * bytes_of(m.dtype));
  fill(state.data, m.dtype, count, !is_first);
  state.point();
}

// A step with all the memory it points to; a copy points to memory of its own.
struct Work {
  Step step{};
  State first, second;
  Bytes parameter{0}, values{0}, row_values{0}, workspace{0};
  Bytes columns{0}, column_roots{0}, column_inverses{0}, column_shares{0};
  bool has_columns = false;
  bool is_in_pieces = false;  // a dense gradient without row_values
  std::shared_ptr<std::vector<int64_t>> ids;
  std::shared_ptr<Bytes> room, sums;

  Work() = default;
  Work(const Work&) = default;

  const Step* pointed() {
    step.parameter = parameter.as<void>();
    step.gradient.values = values.as<void>();
    const bool keeps_squares = second.moment.is_by_row && !is_in_pieces;
    step.row_values = keeps_squares ? row_values.as<float>() : nullptr;
    step.first = first.moment;
    step.second = second.moment;
    if (has_columns) {
      step.columns = columns.as<float>();
      step.column_roots = column_roots.as<float>();
      step.column_inverses = column_inverses.as<float>();
      step.column_shares = column_shares.as<int64_t>();
    }
    replace(workspace, sketchoptim_workspace(&step));
    step.workspace = workspace.as<void>();
    return &step;
  }
};

// Groups random ids as cpu.py does; now and then one is outside the table.
void random_ids(Work& work, int64_t n) {
  const int64_t count = one_of<int64_t>({0, 1, 2, 10, 60, 300});
  const int pattern = static_cast<int>(below(4));
  const int64_t hot = below(n);
  Bytes ids(8 * count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t ends = chance(2) ? n - 1 : 0;
    const int64_t id = pattern == 0 ? ends : pattern == 1 && !chance(4) ? hot : below(n);
    ids.as<int64_t>()[i] = id;
  }
  if (pattern == 2) std::sort(ids.as<int64_t>(), ids.as<int64_t>() + count);
  auto ascend = [&] { return sketchoptim_ascend(ids.as<int64_t>(), count, n); };
  if (count > 0 && chance(5)) {
    int64_t& id = ids.as<int64_t>()[below(count)];
    const int64_t kept = id;
    id = chance(2) ? -1 : n;
    REQUIRE(ascend() == -1);
    id = kept;
  }
  int64_t rows = count;
  Gradient& gradient = work.step.gradient;
  if (ascend() == 0) {
    work.room = std::make_shared<Bytes>(8 * (3 * count + 1));
    const int64_t shared =
        sketchoptim_group(ids.as<int64_t>(), nullptr, count, work.room->as<uint64_t>(), &gradient);
    rows = gradient.rows;
    work.ids = std::make_shared<std::vector<int64_t>>(gradient.ids, gradient.ids + rows);
    if (chance(2)) {  // as after a look at the gradient, which exact storage does without
      work.sums = std::make_shared<Bytes>(4 * shared * work.step.dim);
      gradient.sums = work.sums->as<float>();
    }
  } else {
    work.ids = std::make_shared<std::vector<int64_t>>(ids.as<int64_t>(), ids.as<int64_t>() + count);
  }
  work.ids->shrink_to_fit();
  for (int64_t r = 1; r < rows; ++r) REQUIRE((*work.ids)[r - 1] < (*work.ids)[r]);
  gradient.ids = work.ids->data();
  gradient.rows = rows;
  replace(work.values, count * work.step.dim * bytes_of(work.step.dtype));
  fill(work.values, work.step.dtype, count * work.step.dim, false);
}

void random_rule(Step& s) {
  s.step_size = 0.1f;
  s.second_root = one_of({1.0f, 0.3f});
  s.eps = one_of({1e-8f, 1e-3f});
  s.weight_decay = one_of({0.0f, 0.1f});
  s.shrink = one_of({1.0f, 0.99f});
  s.has_nesterov = s.first.kind != kNone && chance(3);
  s.nesterov = s.has_nesterov ? 0.9f : 0.0f;
  s.has_clip = chance(2);
  s.clip = s.has_clip ? 1.0f : 0.0f;
  s.is_maximizing = chance(2);
  s.largest_gradient = 1099511627776.0f;
  s.is_stochastic = chance(2);
  s.rounding_key = static_cast<uint32_t>(generator());
  s.first_row = one_of<int64_t>({0, 0, 1000, 4294967000});
}

void make_ratio(Work& work, int64_t n, int64_t dim) {
  do {
    random_moment(work.first, true, work.step.dtype, n, dim);
  } while (work.first.moment.kind != kSketch);
  work.first.moment.form = kLinear;
  Moment& second = work.second.moment;
  second = work.first.moment;
  second.is_signed = 0;
  const int64_t count = second.depth * second.width * dim;
  replace(work.second.data, count * bytes_of(second.dtype));
  fill(work.second.data, second.dtype, count, true);
  replace(work.second.words, 8 * 4 * second.depth);
  std::memcpy(work.second.words.as<void>(), work.first.words.as<void>(), 8 * 4 * second.depth);
  work.second.point();
  work.step.is_ratio = 1;
}

Work random_work() {
  Work work;
  const int64_t n = one_of<int64_t>({1, 2, 5, 40, 200});
  const int64_t dim = one_of<int64_t>({1, 2, 15, 16, 17, 33, 64, 70, 130});
  Step& s = work.step;
  s.dim = s.gradient.stride = dim;
  s.gradient.scale = 1.0f;
  s.dtype = s.gradient.dtype = one_of<int32_t>({kFloat32, kBFloat16, kFloat16});
  replace(work.parameter, n * dim * bytes_of(s.dtype));
  fill(work.parameter, s.dtype, n * dim, false);
  if (chance(8)) {
    make_ratio(work, n, dim);
  } else {
    random_moment(work.first, true, s.dtype, n, dim);
    random_moment(work.second, false, s.dtype, n, dim);
  }
  s.first = work.first.moment;
  random_rule(s);
  if (chance(4)) {
    s.gradient.rows = n;
    work.is_in_pieces = chance(2);
    replace(work.values, n * dim * bytes_of(s.dtype));
    fill(work.values, s.dtype, n * dim, false);
  } else {
    random_ids(work, n);
  }
  const Moment& second = work.second.moment;
  work.has_columns = chance(2) && (second.kind == kRowWise || is_conservative(second));
  if (work.has_columns) {
    for (Bytes* bytes : {&work.columns, &work.column_roots, &work.column_inverses})
      replace(*bytes, 4 * dim);
    replace(work.column_shares, 8 * dim);
    fill(work.columns, kFloat32, dim, true);
  }
  replace(work.row_values, work.second.moment.is_by_row ? 4 * s.gradient.rows : 0);
  s.piece_rows = one_of<int64_t>({1, 3, 100});
  work.pointed();
  begin_columns(work.step, 3.0);
  return work;
}

void check_that_a_nan_is_found(Work work) {
  const int64_t count = work.step.gradient.rows * work.step.dim;
  if (count == 0) return;
  const int64_t at = below(count);  // the values of every row, its first entry among them
  if (work.step.dtype == kFloat32)
    work.values.as<float>()[at] = std::numeric_limits<float>::quiet_NaN();
  else
    work.values.as<uint16_t>()[at] = 0x7fff;
  REQUIRE(sketchoptim_inspect(work.pointed()) == 0);
}

void check_noise() {
  const int64_t count = below(4), dim = 1 + below(40);
  const Bytes ids(8 * count), found(4 * count * dim);
  for (int64_t i = 0; i < count; ++i) ids.as<int64_t>()[i] = below(int64_t{1} << 32);
  sketchoptim_noise(static_cast<uint32_t>(generator()), ids.as<int64_t>(), count, dim,
                    found.as<uint32_t>());
  for (int64_t i = 0; i < count * dim; ++i) REQUIRE(found.as<uint32_t>()[i] < (1u << 16));
}

void check_hash() {
  const int32_t depth = one_of<int32_t>({1, 3, kMaxDepth});
  const int64_t count = one_of<int64_t>({0, 1, 33}), width = one_of<int64_t>({1, 7, 1LL << 31});
  Bytes words(8 * 4 * depth), ids(8 * count), buckets(8 * depth * count), signs(4 * depth * count);
  for (int32_t i = 0; i < 4 * depth; ++i)
    words.as<int64_t>()[i] = static_cast<int64_t>(generator());
  for (int64_t i = 0; i < count; ++i)
    ids.as<int64_t>()[i] = chance(3) ? 0xffffffff : below(1LL << 32);
  sketchoptim_hash(words.as<int64_t>(), depth, width, ids.as<int64_t>(), count,
                   buckets.as<int64_t>(), signs.as<float>());
  for (int64_t i = 0; i < depth * count; ++i) {
    REQUIRE(0 <= buckets.as<int64_t>()[i] && buckets.as<int64_t>()[i] < width);
    REQUIRE(std::fabs(signs.as<float>()[i]) == 1.0f);
  }
}

// A search by one thread and by several: the same classes, in falling order of their scores.
void check_top_classes() {
  TopClasses t{};
  t.members = one_of<int32_t>({1, 3, 4, kMaxDepth});
  t.queries = one_of<int32_t>({1, 15, 16, 17, 32});
  t.buckets = one_of<int64_t>({2, 7, 50});
  t.count = one_of<int64_t>({1, 3, 4, 5, 9, 100});
  t.k = 1 + below(t.count);
  t.combination = one_of<int32_t>({kSum, kLeast, kMedian});
  const int64_t columns = t.queries <= 16 ? 16 : 32, rows = t.members * t.buckets;
  Bytes tables(4 * rows * columns), words(8 * 4 * t.members), ids(8 * t.count);
  fill(tables, kFloat32, rows * columns, false);
  for (int32_t i = 0; i < 4 * t.members; ++i)
    words.as<int64_t>()[i] = static_cast<int64_t>(generator());
  for (int64_t i = 0; i < t.count; ++i) ids.as<int64_t>()[i] = i * 42'000'000;
  t.tables = tables.as<float>();
  t.words = words.as<int64_t>();
  t.ids = chance(2) ? ids.as<int64_t>() : nullptr;
  const int64_t found = t.queries * t.k;
  Bytes scores(4 * found), classes(8 * found), other_scores(4 * found), other_classes(8 * found);
  t.threads = 1;
  t.scores = scores.as<float>();
  t.classes = classes.as<int64_t>();
  sketchoptim_top_classes(&t);
  t.threads = one_of<int32_t>({2, 3, 4});
  t.scores = other_scores.as<float>();
  t.classes = other_classes.as<int64_t>();
  sketchoptim_top_classes(&t);
  REQUIRE(scores == other_scores);
  REQUIRE(classes == other_classes);
  for (int64_t i = 0; i < found; ++i) {
    const int64_t id = t.classes[i], last = t.ids ? t.ids[t.count - 1] : t.count - 1;
    REQUIRE(0 <= id && id <= last);
    if (i % t.k > 0) REQUIRE(t.scores[i - 1] >= t.scores[i]);
  }
}

// A block of logits by one thread and by several: the same bytes, and all of them finite.
void check_logits() {
  LogitBlock b{};
  b.tokens = one_of<int64_t>({0, 1, 3, 20});
  b.classes = one_of<int64_t>({1, 15, 16, 31, 32, 33, 70});
  b.first_class = one_of<int64_t>({0, 100});
  b.dtype = one_of<int32_t>({kFloat32, kBFloat16, kFloat16});
  b.softcap = one_of({0.0f, 5.0f});
  b.dim = one_of<int64_t>({1, 17, 40});
  b.target_share = 0.9f;
  b.class_share = 0.1f / static_cast<float>(b.classes);
  Bytes bias(4 * b.classes), target(8 * b.tokens), coefficient(4 * b.tokens);
  fill(bias, kFloat32, b.classes, false);
  fill(coefficient, kFloat32, b.tokens, false);
  for (int64_t t = 0; t < b.tokens; ++t) target.as<int64_t>()[t] = below(2 * b.classes + 100);
  b.bias = chance(2) ? bias.as<float>() : nullptr;
  b.target = target.as<int64_t>();
  b.coefficient = coefficient.as<float>();
  Bytes values(b.tokens * b.classes * bytes_of(b.dtype));
  fill(values, b.dtype, b.tokens * b.classes, false);
  const bool has_sum = chance(2), has_product = chance(2);
  Bytes numbers(4 * b.tokens * (4 + b.dim));
  fill(numbers, kFloat32, b.tokens * (4 + b.dim), true);
  auto run = [&](Bytes& own_values, Bytes& own_numbers, int32_t threads) {
    b.values = own_values.as<void>();
    b.highest = own_numbers.as<float>();
    b.total = b.highest + b.tokens;
    b.chosen = b.total + b.tokens;
    b.sum = has_sum ? b.chosen + b.tokens : nullptr;
    b.product = has_product ? b.chosen + 2 * b.tokens : nullptr;
    b.logsumexp = b.highest;
    b.threads = threads;
    sketchoptim_add_logits(&b);
    sketchoptim_differentiate_logits(&b);
    for (int64_t t = 0; t < b.tokens; ++t) REQUIRE(std::isfinite(b.total[t]));
  };
  Bytes other_values = values, other_numbers = numbers;
  run(values, numbers, 1);
  run(other_values, other_numbers, one_of<int32_t>({2, 3, 4}));
  REQUIRE(values == other_values);
  REQUIRE(numbers == other_numbers);
}

bool are_same(const Work& a, const Work& b) {
  return a.parameter == b.parameter && a.first.data == b.first.data &&
         a.second.data == b.second.data;
}

// Takes a dense gradient in blocks of rows, the last one first.
void step_in_blocks(Work& work) {
  const int64_t n = work.step.gradient.rows, block = 1 + below(n);
  work.step.threads = 3;
  work.pointed();
  unpack_counters(work.step);
  for (int64_t begin = (n - 1) / block * block; begin >= 0; begin -= block) {
    const int64_t rows = std::min(block, n - begin), size = bytes_of(work.step.dtype);
    Bytes values(rows * work.step.dim * size);
    std::memcpy(values.as<char>(), work.values.as<char>() + begin * work.step.dim * size,
                rows * work.step.dim * size);
    sketchoptim_move_rows(&work.step, values.as<void>(), work.step.dtype, begin, rows,
                          one_of<int32_t>({1, 2, 3}));
  }
  work.step.leaves_shares = 1;  // to be compared
  const Rule rule{};
  Call call{};
  call.step = &work.step;
  call.rule = &rule;
  sketchoptim_end_rows(&call);
}

void check_step() {
  Work by_one = random_work();
  check_that_a_nan_is_found(by_one);
  Work by_many = by_one, before = by_one;
  by_one.step.threads = 1;
  by_many.step.threads = one_of<int32_t>({2, 3, 4});
  for (Work* work : {&by_one, &by_many}) {
    work->step.is_inspected = chance(2);
    if (work->step.is_inspected)
      sketchoptim_inspect(work->pointed());
    else
      work->step.gradient.sums = nullptr;
    sketchoptim_step(work->pointed());
  }
  REQUIRE(are_same(by_one, by_many));
  REQUIRE(by_one.row_values == by_many.row_values);
  REQUIRE(by_one.column_shares == by_many.column_shares);
  const Gradient& g = before.step.gradient;
  if (g.ids || g.rows == 0 || !sketchoptim_takes_rows(before.pointed())) return;
  step_in_blocks(before);
  REQUIRE(are_same(by_one, before));
  REQUIRE(by_one.column_shares == before.column_shares);
}

// A parameter's step as one of several, with all the memory that it points to.
struct Table {
  Step step{};
  State first, second;
  Bytes parameter{0}, values{0}, ids{0}, offsets{0}, weights{0}, writes{8};
  double step_count = 3.0;
  float scales[2] = {0.5f, 0x1p-24f};  // the second one is moved into the counters
  Lookups lookups{};
  Call call{};

  void point(const Rule& rule) {
    step.parameter = parameter.as<void>();
    step.step_count = &step_count;
    step.first = first.moment;
    step.second = second.moment;
    step.first.stored_scale = scales;
    step.second.stored_scale = scales + 1;
    if (lookups.ids) lookups.ids = ids.as<int64_t>();
    if (lookups.offsets) lookups.offsets = offsets.as<int64_t>();
    if (lookups.weights) lookups.weights = weights.as<float>();
    lookups.values = values.as<void>();
    call.step = &step;
    call.rule = &rule;
    call.values = values.as<void>();
    if (call.ids) call.ids = ids.as<int64_t>();
    if (call.lookups) call.lookups = &lookups;
  }
};

// Bags of ids of up to three tables, in columns of a wider matrix of outputs.
void random_lookups(Table& table, int64_t count) {
  Lookups& l = table.lookups;
  l.tables = 1 + below(3);
  const bool is_single = chance(3);
  l.outputs = is_single ? count / l.tables : 1 + below(9);
  if (is_single) count = l.outputs * l.tables;
  l.columns = table.step.dim;
  l.stride = table.step.dim + below(4);
  l.is_mean = chance(2);
  l.ids = table.ids.as<int64_t>();
  l.count = count;
  table.call.table = below(l.tables);
  table.call.scale = one_of({1.0, 0.3});
  const int64_t bags = l.tables * l.outputs;
  replace(table.offsets, 8 * bags);
  int64_t* offsets = table.offsets.as<int64_t>();
  for (int64_t b = 0; b < bags; ++b) offsets[b] = is_single ? b : below(count + 1);
  std::sort(offsets, offsets + bags);
  if (bags > 0) offsets[0] = 0;
  if (!is_single || chance(2)) l.offsets = offsets;
  replace(table.weights, 4 * count);
  fill(table.weights, kFloat32, count, true);
  if (chance(2)) l.weights = table.weights.as<float>();
  const int64_t numbers = l.outputs == 0 ? 0 : (l.outputs - 1) * l.stride + table.step.dim;
  replace(table.values, numbers * bytes_of(table.step.dtype));
  fill(table.values, table.step.dtype, numbers, false);
  table.call.lookups = &l;
  table.call.ids = nullptr;
  table.call.entries = 0;
}

void random_table(Table& table) {
  Step& s = table.step;
  s.n = one_of<int64_t>({1, 5, 40, 200});
  s.dim = one_of<int64_t>({1, 15, 16, 64, 70});
  s.dtype = one_of<int32_t>({kFloat32, kBFloat16, kFloat16});
  s.largest_gradient = 1099511627776.0f;
  s.piece_rows = one_of<int64_t>({1, 3, 100});
  s.most_row_values = one_of<int64_t>({0, 1000});
  replace(table.parameter, s.n * s.dim * bytes_of(s.dtype));
  fill(table.parameter, s.dtype, s.n * s.dim, false);
  random_moment(table.first, true, s.dtype, s.n, s.dim);
  random_moment(table.second, false, s.dtype, s.n, s.dim);
  Call& call = table.call;
  call.is_checked = chance(2);
  call.rounding_key = chance(2) ? -1 : below(int64_t{1} << 32);
  const bool is_dense = chance(3);
  call.entries = is_dense ? s.n : one_of<int64_t>({0, 1, 10, 60, 300});
  if (!is_dense) {
    replace(table.ids, 8 * call.entries);
    for (int64_t i = 0; i < call.entries; ++i) table.ids.as<int64_t>()[i] = below(s.n);
    call.ids = table.ids.as<int64_t>();
  }
  if (!is_dense && chance(2)) return random_lookups(table, call.entries);
  replace(table.values, call.entries * s.dim * bytes_of(s.dtype));
  fill(table.values, s.dtype, call.entries * s.dim, false);
}

// Steps of several parameters by one thread and by several, in memory of exactly the size asked for.
void check_calls() {
  const Rule rule{0.1, 1.0, 1e-8, one_of({0.0, 0.1}), 0.99, std::nan(""), 1.0, 0.9, 0.1, 0.5, 0.5,
                  static_cast<double>(chance(2)), 0.0};
  std::vector<Table> by_one(static_cast<size_t>(1 + below(5)));
  for (Table& table : by_one) random_table(table);
  std::vector<Table> by_many = by_one;
  for (std::vector<Table>* tables : {&by_one, &by_many}) {
    std::vector<Call> call;
    for (Table& table : *tables) {
      table.point(rule);
      call.push_back(table.call);
    }
    const Calls calls{call.data(), static_cast<int64_t>(call.size()),
                      tables == &by_one ? 1 : one_of<int32_t>({2, 3}), 0};
    const int64_t needed = sketchoptim_check_ids(&calls);
    REQUIRE(needed >= 0);
    const Bytes room(needed);
    const Bytes memory(sketchoptim_group_ids(&calls, room.as<void>()));
    sketchoptim_check_values(&calls, memory.as<void>());
    sketchoptim_run(&calls);
  }
  for (size_t i = 0; i < by_one.size(); ++i) {
    REQUIRE(by_one[i].parameter == by_many[i].parameter);
    REQUIRE(by_one[i].first.data == by_many[i].first.data);
    REQUIRE(by_one[i].second.data == by_many[i].second.data);
    REQUIRE(by_one[i].step_count == by_many[i].step_count);
  }
}

// The bags of a table's lookups, as if all were of that table, in memory of exactly the size needed.
void check_bags() {
  Table table;
  random_table(table);
  if (!table.call.lookups) return;
  const Rule rule{};
  table.point(rule);
  Lookups& l = table.lookups;
  std::vector<BagTable> tables;
  for (int64_t t = 0; t < l.tables; ++t)
    tables.push_back({table.step.parameter, table.step.n, table.step.dim, t * table.step.dim});
  l.columns = l.tables * table.step.dim;
  const int64_t numbers = l.outputs * l.columns;
  Bytes one(numbers * bytes_of(table.step.dtype)), many = one;
  for (Bytes* output : {&one, &many}) {
    const int32_t threads = output == &one ? 1 : 3;
    const Bags bags{tables.data(), &l, output->as<void>(), table.step.dtype, threads};
    REQUIRE(sketchoptim_pool_bags(&bags) == 0);
  }
  REQUIRE(one == many);
}

}  // namespace

int main(int arguments, char** argument) {
  const long steps = arguments > 1 ? std::atol(argument[1]) : 1000;
  REQUIRE(sketchoptim_abi() == SKETCHOPTIM_ABI);
  for (long i = 0; i < steps; ++i) {
    generator.seed(static_cast<uint64_t>(i));
    check_hash();
    check_noise();
    check_top_classes();
    check_logits();
    check_step();
    check_calls();
    check_bags();
  }
  std::printf("%ld random steps, each by one thread and by several: the same bytes\n", steps);
}
