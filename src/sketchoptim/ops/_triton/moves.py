"""The kernels that move moments and rows; each returns at once where the step is refused."""

import triton
import triton.language as tl

from . import slots
from .codes import move_codes
from .moments import (
    CODES,
    EXACT,
    LINEAR,
    NONE,
    ROW_SKETCH,
    ROW_WISE,
    SKETCH,
    delta,
    estimate,
    median_of_three,
    move_items,
    raise_at_once,
    reading_of,
)
from .rows import gradient, ids_at, positions
from .words import mix, store_nearest, store_weights


@triton.jit
def _move_moment(
    data, words, width, scales, book, borders, ledger, id, hashed, columns, mask, x,
    MOMENT: tl.constexpr, KIND: tl.constexpr, FORM: tl.constexpr, MODE: tl.constexpr,
    DEPTH: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Moves a moment and returns its estimate, [rows, columns] or [rows, 1]."""
    if KIND == EXACT:
        pointers = data + id * DIM + columns
        old = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        result = old + delta(ledger, old, x, MOMENT, MODE)
        store_nearest(pointers, result, mask)
    elif KIND == CODES:
        result = move_codes(
            data, scales, book, borders, ledger, id, columns, mask, x, MOMENT, MODE, DIM, STRIDE
        )
    elif KIND == SKETCH:
        if FORM == LINEAR:
            result = estimate(
                data, words, width, mix(hashed), columns, mask, ledger, x, MOMENT, FORM, MODE,
                DEPTH, DIM,
            )  # fmt: skip
        else:
            result = move_items(
                data, words, width, mix(hashed), hashed, columns, mask, ledger, x, MOMENT, FORM,
                MODE, DEPTH, DIM,
            )  # fmt: skip
    else:
        result = x
    return result


@triton.jit
def direction_of(
    ledger, numerator, second, HAS_SECOND: tl.constexpr, HAS_ROOT: tl.constexpr,
    HAS_CLIP: tl.constexpr,
):  # fmt: skip
    """`FusedRule.direction` from its numerator and the second moment."""
    result = numerator
    if HAS_SECOND:
        size = tl.sqrt_rn(second)
        if HAS_ROOT:
            size = tl.div_rn(size, tl.zeros_like(size) + slots.number(ledger, slots.SECOND_ROOT))
        result = tl.div_rn(result, size + slots.number(ledger, slots.EPS))
    if HAS_CLIP:  # comparisons are false for NaN, which stays
        clip = slots.number(ledger, slots.CLIP)
        result = tl.where(result > clip, clip, result)
        result = tl.where(result < -clip, -clip, result)
    return result


@triton.jit
def _quotient(
    first, first_hash, first_width, second, second_hash, second_width, row, mixed, columns, mask,
    ledger, DIM: tl.constexpr, HAS_ROOT: tl.constexpr, HAS_CLIP: tl.constexpr,
):  # fmt: skip
    """The direction by the readings of one hash row."""
    numerator = reading_of(
        first, first_hash, first_width, row, mixed, columns, mask, ledger, 0.0, slots.FIRST,
        LINEAR, 0, DIM,
    )  # fmt: skip
    square = reading_of(
        second, second_hash, second_width, row, mixed, columns, mask, ledger, 0.0, slots.SECOND,
        LINEAR, 0, DIM,
    )  # fmt: skip
    return direction_of(ledger, numerator, square, True, HAS_ROOT, HAS_CLIP)


@triton.jit
def _median_quotient(
    first, first_hash, first_width, second, second_hash, second_width, mixed, columns, mask,
    ledger, DEPTH: tl.constexpr, DIM: tl.constexpr, HAS_ROOT: tl.constexpr, HAS_CLIP: tl.constexpr,
):  # fmt: skip
    """The ratio form: the median of the quotients of the hash rows."""
    result = _quotient(
        first, first_hash, first_width, second, second_hash, second_width, 0, mixed, columns,
        mask, ledger, DIM, HAS_ROOT, HAS_CLIP,
    )  # fmt: skip
    if DEPTH == 3:
        b = _quotient(
            first, first_hash, first_width, second, second_hash, second_width, 1, mixed, columns,
            mask, ledger, DIM, HAS_ROOT, HAS_CLIP,
        )  # fmt: skip
        c = _quotient(
            first, first_hash, first_width, second, second_hash, second_width, 2, mixed, columns,
            mask, ledger, DIM, HAS_ROOT, HAS_CLIP,
        )  # fmt: skip
        result = median_of_three(result, b, c)
    elif DEPTH > 1:
        low, high = tl.zeros_like(result), tl.zeros_like(result)
        for row in range(DEPTH):
            here = _quotient(
                first, first_hash, first_width, second, second_hash, second_width, row, mixed,
                columns, mask, ledger, DIM, HAS_ROOT, HAS_CLIP,
            )  # fmt: skip
            rank = tl.zeros_like(here).to(tl.int32)
            for other in range(DEPTH):
                there = _quotient(
                    first, first_hash, first_width, second, second_hash, second_width, other,
                    mixed, columns, mask, ledger, DIM, HAS_ROOT, HAS_CLIP,
                )  # fmt: skip
                rank += ((there < here) | ((there == here) & (other < row))).to(tl.int32)
            low = tl.where(rank == (DEPTH - 1) // 2, here, low)
            high = tl.where(rank == DEPTH // 2, here, high)
        if DEPTH % 2 == 1:
            result = high
        else:
            result = (low + high) * 0.5
    return result


@triton.jit
def _move_tile(
    entries, ids, order, partials, parameter, ledger, row_values, factors, first, first_hash,
    first_width, first_units, first_book, first_borders, second, second_hash, second_width,
    second_units, second_book, second_borders, count, first_row, at, id, mask, columns, column_mask,
    FIRST_KIND: tl.constexpr, FIRST_FORM: tl.constexpr, FIRST_MODE: tl.constexpr,
    FIRST_DEPTH: tl.constexpr, SECOND_KIND: tl.constexpr, SECOND_FORM: tl.constexpr,
    SECOND_MODE: tl.constexpr, SECOND_DEPTH: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr,
    LAYOUT: tl.constexpr, IS_MAXIMIZING: tl.constexpr, DECAYS: tl.constexpr,
    HAS_NESTEROV: tl.constexpr, HAS_ROOT: tl.constexpr, HAS_CLIP: tl.constexpr,
    IS_RATIO: tl.constexpr, IS_STOCHASTIC: tl.constexpr, HAS_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Moves some columns of some rows, and what moments keep of them."""
    both = mask & column_mask
    hashed = id + first_row
    if IS_RATIO:
        direction = _median_quotient(
            first, first_hash, first_width, second, second_hash, second_width, mix(hashed),
            columns, both, ledger, FIRST_DEPTH, DIM, HAS_ROOT, HAS_CLIP,
        )  # fmt: skip
    else:
        g = gradient(
            entries, ids, order, partials, parameter, ledger, count, at, id, mask, columns,
            column_mask, DIM, LAYOUT, IS_MAXIMIZING, DECAYS,
        )  # fmt: skip
        direction = g
        if FIRST_KIND != NONE:
            direction = _move_moment(
                first, first_hash, first_width, first_units, first_book, first_borders, ledger,
                id, hashed, columns, both, g, slots.FIRST, FIRST_KIND,
                FIRST_FORM, FIRST_MODE, FIRST_DEPTH, DIM, STRIDE,
            )  # fmt: skip
            if HAS_NESTEROV:
                direction = g + direction * slots.number(ledger, slots.NESTEROV)
        if (SECOND_KIND == ROW_WISE) or (SECOND_KIND == ROW_SKETCH):
            if SECOND_KIND == ROW_SKETCH and SECOND_FORM == LINEAR:
                square = estimate(
                    second, second_hash, second_width, mix(hashed), at * 0, mask, ledger, 0.0,
                    slots.SECOND, LINEAR, SECOND_MODE, SECOND_DEPTH, 1,
                )  # fmt: skip
            else:
                square = tl.load(row_values + at, mask=mask, other=0.0)
            if HAS_COLUMNS:
                square = square * tl.load(factors + columns, mask=column_mask, other=1.0)
        else:
            square = _move_moment(
                second, second_hash, second_width, second_units, second_book, second_borders,
                ledger, id, hashed, columns, both, g * g, slots.SECOND, SECOND_KIND,
                SECOND_FORM, SECOND_MODE, SECOND_DEPTH, DIM, STRIDE,
            )  # fmt: skip
        direction = direction_of(ledger, direction, square, SECOND_KIND != NONE, HAS_ROOT, HAS_CLIP)
    pointers = parameter + id * DIM + columns
    row = tl.load(pointers, mask=both, other=0.0).to(tl.float32)
    row *= slots.number(ledger, slots.SHRINK)
    row -= direction * slots.number(ledger, slots.STEP_SIZE)
    key = slots.key(ledger, slots.WEIGHTS_KEY)
    store_weights(pointers, row, both, key, hashed, columns, IS_STOCHASTIC)


@triton.jit(do_not_specialize=["count", "first_row", "first_width", "second_width"])
def move_rows(
    entries, ids, order, partials, parameter, ledger, flag, row_values, factors, first,
    first_hash, first_width: tl.int64, first_units, first_book, first_borders, second, second_hash,
    second_width: tl.int64, second_units, second_book, second_borders, count: tl.int64,
    first_row: tl.int64, FIRST_KIND: tl.constexpr, FIRST_FORM: tl.constexpr,
    FIRST_MODE: tl.constexpr, FIRST_DEPTH: tl.constexpr, SECOND_KIND: tl.constexpr,
    SECOND_FORM: tl.constexpr, SECOND_MODE: tl.constexpr, SECOND_DEPTH: tl.constexpr,
    IS_RAISED: tl.constexpr,
    DIM: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    LAYOUT: tl.constexpr, IS_MAXIMIZING: tl.constexpr, DECAYS: tl.constexpr,
    HAS_NESTEROV: tl.constexpr, HAS_ROOT: tl.constexpr, HAS_CLIP: tl.constexpr,
    IS_RATIO: tl.constexpr, IS_STOCHASTIC: tl.constexpr, HAS_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Moves all rows, in any order: rows that share no numbers, or only maxima."""
    if tl.load(flag) == 0:
        at = positions(tl.program_id(0), ROWS)
        id, _, mask = ids_at(ids, at, count, LAYOUT)
        for start in range(0, DIM, STRIDE):
            offsets = tl.arange(0, BLOCK)[None, :]
            columns = start + offsets
            _move_tile(
                entries, ids, order, partials, parameter, ledger, row_values, factors, first,
                first_hash, first_width, first_units, first_book, first_borders, second,
                second_hash, second_width, second_units, second_book, second_borders, count,
                first_row, at, id, mask, columns, (offsets < STRIDE) & (columns < DIM), FIRST_KIND,
                FIRST_FORM, FIRST_MODE, FIRST_DEPTH, SECOND_KIND, SECOND_FORM, SECOND_MODE,
                SECOND_DEPTH, DIM, STRIDE, LAYOUT, IS_MAXIMIZING, DECAYS, HAS_NESTEROV, HAS_ROOT,
                HAS_CLIP, IS_RATIO, IS_STOCHASTIC, HAS_COLUMNS,
            )  # fmt: skip
        if SECOND_KIND == ROW_WISE:
            value = tl.load(row_values + at, mask=mask, other=0.0)
            tl.store(second + id, value, mask=mask)
        elif IS_RAISED:
            value = tl.load(row_values + at, mask=mask, other=0.0)
            raise_at_once(
                second, second_hash, second_width, mix(id + first_row), value, mask, ledger,
                SECOND_DEPTH,
            )  # fmt: skip


@triton.jit(do_not_specialize=["count", "first_row", "first_width", "second_width"])
def move_rows_in_order(
    entries, ids, order, partials, parameter, ledger, flag, row_values, factors, first,
    first_hash, first_width: tl.int64, first_units, first_book, first_borders, second, second_hash,
    second_width: tl.int64, second_units, second_book, second_borders, count: tl.int64,
    first_row: tl.int64, FIRST_KIND: tl.constexpr, FIRST_FORM: tl.constexpr,
    FIRST_MODE: tl.constexpr, FIRST_DEPTH: tl.constexpr, SECOND_KIND: tl.constexpr,
    SECOND_FORM: tl.constexpr, SECOND_MODE: tl.constexpr, SECOND_DEPTH: tl.constexpr,
    IS_RAISED: tl.constexpr,
    DIM: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    LAYOUT: tl.constexpr, IS_MAXIMIZING: tl.constexpr, DECAYS: tl.constexpr,
    HAS_NESTEROV: tl.constexpr, HAS_ROOT: tl.constexpr, HAS_CLIP: tl.constexpr,
    IS_RATIO: tl.constexpr, IS_STOCHASTIC: tl.constexpr, HAS_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The same for sketches of the paper and bucket forms: one row after the other.

    Columns are independent of each other, so each program takes a block of them.
    """
    if tl.load(flag) == 0:
        offsets = tl.arange(0, BLOCK)[None, :]
        columns = tl.program_id(0) * STRIDE + offsets
        column_mask = (offsets < STRIDE) & (columns < DIM)
        for position in range(count):
            id, _, is_head = ids_at(ids, position, count, LAYOUT)
            if is_head:
                at = tl.full([1, 1], position, tl.int64)
                row_id = tl.full([1, 1], id, tl.int64)
                _move_tile(
                    entries, ids, order, partials, parameter, ledger, row_values, factors, first,
                    first_hash, first_width, first_units, first_book, first_borders, second,
                    second_hash, second_width, second_units, second_book, second_borders, count,
                    first_row, at, row_id, at >= 0, columns, column_mask, FIRST_KIND, FIRST_FORM,
                    FIRST_MODE, FIRST_DEPTH, SECOND_KIND, SECOND_FORM, SECOND_MODE, SECOND_DEPTH,
                    DIM, STRIDE, LAYOUT, IS_MAXIMIZING, DECAYS, HAS_NESTEROV, HAS_ROOT, HAS_CLIP,
                    IS_RATIO, IS_STOCHASTIC, HAS_COLUMNS,
                )  # fmt: skip
                if (SECOND_KIND == ROW_WISE) or IS_RAISED:
                    if tl.program_id(0) == 0:
                        value = tl.load(row_values + at)
                        if IS_RAISED:
                            raise_at_once(
                                second, second_hash, second_width, mix(row_id + first_row), value,
                                at >= 0, ledger, SECOND_DEPTH,
                            )  # fmt: skip
                        else:
                            tl.store(second + row_id, value)
                # What one thread has stored, another may load in the next turn.
                tl.debug_barrier()
