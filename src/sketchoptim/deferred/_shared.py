"""Parts of a gradient that several processes have together."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._lookups import Lookups
from ._parts import Part, Reader, Scale

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SharedSum(Part):
    """The sum over processes of parts that each of them keeps to itself.

    The rows of a block are summed when they are read. So all processes must read the same blocks in
    the same order, as clipping and the optimizers do.

    Args:
        weight: The parameter.
        terms: The parts of this process, each with a factor. There may be none.
        group: The processes.
        block_rows: How many rows are read at once, the same in all processes.
        nbytes: What the parts take in the process that keeps most.
    """

    is_collective = True

    def __init__(
        self,
        weight: Tensor,
        terms: Sequence[tuple[Part, Scale]],
        group: "ProcessGroup",
        block_rows: int | None,
        nbytes: int,
    ) -> None:
        self.terms, self.group, self.block_rows = tuple(terms), group, block_rows
        self._nbytes = nbytes
        super().__init__(weight, is_sparse=False)

    def reader(self) -> Reader:
        return _SharedReader(self)

    def bound(self) -> Tensor:
        import torch.distributed as dist

        total = torch.zeros((), device=self.device)
        for part, scale in self.terms:
            total = total + part.bound() * (
                scale.abs() if isinstance(scale, Tensor) else abs(scale)
            )
        dist.all_reduce(total, group=self.group)
        return total

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def is_current(self) -> bool:
        return all(part.is_current for part, _ in self.terms)

    def check_current(self) -> None:
        for part, _ in self.terms:
            part.check_current()

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedSum":
        terms = [(part.__deepcopy__(memo), scale) for part, scale in self.terms]
        like = torch.empty(self.shape, dtype=self.dtype, device="meta")
        copied = SharedSum(like, terms, self.group, self.block_rows, self._nbytes)
        copied.device, copied.is_shared = self.device, self.is_shared
        return copied


class _SharedReader:
    def __init__(self, part: SharedSum) -> None:
        self.group = part.group
        self.readers = [(own.reader(), scale) for own, scale in part.terms]

    def add_(self, out: Tensor, at: slice | Tensor) -> None:
        import torch.distributed as dist

        total = torch.zeros_like(out)
        for reader, scale in self.readers:
            rows = torch.zeros_like(out)
            reader.add_(rows, at)
            total.add_(rows.mul_(scale))
        dist.all_reduce(total, group=self.group)
        out.add_(total)


def joined_lookups(weight: Tensor, terms: Sequence[tuple[Part, Scale]]) -> Lookups:
    """Lookups, and sparse rows that exist, as one part in bags without options."""
    device = weight.device
    ids = [torch.empty(0, dtype=torch.int64, device=device)]
    sizes = [ids[0]]
    values = [torch.empty(0, weight.shape[1:].numel(), dtype=weight.dtype, device=device)]
    factors = [torch.empty(0, dtype=torch.float32, device=device)]
    for part, scale in terms:
        own = part if isinstance(part, Lookups) else _as_lookups(weight, part)
        kept, bags, own_factors = own.kept()
        rows = own.output_gradient.reshape(-1, values[0].shape[1])
        ids.append(kept)
        sizes.append(torch.bincount(bags, minlength=len(rows)))
        values.append((rows * scale).to(weight.dtype))
        factors.append(
            torch.ones(kept.shape, device=device) if own_factors is None else own_factors.float()
        )
    counts = torch.cat(sizes)
    return Lookups(
        weight,
        torch.cat(ids),
        torch.cat(values),
        offsets=counts.cumsum(0) - counts,
        lookup_weights=torch.cat(factors),
        is_sparse=all(part.is_sparse for part, _ in terms),
    )


def _as_lookups(weight: Tensor, part: Part) -> Lookups:
    ids, values = part.entries()
    return Lookups(weight, ids, values.reshape(len(ids), -1))


def gathered_lookups(
    own: Lookups, weight: Tensor, group: "ProcessGroup", *, is_sparse: bool
) -> Lookups:
    """The lookups of all processes, in the order of the processes."""
    assert own.offsets is not None
    assert own.lookup_weights is not None
    counts = torch.diff(own.offsets, append=own.offsets.new_tensor([own.ids.numel()]))
    sizes = everywhere([own.ids.numel(), len(counts)], weight.device, group)
    ids, factors = (
        _gathered(part, [size for size, _ in sizes], group)
        for part in (own.ids, own.lookup_weights)
    )
    counts, values = (
        _gathered(part, [size for _, size in sizes], group)
        for part in (counts, own.output_gradient)
    )
    is_single, has_ones = bool((counts == 1).all()), bool((factors == 1).all())
    return Lookups(
        weight,
        ids,
        values,
        offsets=None if is_single else counts.cumsum(0) - counts,
        lookup_weights=None if has_ones else factors,
        is_sparse=is_sparse,
    )


def everywhere(numbers: Any, device: torch.device, group: "ProcessGroup") -> list[Any]:
    """The integers of each process, in lists of one shape."""
    import torch.distributed as dist

    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    room = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(room, own, group=group)
    return [it.tolist() for it in room]


def _gathered(own: Tensor, sizes: list[int], group: "ProcessGroup") -> Tensor:
    """The rows of all processes; `sizes` has the number of rows of each."""
    import torch.distributed as dist

    # As bytes, because not every backend has every dtype; padded to one size.
    room = own.new_zeros(max(sizes), *own.shape[1:])
    room[: len(own)] = own
    rooms = [torch.empty_like(room).view(torch.uint8) for _ in sizes] if room.numel() else []
    if rooms:
        dist.all_gather(rooms, room.view(torch.uint8), group=group)
    parts = [it.view(own.dtype)[:size] for it, size in zip(rooms, sizes, strict=False)]
    return torch.cat([own[:0], *parts])
