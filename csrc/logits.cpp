// Passes over a block of logits that is in the cache, between the matrix products of a softmax head.
//
// Each token is a row of logits [classes]. The first pass replaces logits by exponentials and keeps
// their sum under the largest logit so far. The second one replaces them by the gradient of the loss.
#include <algorithm>
#include <cmath>

#include "lanes.h"

namespace {

constexpr int64_t kPartials = 32;  // partial sums of a row, at every SIMD level
constexpr int64_t kRuns = kPartials / kLanes;

// Calls visit(column, count, run) for runs of kLanes columns; runs are numbered below kRuns.
template <typename Visit>
INLINE void for_runs(int64_t columns, Visit visit) {
  int64_t c = 0;
  for (; c + kPartials <= columns; c += kPartials)
#pragma GCC unroll 8
    for (int64_t i = 0; i < kRuns; ++i) visit(c + i * kLanes, kLanes, i);
#pragma GCC unroll 8
  for (int64_t i = 0; i < kRuns; ++i)
    if (c + i * kLanes < columns)
      visit(c + i * kLanes, std::min(kLanes, columns - c - i * kLanes), i);
}

float sum_of(const Lanes* runs) {
  float parts[kPartials];
  std::memcpy(parts, runs, sizeof(parts));
  for (int64_t half = kPartials / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) parts[i] += parts[i + half];
  return parts[0];
}

float largest_of(const Lanes* runs) {
  float parts[kPartials];
  std::memcpy(parts, runs, sizeof(parts));
  return *std::max_element(parts, parts + kPartials);
}

// x in the first `count` lanes, and a number in the others.
INLINE Lanes filled(Lanes x, int64_t count, float rest) {
  if (count == kLanes) return x;
  const IntLanes lane = LANE_NUMBERS;
  return lane < static_cast<int32_t>(count) ? x : all(rest);
}

// e^x within 2 units of the last place for -87 <= x <= 88; 0 below, e^88 above, NaN for NaN.
INLINE Lanes exponential(Lanes x) {
  const Lanes magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Lanes kept = smaller(larger(x, all(-87.0f)), all(88.0f));
  const Lanes shifted = kept * 1.44269504f + magic, n = shifted - magic;
  const Lanes r = (kept - n * 0.693359375f) - n * -2.12194440e-4f;
  Lanes p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  const WordLanes power = (bits_of(shifted) + (127u - 0x4b400000u)) << 23;
  const Lanes result = p * lanes_of(power);
  return x < -87.0f ? Lanes{} : result;
}

struct Logit {
  Lanes value;
  Lanes slope;  // the derivative of a capped logit by the product
};

// kIsPlain: without bias and cap.
template <int32_t D, bool kIsPlain>
INLINE Logit logit_at(const LogitBlock& b, const void* row, int64_t c, int64_t count) {
  Lanes x = load(row, D, c, count);
  if (kIsPlain) return {x, all(1.0f)};
  if (b.bias) x += load(b.bias, kFloat32, c, count);
  if (!(b.softcap > 0.0f)) return {x, all(1.0f)};
  // tanh(y) = sign(y) (1 - e^-2|y|) / (1 + e^-2|y|)
  const Lanes y = x / b.softcap, small = exponential(smaller(y, -y) * 2.0f);
  const Lanes tangent = (1.0f - small) / (1.0f + small);
  const Lanes tanh = y < 0.0f ? -tangent : tangent;
  return {tanh * b.softcap, 1.0f - tanh * tanh};
}

// The place of a token's target among the columns of the block, or -1.
INLINE int64_t target_of(const LogitBlock& b, int64_t token) {
  const int64_t at = b.target[token] - b.first_class;
  return 0 <= at && at < b.classes ? at : -1;
}

// Raises the largest logit of a token, and rescales what was summed under a smaller one.
void raise(const LogitBlock& b, int64_t token, float highest) {
  const float factor = std::exp(b.highest[token] - highest);
  b.highest[token] = highest;
  b.total[token] *= factor;
  if (!b.product) return;
  float* product = b.product + token * b.dim;
  for_columns(0, b.dim, [&](int64_t c, int64_t count) ALWAYS {
    store(product, kFloat32, c, count, load(product, kFloat32, c, count) * factor);
  });
}

template <int32_t D, bool kIsPlain>
void add_token(const LogitBlock& b, int64_t token) {
  void* row = static_cast<char*>(b.values) + token * b.classes * bytes_of(D);
  Lanes runs[kRuns];
  for (Lanes& run : runs) run = all(-INFINITY);
  for_runs(b.classes, [&](int64_t c, int64_t count, int64_t i) ALWAYS {
    const Lanes x = logit_at<D, kIsPlain>(b, row, c, count).value;
    runs[i] = larger(runs[i], filled(x, count, -INFINITY));
  });
  const float largest = largest_of(runs);
  if (largest > b.highest[token]) raise(b, token, largest);
  const int64_t target = target_of(b, token);
  if (target >= 0) b.chosen[token] = logit_at<D, kIsPlain>(b, row, target, 1).value[0];
  // If all logits are -inf so far, any number stands for the largest: all exponentials are 0.
  const float highest = b.highest[token] == -INFINITY ? 0.0f : b.highest[token];
  Lanes sums[kRuns] = {};
  for (Lanes& run : runs) run = Lanes{};
  for_runs(b.classes, [&](int64_t c, int64_t count, int64_t i) ALWAYS {
    const Logit logit = logit_at<D, kIsPlain>(b, row, c, count);
    const Lanes x = exponential(logit.value - highest);
    runs[i] += filled(x, count, 0.0f);
    if (b.sum) sums[i] += filled(logit.value, count, 0.0f);
    if (b.product) store(row, D, c, count, x * logit.slope);
  });
  b.total[token] += sum_of(runs);
  if (b.sum) b.sum[token] += sum_of(sums);
}

template <int32_t D, bool kIsPlain>
void differentiate_token(const LogitBlock& b, int64_t token) {
  void* row = static_cast<char*>(b.values) + token * b.classes * bytes_of(D);
  const float logsumexp = b.logsumexp[token], coefficient = b.coefficient[token];
  auto gradient = [&](int64_t c, int64_t count, float share) ALWAYS {
    const Logit logit = logit_at<D, kIsPlain>(b, row, c, count);
    return (exponential(logit.value - logsumexp) - share) * logit.slope * coefficient;
  };
  const int64_t target = target_of(b, token);
  const Lanes at_target =
      target < 0 ? Lanes{} : gradient(target, 1, b.class_share + b.target_share);
  for_columns(0, b.classes, [&](int64_t c, int64_t count) ALWAYS {
    store(row, D, c, count, gradient(c, count, b.class_share));
  });
  if (target >= 0) store(row, D, target, 1, at_target);
}

// Calls f<dtype, is plain>(block, token) for each token.
#define FOR_TOKENS(f)                                                                             \
  const int32_t threads = std::max(1, b->threads);                                                \
  const bool is_plain = !b->bias && !(b->softcap > 0.0f);                                         \
  auto token = b->dtype == kFloat32    ? (is_plain ? f<kFloat32, true> : f<kFloat32, false>)      \
               : b->dtype == kBFloat16 ? (is_plain ? f<kBFloat16, true> : f<kBFloat16, false>)    \
                                       : (is_plain ? f<kFloat16, true> : f<kFloat16, false>);     \
  _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1)")              \
  for (int64_t t = 0; t < b->tokens; ++t) token(*b, t)

}  // namespace

extern "C" void sketchoptim_add_logits(const LogitBlock* b) { FOR_TOKENS(add_token); }

extern "C" void sketchoptim_differentiate_logits(const LogitBlock* b) {
  FOR_TOKENS(differentiate_token);
}
