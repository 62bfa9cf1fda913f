"""8-bit moments whose blocks hold several whole rows: a block moves at once."""

import triton
import triton.language as tl

from . import slots
from .codes import decode, encode
from .moments import CODES, NONE, delta
from .moves import direction_of
from .rows import DENSE, gradient, id_at, positions, run_start
from .words import store_nearest, store_weights


@triton.jit
def _move_block(
    data, scales, book, borders, ledger, group, at, is_inside, is_touched, x,
    MOMENT: tl.constexpr, KIND: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Moves the touched numbers of whole blocks; returns the estimates."""
    if KIND == CODES:
        is_block = tl.max(is_inside.to(tl.int32), 1)[:, None] > 0
        scale = tl.load(scales + group, mask=is_block, other=0.0)
        old = decode(data + at, book, scale, is_inside)
        result = tl.where(is_touched, old + delta(ledger, old, x, MOMENT, MODE), old)
        result = tl.where(is_inside, result, 0.0)
        largest = tl.max(tl.abs(result), 1)[:, None]
        tl.store(scales + group, largest, mask=is_block)
        encode(data + at, borders, result, largest, is_inside, MOMENT == slots.FIRST)
    else:
        old = tl.load(data + at, mask=is_touched, other=0.0).to(tl.float32)
        result = old + delta(ledger, old, x, MOMENT, MODE)
        store_nearest(data + at, result, is_touched)
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
        at = positions(tl.program_id(0), ROWS)
        if LAYOUT == DENSE:
            group = at
            is_group = group * BLOCK_ROWS < row_count
        else:
            is_inside = at < count
            group = id_at(ids, at, is_inside) // BLOCK_ROWS
            before = id_at(ids, at - 1, is_inside & (at > 0)) // BLOCK_ROWS
            is_group = is_inside & ((at == 0) | (before != group))
        offsets = tl.arange(0, BLOCK)[None, :]
        id = group * BLOCK_ROWS + offsets // DIM
        columns = offsets % DIM
        is_number = is_group & (offsets < BLOCK_ROWS * DIM) & (id < row_count)
        if LAYOUT == DENSE:
            position = id
            is_touched = is_number
        else:
            last = tl.zeros_like(id) + (count - 1)
            position = run_start(ids, last, id)
            is_touched = is_number & (id_at(ids, position, is_number) == id)
        g = gradient(
            entries, ids, order, partials, parameter, ledger, count, position, id, is_touched,
            columns, is_touched, DIM, LAYOUT, IS_MAXIMIZING, DECAYS,
        )  # fmt: skip
        place = id * DIM + columns
        direction = g
        if FIRST_KIND != NONE:
            direction = _move_block(
                first, first_units, first_book, first_borders, ledger, group, place, is_number,
                is_touched, g, slots.FIRST, FIRST_KIND, FIRST_MODE,
            )  # fmt: skip
            if HAS_NESTEROV:
                direction = g + direction * slots.number(ledger, slots.NESTEROV)
        square = g
        if SECOND_KIND != NONE:
            square = _move_block(
                second, second_units, second_book, second_borders, ledger, group, place,
                is_number, is_touched, g * g, slots.SECOND, SECOND_KIND, SECOND_MODE,
            )  # fmt: skip
        direction = direction_of(ledger, direction, square, SECOND_KIND != NONE, HAS_ROOT, HAS_CLIP)
        row = tl.load(parameter + place, mask=is_touched, other=0.0).to(tl.float32)
        row *= slots.number(ledger, slots.SHRINK)
        row -= direction * slots.number(ledger, slots.STEP_SIZE)
        key = slots.key(ledger, slots.WEIGHTS_KEY)
        store_weights(
            parameter + place, row, is_touched, key, id + first_row, columns, IS_STOCHASTIC
        )
