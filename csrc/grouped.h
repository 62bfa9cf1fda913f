// Rows with several entries each, whose only moment has one number for each row.
#pragma once

#include "by_row.h"
#include "rows.h"

// Whether move_grouped_rows() takes a step: it finds the mean squares itself.
bool are_rows_grouped(const Step& s);

// Moves the rows of the parameter, and leaves their second moments in row_values, which have what is
// kept of each row.
void move_grouped_rows(const Step& s);
