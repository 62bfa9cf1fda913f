"""8-bit moments in Triton: blocks are decoded, moved and encoded, as `moments/_quantized.py`."""

import triton
import triton.language as tl

from . import slots
from .moments import delta


@triton.jit
def nearest_codes(borders, x):
    """How many of the 255 borders lie below numbers in [-1, 1]: the nearest code, int32."""
    low = tl.zeros_like(x).to(tl.int32)
    for exponent in tl.static_range(8):
        step = 128 >> exponent
        low = tl.where(tl.load(borders + low + (step - 1)) < x, low + step, low)
    return low


@triton.jit
def encode(codes, borders, x, largest, mask, IS_FIRST: tl.constexpr):
    """Stores the codes of numbers whose block has the given largest magnitude."""
    scale = tl.maximum(largest, 1.1754943508222875e-38)  # the least normal float32
    found = nearest_codes(borders, tl.div_rn(x, tl.zeros_like(x) + scale))
    if not IS_FIRST:  # a second moment is zero only if it was
        found = tl.where((found == 0) & (x > 0), 1, found)
    tl.store(codes, found.to(tl.uint8), mask=mask)


@triton.jit
def decode(codes, book, scale, mask):
    found = tl.load(codes, mask=mask, other=0).to(tl.int32)
    return tl.load(book + found) * scale


@triton.jit
def move_codes(
    codes, scales, book, borders, ledger, id, columns, mask, x,
    MOMENT: tl.constexpr, MODE: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Moves one block of each row, where no two rows share a block; returns the estimate."""
    blocks: tl.constexpr = (DIM + STRIDE - 1) // STRIDE
    block = tl.min(columns, 1)[:, None] // STRIDE
    is_row = tl.max(mask.to(tl.int32), 1)[:, None] > 0
    at = scales + id * blocks + block
    pointers = codes + id * DIM + columns
    old = decode(pointers, book, tl.load(at, mask=is_row, other=0.0), mask)
    result = tl.where(mask, old + delta(ledger, old, x, MOMENT, MODE), 0.0)
    largest = tl.max(tl.abs(result), 1)[:, None]
    tl.store(at, largest, mask=is_row)
    encode(pointers, borders, result, largest, mask, MOMENT == slots.FIRST)
    return result
