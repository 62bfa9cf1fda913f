"""8-bit moments whose blocks hold several whole rows: a block moves at once."""

import triton
import triton.language as tl

from . import slots
from .codes import decode, encode
from .moments import CODES, NONE, delta
from .moves import direction_of
from .rows import DENSE, gradient, id_at, run_start
from .words import store_nearest, store_weights


@triton.jit
def _largest_of_blocks(magnitudes, ROWS: tl.constexpr):
    """The largest of all numbers of a block, for each of its rows, [rows, 1]."""
    rows: tl.constexpr = magnitudes.shape[0]
    of_rows = tl.reshape(tl.max(magnitudes, 1), [ROWS, rows // ROWS])
    largest = tl.broadcast_to(tl.max(of_rows, 1)[:, None], [ROWS, rows // ROWS])
    return tl.reshape(largest, [rows])[:, None]


@triton.jit
def _move_block(
    data, scales, book, borders, ledger, group, at, is_row, is_touched, column_mask, x,
    MOMENT: tl.constexpr, KIND: tl.constexpr, MODE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Moves the touched rows of whole blocks; returns the estimates."""
    is_moved = is_touched & column_mask
    if KIND == CODES:
        is_number = is_row & column_mask
        scale = tl.load(scales + group, mask=is_row, other=0.0)
        old = decode(data + at, book, scale, is_number)
        result = tl.where(is_moved, old + delta(ledger, old, x, MOMENT, MODE), old)
        result = tl.where(is_number, result, 0.0)
        largest = _largest_of_blocks(tl.abs(result), ROWS)
        tl.store(scales + group, largest, mask=is_row)
        encode(data + at, borders, result, largest, is_number, MOMENT == slots.FIRST)
    else:
        old = tl.load(data + at, mask=is_moved, other=0.0).to(tl.float32)
        result = old + delta(ledger, old, x, MOMENT, MODE)
        store_nearest(data + at, result, is_moved)
    return result


@triton.jit(do_not_specialize=["count", "row_count", "first_row"])
def move_blocks(
    entries, ids, order, partials, parameter, ledger, flag, first, first_units, first_book,
    first_borders, second, second_units, second_book, second_borders, count: tl.int64,
    row_count: tl.int64, first_row: tl.int64, FIRST_KIND: tl.constexpr, FIRST_MODE: tl.constexpr,
    SECOND_KIND: tl.constexpr, SECOND_MODE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, LAYOUT: tl.constexpr,
    IS_MAXIMIZING: tl.constexpr, DECAYS: tl.constexpr, HAS_NESTEROV: tl.constexpr,
    HAS_ROOT: tl.constexpr, HAS_CLIP: tl.constexpr, IS_STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Moves all rows, block by block; the first entry of a block stands for it."""
    if tl.load(flag) == 0:
        # A tile has ROWS blocks, each of as many rows as the next power of two.
        padded: tl.constexpr = triton.next_power_of_2(BLOCK_ROWS)
        number = tl.arange(0, ROWS * padded)
        at = (tl.program_id(0).to(tl.int64) * ROWS + number // padded)[:, None]
        row = (number % padded)[:, None]
        if LAYOUT == DENSE:
            group = at
            is_group = group * BLOCK_ROWS < row_count
        else:
            is_inside = at < count
            group = id_at(ids, at, is_inside) // BLOCK_ROWS
            before = id_at(ids, at - 1, is_inside & (at > 0)) // BLOCK_ROWS
            is_group = is_inside & ((at == 0) | (before != group))
        id = group * BLOCK_ROWS + row
        is_row = is_group & (row < BLOCK_ROWS) & (id < row_count)
        position = id
        is_touched = is_row
        if LAYOUT != DENSE:
            position = run_start(ids, tl.zeros_like(id) + (count - 1), id, count)
            is_touched = is_row & (id_at(ids, position, is_row) == id)
        columns = tl.arange(0, BLOCK)[None, :]
        column_mask = columns < DIM
        g = gradient(
            entries, ids, order, partials, parameter, ledger, count, position, id, is_touched,
            columns, column_mask, DIM, LAYOUT, IS_MAXIMIZING, DECAYS,
        )  # fmt: skip
        place = id * DIM + columns
        direction = g
        if FIRST_KIND != NONE:
            direction = _move_block(
                first, first_units, first_book, first_borders, ledger, group, place, is_row,
                is_touched, column_mask, g, slots.FIRST, FIRST_KIND, FIRST_MODE, ROWS,
            )  # fmt: skip
            if HAS_NESTEROV:
                direction = g + direction * slots.number(ledger, slots.NESTEROV)
        square = g
        if SECOND_KIND != NONE:
            square = _move_block(
                second, second_units, second_book, second_borders, ledger, group, place, is_row,
                is_touched, column_mask, g * g, slots.SECOND, SECOND_KIND, SECOND_MODE, ROWS,
            )  # fmt: skip
        direction = direction_of(ledger, direction, square, SECOND_KIND != NONE, HAS_ROOT, HAS_CLIP)
        is_moved = is_touched & column_mask
        weight = tl.load(parameter + place, mask=is_moved, other=0.0).to(tl.float32)
        weight *= slots.number(ledger, slots.SHRINK)
        weight -= direction * slots.number(ledger, slots.STEP_SIZE)
        key = slots.key(ledger, slots.WEIGHTS_KEY)
        store_weights(
            parameter + place, weight, is_moved, key, id + first_row, columns, IS_STOCHASTIC
        )
