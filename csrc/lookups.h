// Where the ids of tables and of bags are among those of lookups.
#pragma once

#include "moment.h"

// The first id of a bag; bags are numbered through all tables.
INLINE int64_t first_of(const Lookups& l, int64_t bag) {
  if (bag == l.tables * l.outputs) return l.count;
  return l.is_single ? bag : l.offsets[bag];
}

INLINE Span ids_of_bag(const Lookups& l, int64_t bag) {
  return {first_of(l, bag), first_of(l, bag + 1)};
}

INLINE Span ids_of_table(const Lookups& l, int64_t table) {
  return {first_of(l, table * l.outputs), first_of(l, (table + 1) * l.outputs)};
}

// Whether the offsets divide all ids among the bags. Notes whether each bag has one id.
inline bool are_bags(Lookups& l) {
  const int64_t bags = l.tables * l.outputs;
  l.is_single = l.count == bags;
  if (!l.offsets) return l.is_single;
  if (bags == 0) return l.count == 0;
  int64_t wrong = l.offsets[0] != 0, others = 0;
  for (int64_t bag = 1; bag < bags; ++bag) {
    wrong += l.offsets[bag] < l.offsets[bag - 1];
    others += l.offsets[bag] != bag;
  }
  l.is_single = l.is_single && others == 0;
  return wrong == 0 && l.offsets[bags - 1] <= l.count;
}
