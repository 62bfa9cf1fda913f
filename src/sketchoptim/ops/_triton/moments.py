"""How moments move in Triton, each as its `Moment` class in `moments/` defines it.

Functions take tiles: positions and ids [rows, 1], columns [1, columns], numbers [rows, columns]. A
moment is described by constants: its kind, its form and its mode.
"""

import triton
import triton.language as tl

from . import slots
from .words import bucket_of, noise, sign_of, stochastic_bfloat16

# Kinds. ROW_SKETCH has one number for a row, SKETCH one for each column.
NONE = tl.constexpr(0)
EXACT = tl.constexpr(1)
ROW_WISE = tl.constexpr(2)
SKETCH = tl.constexpr(3)
ROW_SKETCH = tl.constexpr(4)
CODES = tl.constexpr(5)
# Forms of sketches.
LINEAR = tl.constexpr(0)
PAPER = tl.constexpr(1)
BUCKET = tl.constexpr(2)
CONSERVATIVE = tl.constexpr(3)
# Modes: a moving average, a sum, and any other decay and weight.
AVERAGE = tl.constexpr(0)
SUM = tl.constexpr(1)
GENERAL = tl.constexpr(2)


@triton.jit
def delta(ledger, old, x, MOMENT: tl.constexpr, MODE: tl.constexpr):
    """What a moment has to move by: `Average.delta`."""
    weight = slots.number(ledger, MOMENT + slots.WEIGHT)
    if MODE == AVERAGE:
        return (x - old) * weight
    elif MODE == SUM:
        return x * weight
    else:
        return old * slots.number(ledger, MOMENT + slots.DECAY_LESS_ONE) + x * weight


@triton.jit
def _pointers(counters, words, width, row, mixed, columns, DIM: tl.constexpr):
    return counters + (row * width + bucket_of(words, row, mixed, width)) * DIM + columns


