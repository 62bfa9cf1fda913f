// The largest of several magnitudes, which is NaN if one of them is.
#pragma once

#include <algorithm>

#include "lanes.h"
#include "moment.h"

constexpr int64_t kStreams = 4;  // places that numbers are read from at once; see rows.h

// Bits of numbers without their signs ascend as the numbers do, with NaN above all.
class Largest {
 public:
  INLINE void take(Lanes x) {
    const WordLanes bits = bits_of(x) & 0x7fffffffu;
    most_ = (IntLanes)most_ > (IntLanes)bits ? most_ : bits;
  }

  void take(const Largest& other) { take(lanes_of(other.most_)); }

  uint32_t bits() const {
    uint32_t most = 0;
    for (int64_t i = 0; i < kLanes; ++i) most = std::max<uint32_t>(most, most_[i]);
    return most;
  }

  float value() const {
    const uint32_t found = bits();
    float x;
    std::memcpy(&x, &found, sizeof(x));
    return x;
  }

 private:
  WordLanes most_{};
};

// Of numbers one after the other, from several places at once.
template <int32_t P>
Largest largest_of(const void* values, Span numbers) {
  constexpr int64_t kTogether = 4 * kLanes;
  Largest largest[kStreams];
  const int64_t stride = (numbers.end - numbers.begin) / kStreams / kTogether * kTogether;
  for (int64_t at = numbers.begin; at < numbers.begin + stride; at += kTogether)
    for (int64_t i = 0; i < kStreams; ++i)
      for (int64_t c = 0; c < kTogether; c += kLanes)
        largest[i].take(load(values, P, at + i * stride + c, kLanes));
  for_columns(numbers.begin + kStreams * stride, numbers.end, [&](int64_t c, int64_t count) ALWAYS {
    largest[0].take(load(values, P, c, count));
  });
  for (int64_t i = 1; i < kStreams; ++i) largest[0].take(largest[i]);
  return largest[0];
}
