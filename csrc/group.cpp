// Equal ids together, in ascending order: a least-significant-digit radix sort that reads only the
// digits which the largest id has.
#include <algorithm>

#include "abi.h"

namespace {

constexpr int kMostDigitBits = 11;

int bits_of(uint64_t number) { return number ? 64 - __builtin_clzll(number) : 0; }

// Entries are (id << 32 | position): ids below 2^32, fewer than 2^32 entries. The fewest digits
// there can be, and those as short as they can be.
uint64_t* sort_by_id(uint64_t* entries, uint64_t* other, int64_t count, uint64_t largest) {
  const int bits = bits_of(largest), digits = (bits + kMostDigitBits - 1) / kMostDigitBits;
  for (int digit = 0; digit < digits; ++digit) {
    const int low = bits * digit / digits, high = bits * (digit + 1) / digits;
    const uint64_t mask = (uint64_t{1} << (high - low)) - 1;
    auto digit_of = [&](uint64_t entry) { return (entry >> (32 + low)) & mask; };
    uint32_t begins[1 << kMostDigitBits] = {};
    for (int64_t i = 0; i < count; ++i) ++begins[digit_of(entries[i])];
    uint32_t begin = 0;
    for (uint64_t value = 0; value <= mask; ++value) {
      const uint32_t size = begins[value];
      begins[value] = begin;
      begin += size;
    }
    for (int64_t i = 0; i < count; ++i) other[begins[digit_of(entries[i])]++] = entries[i];
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

extern "C" int64_t sketchoptim_group(const int64_t* ids, int64_t count, uint64_t* room,
                                     Gradient* gradient) {
  int64_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, ids[i]);
    room[i] = static_cast<uint64_t>(ids[i]) << 32 | static_cast<uint64_t>(i);
  }
  uint64_t* sorted = sort_by_id(room, room + count, count, static_cast<uint64_t>(largest));
  // What the sort is done with is written over: one buffer at once, the other while it is read.
  uint32_t* order = reinterpret_cast<uint32_t*>(sorted == room ? room + count : room);
  uint32_t* slots = order + count;
  uint32_t* starts = reinterpret_cast<uint32_t*>(room + 2 * count);
  uint32_t rows = 0, shared = 0;
  starts[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t id = sorted[i] >> 32;
    const bool is_last = i + 1 == count || sorted[i + 1] >> 32 != id;
    order[i] = static_cast<uint32_t>(sorted[i]);
    sorted[rows] = id;
    slots[rows] = shared;
    starts[rows + 1] = static_cast<uint32_t>(i + 1);
    shared += is_last && starts[rows] != i;
    rows += is_last;
  }
  gradient->ids = reinterpret_cast<int64_t*>(sorted);
  gradient->starts = starts;
  gradient->order = order;
  gradient->slots = slots;
  gradient->rows = rows;
  return shared;
}
