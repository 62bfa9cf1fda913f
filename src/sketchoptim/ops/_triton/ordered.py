"""The kernels that go through rows in ascending order before any row of the parameter moves.

Each returns at once where the step is refused.
"""

import triton
import triton.language as tl

from . import slots
from .moments import CONSERVATIVE, LINEAR, ROW_SKETCH, SKETCH, add, move_items, raise_one
from .rows import gradient, ids_at
from .words import bucket_of, mix


@triton.jit
def _add_to(
    entries, ids, order, partials, parameter, ledger, row_values, counters, words, width, count,
    first_row, row, part, PARTS: tl.constexpr, MOMENT: tl.constexpr, KIND: tl.constexpr,
    FORM: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr,
    IS_MAXIMIZING: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    """Adds rows, in ascending order, to those buckets of a hash row that are this part's."""
    offsets = tl.arange(0, BLOCK)[None, :]
    columns = tl.program_id(0) * BLOCK + offsets
    for position in range(count):
        id, _, is_head = ids_at(ids, position, count, LAYOUT)
        if is_head:
            mixed = mix((id + first_row).to(tl.int64))
            if bucket_of(words, row, mixed, width) % PARTS == part:
                at = tl.full([1, 1], position, tl.int64)
                row_id = tl.full([1, 1], id, tl.int64)
                one = at >= 0
                hashed = row_id + first_row
                if KIND == ROW_SKETCH:
                    value = tl.load(row_values + at)
                    if FORM == CONSERVATIVE:
                        raise_one(counters, words, width, row, mix(hashed), hashed, value, ledger)
                    else:
                        add(
                            counters, words, width, row, mix(hashed), hashed, at * 0, one, ledger,
                            value, MOMENT, 1,
                        )  # fmt: skip
                else:
                    mask = columns < DIM
                    x = gradient(
                        entries, ids, order, partials, parameter, ledger, count, at, row_id, one,
                        columns, mask, DIM, LAYOUT, IS_MAXIMIZING, DECAYS,
                    )  # fmt: skip
                    if MOMENT == slots.SECOND:
                        x = x * x
                    add(
                        counters, words, width, row, mix(hashed), hashed, columns, mask, ledger, x,
                        MOMENT, DIM,
                    )  # fmt: skip
                # What one thread has stored, another may load in the next turn.
                tl.debug_barrier()


@triton.jit(do_not_specialize=["count", "first_row", "first_width", "second_width"])
def add_rows(
    entries, ids, order, partials, parameter, ledger, flag, row_values, first, first_hash,
    first_width: tl.int64, second, second_hash, second_width: tl.int64, count: tl.int64,
    first_row: tl.int64, PARTS: tl.constexpr, FIRST_DEPTH: tl.constexpr,
    SECOND_DEPTH: tl.constexpr, SECOND_KIND: tl.constexpr, SECOND_FORM: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr, IS_MAXIMIZING: tl.constexpr,
    DECAYS: tl.constexpr,
):  # fmt: skip
    """Adds all rows to sketches of the linear form, and raises conservative bfloat16 counters.

    Program (block of columns, hash row and part, moment). A depth of 0 stands for a moment that
    has nothing to add. A bucket belongs to one part, which goes through the rows in ascending
    order: so the sums of floats are the same in every run, unlike with atomic additions.
    """
    row, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    if tl.load(flag) == 0:
        if FIRST_DEPTH > 0:
            if (tl.program_id(2) == 0) & (row < FIRST_DEPTH):
                _add_to(
                    entries, ids, order, partials, parameter, ledger, row_values, first,
                    first_hash, first_width, count, first_row, row, part, PARTS, slots.FIRST,
                    SKETCH, LINEAR, DIM, BLOCK, LAYOUT, IS_MAXIMIZING, DECAYS,
                )  # fmt: skip
        if SECOND_DEPTH > 0:
            is_mine = (tl.program_id(2) == 1) & (row < SECOND_DEPTH)
            if SECOND_KIND == ROW_SKETCH:
                is_mine = is_mine & (tl.program_id(0) == 0)
            if is_mine:
                _add_to(
                    entries, ids, order, partials, parameter, ledger, row_values, second,
                    second_hash, second_width, count, first_row, row, part, PARTS, slots.SECOND,
                    SECOND_KIND, SECOND_FORM, DIM, BLOCK, LAYOUT, IS_MAXIMIZING, DECAYS,
                )  # fmt: skip


@triton.jit(do_not_specialize=["count", "first_row", "second_width"])
def move_by_row(
    ids, ledger, flag, row_values, second, second_hash, second_width: tl.int64, count: tl.int64,
    first_row: tl.int64, SECOND_FORM: tl.constexpr, SECOND_MODE: tl.constexpr,
    SECOND_DEPTH: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Moves a sketch by row of the paper or bucket form, one row after the other."""
    if tl.load(flag) == 0:
        for position in range(count):
            id, _, is_head = ids_at(ids, position, count, LAYOUT)
            if is_head:
                at = tl.full([1, 1], position, tl.int64)
                hashed = tl.full([1, 1], id, tl.int64) + first_row
                value = move_items(
                    second, second_hash, second_width, mix(hashed), hashed, at * 0, at >= 0,
                    ledger, tl.load(row_values + at), slots.SECOND, SECOND_FORM, SECOND_MODE,
                    SECOND_DEPTH, 1,
                )  # fmt: skip
                tl.store(row_values + at, value)
                tl.debug_barrier()
