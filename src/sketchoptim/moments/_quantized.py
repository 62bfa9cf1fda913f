"""One byte for each weight: 8-bit codes, and a float32 scale for each block of weights."""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .._rows import CHUNK_ELEMENTS
from ..storage import Quantized
from ._moment import CodesView, Moment, Name, Part, Parts, Table

# Below this many elements a tensor is kept in float32, as in bitsandbytes, and so are all vectors,
# the norms and biases of a model: their bytes are few, and their blocks would cross the borders
# between the processes that divide them.
_FEWEST_ELEMENTS = 4096
# The exponents of the code: powers of ten below the largest value of a block.
_EXPONENTS = 7


@functools.cache
def code_book(is_signed: bool) -> Tensor:
    """The 256 values in [-1, 1], or [0, 1], that a code stands for, in ascending order.

    Dynamic tree quantization (Dettmers, 8-Bit Approximations for Parallelism in Deep Learning,
    2015): the values between two powers of ten are evenly spaced, and each power of ten has twice
    as many of them as the next smaller one. Large values have a small relative error, and small
    ones, down to a millionth of the largest, are not lost. Zero and one are exact.

    >>> code_book(True).numel(), code_book(False).numel()
    (256, 256)
    """
    values = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        count = 2**exponent if is_signed else 2 ** (exponent + 1)
        scale = 10.0 ** (exponent + 1 - _EXPONENTS)
        middles = [scale * (0.1 + 0.9 * (i + 0.5) / count) for i in range(count)]
        values += middles
        if is_signed:
            values += [-middle for middle in middles]
    return torch.tensor(sorted(values), dtype=torch.float32, device="cpu")


class Encoder:
    """Nearest codes: a look-up by the leading bits of a float32, and one comparison.

    Numbers that share sign, exponent and eight bits of mantissa differ by at most 1/256 of
    themselves, less than two codes do; so at most one border between codes lies among them
    (`tests/moments/test_quantized.py::test_codes_are_the_nearest`). Six times as fast as
    `torch.bucketize`.
    """

    def __init__(self, book: Tensor) -> None:
        borders = (book[1:] + book[:-1]) / 2
        bits = torch.arange(1 << 17, dtype=torch.int32, device=book.device) << 15
        # The lowest number with these leading bits: of a negative one, all other bits are ones.
        lowest = torch.where(bits < 0, bits | 0x7FFF, bits).view(torch.float32).nan_to_num(1.0)
        self.first_codes = torch.bucketize(lowest, borders).to(torch.int32)
        self.borders = torch.cat([borders, borders.new_full((1,), math.inf)])

    def __call__(self, values: Tensor) -> Tensor:
        """The codes, int32, of float32 values in [-1, 1]."""
        codes = self.first_codes[(values.view(torch.int32) >> 15) & 0x1FFFF]
        return codes + (values > self.borders[codes])


@functools.cache
def encoder(is_signed: bool, device: torch.device) -> Encoder:
    """The encoder of first or second moments, made once for a device."""
    return Encoder(code_book(is_signed).to(device))


