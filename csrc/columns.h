// Factors of columns next to a second moment by row, as sketchoptim/moments/_columns.py specifies them.
//
// The mean square of a row is that of its gradient divided by the roots of the factors. What each
// column has of the squares of a row is an integer, so that sums over rows have the same bits in any
// order.
#pragma once

#include <algorithm>
#include <cfloat>

#include "square_sum.h"

constexpr float kShareUnits = 0x1p26f;  // of a row
constexpr int64_t kRowsTogether = 32;   // whose shares fit in 32 bits

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
  // With room for a number for each column, if the step has factors.
  MeanSquares(const Step& s, void* room) : s_(s), sums_(static_cast<uint32_t*>(room)) { clear(); }
  MeanSquares(const MeanSquares&) = delete;
  ~MeanSquares() { flush(); }

  // Of a row whose squares add up to `squares`.
  template <typename Columns>
  INLINE float operator()(const Columns& g, float squares) {
    if (!s_.columns) return squares / static_cast<float>(s_.dim);
    return with_factors(g, squares);
  }

 private:
  template <typename Columns>
  __attribute__((noinline)) float with_factors(const Columns& g, float squares) {
    const float inverse = 1.0f / std::max(squares, FLT_MIN);
    for_columns(0, s_.dim, [&](int64_t c, int64_t count) ALWAYS {
      const Lanes x = g(c, count), share = x * x * inverse * kShareUnits + 0.5f;
      WordLanes sum{};
      std::memcpy(&sum, sums_ + c, count * sizeof(uint32_t));
      sum += (WordLanes)__builtin_convertvector(share, IntLanes);
      std::memcpy(sums_ + c, &sum, count * sizeof(uint32_t));
    });
    if (++rows_ == kRowsTogether) flush();
    return square_sum(Divided<Columns>{g, s_.column_inverses}, s_.dim) / static_cast<float>(s_.dim);
  }

  void clear() {
    rows_ = 0;
    if (s_.columns) std::fill(sums_, sums_ + s_.dim, 0u);
  }

  void flush() {
    if (rows_ == 0) return;
    for (int64_t c = 0; c < s_.dim; ++c)
      __atomic_fetch_add(s_.column_shares + c, static_cast<int64_t>(sums_[c]), __ATOMIC_RELAXED);
    clear();
  }

  const Step& s_;
  uint32_t* const sums_;
  int64_t rows_ = 0;
};

// Before a step: no shares yet, and the factors that it uses.
void begin_columns(const Step& s);
// After it, with the numbers of the moment's average.
void end_columns(const Step& s, double decay, double weight);
