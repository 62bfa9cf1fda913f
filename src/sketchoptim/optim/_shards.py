"""What a process holds of a parameter whose rows are divided among processes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._validation import check_int, is_dtensor, is_wrapper
from ..moments import Part, Table

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class Shard:
    """The part of a parameter that this process holds."""

    rows: range
    group: "ProcessGroup | None"
    """The processes that divide the rows among them; None where each of them has all rows."""

    @classmethod
    def of(cls, parameter: Tensor) -> "Shard | None":
        """The part of a DTensor; None for a tensor that is all here, and an error for all else."""
        if not is_wrapper(parameter):
            return None
        owner = f"the parameter of shape {list(parameter.shape)}"
        if not is_dtensor(parameter):
            raise TypeError(
                f"{owner} must be a plain tensor or a DTensor, got a {type(parameter).__name__}; "
                "use torch.optim for it"
            )
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor import Shard as ShardOf

        mesh, placements = parameter.device_mesh, parameter.placements
        dividing = [at for at, it in enumerate(placements) if type(it) is not Replicate]
        # By type as well: torch 2.9 takes a strided division for an equal one.
        by_rows = [
            type(placements[at]) is ShardOf and placements[at] == ShardOf(0) for at in dividing
        ]
        if len(dividing) > 1 or not all(by_rows):
            raise ValueError(
                f"{owner} must be divided by whole rows over one dimension of its mesh, Shard(0), "
                f"and replicated over the others, got the placements {placements}; use torch.optim "
                "for it"
            )
        if not dividing:
            return cls(range(parameter.shape[:1].numel()), None)
        total, size = parameter.shape[0], mesh.size(dividing[0])
        start = min(mesh.get_local_rank(dividing[0]) * -(-total // size), total)
        return cls(range(start, start + len(local(parameter))), mesh.get_group(dividing[0]))


def local(tensor: Tensor) -> Tensor:
    """The tensor that holds the numbers of this process, in the same memory."""
    if not is_dtensor(tensor):
        return tensor.detach() if _is_plain_inside(tensor) else tensor
    with torch.no_grad():
        held: Any = tensor.to_local()
    ready: Tensor = held.wait() if is_wrapper(held) else held  # a collective may be under way
    return ready


def _is_plain_inside(tensor: Tensor) -> bool:
    """Whether it is of a subclass of nn.Parameter that adds attributes alone, as TorchRec's is."""
    kind = type(tensor)
    return (
        isinstance(tensor, Parameter)
        and kind is not Parameter
        and not is_wrapper(tensor)
        and kind.__torch_function__ == Parameter.__torch_function__
        and kind.__torch_dispatch__ == Parameter.__torch_dispatch__
    )


def whole(tensor: Tensor) -> Tensor:
    """The tensor with the numbers of all processes."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def layout(tensor: Tensor) -> str:
    """How processes hold a tensor, in words that are the same only where the layout is."""
    if not is_dtensor(tensor):
        return "a plain tensor" if not is_wrapper(tensor) else f"a {type(tensor).__name__}"
    return f"a DTensor {tensor.placements} over {tensor.device_mesh}"


def table_of(parameter: Tensor, key: str | int, state: Mapping[str, Any] | None = None) -> Table:
    """A parameter as its moments need it, and its state, if any."""
    sized_for = (state or {}).get("sized_for")
    table = Table(
        parameter.shape, parameter.dtype, parameter.device, key, held_rows(parameter), sized_for
    )
    if sized_for is not None:
        check_int(f"sized_for in the state of {key!r}", sized_for, least=1, most=table.rows)
    return table


def held_rows(parameter: Tensor) -> range | None:
    """The rows of a parameter that this process holds; None if it holds all."""
    shard = Shard.of(parameter)
    return None if shard is None or shard.group is None else shard.rows


def check_parts(table: Table, parts: Iterable[Part], storage: object) -> None:
    """Raises where a moment cannot be kept by processes that divide the rows."""
    refused = [part.name for part in parts if part.combine == "refused"]
    if table.held is not None and refused:
        raise ValueError(
            f"the parameter of shape {list(table.shape)} is divided by rows among processes, but "
            f"its {refused[0]} in {storage} depend on the order of rows or are shared by "
            'neighbours; use memory="lean", "row-wise", "rank-one" or "exact"'
        )


# -- state as it leaves and enters -----------------------------------------------------------------


def as_global(parameter: Tensor, part: Part, tensor: Tensor) -> Tensor:
    """A part of a moment for checkpoints: a DTensor of all rows if they are divided."""
    if not is_dtensor(parameter) or part.sharding == "replicated":
        return tensor
    from torch.distributed.tensor import DTensor

    shape = torch.Size(part.shape)
    return DTensor.from_local(
        tensor,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def as_held(parameter: Tensor, part: Part, tensor: Any) -> Any:
    """What this process keeps of a part from a checkpoint; all else is returned as it is."""
    if part.sharding == "replicated" or not is_dtensor(parameter):
        return whole(tensor)
    if is_dtensor(tensor):
        return local(tensor.redistribute(parameter.device_mesh, parameter.placements))
    shard = Shard.of(parameter)
    assert shard is not None  # it is a DTensor
    is_all = isinstance(tensor, Tensor) and tuple(tensor.shape) == part.shape
    return tensor[shard.rows.start : shard.rows.stop] if is_all and shard.group else tensor
