// A sweep over the rows of a step.
#pragma once

#include "abi.h"

// Sketches that are linear take all rows of a step in a sweep of their own, before any is moved.
enum class Sweep { kAdd, kUpdate };

// Adds rows to sketches by element that are linear, or moves moments by element and rows. A moment
// by row has left its estimates in row_values, or what read_by_row() leaves if !s.is_inspected.
void sweep_rows(const Step& s, Sweep sweep);
