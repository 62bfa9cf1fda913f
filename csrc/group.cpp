// Groups equal ids in ascending order, by a least-significant-digit radix sort over the digits that
// the largest id has.
#include <algorithm>

#include "abi.h"

namespace {

constexpr int kIdBits = 32;
constexpr int kMostDigitBits = 11;
constexpr int kMostDigits = (kIdBits + kMostDigitBits - 1) / kMostDigitBits;

// The smallest number of digits that ids can be written in, with as few bits each as possible.
struct Digits {
  int count, bits;

  explicit Digits(uint64_t largest) {
    const int all = largest ? 64 - __builtin_clzll(largest) : 0;
    count = (all + kMostDigitBits - 1) / kMostDigitBits;
    bits = count ? (all + count - 1) / count : 0;
  }

  uint64_t operator()(uint64_t id, int digit) const {
    return (id >> (digit * bits)) & ((uint64_t{1} << bits) - 1);
  }
};

// Up to this many entries are sorted by comparing them: a radix sort clears a table for each digit.
constexpr int64_t kFew = 64;

// Writes (id << 32 | place) of each id into entries and returns them sorted, in either buffer. Its
// place is its position, or its output.
uint64_t* sorted_entries(const int64_t* ids, const uint32_t* outputs, int64_t count,
                         uint64_t* entries, uint64_t* other) {
  auto entry = [&](int64_t i) {
    const uint64_t place = outputs ? outputs[i] : static_cast<uint64_t>(i);
    return static_cast<uint64_t>(ids[i]) << kIdBits | place;
  };
  if (count <= kFew) {
    for (int64_t i = 0; i < count; ++i) entries[i] = entry(i);
    std::sort(entries, entries + count);
    return entries;
  }
  const Digits digits(count ? static_cast<uint64_t>(*std::max_element(ids, ids + count)) : 0);
  uint32_t begins[kMostDigits][1 << kMostDigitBits];
  for (int digit = 0; digit < digits.count; ++digit)
    std::fill_n(begins[digit], 1 << digits.bits, 0);
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t id = static_cast<uint64_t>(ids[i]);
    entries[i] = entry(i);
    for (int digit = 0; digit < digits.count; ++digit) ++begins[digit][digits(id, digit)];
  }
  for (int digit = 0; digit < digits.count; ++digit) {
    uint32_t begin = 0;
    for (int64_t value = 0; value < 1 << digits.bits; ++value) {
      const uint32_t size = begins[digit][value];
      begins[digit][value] = begin;
      begin += size;
    }
    for (int64_t i = 0; i < count; ++i)
      other[begins[digit][digits(entries[i] >> kIdBits, digit)]++] = entries[i];
    std::swap(entries, other);
  }
  return entries;
}

}  // namespace

extern "C" int32_t sketchoptim_ascend(const int64_t* ids, int64_t count, int64_t n) {
  int64_t outside = 0, descents = 0;
  for (int64_t i = 0; i < count; ++i) {
    outside += ids[i] < 0 || ids[i] >= n;
    descents += i > 0 && ids[i - 1] >= ids[i];
  }
  return outside ? -1 : descents == 0;
}

extern "C" int64_t sketchoptim_group(const int64_t* ids, const uint32_t* outputs, int64_t count,
                                     uint64_t* room, Gradient* gradient) {
  uint64_t* sorted = sorted_entries(ids, outputs, count, room, room + count);
  // Both buffers of the sort are reused: one is free, the other is overwritten while it is read.
  uint32_t* order = reinterpret_cast<uint32_t*>(sorted == room ? room + count : room);
  uint32_t* slots = order + count;
  uint32_t* starts = reinterpret_cast<uint32_t*>(room + 2 * count);
  uint32_t rows = 0, shared = 0, start = 0;
  starts[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t id = sorted[i] >> kIdBits;
    const bool is_last = i + 1 == count || sorted[i + 1] >> kIdBits != id;
    order[i] = static_cast<uint32_t>(sorted[i]);
    sorted[rows] = id;
    slots[rows] = shared;
    starts[rows + 1] = static_cast<uint32_t>(i + 1);
    shared += is_last && start != i;
    start = is_last ? static_cast<uint32_t>(i + 1) : start;
    rows += is_last;
  }
  gradient->ids = reinterpret_cast<int64_t*>(sorted);
  gradient->starts = starts;
  gradient->order = order;
  gradient->slots = slots;
  gradient->rows = rows;
  return shared;
}