class _Blocks(NamedTuple):
    """How rows of `dim` elements are cut into blocks that have a scale each.

    A row of at least a block's size is cut into blocks of its own; smaller rows share one.
    """

    rows: int
    """Rows that share a block."""
    columns: int
    """Blocks in a row."""

    @classmethod
    def of(cls, dim: int, size: int) -> "_Blocks":
        return cls(rows=max(1, size // max(1, dim)), columns=max(1, math.ceil(dim / size)))


class QuantizedMoment(Moment, storage=Quantized):
    """``code_book[codes] * scale of the block``; only touched rows move.

    A step decodes the touched blocks, moves the touched rows, and encodes the blocks again: the
    largest value of a block becomes its scale, every other one is rounded to the nearest code. With
    s for the scale, a first moment x is off by at most ``0.0071 s``, and by at most ``0.071 |x|``
    where ``|x| >= s / 10``; for second moments it is half of both
    (`tests/moments/test_quantized.py::test_a_value_is_near_its_code`). A second moment becomes zero
    only if it is zero, so no step divides by a root that vanished.
    """

    storage: Quantized

    @classmethod
    def declare(cls, storage: Quantized, name: Name, table: Table, fill: float) -> tuple[Part, ...]:
        least = 0.0 if name == "second" else -math.inf
        shape = tuple(table.shape)
        if table.first_rows * table.dim < _FEWEST_ELEMENTS or len(table.shape) < 2:
            return (Part("uncoded", shape, by="row", initial=fill, least=least),)
        blocks = _Blocks.of(table.dim, storage.block)
        scales = (math.ceil(table.rows / blocks.rows), blocks.columns)
        codes = Part("codes", shape, torch.uint8, by="row", initial=255)  # stands for one
        if blocks.rows == 1:
            return codes, Part("scales", scales, by="row", initial=fill, least=0.0)
        # Rows that share a block cannot be divided among processes.
        return codes, Part("scales", scales, combine="refused", initial=fill, least=0.0)

    def __init__(
        self, storage: Quantized, name: Name, tensors: Parts, held: range | None = None
    ) -> None:
        super().__init__(storage, name, tensors, held)
        self.is_small = "uncoded" in tensors
        stored = tensors["uncoded" if self.is_small else "codes"]
        self.count = stored.shape[0] if stored.dim() else 1
        self.dim = stored.shape[1:].numel()
        self.stored = stored.view(self.count, self.dim)
        self.blocks = _Blocks.of(self.dim, storage.block)
        self.book = code_book(name == "first").to(stored.device)
        self.encoder = encoder(name == "first", stored.device)

    def kernel_view(self) -> CodesView:
        if self.is_small:
            return CodesView(self.stored, self.stored, self.book, self.book, block=0, rows=1)
        borders = self.encoder.borders
        scales = self.tensors["scales"]
        block, rows = self.storage.block, self.blocks.rows
        return CodesView(self.stored, scales, self.book, borders, block=block, rows=rows)

    def update_(self, ids: Tensor, values: Tensor) -> Tensor:
        if self.is_small:
            new = self.average.after(self.stored.index_select(0, ids).to(values.dtype), values)
            self.stored.index_copy_(0, ids, new.to(self.stored.dtype))
            return new
        return torch.cat([self._update_some_(*part) for part in self._parts(ids, values)])

    def start_rows_(self, added: range, fill: float) -> None:
        size = self.blocks.rows
        if self.is_small or not added or added.start % size == 0:
            return
        # Rows that share a block with old ones: their fresh codes stand for its scale.
        scale = self.tensors["scales"][added.start // size]
        code = self.encoder(fill / scale.clamp_min(torch.finfo(torch.float32).tiny))
        self.stored[added.start : -(-added.start // size) * size] = code.to(torch.uint8)

    def _parts(self, ids: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Few enough rows at a time that the rows which share their blocks stay a chunk."""
        size = max(1, CHUNK_ELEMENTS // max(1, self.dim * self.blocks.rows))
        # At least one part, so that an empty step has an estimate to give.
        for start in range(0, max(1, ids.numel()), size):
            yield ids[start : start + size], values[start : start + size]

    def _update_some_(self, ids: Tensor, values: Tensor) -> Tensor:
        neighbours, touched = self._neighbours(ids)
        decoded = self._decode(neighbours).to(values.dtype)
        new = self.average.after(decoded[touched], values)
        decoded[touched] = new
        self._encode_(neighbours, decoded.float())
        return new

    def _neighbours(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """All rows that share blocks with some, ascending, and where those rows are among them."""
        size = self.blocks.rows
        if size == 1:
            return ids, torch.arange(ids.numel(), device=ids.device)
        groups = torch.unique(ids // size)
        offsets = torch.arange(size, device=ids.device)
        rows = (groups.unsqueeze(1) * size + offsets).flatten()
        rows = rows[rows < self.count]
        return rows, torch.searchsorted(rows, ids)

    def _decode(self, ids: Tensor) -> Tensor:
        scales = self.tensors["scales"].index_select(0, ids // self.blocks.rows)
        if self.blocks.columns > 1:
            scales = scales.repeat_interleave(self.storage.block, 1)[:, : self.dim]
        return self.book[self.stored.index_select(0, ids).int()] * scales

    def _encode_(self, ids: Tensor, values: Tensor) -> None:
        """Encodes rows that are all the rows of their blocks."""
        size, columns = self.storage.block, self.blocks.columns
        groups = ids // self.blocks.rows
        if columns > 1:
            padded = torch.nn.functional.pad(values.abs(), (0, columns * size - self.dim))
            largest = padded.view(-1, columns, size).amax(2)
            scales = largest.repeat_interleave(size, 1)[:, : self.dim]
        else:
            groups, position = torch.unique_consecutive(groups, return_inverse=True)
            largest = values.new_zeros(groups.numel(), 1)
            row_largest = values.abs().amax(1, keepdim=True)
            largest.scatter_reduce_(0, position.unsqueeze(1), row_largest, "amax")
            scales = largest[position]
        self.tensors["scales"].index_copy_(0, groups, largest)
        codes = self.encoder(values / scales.clamp_min(torch.finfo(torch.float32).tiny))
        if self.name == "second":
            codes = codes.masked_fill((codes == 0) & (values > 0), 1)
        self.stored.index_copy_(0, ids, codes.to(torch.uint8))

    def estimate(self, ids: Tensor) -> Tensor:
        return self.stored.index_select(0, ids) if self.is_small else self._decode(ids)
