"""Parameters whose rows are divided among processes: what each one holds, and what they exchange.

A process steps the rows that it holds. Sketches are sized by the whole table and kept by every
process; after a step, or in its middle, the processes make theirs one, as the moments declare.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

from .._validation import is_wrapper
from ..moments import Moments, Part, Table

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

    from ._binding import BoundStep
    from .base import Optimizer

# The parameters that the processes of a group divide by rows, in the same order in all of them.
Divided = dict["ProcessGroup", list[Tensor]]


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
        if len(dividing) > 1 or any(placements[at] != ShardOf(0) for at in dividing):
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


def is_dtensor(tensor: Any) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor; without an import of torch.distributed.tensor, which takes long."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


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


def table_of(parameter: Tensor, key: str | int) -> Table:
    """What a moment knows of a parameter."""
    shard = Shard.of(parameter)
    held = None if shard is None or shard.group is None else shard.rows
    return Table(parameter.shape, parameter.dtype, parameter.device, key, held)


def check_parts(table: Table, parts: Iterable[Part], storage: object) -> None:
    """Raises where a moment cannot be kept by processes that divide the rows."""
    refused = [part.name for part in parts if part.combine == "refused"]
    if table.held is not None and refused:
        raise ValueError(
            f"the parameter of shape {list(table.shape)} is divided by rows among processes, but "
            f"its {refused[0]} in {storage} depend on the order of rows or are shared by "
            'neighbours; use memory="lean", "row-wise", "rank-one" or "exact"'
        )


# -- one step of several processes -----------------------------------------------------------------


def divided_parameters(optimizer: "Optimizer") -> Divided:
    """The compressed parameters whose rows are divided.

    Their gradients are dense, so that their group says whether they are compressed.
    """
    return _by_group(
        parameter
        for group in optimizer.param_groups
        if group["compress_dense"] and not group["memory"].is_exact
        for parameter in group["params"]
    )


def _by_group(parameters: Iterable[Tensor]) -> Divided:
    found: Divided = {}
    for parameter in filter(is_dtensor, parameters):
        try:
            shard = Shard.of(parameter)
        except ValueError:  # its first step will be refused
            continue
        if shard is not None and shard.group is not None:
            found.setdefault(shard.group, []).append(parameter)
    return found


def is_anywhere(flag: bool, parameters: Iterable[Tensor]) -> bool:
    """Whether the flag is set in any process that holds some of these parameters."""
    for group, divided in _by_group(parameters).items():
        flag = _reduce_flags(group, divided, is_refused=flag, nonfinite=set()).is_refused
    return flag


def refuse(divided: Divided) -> None:
    """Tells the other processes that this one refuses the step, instead of `agree`."""
    for group, parameters in divided.items():
        _reduce_flags(group, parameters, is_refused=True, nonfinite=set())


def agree(divided: Divided, steps: list["BoundStep"]) -> list["BoundStep"]:
    """The steps as all processes take them: refused everywhere, or skipped everywhere, or run.

    Args:
        divided: What `divided_parameters` gave.
        steps: The steps that this process has prepared.
    """
    is_refused = False
    nonfinite = {it.binding.parameter for it in steps if it.is_skipped}
    lacking: list[Tensor] = []
    for group, parameters in divided.items():
        flags = _reduce_flags(group, parameters, is_refused=is_refused, nonfinite=nonfinite)
        is_refused = is_refused or flags.is_refused
        nonfinite.update(flags.nonfinite)
        lacking += flags.lacking
    if is_refused:
        raise RuntimeError(
            "another process refused this step; its error says why. Nothing has changed here either"
        )
    if lacking:
        raise ValueError(
            f"the parameter of shape {list(lacking[0].shape)} must have a gradient in all "
            "processes or in none; use it in the loss of every process. Nothing has changed"
        )
    return [
        it._replace(is_skipped=True) if it.binding.parameter in nonfinite else it for it in steps
    ]


class _Flags(NamedTuple):
    is_refused: bool
    nonfinite: list[Tensor]
    lacking: list[Tensor]
    """Parameters that have a gradient in some processes only."""


def _reduce_flags(
    group: "ProcessGroup", parameters: list[Tensor], *, is_refused: bool, nonfinite: set[Tensor]
) -> _Flags:
    """What any of the processes says."""
    import torch.distributed as dist

    has = torch.tensor([it.grad is not None for it in parameters], dtype=torch.float32)
    is_nonfinite = torch.tensor([it in nonfinite for it in parameters], dtype=torch.float32)
    flags = torch.cat([torch.tensor([float(is_refused)]), is_nonfinite, has, -has])
    flags = flags.to(local(parameters[0]).device)
    dist.all_reduce(flags, dist.ReduceOp.MAX, group)
    refused, *found = flags.tolist()
    count = len(parameters)
    return _Flags(
        is_refused=refused > 0,
        nonfinite=[it for it, flag in zip(parameters, found, strict=False) if flag],
        lacking=[
            it
            for it, some, none in zip(parameters, found[count:], found[2 * count :], strict=False)
            if some != -none
        ],
    )


def run_(steps: Sequence["BoundStep"]) -> None:
    """Runs steps that all processes have agreed on; they exchange what they share."""
    _sum_gathered_(steps)
    for step in steps:
        step.run_(maintains=False)
    _unify_(steps)
    for step in steps:
        step.maintain_()


def _sum_gathered_(steps: Iterable["BoundStep"]) -> None:
    """Lets moments whose estimates depend on all rows see those of all processes."""
    gathering = [it for it in steps if not it.is_skipped and _gathers(it.binding.moments)]
    for it in gathering:
        it.gather_()
    _exchange_(gathering, _gathered, "SUM")


def _unify_(steps: Iterable["BoundStep"]) -> None:
    """Makes the sketches that each process has raised one, the same in all of them."""
    _exchange_([it for it in steps if not it.is_skipped], _raised, "MAX")


def _gathers(moments: Moments) -> bool:
    return any(moment is not None and moment.gathers for moment in moments)


def _gathered(step: "BoundStep") -> Iterator[Tensor]:
    for moment in step.binding.moments:
        if moment is not None and moment.gathered is not None:
            yield moment.gathered


def _raised(step: "BoundStep") -> Iterator[Tensor]:
    moments = step.binding.moments._asdict()
    for name, part in step.binding.raised_parts:
        yield moments[name].tensors[part]


def _exchange_(
    steps: Iterable["BoundStep"],
    tensors_of: Callable[["BoundStep"], Iterable[Tensor]],
    operation: str,
) -> None:
    """Reduces the tensors of all steps over their processes, in one collective for each group."""
    by_group: dict[ProcessGroup, list[Tensor]] = {}
    for step in steps:
        shard = step.binding.shard
        if shard is not None and shard.group is not None:
            by_group.setdefault(shard.group, []).extend(tensors_of(step))
    import torch.distributed as dist

    reduce = getattr(dist.ReduceOp, operation)
    for group, tensors in by_group.items():
        if len(tensors) == 1:
            dist.all_reduce(tensors[0], reduce, group)
        elif tensors:
            together = torch.cat([tensor.flatten().float() for tensor in tensors])
            dist.all_reduce(together, reduce, group)
            parts = together.split([tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))


# -- state as it leaves and enters -----------------------------------------------------------------


def as_global(parameter: Tensor, part: Part, tensor: Tensor) -> Tensor:
    """A part of a moment as checkpoints see it: a DTensor of all rows where they are divided."""
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
