"""The rows of a step in Triton: which positions head a row, and the gradient of each row.

A gradient has one of three layouts. DENSE: a position is a row. UNIQUE: ids that ascend strictly,
as coalesced ones do. REPEATED: ids, sorted stably, and the order that sorts them. Equal ids are
neighbours, a run; the first position of a run is its head and stands for the row. No positions are
counted or compacted, so the host needs no count of the rows. A run is summed in pieces
of `PIECE` entries: the first piece by the head, the others beforehand by `begin`, in parallel.
Piece q of a run that starts at s lies in slot (s + q * PIECE) // PIECE of the partial sums, which
no two pieces share. So the order of a sum depends on its own run alone. `inspect` adds the pieces
and stores the sum of the run, which later kernels read.

Positions, ids and masks have the shape [rows, 1], columns [1, columns].
"""

import triton
import triton.language as tl

from .slots import WEIGHT_DECAY, number

PIECE = tl.constexpr(32)
DENSE = tl.constexpr(0)
UNIQUE = tl.constexpr(1)
REPEATED = tl.constexpr(2)


@triton.jit
def positions(tile, ROWS: tl.constexpr):
    """The positions of a tile, [rows, 1]: int64 before the product, which may exceed 2^31."""
    return (tile.to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]


@triton.jit
def any_of(mask):
    """Whether a mask [rows, 1] is true anywhere."""
    return tl.max(tl.max(mask.to(tl.int32), 1), 0) > 0


@triton.jit
def id_at(ids, at, mask):
    """The row ids at positions of the sorted list, int64."""
    return tl.load(ids + at, mask=mask, other=0).to(tl.int64)


@triton.jit
def ids_at(ids, at, count, LAYOUT: tl.constexpr):
    """The ids of positions, whether these are within the gradient, and whether they are heads."""
    is_inside = at < count
    if LAYOUT == DENSE:
        return at, is_inside, is_inside
    elif LAYOUT == UNIQUE:
        return id_at(ids, at, is_inside), is_inside, is_inside
    else:
        id = id_at(ids, at, is_inside)
        before = id_at(ids, at - 1, is_inside & (at > 0))
        return id, is_inside, is_inside & ((at == 0) | (before != id))


@triton.jit
def _is_in_run(ids, at, id, count, mask):
    is_inside = mask & (at < count)
    return is_inside & (id_at(ids, at, is_inside) == id)


@triton.jit
def _entries(entries, order, at, mask, columns, column_mask, DIM: tl.constexpr):
    """The values of the entries at positions, [rows, columns], float32."""
    return _values(
        entries, tl.load(order + at, mask=mask, other=0), mask, columns, column_mask, DIM
    )


@triton.jit
def _values(entries, entry, mask, columns, column_mask, DIM: tl.constexpr):
    both = mask & column_mask
    return tl.load(entries + entry * DIM + columns, mask=both, other=0.0).to(tl.float32)


@triton.jit
def piece_sum(entries, ids, order, count, at, id, mask, columns, column_mask, DIM: tl.constexpr):
    """The sums of up to PIECE entries of a run, from given positions on, one after the other.

    Four entries a turn: loads that wait for each other are those of one entry alone.
    """
    total = _entries(entries, order, at, mask, columns, column_mask, DIM)
    offset = 1
    more = _is_in_run(ids, at + 1, id, count, mask)
    while (offset < PIECE) & any_of(more):
        here = at + offset
        is_1 = _is_in_run(ids, here + 1, id, count, mask)
        is_2 = _is_in_run(ids, here + 2, id, count, mask)
        # A piece without its first entry is a multiple of four less one.
        is_3 = _is_in_run(ids, here + 3, id, count, mask & (offset + 3 < PIECE))
        entry_0 = tl.load(order + here, mask=more, other=0)
        entry_1 = tl.load(order + here + 1, mask=is_1, other=0)
        entry_2 = tl.load(order + here + 2, mask=is_2, other=0)
        entry_3 = tl.load(order + here + 3, mask=is_3, other=0)
        value_0 = _values(entries, entry_0, more, columns, column_mask, DIM)
        value_1 = _values(entries, entry_1, is_1, columns, column_mask, DIM)
        value_2 = _values(entries, entry_2, is_2, columns, column_mask, DIM)
        value_3 = _values(entries, entry_3, is_3, columns, column_mask, DIM)
        total = (((total + value_0) + value_1) + value_2) + value_3
        offset += 4
        more = _is_in_run(ids, at + offset, id, count, mask)
    return total


