"""What processes that divide the rows of parameters exchange in a step.

A process steps the rows that it holds. Sketches are sized by the whole table and kept by every
process; after a step, or in its middle, the processes make theirs one, as the moments declare.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._group_options import compresses_dense
from .._validation import is_dtensor
from ._shards import Shard, local

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# The parameters that the processes of a group divide by rows, in the same order in all of them.
Divided = dict["ProcessGroup", list[Tensor]]


class SharedStep(Protocol):
    """One parameter's step, as far as other processes take part in it."""

    is_skipped: bool

    @property
    def parameter(self) -> Tensor: ...
    @property
    def process_group(self) -> "ProcessGroup | None":
        """The processes that divide the rows among them; None if one process has them all."""

    def skip_(self) -> None:
        """Leaves the step out."""

    def gather_(self) -> list[Tensor]:
        """Takes in the rows of this process; returns what the processes then sum."""

    def raised(self) -> list[Tensor]:
        """What each process has raised, and whose maximum is the moment's, after the step."""

    def added(self) -> list[Tensor]:
        """What each process adds to a part that all have, after the step."""

    def take_added_(self) -> None:
        """Takes in what the processes have added together."""


def divided_parameters(groups: Iterable[dict[str, Any]]) -> Divided:
    """The compressed parameters of parameter groups whose rows are divided.

    Their gradients are dense, so a group determines whether they are compressed.
    """
    return _by_process_group(
        parameter
        for group in groups
        if not group["memory"].is_exact
        for parameter in group["params"]
        if compresses_dense(group, parameter)
    )


def _by_process_group(parameters: Iterable[Tensor]) -> Divided:
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
    for group, divided in _by_process_group(parameters).items():
        flag = _reduce_flags(group, divided, is_refused=flag, nonfinite=set()).is_refused
    return flag


def refuse(divided: Divided) -> None:
    """Makes the other processes refuse the step too; called instead of `agree_`."""
    for group, parameters in divided.items():
        _reduce_flags(group, parameters, is_refused=True, nonfinite=set())


def agree_(divided: Divided, steps: Sequence[SharedStep]) -> None:
    """Lets all processes take the same steps: refused everywhere, or skipped everywhere, or run.

    Args:
        divided: What `divided_parameters` gave.
        steps: The steps that this process has prepared.
    """
    is_refused = False
    nonfinite = {it.parameter for it in steps if it.is_skipped}
    lacking: list[Tensor] = []
    for group, parameters in divided.items():
        flags = _reduce_flags(group, parameters, is_refused=is_refused, nonfinite=nonfinite)
        is_refused = is_refused or flags.is_refused
        nonfinite.update(flags.nonfinite)
        lacking += flags.lacking
    if is_refused:
        raise RuntimeError(
            "another process refused this step, and its error has the reason. Nothing has changed "
            "here either"
        )
    if lacking:
        raise ValueError(
            f"the parameter of shape {list(lacking[0].shape)} must have a gradient in all "
            "processes or in none; use it in the loss of every process. Nothing has changed"
        )
    for it in steps:
        if it.parameter in nonfinite:
            it.skip_()


class _Flags(NamedTuple):
    is_refused: bool
    nonfinite: list[Tensor]
    lacking: list[Tensor]
    """Parameters that have a gradient in some processes only."""


def _reduce_flags(
    group: "ProcessGroup", parameters: list[Tensor], *, is_refused: bool, nonfinite: set[Tensor]
) -> _Flags:
    """The flags that are set in any of the processes."""
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


def sum_gathered_(steps: Iterable[SharedStep]) -> None:
    """Exchanges the moments whose estimates depend on the rows of all processes."""
    _exchange_(steps, lambda step: step.gather_(), "SUM")


def unify_(steps: Sequence[SharedStep]) -> None:
    """Makes what each process has raised or added to one, the same in all of them."""
    _exchange_(steps, lambda step: step.raised(), "MAX")
    _exchange_(steps, lambda step: step.added(), "SUM")
    for step in steps:
        step.take_added_()


def _exchange_(
    steps: Iterable[SharedStep],
    tensors_of: Callable[[SharedStep], list[Tensor]],
    operation: str,
) -> None:
    """Reduces the tensors of all steps over their processes, in one collective for each group."""
    by_group: dict[ProcessGroup, list[Tensor]] = {}
    for step in steps:
        if step.process_group is not None and not step.is_skipped:
            by_group.setdefault(step.process_group, []).extend(tensors_of(step))
    import torch.distributed as dist

    reduce = getattr(dist.ReduceOp, operation)
    for group, tensors in by_group.items():
        if len(tensors) == 1:
            dist.all_reduce(tensors[0], reduce, group)
        elif tensors:
            wide = torch.float32 if tensors[0].is_floating_point() else torch.int64
            together = torch.cat([tensor.flatten().to(wide) for tensor in tensors])
            dist.all_reduce(together, reduce, group)
            parts = together.split([tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
