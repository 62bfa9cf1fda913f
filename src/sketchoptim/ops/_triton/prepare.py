"""The kernels around the moves of a step: they begin it, inspect its gradient, and finish it."""

import triton
import triton.language as tl

from . import slots
from .moments import AVERAGE, CONSERVATIVE, LINEAR, ROW_SKETCH, ROW_WISE, SUM, delta, estimate
from .rows import (
    PIECE,
    REPEATED,
    UNIQUE,
    any_of,
    gradient,
    id_at,
    ids_at,
    piece_sum,
    positions,
    run_start,
)
from .words import mix, splitmix64, store_nearest

# Corrections of a step's numbers by its number: none, Adam's, Adagrad's.
PLAIN = tl.constexpr(0)
BIAS_BEFORE_EPS = tl.constexpr(1)
BIAS_AFTER_EPS = tl.constexpr(2)
RATE_DECAY = tl.constexpr(3)


@triton.jit(do_not_specialize=["count", "row_count", "least_id"])
def collect_keys(
    ids, keys, count: tl.int64, row_count: tl.int64, least_id: tl.int64, BLOCK: tl.constexpr
):
    """Writes the keys by which ids are sorted: ids that begin at `least_id`, in fewer bits.

    An id outside the table becomes the first one behind it.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids + at, mask=at < count, other=0)
    id = tl.where((id < 0) | (id >= row_count), row_count, id) + least_id
    tl.store(keys + at, id.to(keys.dtype.element_ty), mask=at < count)


@triton.jit
def _double(bits):
    """A float64 that came as its 64 bits: Triton takes Python's floats as float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _power(base, exponent):
    """A float64 to the power of a count."""
    result = base * 0.0 + 1.0
    left = exponent.to(tl.int64)
    while left > 0:
        result = tl.where(left % 2 == 1, result * base, result)
        base = base * base
        left = left // 2
    return result


@triton.jit
def _begin_numbers(
    ledger, expected_step, weights_key, step_size, second_root, clip, first_beta, second_beta,
    eps, weight_decay, shrink, nesterov, CORRECTION: tl.constexpr,
):  # fmt: skip
    """Writes the numbers of the step that follows those that the device has counted."""
    step = tl.load(ledger + slots.STEP) + 1.0
    size, root, bound = _double(step_size), _double(second_root), _double(clip)
    if CORRECTION == RATE_DECAY:  # `first_beta` is the decay of the rate
        size = size / (1.0 + (step - 1.0) * _double(first_beta))
    elif CORRECTION != PLAIN:
        denominator = 1.0 - _power(_double(first_beta), step)
        corrected = tl.sqrt(1.0 - _power(_double(second_beta), step))
        if CORRECTION == BIAS_BEFORE_EPS:
            size = size * corrected / denominator
            bound = bound * denominator / corrected
        else:
            size = size / denominator
            bound = bound * denominator
            root = corrected
    # Where the device has counted other steps than the host, as when a graph is replayed, the
    # host's key is not one of this step alone. Below zero, the host has not counted.
    drift = tl.where(expected_step < 0, 0, step.to(tl.int64) - expected_step)
    given = weights_key.to(tl.int64).to(tl.uint64)
    drifted = splitmix64(given ^ (drift << 32).to(tl.uint64)) & 0xFFFFFFFF
    tl.store(ledger + slots.WEIGHTS_KEY, tl.where(drift == 0, given, drifted).to(tl.float64))
    tl.store(ledger + slots.STEP_SIZE, size)
    tl.store(ledger + slots.SECOND_ROOT, root)
    tl.store(ledger + slots.CLIP, bound)
    tl.store(ledger + slots.EPS, _double(eps))
    tl.store(ledger + slots.WEIGHT_DECAY, _double(weight_decay))
    tl.store(ledger + slots.SHRINK, _double(shrink))
    tl.store(ledger + slots.NESTEROV, _double(nesterov))


