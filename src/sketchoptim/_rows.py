"""Gradient -> unique rows and their summed gradients, handed out in cache-sized chunks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ._torch_private import entries

# Elements a chunk holds at most: temporaries of a step stay in the cache, and their bytes stay
# small beside one copy of the touched rows, which is what contract "two copies" needs.
CHUNK_ELEMENTS = 1 << 17
# On other devices chunks are larger, because each of them costs launches.
DEVICE_CHUNK_ELEMENTS = 1 << 22


class Chunk(NamedTuple):
    """Some rows of a parameter: where they are, their ids, and their gradients."""

    at: slice | Tensor
    """Indexes the parameter's first dimension."""
    ids: Tensor
    """Ascending and unique, int64 of shape ``[k]``."""
    gradient: Tensor
    """Gradients of the rows, ``[k, dim]``, in the dtype of the arithmetic."""


class RowChunks(Protocol):
    """The rows that a step moves, block by block."""

    def __len__(self) -> int:
        """How many rows there are."""

    def chunks(self) -> Iterator[Chunk]:
        """The rows in ascending order; a chunk may be overwritten by the next."""


@dataclass(frozen=True)
class Rows:
    """The rows a gradient touches: unique ids in ascending order with their summed gradients."""

    ids: Tensor | None
    """int64 of shape ``[k]``, or None for a dense gradient, which touches every row."""
    values: Tensor
    """Rows ``[k, *row_shape]``; dense and coalesced gradients are not copied."""

    def __len__(self) -> int:
        return self.values.shape[0]

    @property
    def dim(self) -> int:
        return math.prod(self.values.shape[1:])

    def chunks(self) -> Iterator[Chunk]:
        """The rows in ascending order, at most `CHUNK_ELEMENTS` elements at a time on a CPU."""
        size = rows_in_a_chunk(self.dim, self.values.device)
        dtype = arithmetic_dtype(self.values.dtype)
        for start in range(0, len(self), size):
            stop = min(start + size, len(self))
            gradient = self.values[start:stop].reshape(stop - start, self.dim).to(dtype)
            if self.ids is None:
                ids = torch.arange(start, stop, device=self.values.device)
                yield Chunk(slice(start, stop), ids, gradient)
            else:
                ids = self.ids[start:stop]
                yield Chunk(ids, ids, gradient)


def row_chunks(parameter: Tensor, *, dim: int | None = None) -> Iterator[tuple[Any, Tensor]]:
    """All rows in turn, some `CHUNK_ELEMENTS` numbers at a time: where they are, and their ids."""
    if not parameter.dim():
        yield ..., torch.zeros(1, dtype=torch.int64, device=parameter.device)
        return
    size = rows_in_a_chunk(parameter.shape[1:].numel() if dim is None else dim, parameter.device)
    for start in range(0, parameter.shape[0], size):
        stop = min(start + size, parameter.shape[0])
        yield slice(start, stop), torch.arange(start, stop, device=parameter.device)


def rows_in_a_chunk(dim: int, device: torch.device) -> int:
    elements = CHUNK_ELEMENTS if device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
    return max(1, elements // max(1, dim))


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything narrower."""
    return torch.promote_types(dtype, torch.float32)


def of_gradient(gradient: Tensor) -> Rows:
    """The unique rows of a dense or sparse COO gradient; the gradient itself stays as it is.

    Duplicates are summed in float32 at least, in their order. Ids that ascend strictly, as those
    of a coalesced gradient do, have none: looked at, since the flag of a gradient may be wrong.
    """
    if not gradient.is_sparse:
        values = gradient if gradient.dim() > 0 else gradient.reshape(1)
        return Rows(None, values)
    indices, values = entries(gradient)
    ids = indices[0]
    if (ids[1:] > ids[:-1]).all():
        return Rows(ids, values)
    return Rows(*unique_sums(ids, values))


def unique_sums(ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct ids in ascending order, and for each the sum of its values, in their order."""
    unique, position = torch.unique(ids, return_inverse=True)
    dtype = arithmetic_dtype(values.dtype)
    sums = values.new_zeros((unique.numel(), *values.shape[1:]), dtype=dtype)
    # In slices, because half-precision values are widened on the way.
    size = rows_in_a_chunk(math.prod(values.shape[1:]), values.device)
    for start in range(0, values.shape[0], size):
        part = slice(start, start + size)
        add_rows_(sums, position[part], values[part].to(dtype))
    return unique, sums


def add_rows_(target: Tensor, at: Tensor, values: Tensor) -> None:
    """Adds ``values[k]`` to the rows ``target[at[k]]``, with the same bits in every run.

    On a GPU `index_add_` adds in any order, while this form sorts first.
    """
    if target.device.type == "cpu":
        target.index_add_(0, at, values)
    else:
        target.index_put_((at,), values, accumulate=True)