@triton.jit
def _partials(partials, piece, mask, columns, column_mask, DIM: tl.constexpr):
    pointers = partials + (piece // PIECE) * DIM + columns
    return tl.load(pointers, mask=mask & column_mask, other=0.0)


@triton.jit
def _run_sum(
    entries, ids, order, partials, count, at, id, mask, columns, column_mask, DIM: tl.constexpr
):
    """The sums of whole runs: of their first entries, and of the pieces that `begin` has summed."""
    total = piece_sum(entries, ids, order, count, at, id, mask, columns, column_mask, DIM)
    piece = at + PIECE
    more = _is_in_run(ids, piece, id, count, mask)
    while any_of(more):
        is_1 = _is_in_run(ids, piece + PIECE, id, count, mask)
        is_2 = _is_in_run(ids, piece + 2 * PIECE, id, count, mask)
        is_3 = _is_in_run(ids, piece + 3 * PIECE, id, count, mask)
        sum_0 = _partials(partials, piece, more, columns, column_mask, DIM)
        sum_1 = _partials(partials, piece + PIECE, is_1, columns, column_mask, DIM)
        sum_2 = _partials(partials, piece + 2 * PIECE, is_2, columns, column_mask, DIM)
        sum_3 = _partials(partials, piece + 3 * PIECE, is_3, columns, column_mask, DIM)
        total = (((total + sum_0) + sum_1) + sum_2) + sum_3
        piece += 4 * PIECE
        more = _is_in_run(ids, piece, id, count, mask)
    return total


@triton.jit
def row_sum(
    entries, ids, order, partials, count, at, id, mask, columns, column_mask,
    DIM: tl.constexpr, LAYOUT: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    """The summed entries of the rows at given heads, [rows, columns], float32.

    With `STORES`, as `inspect` does it, the sum of a run of several pieces is stored in place of
    that of its second piece; without, it is read there.
    """
    if LAYOUT != REPEATED:
        pointers = entries + at * DIM + columns
        return tl.load(pointers, mask=mask & column_mask, other=0.0).to(tl.float32)
    else:
        is_long = _is_in_run(ids, at + PIECE, id, count, mask)
        if STORES:
            total = _run_sum(
                entries, ids, order, partials, count, at, id, mask, columns, column_mask, DIM
            )
            pointers = partials + ((at + PIECE) // PIECE) * DIM + columns
            tl.store(pointers, total, mask=is_long & column_mask)
            return total
        else:
            is_short = mask & ~is_long
            total = piece_sum(
                entries, ids, order, count, at, id, is_short, columns, column_mask, DIM
            )
            stored = _partials(partials, at + PIECE, is_long, columns, column_mask, DIM)
            return tl.where(is_long, stored, total)


@triton.jit
def gradient(
    entries, ids, order, partials, parameter, ledger, count, at, id, mask, columns, column_mask,
    DIM: tl.constexpr, LAYOUT: tl.constexpr, IS_MAXIMIZING: tl.constexpr, DECAYS: tl.constexpr,
    STORES: tl.constexpr = False,
):  # fmt: skip
    """The gradients of rows as they reach the moments."""
    g = row_sum(
        entries, ids, order, partials, count, at, id, mask, columns, column_mask, DIM, LAYOUT,
        STORES,
    )  # fmt: skip
    if IS_MAXIMIZING:
        g = -g
    if DECAYS:
        pointers = parameter + id * DIM + columns
        row = tl.load(pointers, mask=mask & column_mask, other=0.0).to(tl.float32)
        g += row * number(ledger, WEIGHT_DECAY)
    return g


@triton.jit
def run_start(ids, at, id, count):
    """The first position whose id is not below `id`, at most `at`, which is at most `count`."""
    low, high = at * 0, at
    left = count
    while left > 0:
        middle = (low + high) // 2
        is_open = low < high
        is_below = id_at(ids, middle, is_open) < id
        low = tl.where(is_open & is_below, middle + 1, low)
        high = tl.where(is_open & ~is_below, middle, high)
        left = left // 2
    return low
