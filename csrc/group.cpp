// Equal ids together, in ascending order: a least-significant-digit radix sort that reads only the
// digits which the largest id has.
#include <algorithm>

#include "abi.h"

namespace {

constexpr int kDigitBits = 11;
constexpr uint64_t kDigits = 1u << kDigitBits;

// Entries are (id << 32 | position): ids below 2^32, fewer than 2^32 entries.
uint64_t* sort_by_id(uint64_t* entries, uint64_t* other, int64_t count, uint64_t largest) {
  for (int shift = 32; shift < 64 && (largest << 32) >> shift; shift += kDigitBits) {
    int64_t begins[kDigits] = {};
    for (int64_t i = 0; i < count; ++i) ++begins[(entries[i] >> shift) % kDigits];
    int64_t begin = 0;
    for (uint64_t digit = 0; digit < kDigits; ++digit) {
      const int64_t size = begins[digit];
      begins[digit] = begin;
      begin += size;
    }
    for (int64_t i = 0; i < count; ++i) other[begins[(entries[i] >> shift) % kDigits]++] = entries[i];
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

extern "C" int64_t sketchoptim_group(const int64_t* ids, int64_t count, uint64_t* scratch,
                                     int64_t* order, int64_t* starts, int64_t* slots,
                                     int64_t* unique) {
  const int64_t largest = count ? *std::max_element(ids, ids + count) : 0;
  for (int64_t i = 0; i < count; ++i)
    scratch[i] = static_cast<uint64_t>(ids[i]) << 32 | static_cast<uint64_t>(i);
  const uint64_t* sorted =
      sort_by_id(scratch, scratch + count, count, static_cast<uint64_t>(largest));
  int64_t rows = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = static_cast<int64_t>(sorted[i] >> 32);
    if (i == 0 || unique[rows - 1] != id) {
      unique[rows] = id;
      starts[rows++] = i;
    }
    order[i] = static_cast<int64_t>(sorted[i] & 0xffffffffu);
  }
  starts[rows] = count;
  slots[0] = 0;
  for (int64_t r = 0; r < rows; ++r) slots[r + 1] = slots[r] + (starts[r + 1] - starts[r] > 1);
  return rows;
}
