// The forward pass of many tables: for each table and bag, the sum or the mean of its ids' rows.
//
// A row of the output has the columns of all tables. Rows are read from random places, so they are
// prefetched some ids ahead, across bags.
#include <algorithm>

#include "lanes.h"
#include "lookups.h"

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

bool are_ids_valid(const int64_t* ids, Span span, int64_t rows) {
  int64_t wrong = 0;
  for (int64_t i = span.begin; i < span.end; ++i)
    wrong += static_cast<uint64_t>(ids[i]) >= static_cast<uint64_t>(rows);
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
  const BagTable t;
  const Lookups all;
  void* const output;
  const int64_t first_bag, last_id, row_bytes, bytes_ahead;
  const bool is_streamed;

  Pool(const Bags& bags, int64_t table)
      : t(bags.table[table]), all(*bags.lookups), output(bags.output),
        first_bag(table * all.outputs), last_id(ids_of_table(all, table).end - 1),
        row_bytes(t.dim * bytes_of(P)), bytes_ahead(std::min(row_bytes, kMostBytesAhead)),
        is_streamed(P == kFloat32 && is_aligned()) {}

  bool is_aligned() const {
    const int64_t row = all.columns * sizeof(float), first = t.column * sizeof(float);
    const int64_t begin = reinterpret_cast<intptr_t>(output) + first;
    return begin % kCacheLine == 0 && row % kCacheLine == 0 && t.dim % kLine == 0;
  }

  INLINE const char* row(int64_t i) const {
    return static_cast<const char*>(t.weight) + all.ids[i] * row_bytes;
  }

  INLINE void prefetch(int64_t i) const {
    const char* begin = row(std::min(i, last_id));
    for (int64_t at = 0; at < bytes_ahead; at += kCacheLine) __builtin_prefetch(begin + at);
  }

  // kCount registers of columns, of which the last has `width` columns.
  template <int64_t kCount>
  INLINE void pool(int64_t bag, Span ids, float factor, int64_t column, int64_t width) const {
    Lanes sums[kCount];
    for (int64_t k = 0; k < kCount; ++k) sums[k] = Lanes{};
    for (int64_t i = ids.begin; i < ids.end; ++i) {
      if (column == 0) prefetch(i + kRowsAhead);
      for (int64_t k = 0; k < kCount; ++k) {
        const Lanes x = load(row(i), P, column + k * kLanes, width);
        sums[k] += all.weights ? x * all.weights[i] : x;
      }
    }
    const int64_t at = bag * all.columns + t.column + column;
    for (int64_t k = 0; k < kCount; ++k) {
      const Lanes x = all.is_mean ? sums[k] * factor : sums[k];
      if (is_streamed)
        store_past_caches(static_cast<float*>(output) + at + k * kLanes, x);
      else
        store(output, P, at + k * kLanes, width, x);
    }
  }

  void operator()(Span bags) const {
    const int64_t first = first_of(all, first_bag + bags.begin);
    for (int64_t i = first; i < std::min(first + kRowsAhead, last_id + 1); ++i) prefetch(i);
    for (int64_t bag = bags.begin; bag < bags.end; ++bag) {
      const Span ids = ids_of_bag(all, first_bag + bag);
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

void pool_bags(const Bags& all, int64_t table, Span bags) {
  switch (all.dtype) {
    case kBFloat16: return Pool<kBFloat16>(all, table)(bags);
    case kFloat16: return Pool<kFloat16>(all, table)(bags);
    default: return Pool<kFloat32>(all, table)(bags);
  }
}

}  // namespace

extern "C" int64_t sketchoptim_pool_bags(const Bags* bags) {
  const Bags& all = *bags;
  Lookups& lookups = *all.lookups;
  if (!are_bags(lookups)) return -1;
  for (int64_t t = 0; t < lookups.tables; ++t)
    if (!are_ids_valid(lookups.ids, ids_of_table(lookups, t), all.table[t].rows)) return t + 1;
  const int64_t parts = (lookups.outputs + kBagsOfTask - 1) / kBagsOfTask;
#pragma omp parallel for schedule(dynamic, 1) num_threads(all.threads) if (all.threads > 1)
  for (int64_t task = 0; task < lookups.tables * parts; ++task) {
    const int64_t begin = task % parts * kBagsOfTask;
    pool_bags(all, task / parts, {begin, std::min(begin + kBagsOfTask, lookups.outputs)});
  }
  return 0;
}
