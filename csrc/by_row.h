// Second moments with one number a row, moved from the mean squares of rows.
#pragma once

#include "moment.h"

// Some rows of a step: their ids, and for each the mean square of its gradient.
struct Squares {
  const int64_t* ids;  // without them the ids ascend by one from first_id
  int64_t first_id;
  int64_t rows;
  int64_t first_row;
  float* values;

  int64_t id(int64_t r) const { return ids ? ids[r] : first_id + r; }
  int64_t hashed_id(int64_t r) const { return first_row + id(r); }
};

// Adds rows to a linear sketch, which no row may read before all rows of the step are in it.
void add_by_row(const Moment& m, const Squares& squares, int32_t threads);

// Moves all others, and leaves the second moment of each row in place of its mean square, in a
// linear sketch too. A conservative sketch is read as it was before the step: `before` is m, or has
// a copy of its counters where these are not all rows of the step.
void move_by_row(const Moment& m, const Moment& before, const Squares& squares, int32_t threads);

// The same for a conservative sketch in two parts: read_targets() leaves second moments, which are
// the targets, and changes no counter; raise_to_targets() takes them.
void read_targets(const Moment& m, const Squares& squares, int32_t threads);
void raise_to_targets(const Moment& m, const Squares& squares, int32_t threads);

// Prefetches all counters in the order of memory, if most of them are about to be read by `rows`
// rows. In the order of rows, one cache miss would wait for the other.
void prefetch_counters(const Moment& m, int64_t rows);
