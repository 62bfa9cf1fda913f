"""The same kernels over several tables at once: the second axis of the grid is the table.

Arguments lie in a matrix of 64-bit words on the device, a row for each table: addresses and counts
in the order of the kernel's parameters. What a kernel is compiled for is the same for all tables.
"""

import triton
import triton.language as tl

from . import moves, prepare
from .rows import ID_BITS, ID_MASK


@triton.jit
def _pointer(row, slot: tl.constexpr, dtype: tl.constexpr):
    """A pointer from its address, which is a multiple of 16 bytes."""
    return tl.multiple_of(tl.load(row + slot).to(tl.pointer_type(dtype)), 16)


@triton.jit(do_not_specialize=["stride"])
def collect_keys(words, stride, keys, BLOCK: tl.constexpr):
    """Writes the ids of all tables into one list, with the number of the table above them.

    A row of `words` has the address of the ids, their count, and where they begin in the list.
    """
    row = words + tl.program_id(1).to(tl.int64) * stride
    ids = tl.load(row).to(tl.pointer_type(tl.int64))
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < tl.load(row + 1)
    id = tl.load(ids + at, mask=mask, other=0)
    id = tl.where((id < 0) | (id > ID_MASK), ID_MASK, id)  # one that no table has
    table = tl.program_id(1).to(tl.int64) << ID_BITS
    tl.store(keys + tl.load(row + 2) + at, table | id, mask=mask)


@triton.jit(do_not_specialize=["stride"])
def begin(
    words, stride, PARAMETER: tl.constexpr, CORRECTION: tl.constexpr, FIRST_DECAYS: tl.constexpr,
    FIRST_FORGETS: tl.constexpr, SECOND_DECAYS: tl.constexpr, SECOND_FORGETS: tl.constexpr,
    HAS_PIECES: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = words + tl.program_id(1).to(tl.int64) * stride
    prepare.begin(
        _pointer(row, 0, tl.float64), tl.load(row + 1).to(tl.pointer_type(tl.int32)),
        _pointer(row, 2, PARAMETER), tl.load(row + 3).to(tl.pointer_type(tl.int64)),
        tl.load(row + 4).to(tl.pointer_type(tl.int64)), _pointer(row, 5, tl.float32),
        tl.load(row + 6), tl.load(row + 7), tl.load(row + 8), tl.load(row + 9), tl.load(row + 10),
        tl.load(row + 11), tl.load(row + 12), tl.load(row + 13), tl.load(row + 14),
        tl.load(row + 15), tl.load(row + 16), tl.load(row + 17), tl.load(row + 18),
        tl.load(row + 19), tl.load(row + 20), tl.load(row + 21), CORRECTION, FIRST_DECAYS,
        FIRST_FORGETS, SECOND_DECAYS, SECOND_FORGETS, HAS_PIECES, DIM, STRIDE, BLOCK, ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride"])
def inspect(
    words, stride, PARAMETER: tl.constexpr, SECOND: tl.constexpr, DIM: tl.constexpr,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, IS_DENSE: tl.constexpr,
    IS_MAXIMIZING: tl.constexpr, DECAYS: tl.constexpr, LARGEST: tl.constexpr,
    IS_CHECKED: tl.constexpr, SECOND_KIND: tl.constexpr, SECOND_FORM: tl.constexpr,
    SECOND_MODE: tl.constexpr, SECOND_DEPTH: tl.constexpr, SECOND_FORGETS: tl.constexpr,
):  # fmt: skip
    row = words + tl.program_id(1).to(tl.int64) * stride
    prepare.inspect(
        _pointer(row, 0, PARAMETER), tl.load(row + 1).to(tl.pointer_type(tl.int64)),
        tl.load(row + 2).to(tl.pointer_type(tl.int64)), _pointer(row, 3, tl.float32),
        _pointer(row, 4, PARAMETER), _pointer(row, 5, tl.float64),
        tl.load(row + 6).to(tl.pointer_type(tl.int32)), _pointer(row, 7, tl.float32),
        _pointer(row, 8, SECOND), _pointer(row, 9, tl.int64), tl.load(row + 10), tl.load(row + 11),
        tl.load(row + 12), tl.load(row + 13), DIM, STRIDE, BLOCK, ROWS, IS_DENSE, IS_MAXIMIZING,
        DECAYS, LARGEST, IS_CHECKED, SECOND_KIND, SECOND_FORM, SECOND_MODE, SECOND_DEPTH,
        SECOND_FORGETS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride"])
def move_rows(
    words, stride, PARAMETER: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    FIRST_KIND: tl.constexpr, FIRST_FORM: tl.constexpr, FIRST_MODE: tl.constexpr,
    FIRST_DEPTH: tl.constexpr, SECOND_KIND: tl.constexpr, SECOND_FORM: tl.constexpr,
    SECOND_MODE: tl.constexpr, SECOND_DEPTH: tl.constexpr, IS_RAISED: tl.constexpr,
    DIM: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    IS_DENSE: tl.constexpr, IS_MAXIMIZING: tl.constexpr, DECAYS: tl.constexpr,
    HAS_NESTEROV: tl.constexpr, HAS_ROOT: tl.constexpr, HAS_CLIP: tl.constexpr,
    IS_RATIO: tl.constexpr, IS_STOCHASTIC: tl.constexpr,
):  # fmt: skip
    row = words + tl.program_id(1).to(tl.int64) * stride
    moves.move_rows(
        _pointer(row, 0, PARAMETER), tl.load(row + 1).to(tl.pointer_type(tl.int64)),
        tl.load(row + 2).to(tl.pointer_type(tl.int64)), _pointer(row, 3, tl.float32),
        _pointer(row, 4, PARAMETER), _pointer(row, 5, tl.float64),
        tl.load(row + 6).to(tl.pointer_type(tl.int32)), _pointer(row, 7, tl.float32),
        _pointer(row, 8, FIRST), _pointer(row, 9, tl.int64), tl.load(row + 10),
        _pointer(row, 11, tl.float32), _pointer(row, 12, tl.float32), _pointer(row, 13, tl.float32),
        _pointer(row, 14, SECOND), _pointer(row, 15, tl.int64), tl.load(row + 16),
        _pointer(row, 17, tl.float32), _pointer(row, 18, tl.float32), _pointer(row, 19, tl.float32),
        tl.load(row + 20), tl.load(row + 21), FIRST_KIND, FIRST_FORM, FIRST_MODE, FIRST_DEPTH,
        SECOND_KIND, SECOND_FORM, SECOND_MODE, SECOND_DEPTH, IS_RAISED, DIM, STRIDE, BLOCK, ROWS,
        IS_DENSE, IS_MAXIMIZING, DECAYS, HAS_NESTEROV, HAS_ROOT, HAS_CLIP, IS_RATIO, IS_STOCHASTIC,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride"])
def finish(
    words, stride, FIRST: tl.constexpr, SECOND: tl.constexpr, HAS_FIRST: tl.constexpr,
    HAS_SECOND: tl.constexpr, FIRST_DECAYS: tl.constexpr, SECOND_DECAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = words + tl.program_id(1).to(tl.int64) * stride
    prepare.finish(
        _pointer(row, 0, tl.float64), tl.load(row + 1).to(tl.pointer_type(tl.int32)),
        tl.load(row + 2).to(tl.pointer_type(tl.float64)), _pointer(row, 3, FIRST),
        _pointer(row, 4, SECOND), tl.load(row + 5), tl.load(row + 6), HAS_FIRST, HAS_SECOND,
        FIRST_DECAYS, SECOND_DECAYS, BLOCK,
    )  # fmt: skip
