// The forward pass of many tables: for each table and bag, the sum or the mean of its ids' rows.
//
// A row of the output has the columns of all tables. Rows are read from random places, so they are
// prefetched some ids ahead, across bags.
#include <algorithm>

#include "lanes.h"

#if defined(__SSE__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kRegisters = 4;    // columns that are summed in registers, in units of kLanes
constexpr int64_t kRowsAhead = 24;   // twelve to thirty-two take the same time
constexpr int64_t kMostBytesAhead = 512;  // from there on the hardware prefetches
constexpr int64_t kBagsOfTask = 256;
constexpr int64_t kCacheLine = 64;
constexpr int64_t kLine = kCacheLine / sizeof(float);

// Where a bag has its ids.
struct Range {
  int64_t begin, end;
};

INLINE Range bag_of(const BagTable& t, int64_t bag, int64_t bags) {
  if (!t.offsets) return {bag * t.ids_a_bag, (bag + 1) * t.ids_a_bag};
  const int64_t end = bag + 1 < bags ? t.offsets[bag + 1] - t.first_offset : t.count;
  return {t.offsets[bag] - t.first_offset, end};
}

// Whether offsets ascend from the table's first id to its last one.
bool are_offsets_valid(const BagTable& t, int64_t bags) {
  if (!t.offsets) return t.count == bags * t.ids_a_bag;
  if (bags == 0) return t.count == 0;
  int64_t wrong = t.offsets[0] != t.first_offset;
  for (int64_t bag = 1; bag < bags; ++bag) wrong += t.offsets[bag] < t.offsets[bag - 1];
  return wrong == 0 && t.offsets[bags - 1] - t.first_offset <= t.count;
}

bool are_ids_valid(const BagTable& t) {
  const uint64_t rows = static_cast<uint64_t>(t.rows);
  int64_t wrong = 0;
  for (int64_t i = 0; i < t.count; ++i) wrong += static_cast<uint64_t>(t.ids[i]) >= rows;
  return wrong == 0;
}

// Stores a register past the caches: the output is read again only after all of it is written.
INLINE void store_past_caches(float* to, Lanes x) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, (__m512)x);
#elif defined(__AVX2__)
  _mm256_stream_ps(to, (__m256)x);
#elif defined(__SSE__)
  _mm_stream_ps(to, (__m128)x);
#else
  std::memcpy(to, &x, sizeof(x));
#endif
}

// Before other threads read what this one has stored past the caches.
void finish_stores() {
#if defined(__SSE__)
  _mm_sfence();
#endif
}

// Pools bags of one table, whose rows are of dtype P.
template <int32_t P>
struct Pool {
  const BagTable& t;
  const Bags& all;
  const int64_t row_bytes, bytes_ahead;
  const bool is_streamed;

  Pool(const BagTable& table, const Bags& bags)
      : t(table), all(bags), row_bytes(table.dim * bytes_of(P)),
        bytes_ahead(std::min(row_bytes, kMostBytesAhead)),
        is_streamed(P == kFloat32 && is_aligned(table, bags)) {}

  static bool is_aligned(const BagTable& t, const Bags& all) {
    const int64_t row = all.columns * sizeof(float), first = t.column * sizeof(float);
    const int64_t begin = reinterpret_cast<intptr_t>(all.output) + first;
    return begin % kCacheLine == 0 && row % kCacheLine == 0 && t.dim % kLine == 0;
  }

  INLINE const char* row(int64_t i) const {
    return static_cast<const char*>(t.weight) + t.ids[i] * row_bytes;
  }

  INLINE void prefetch(int64_t i) const {
    const char* begin = row(std::min(i, t.count - 1));
    for (int64_t at = 0; at < bytes_ahead; at += kCacheLine) __builtin_prefetch(begin + at);
  }

  // kCount registers of columns, of which the last has `width` columns.
  template <int64_t kCount>
  INLINE void pool(int64_t bag, Range ids, float factor, int64_t column, int64_t width) const {
    Lanes sums[kCount];
    for (int64_t k = 0; k < kCount; ++k) sums[k] = Lanes{};
    for (int64_t i = ids.begin; i < ids.end; ++i) {
      if (column == 0) prefetch(i + kRowsAhead);
      for (int64_t k = 0; k < kCount; ++k) {
        const Lanes x = load(row(i), P, column + k * kLanes, width);
        sums[k] += t.factors ? x * t.factors[i] : x;
      }
    }
    const int64_t at = bag * all.columns + t.column + column;
    for (int64_t k = 0; k < kCount; ++k) {
      const Lanes x = all.is_mean ? sums[k] * factor : sums[k];
      if (is_streamed)
        store_past_caches(static_cast<float*>(all.output) + at + k * kLanes, x);
      else
        store(all.output, P, at + k * kLanes, width, x);
    }
  }

  void operator()(Range bags) const {
    const int64_t first = bag_of(t, bags.begin, all.bags).begin;
    for (int64_t i = first; i < std::min(first + kRowsAhead, t.count); ++i) prefetch(i);
    for (int64_t bag = bags.begin; bag < bags.end; ++bag) {
      const Range ids = bag_of(t, bag, all.bags);
      const float factor = 1.0f / static_cast<float>(std::max<int64_t>(1, ids.end - ids.begin));
      int64_t column = 0;
      for (; column + kRegisters * kLanes <= t.dim; column += kRegisters * kLanes)
        pool<kRegisters>(bag, ids, factor, column, kLanes);
      for (; column + kLanes <= t.dim; column += kLanes) pool<1>(bag, ids, factor, column, kLanes);
      if (column < t.dim) pool<1>(bag, ids, factor, column, t.dim - column);
    }
    finish_stores();
  }
};

void pool_bags(const BagTable& t, const Bags& all, Range bags) {
  switch (all.dtype) {
    case kBFloat16: return Pool<kBFloat16>(t, all)(bags);
    case kFloat16: return Pool<kFloat16>(t, all)(bags);
    default: return Pool<kFloat32>(t, all)(bags);
  }
}

}  // namespace

extern "C" int64_t sketchoptim_pool_bags(const Bags* bags) {
  const Bags& all = *bags;
  for (int64_t t = 0; t < all.tables; ++t) {
    if (!are_offsets_valid(all.table[t], all.bags)) return -(t + 1);
    if (!are_ids_valid(all.table[t])) return t + 1;
  }
  const int64_t parts = (all.bags + kBagsOfTask - 1) / kBagsOfTask;
#pragma omp parallel for schedule(dynamic, 1) num_threads(all.threads) if (all.threads > 1)
  for (int64_t task = 0; task < all.tables * parts; ++task) {
    const int64_t begin = task % parts * kBagsOfTask;
    pool_bags(all.table[task / parts], all, {begin, std::min(begin + kBagsOfTask, all.bags)});
  }
  return 0;
}
