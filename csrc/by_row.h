// Second moments with one number a row: row_values go in as mean squares, come out as estimates.
#pragma once

#include "moment.h"

void move_by_row(const Moment& m, const int64_t* ids, int64_t rows, int32_t threads,
                 float* row_values);
