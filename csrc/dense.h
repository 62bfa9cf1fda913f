// Steps along dense gradients, row by row.
#pragma once

#include <type_traits>

#include "moment.h"

// The gradient of row r as it reaches the moments, column by column. It is plain if it is what
// was given: neither turned around nor joined by the weights that decay. G is its dtype, and P that
// of the parameter.
template <int32_t G, int32_t P, bool kIsGiven>
struct DenseRow {
  static constexpr int32_t kValues = G, kWeights = P;
  static constexpr bool kIsPlain = kIsGiven;
  const void *values, *weights;
  const int64_t at, weights_at;
  const float sign, decay;

  DenseRow(const Step& s, int64_t r)
      : values(s.gradient.values), weights(s.parameter), at(r * s.dim),
        weights_at((s.gradient.first_id + r) * s.dim), sign(s.is_maximizing ? -1.0f : 1.0f),
        decay(s.weight_decay) {}

  INLINE Lanes operator()(int64_t column, int64_t count) const {
    const Lanes x = load(values, G, at + column, count);
    if (kIsPlain) return x;
    // Skipped without decay: a weight that is not finite would become NaN when multiplied by 0.
    if (decay == 0.0f) return x * sign;
    return x * sign + load(weights, P, weights_at + column, count) * decay;
  }
};

template <typename T>
struct Type {
  using type = T;
};

// Calls visit(Type<DenseRow<...>>) with the kind of rows that a dense gradient has.
template <typename Visit>
auto with_dense_rows(const Step& s, Visit visit) {
  auto with_dtypes = [&](auto values, auto weights) {
    constexpr int32_t G = decltype(values)::value, P = decltype(weights)::value;
    if (s.is_maximizing || s.weight_decay != 0.0f) return visit(Type<DenseRow<G, P, false>>{});
    return visit(Type<DenseRow<G, P, true>>{});
  };
  const std::integral_constant<int32_t, kFloat32> float32{};
  const std::integral_constant<int32_t, kBFloat16> bfloat16{};
  const std::integral_constant<int32_t, kFloat16> float16{};
  const bool is_float32 = s.gradient.dtype == kFloat32;
  switch (s.dtype) {
    case kBFloat16:
      return is_float32 ? with_dtypes(float32, bfloat16) : with_dtypes(bfloat16, bfloat16);
    case kFloat16:
      return is_float32 ? with_dtypes(float32, float16) : with_dtypes(float16, float16);
    default: return with_dtypes(float32, float32);
  }
}

// Whether rows of a dense gradient may be taken one after the other, in any order.
bool is_taken_row_by_row(const Step& s);
int64_t workspace_row_by_row(const Step& s);

// The parts of such a step. What rows share is in the workspace in between.
void unpack_counters(const Step& s);
void move_rows(const Step& s);
void pack_counters(const Step& s);