@triton.jit
def _begin_moment(
    ledger, weight, decay, MOMENT: tl.constexpr, LASTING: tl.constexpr,
    DECAYS_WHOLE: tl.constexpr, FORGETS: tl.constexpr,
):  # fmt: skip
    """Writes how a moment moves: a scale below 2^-24 becomes counters' power of two afterwards."""
    tl.store(ledger + MOMENT + slots.WEIGHT, _double(weight))
    tl.store(ledger + MOMENT + slots.DECAY_LESS_ONE, _double(decay) - 1.0)
    before = tl.load(ledger + LASTING + slots.LASTING_SCALE)
    scale = before
    if FORGETS:
        scale = before * 0.0 + 1.0
    elif DECAYS_WHOLE:
        scale = before * _double(decay)
    bits = scale.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 0x7FF) - 1022
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | (1022 << 52)).to(tl.float64, bitcast=True)
    is_small = scale < 5.9604644775390625e-08  # 2^-24
    next_scale = tl.where(is_small, mantissa, scale).to(tl.float32).to(tl.float64)
    shift = tl.where(is_small, exponent, exponent * 0).to(tl.float64)
    scale = scale.to(tl.float32).to(tl.float64)
    tl.store(ledger + MOMENT + slots.SCALE, scale)
    tl.store(ledger + MOMENT + slots.INVERSE_SCALE, 1.0 / scale)
    tl.store(ledger + MOMENT + slots.NEXT_SCALE, next_scale)
    tl.store(ledger + MOMENT + slots.NEXT_SHIFT, shift)
    writes = tl.load(ledger + LASTING + slots.LASTING_WRITES).to(tl.int64) + 1
    key = splitmix64(writes.to(tl.uint64)) & 0xFFFFFFFF
    tl.store(ledger + MOMENT + slots.KEY, key.to(tl.float64))


