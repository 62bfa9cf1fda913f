// The best classes of a few queries, where the score of a class is combined from one bucket of each
// hash row. Buckets are hashed, never stored, and a score is read for all queries at once.
#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "moment.h"

namespace {

constexpr int64_t kFewQueries = 16;  // so many columns or kMaxQueries
constexpr int64_t kLine = 16;  // numbers in a cache line
constexpr int64_t kTogether = 4;  // classes that are scored before one test whether any is good

struct Found {
  float score;
  int64_t id;
};

// The order of the result: higher scores first, lower ids first among equal ones.
bool is_before(const Found& a, const Found& b) {
  return a.score > b.score || (a.score == b.score && a.id < b.id);
}

// The best classes of one thread: for each query a heap with the worst of them at the front.
struct Best {
  explicit Best(const TopClasses& t) : k(t.k), heaps(t.queries) {
    for (int64_t q = 0; q < kMaxQueries; ++q) bounds[q] = q < t.queries ? -INFINITY : INFINITY;
  }

  void reserve(const TopClasses& t) {
    for (auto& heap : heaps) heap.reserve(std::min(t.k, t.count));
  }

  void offer(int64_t query, float score, int64_t id) {
    std::vector<Found>& heap = heaps[query];
    if (static_cast<int64_t>(heap.size()) == k) {
      std::pop_heap(heap.begin(), heap.end(), is_before);
      heap.pop_back();
    }
    heap.push_back({score, id});
    std::push_heap(heap.begin(), heap.end(), is_before);
    if (static_cast<int64_t>(heap.size()) == k) bounds[query] = heap.front().score;
  }

  int64_t k;
  float bounds[kMaxQueries];  // a score must be above it; of equal scores the first id stays
  std::vector<std::vector<Found>> heaps;
};

INLINE int64_t class_at(const TopClasses& t, int64_t i) { return t.ids ? t.ids[i] : i; }

// Where the scores of a few classes lie: found and prefetched one round ahead.
template <int64_t kColumns>
struct Places {
  const float* at[kTogether][kMaxDepth];

  INLINE void find(const TopClasses& t, int64_t begin, int64_t classes) {
    uint64_t mixed[kTogether];
    for (int64_t c = 0; c < classes; ++c) mixed[c] = mix_id(class_at(t, begin + c));
    for (int32_t j = 0; j < t.members; ++j) {
      int64_t rows[kTogether];
      for (int64_t c = 0; c < classes; ++c)
        rows[c] = j * t.buckets + bucket_of(t.words + 4 * j, mixed[c], t.buckets);
      for (int64_t c = 0; c < classes; ++c) {
        at[c][j] = t.tables + rows[c] * kColumns;
        for (int64_t i = 0; i < kColumns; i += kLine) __builtin_prefetch(at[c][j] + i);
      }
    }
  }
};

template <int32_t kCombination>
INLINE Lanes combined(const float* const* rows, int32_t members, int64_t column) {
  if (kCombination == kMedian) {
    Lanes readings[kMaxDepth];
    for (int32_t j = 0; j < members; ++j) readings[j] = load(rows[j], kFloat32, column, kLanes);
    return median(readings, members);
  }
  Lanes x = load(rows[0], kFloat32, column, kLanes);
  for (int32_t j = 1; j < members; ++j) {
    const Lanes more = load(rows[j], kFloat32, column, kLanes);
    x = kCombination == kSum ? x + more : smaller(x, more);
  }
  return x;
}

// Where a combined score may be above its bound. A median is above only if half of the readings
// are. Counting those is cheaper than sorting, which is then rarely needed.
template <int32_t kCombination>
INLINE IntLanes may_be_above(const float* const* rows, int32_t members, int64_t column,
                             Lanes bounds) {
  if (kCombination != kMedian) return combined<kCombination>(rows, members, column) > bounds;
  IntLanes count{};
  for (int32_t j = 0; j < members; ++j)
    count -= load(rows[j], kFloat32, column, kLanes) > bounds;
  return count >= members - members / 2;
}

INLINE bool is_any(IntLanes x) {
  int64_t words[kLanes / 2], any = 0;
  std::memcpy(words, &x, sizeof(words));
  for (int64_t word : words) any |= word;
  return any != 0;
}

// Seldom called: most classes are not among the best of any query.
template <int32_t kCombination>
void offer_class(const TopClasses& t, int64_t id, const float* const* rows, Best& best) {
  for (int64_t column = 0; column < t.queries; column += kLanes) {
    const Lanes scores = combined<kCombination>(rows, t.members, column);
    for (int64_t lane = 0; lane < std::min(kLanes, t.queries - column); ++lane)
      if (scores[lane] > best.bounds[column + lane]) best.offer(column + lane, scores[lane], id);
  }
}

template <int32_t kCombination, int64_t kColumns>
INLINE void scan_classes(const TopClasses& t, int64_t begin, int64_t classes,
                         const Places<kColumns>& places, Best& best) {
  IntLanes above{};
  for (int64_t column = 0; column < kColumns; column += kLanes) {
    const Lanes bounds = load(best.bounds, kFloat32, column, kLanes);
    for (int64_t c = 0; c < classes; ++c)
      above |= may_be_above<kCombination>(places.at[c], t.members, column, bounds);
  }
  if (__builtin_expect(!is_any(above), 1)) return;
  for (int64_t c = 0; c < classes; ++c)
    offer_class<kCombination>(t, class_at(t, begin + c), places.at[c], best);
}

template <int32_t kCombination, int64_t kColumns>
void scan(const TopClasses& t, Span classes, Best& best) {
  Places<kColumns> places[2];
  int64_t i = classes.begin, round = 0;
  if (i + kTogether <= classes.end) places[0].find(t, i, kTogether);
  for (; i + kTogether <= classes.end; i += kTogether, ++round) {
    if (i + 2 * kTogether <= classes.end) places[(round + 1) % 2].find(t, i + kTogether, kTogether);
    scan_classes<kCombination>(t, i, kTogether, places[round % 2], best);
  }
  places[0].find(t, i, classes.end - i);
  scan_classes<kCombination>(t, i, classes.end - i, places[0], best);
}

template <int32_t kCombination>
void run(const TopClasses& t) {
  const int64_t parts = std::max(1, t.threads);
  // Reserved before threads start, which no exception may leave.
  std::vector<Best> found(parts, Best(t));
  for (Best& best : found) best.reserve(t);
#pragma omp parallel for schedule(static, 1) num_threads(t.threads) if (parts > 1)
  for (int64_t part = 0; part < parts; ++part) {
    const Span classes{t.count * part / parts, t.count * (part + 1) / parts};
    if (t.queries <= kFewQueries)
      scan<kCombination, kFewQueries>(t, classes, found[part]);
    else
      scan<kCombination, kMaxQueries>(t, classes, found[part]);
  }
  for (int64_t q = 0; q < t.queries; ++q) {
    std::vector<Found> all;
    for (const auto& best : found)
      all.insert(all.end(), best.heaps[q].begin(), best.heaps[q].end());
    std::sort(all.begin(), all.end(), is_before);
    for (int64_t i = 0; i < t.k; ++i) {
      t.scores[q * t.k + i] = all[i].score;
      t.classes[q * t.k + i] = all[i].id;
    }
  }
}

}  // namespace

extern "C" int32_t sketchoptim_top_classes(const TopClasses* t) {
  try {
    switch (t->combination) {
      case kLeast: run<kLeast>(*t); break;
      case kMedian: run<kMedian>(*t); break;
      default: run<kSum>(*t);
    }
    return 1;
  } catch (const std::bad_alloc&) {
    return 0;
  }
}
