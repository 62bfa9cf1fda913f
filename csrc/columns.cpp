#include "columns.h"

#include <cmath>

namespace {

constexpr double kLeastFactor = 0x1p-20;

}  // namespace

void begin_columns(Step& s, double number) {
  if (!s.columns) return;
  s.share_step = static_cast<uint64_t>(number);
  double sum = 0.0;
  for (int64_t c = 0; c < s.dim; ++c) sum += s.columns[c];
  const double mean = sum / static_cast<double>(std::max<int64_t>(1, s.dim));
  for (int64_t c = 0; c < s.dim; ++c) {
    const double factor = mean > 0.0 ? s.columns[c] / mean : 1.0;
    s.column_roots[c] = static_cast<float>(std::sqrt(std::max(factor, kLeastFactor)));
    s.column_inverses[c] = 1.0f / s.column_roots[c];
    s.column_shares[c] = 0;
  }
}

void end_columns(const Step& s, const Rule& rule) {
  if (!s.columns || s.leaves_shares) return;
  const double decay = rule.second_decay, weight = rule.second_weight;
  int64_t total = 0;
  for (int64_t c = 0; c < s.dim; ++c) total += s.column_shares[c];
  if (total <= 0) return;
  for (int64_t c = 0; c < s.dim; ++c) {
    const double old = s.columns[c], unit = static_cast<double>(s.dim) / static_cast<double>(total);
    const double x = static_cast<double>(s.column_shares[c]) * unit;
    const double delta = weight == 1.0 - decay ? (x - old) * weight
                         : decay == 1.0        ? x * weight
                                               : old * (decay - 1.0) + x * weight;
    s.columns[c] = static_cast<float>(old + delta);
  }
}