@triton.jit
def _begin_columns(columns, factors, shares, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the factors of the step, a column over the mean of all; clears the shares.

    The inverses come behind the factors.
    """
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, DIM, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(columns + at, mask=at < DIM, other=0.0).to(tl.float64)
    mean = tl.sum(total, 0) / DIM
    for start in range(0, DIM, BLOCK):
        at = start + tl.arange(0, BLOCK)
        column = tl.load(columns + at, mask=at < DIM, other=0.0).to(tl.float64)
        factor = tl.where(mean > 0.0, column / tl.where(mean > 0.0, mean, 1.0), 1.0)
        factor = tl.maximum(factor, 9.5367431640625e-07)  # 2^-20
        factor = factor.to(tl.float32)
        tl.store(factors + at, factor, mask=at < DIM)
        tl.store(
            factors + DIM + at, tl.div_rn(tl.full([BLOCK], 1.0, tl.float32), factor), mask=at < DIM
        )
        tl.store(shares + at, tl.zeros([BLOCK], tl.int64), mask=at < DIM)


@triton.jit
def _sum_pieces(
    entries, ids, order, partials, count, at, DIM: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums the pieces of long runs that start at given positions, but for each run's first."""
    id, is_inside, _ = ids_at(ids, at, count, REPEATED)
    is_deep = is_inside & (at >= PIECE)
    is_deep = is_deep & (id_at(ids, at - PIECE, is_deep) == id)
    if any_of(is_deep):
        starts = run_start(ids, tl.where(is_deep, at, 0), id, count)
        is_piece = is_deep & ((at - starts) % PIECE == 0)
        for start in range(0, DIM, STRIDE):
            offsets = tl.arange(0, BLOCK)[None, :]
            columns = start + offsets
            column_mask = (offsets < STRIDE) & (columns < DIM)
            total = piece_sum(
                entries, ids, order, count, at, id, is_piece, columns, column_mask, DIM
            )
            pointers = partials + (at // PIECE) * DIM + columns
            tl.store(pointers, total, mask=is_piece & column_mask)


@triton.jit(
    do_not_specialize=[
        "count", "expected_step", "weights_key", "step_size", "second_root", "clip", "first_beta",
        "second_beta", "eps", "weight_decay", "shrink", "nesterov", "first_weight", "first_decay",
        "second_weight", "second_decay",
    ]
)  # fmt: skip
def begin(
    ledger, flag, entries, ids, order, partials, count: tl.int64, expected_step: tl.int64,
    weights_key: tl.int64, step_size: tl.int64, second_root: tl.int64, clip: tl.int64,
    first_beta: tl.int64, second_beta: tl.int64, eps: tl.int64, weight_decay: tl.int64,
    shrink: tl.int64, nesterov: tl.int64, first_weight: tl.int64, first_decay: tl.int64,
    second_weight: tl.int64, second_decay: tl.int64, columns, factors, shares,
    CORRECTION: tl.constexpr, FIRST_DECAYS: tl.constexpr, FIRST_FORGETS: tl.constexpr,
    SECOND_DECAYS: tl.constexpr, SECOND_FORGETS: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    HAS_PIECES: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Program 0 writes the numbers of the step; the others sum the pieces of long runs."""
    program = tl.program_id(0)
    if program == 0:
        tl.store(flag, 0)
        _begin_numbers(
            ledger, expected_step, weights_key, step_size, second_root, clip, first_beta,
            second_beta, eps, weight_decay, shrink, nesterov, CORRECTION,
        )  # fmt: skip
        _begin_moment(
            ledger, first_weight, first_decay, slots.FIRST, slots.FIRST_LASTING, FIRST_DECAYS,
            FIRST_FORGETS,
        )  # fmt: skip
        _begin_moment(
            ledger, second_weight, second_decay, slots.SECOND, slots.SECOND_LASTING, SECOND_DECAYS,
            SECOND_FORGETS,
        )  # fmt: skip
        if HAS_COLUMNS:
            _begin_columns(columns, factors, shares, DIM, BLOCK)
    elif HAS_PIECES:
        at = positions(program - 1, ROWS)
        _sum_pieces(entries, ids, order, partials, count, at, DIM, STRIDE, BLOCK)


@triton.jit
def _share_units(square, total):
    """The shares of columns in their rows, in units of 2^-26, rounded to nearest, ties to even."""
    least = tl.maximum(total, 1.1754943508222875e-38)  # the least normal float32
    least = tl.where(total < float("inf"), least, 1.0)  # the step will be refused
    share = tl.div_rn(square, tl.zeros_like(square) + least) * 67108864.0
    share = tl.where(share <= 67108864.0, share, 0.0)
    # Numbers from 2^23 on are whole; below, that sum has no place for a fraction.
    whole = tl.where(share < 8388608.0, (share + 8388608.0) - 8388608.0, share)
    return whole.to(tl.int64)


@triton.jit(do_not_specialize=["count", "row_count", "first_row", "least_id", "second_width"])
def inspect(
    entries, ids, order, partials, parameter, ledger, flag, row_values, factors, shares,
    second, second_hash, second_width: tl.int64, count: tl.int64, row_count: tl.int64,
    first_row: tl.int64, least_id: tl.int64,
    DIM: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    LAYOUT: tl.constexpr, IS_MAXIMIZING: tl.constexpr, DECAYS: tl.constexpr,
    LARGEST: tl.constexpr, IS_CHECKED: tl.constexpr, SECOND_KIND: tl.constexpr,
    SECOND_FORM: tl.constexpr, SECOND_MODE: tl.constexpr, SECOND_DEPTH: tl.constexpr,
    SECOND_FORGETS: tl.constexpr, HAS_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Raises the flag for bad ids and values; writes the mean squares of rows, or their targets."""
    at = positions(tl.program_id(0), ROWS)
    id, is_inside, is_head = ids_at(ids, at, count, LAYOUT)
    is_row = (id >= least_id) & (id < least_id + row_count)
    if LAYOUT == UNIQUE:  # by a flag of the gradient, which may be wrong
        is_row = is_row & ((at == 0) | (id_at(ids, at - 1, is_inside & (at > 0)) < id))
    if any_of(is_inside & ~is_row):
        tl.atomic_or(flag, slots.BAD_IDS)
    mask = is_head & is_row
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    square = squares
    plain = squares  # not divided by the factors of columns
    for start in range(0, DIM, STRIDE):
        offsets = tl.arange(0, BLOCK)[None, :]
        columns = start + offsets
        column_mask = (offsets < STRIDE) & (columns < DIM)
        g = gradient(
            entries, ids, order, partials, parameter, ledger, count, at, id, mask, columns,
            column_mask, DIM, LAYOUT, IS_MAXIMIZING, DECAYS, True,
        )  # fmt: skip
        square = g * g
        if IS_CHECKED:  # no sum of squares within the bound is infinite; NaN is not within it
            square = tl.where(tl.abs(g) <= LARGEST, square, float("inf"))
        if HAS_COLUMNS:
            if DIM > STRIDE:
                plain += square
            else:
                plain = square
            squares += square * tl.load(factors + DIM + columns, mask=column_mask, other=1.0)
        else:
            squares += square
    if HAS_COLUMNS:
        # One row in eight gives its shares: `ColumnsMoment`.
        number = tl.load(ledger + slots.STEP).to(tl.int64).to(tl.uint64) + 1
        gives_shares = mask & ((mix(id + first_row) + number) % 8 == 0)
        if any_of(gives_shares):
            total = tl.sum(plain, 1)[:, None]
            for start in range(0, DIM, STRIDE):
                offsets = tl.arange(0, BLOCK)[None, :]
                columns = start + offsets
                column_mask = (offsets < STRIDE) & (columns < DIM)
                if DIM > STRIDE:  # else the tile has all columns, and is there
                    tl.debug_barrier()  # sums that one thread has stored, another may load
                    g = gradient(
                        entries, ids, order, partials, parameter, ledger, count, at, id, mask,
                        columns, column_mask, DIM, LAYOUT, IS_MAXIMIZING, DECAYS,
                    )  # fmt: skip
                    square = g * g
                # Sums of integers are the same in any order.
                units = tl.where(gives_shares, _share_units(square, total), 0)
                units = tl.sum(units, 0)[None, :]
                tl.atomic_add(shares + columns, units, mask=column_mask, sem="relaxed")
    if IS_CHECKED:
        if tl.max(tl.max(squares, 1), 0) == float("inf"):
            tl.atomic_or(flag, slots.BAD_VALUES)
    if (SECOND_KIND == ROW_WISE) or (SECOND_KIND == ROW_SKETCH):
        value = tl.div_rn(tl.sum(squares, 1)[:, None], tl.full([ROWS, 1], DIM, tl.float32))
        if SECOND_KIND == ROW_WISE:
            old = tl.load(second + id, mask=mask, other=0.0)
            value = old + delta(ledger, old, value, slots.SECOND, SECOND_MODE)
        elif SECOND_FORM == CONSERVATIVE:
            least = tl.zeros([ROWS, 1], tl.float32)
            if not SECOND_FORGETS:
                least = estimate(
                    second, second_hash, second_width, mix(id + first_row), at * 0, mask, ledger,
                    value, slots.SECOND, LINEAR, SECOND_MODE, SECOND_DEPTH, 1,
                )  # fmt: skip
            value = least + value * slots.number(ledger, slots.SECOND + slots.WEIGHT)
        tl.store(row_values + at, value, mask=mask)


@triton.jit
def _rescale(counters, size, factor, BLOCK: tl.constexpr):
    """Multiplies counters; each program takes every so many blocks of them."""
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, stride):
        at = start + tl.arange(0, BLOCK)
        mask = at < size
        stored = tl.load(counters + at, mask=mask, other=0.0).to(tl.float64) * factor
        store_nearest(counters + at, stored.to(tl.float32), mask)


@triton.jit(do_not_specialize=["first_size", "second_size"])
def forget(
    flag, first, second, first_size: tl.int64, second_size: tl.int64, FIRST_FORGETS: tl.constexpr,
    SECOND_FORGETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Zeroes the counters of moments whose decay is zero, unless the step is refused."""
    if tl.load(flag) == 0:
        if FIRST_FORGETS:
            _rescale(first, first_size, 0.0, BLOCK)
        if SECOND_FORGETS:
            _rescale(second, second_size, 0.0, BLOCK)


@triton.jit
def _finish_moment(ledger, counters, size, MOMENT: tl.constexpr, BLOCK: tl.constexpr):
    shift = tl.load(ledger + MOMENT + slots.NEXT_SHIFT)
    if shift != 0.0:
        power = ((shift.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)  # 2^shift
        _rescale(counters, size, power, BLOCK)


@triton.jit
def _increase(pointer, by):
    """Adds to one number, which every warp loads and one of them stores; returns the sum."""
    total = tl.load(pointer) + by
    tl.debug_barrier()
    tl.store(pointer, total)
    return total


@triton.jit
def _commit_moment(ledger, MOMENT: tl.constexpr, LASTING: tl.constexpr):
    tl.store(ledger + LASTING + slots.LASTING_SCALE, tl.load(ledger + MOMENT + slots.NEXT_SCALE))
    _increase(ledger + LASTING + slots.LASTING_WRITES, 1.0)


@triton.jit
def _move_columns(
    ledger, columns, shares, MODE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """Moves the columns by their mean shares: `ColumnsMoment._move_columns_`."""
    units = tl.zeros([BLOCK], tl.int64)
    for start in range(0, DIM, BLOCK):
        at = start + tl.arange(0, BLOCK)
        units += tl.load(shares + at, mask=at < DIM, other=0)
    total = tl.sum(units, 0).to(tl.float64)
    if total > 0.0:
        weight = tl.load(ledger + slots.SECOND + slots.WEIGHT)
        for start in range(0, DIM, BLOCK):
            at = start + tl.arange(0, BLOCK)
            share = tl.load(shares + at, mask=at < DIM, other=0).to(tl.float64) * (DIM / total)
            old = tl.load(columns + at, mask=at < DIM, other=0.0).to(tl.float64)
            if MODE == AVERAGE:
                moved = old + (share - old) * weight
            elif MODE == SUM:
                moved = old + share * weight
            else:
                less = tl.load(ledger + slots.SECOND + slots.DECAY_LESS_ONE)
                moved = old + (old * less + share * weight)
            tl.store(columns + at, moved.to(tl.float32), mask=at < DIM)


@triton.jit(do_not_specialize=["first_size", "second_size"])
def finish(
    ledger, flag, report, first, second, columns, shares, first_size: tl.int64,
    second_size: tl.int64, HAS_FIRST: tl.constexpr, HAS_SECOND: tl.constexpr,
    FIRST_DECAYS: tl.constexpr, SECOND_DECAYS: tl.constexpr, SECOND_MODE: tl.constexpr,
    HAS_COLUMNS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Moves small scales into the counters; program 0 counts the step, or that it was refused."""
    found = tl.load(flag)
    if found == 0:
        if FIRST_DECAYS:
            _finish_moment(ledger, first, first_size, slots.FIRST, BLOCK)
        if SECOND_DECAYS:
            _finish_moment(ledger, second, second_size, slots.SECOND, BLOCK)
    if tl.program_id(0) == 0:
        if found == 0:
            _increase(ledger + slots.STEP, 1.0)
            if HAS_FIRST:
                _commit_moment(ledger, slots.FIRST, slots.FIRST_LASTING)
            if HAS_SECOND:
                _commit_moment(ledger, slots.SECOND, slots.SECOND_LASTING)
            if HAS_COLUMNS:
                _move_columns(ledger, columns, shares, SECOND_MODE, DIM, BLOCK)
        else:
            # The report is memory of the host, which may read it at any time without a wait.
            values = (found & slots.BAD_VALUES) != 0
            tl.store(report, _increase(ledger + slots.REFUSED_VALUES, values))
            ids = (found & slots.BAD_IDS) != 0
            tl.store(report + 1, _increase(ledger + slots.REFUSED_IDS, ids))