@triton.jit
def reading_of(
    counters, words, width, row, mixed, columns, mask, ledger, x,
    MOMENT: tl.constexpr, FORM: tl.constexpr, MODE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The estimate of one hash row; for the bucket form, after it has moved."""
    pointers = _pointers(counters, words, width, row, mixed, columns, DIM)
    reading = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    reading *= slots.number(ledger, MOMENT + slots.SCALE)
    if MOMENT == slots.FIRST:
        reading *= sign_of(words, row, mixed)
    if FORM == BUCKET:
        reading += delta(ledger, reading, x, MOMENT, MODE)
    return reading


@triton.jit
def median_of_three(a, b, c):
    return tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))


@triton.jit
def estimate(
    counters, words, width, mixed, columns, mask, ledger, x,
    MOMENT: tl.constexpr, FORM: tl.constexpr, MODE: tl.constexpr, DEPTH: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """The least reading of a second moment, the median reading of a first one."""
    result = reading_of(
        counters, words, width, 0, mixed, columns, mask, ledger, x, MOMENT, FORM, MODE, DIM
    )
    if MOMENT == slots.SECOND:
        for row in range(1, DEPTH):
            reading = reading_of(
                counters, words, width, row, mixed, columns, mask, ledger, x, MOMENT, FORM, MODE,
                DIM,
            )  # fmt: skip
            result = tl.minimum(result, reading)
    elif DEPTH == 3:
        b = reading_of(
            counters, words, width, 1, mixed, columns, mask, ledger, x, MOMENT, FORM, MODE, DIM
        )
        c = reading_of(
            counters, words, width, 2, mixed, columns, mask, ledger, x, MOMENT, FORM, MODE, DIM
        )
        result = median_of_three(result, b, c)
    elif DEPTH > 1:
        # The readings of rank (DEPTH - 1) // 2 and DEPTH // 2, found by counting smaller ones.
        low, high = tl.zeros_like(result), tl.zeros_like(result)
        for row in range(DEPTH):
            here = reading_of(
                counters, words, width, row, mixed, columns, mask, ledger, x, MOMENT, FORM, MODE,
                DIM,
            )  # fmt: skip
            rank = tl.zeros_like(here).to(tl.int32)
            for other in range(DEPTH):
                there = reading_of(
                    counters, words, width, other, mixed, columns, mask, ledger, x, MOMENT, FORM,
                    MODE, DIM,
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
def store_counters(pointers, x, mask, ledger, ids, columns, MOMENT: tl.constexpr):
    """Stores counters; bfloat16 ones are rounded by the same bits in every hash row."""
    if pointers.dtype.element_ty == tl.bfloat16:
        bits_of_noise = noise(slots.key(ledger, MOMENT + slots.KEY), ids, columns)
        tl.store(pointers, stochastic_bfloat16(x, bits_of_noise).to(tl.bfloat16), mask=mask)
    else:
        tl.store(pointers, x, mask=mask)


@triton.jit
def move_items(
    counters, words, width, mixed, ids, columns, mask, ledger, x,
    MOMENT: tl.constexpr, FORM: tl.constexpr, MODE: tl.constexpr, DEPTH: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Moves sketches of the paper and bucket forms, no two rows at once; returns the estimate."""
    result = estimate(
        counters, words, width, mixed, columns, mask, ledger, x, MOMENT, FORM, MODE, DEPTH, DIM
    )
    moved = delta(ledger, result, x, MOMENT, MODE)
    inverse = slots.number(ledger, MOMENT + slots.INVERSE_SCALE)
    for row in range(DEPTH):
        reading = reading_of(
            counters, words, width, row, mixed, columns, mask, ledger, x, MOMENT, FORM, MODE, DIM
        )
        if FORM == PAPER:
            reading += moved
        if MOMENT == slots.FIRST:
            reading *= sign_of(words, row, mixed)
        pointers = _pointers(counters, words, width, row, mixed, columns, DIM)
        store_counters(pointers, reading * inverse, mask, ledger, ids, columns, MOMENT)
    if FORM == PAPER:
        result += moved
    return result


@triton.jit
def add(
    counters, words, width, row, mixed, ids, columns, mask, ledger, x,
    MOMENT: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Adds the rows' share to the counters of one hash row of a sketch of the linear form."""
    share = x * slots.number(ledger, MOMENT + slots.WEIGHT)
    if MOMENT == slots.FIRST:
        share *= sign_of(words, row, mixed)
    share *= slots.number(ledger, MOMENT + slots.INVERSE_SCALE)
    pointers = _pointers(counters, words, width, row, mixed, columns, DIM)
    total = tl.load(pointers, mask=mask, other=0.0).to(tl.float32) + share
    store_counters(pointers, total, mask, ledger, ids, columns, MOMENT)


@triton.jit
def raise_one(counters, words, width, row, mixed, ids, target, ledger):
    """Raises the counters of one hash row, bfloat16 ones, that nobody else writes to."""
    pointers = counters + row * width + bucket_of(words, row, mixed, width)
    stored = target * slots.number(ledger, slots.SECOND + slots.INVERSE_SCALE)
    bits_of_noise = noise(slots.key(ledger, slots.SECOND + slots.KEY), ids, ids * 0)
    stored = stochastic_bfloat16(stored, bits_of_noise)
    old = tl.load(pointers).to(tl.float32)
    tl.store(pointers, tl.maximum(stored, old).to(tl.bfloat16))


@triton.jit
def raise_at_once(counters, words, width, mixed, target, mask, ledger, DEPTH: tl.constexpr):
    """Raises float32 counters to the targets of rows, in any order.

    Numbers that are not negative compare like their bits, and a maximum of integers is one atomic
    instruction.
    """
    stored = target * slots.number(ledger, slots.SECOND + slots.INVERSE_SCALE)
    bits = stored.to(tl.int32, bitcast=True)
    whole = counters.to(tl.pointer_type(tl.int32), bitcast=True)
    for row in tl.static_range(DEPTH):
        at = whole + row * width + bucket_of(words, row, mixed, width)
        tl.atomic_max(at, bits, mask=mask, sem="relaxed")
