// Factors of columns next to a second moment by row, as sketchoptim/moments/_columns.py specifies them.
//
// The mean square of a row is that of its gradient divided by the roots of the factors. What each
// column has of the squares of a row is an integer, so that sums over rows have the same bits in any
// order. One row in eight is asked for its shares, by its id and the number of the step.
#pragma once

#include <algorithm>
#include <cfloat>

#include "hash.h"
#include "square_sum.h"

constexpr float kShareUnits = 0x1p26f;  // of a row
constexpr uint64_t kRowsAShare = 8;     // of which one gives its shares

typedef int64_t LongLanes __attribute__((vector_size(8 * kLanes)));

template <typename Columns>
struct Divided {
  const Columns& g;
  const float* inverses;
  INLINE Lanes operator()(int64_t column, int64_t count) const {
    return g(column, count) * load(inverses, kFloat32, column, count);
  }
};

// Finds the mean squares of rows that one thread takes, and adds up the shares of their columns.
class MeanSquares {
 public:
  // With room for a sum for each column, if the step has factors.
  MeanSquares(const Step& s, void* room) : s_(s), sums_(static_cast<int64_t*>(room)) {
    if (s.columns) std::fill(sums_, sums_ + s.dim, 0);
  }
  MeanSquares(const MeanSquares&) = delete;
  ~MeanSquares() {
    for (int64_t c = 0; s_.columns && c < s_.dim; ++c)
      __atomic_fetch_add(s_.column_shares + c, sums_[c], __ATOMIC_RELAXED);
  }

  template <typename Columns>
  INLINE float operator()(const Columns& g, int64_t hashed_id) {
    const auto dim = static_cast<float>(s_.dim);
    if (!s_.columns) return square_sum(g, s_.dim) / dim;
    if ((mix_id(hashed_id) + s_.share_step) % kRowsAShare == 0) add_shares(g);
    return square_sum(Divided<Columns>{g, s_.column_inverses}, s_.dim) / dim;
  }

 private:
  template <typename Columns>
  __attribute__((noinline)) void add_shares(const Columns& g) {
    const float inverse = 1.0f / std::max(square_sum(g, s_.dim), FLT_MIN);
    for_columns(0, s_.dim, [&](int64_t c, int64_t count) ALWAYS {
      const Lanes x = g(c, count), share = x * x * inverse * kShareUnits + 0.5f;
      LongLanes sum{};
      std::memcpy(&sum, sums_ + c, count * sizeof(int64_t));
      sum += __builtin_convertvector(__builtin_convertvector(share, IntLanes), LongLanes);
      std::memcpy(sums_ + c, &sum, count * sizeof(int64_t));
    });
  }

  const Step& s_;
  int64_t* const sums_;
};

// Before a step of this number: no shares yet, and the factors that it uses.
void begin_columns(Step& s, double number);
// After it.
void end_columns(const Step& s, const Rule& rule);
