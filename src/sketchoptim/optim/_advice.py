"""Warnings about the way parameters are stepped, each with its remedy."""

from collections.abc import Iterator

from torch import Tensor

from .._group_options import MIN_TABLE_ROWS
from .._names import keyed_parameters, name_of
from .._warning import warn
from ..deferred import is_row_sparse
from ._algorithm import EXACT, Algorithm, Group
from ._binding import Binding
from ._step import Step


def warn_(
    optimizer: Algorithm,
    steps: list[Step],
    fresh: list[Binding],
    said: set[tuple[int, str]],
) -> None:
    """Issues each warning about steps and new bindings once."""
    found = [
        (id(step.binding.parameter), kind, message)
        for step in steps
        if step.fallback_reason or step.binding.is_watched
        for kind, message in step_warnings(step)
    ]
    if fresh:
        groups = {parameter: group for _, parameter, group in keyed_parameters(optimizer)}
        found += [
            (0, kind, message)
            for kind, message in (
                ("exact tables", exact_tables_warning(optimizer, fresh, groups)),
                ("void option", void_option_warning(optimizer, fresh, groups)),
            )
            if message is not None
        ]
    for owner, kind, message in found:
        if (owner, kind) not in said:
            said.add((owner, kind))
            warn(message)


def step_warnings(step: Step) -> Iterator[tuple[str, str]]:
    """What is wrong with the way the parameter is stepped, each with a key."""
    binding = step.binding
    owner = f"the parameter of shape {list(binding.parameter.shape)}"
    if step.fallback_reason:
        yield (
            "fallback",
            f"{owner} is stepped by the reference kernels, which are many times slower: "
            f"{step.fallback_reason}",
        )
    first, average = binding.moments.first, step.rule.first
    overload = first and average and first.overload(step.touched, average.decay)
    if overload:
        yield "overload", f"{owner} has {overload}"
    if binding.storages and binding.memory != binding.group_memory:
        yield (
            "exact",
            f"{owner} has a sparse gradient, but is kept exactly, because its first gradient "
            "was dense. Put it into a group that names its memory to compress it from the "
            "beginning",
        )


def void_option_warning(
    optimizer: Algorithm, bindings: list[Binding], groups: dict[Tensor, Group]
) -> str | None:
    """A warning about an option that compressed parameters make no use of, or None."""
    messages = (
        optimizer.void_option(groups[it.parameter], it.memory)
        for it in bindings
        if it.memory is not EXACT
    )
    return next((message for message in messages if message is not None), None)


def exact_tables_warning(
    optimizer: Algorithm, bindings: list[Binding], groups: dict[Tensor, Group]
) -> str | None:
    """A warning about large tables that are exact because their gradients are dense, or None.

    There is none if a group, or the optimizer itself, was asked to be exact, or if shapes decide.
    """
    found = [
        it
        for it in bindings
        if it.memory is EXACT
        and it.group_memory != EXACT
        and groups[it.parameter].get("compress") != "tables"
        and it.storages
        and not is_row_sparse(it.gradient)
        and it.parameter.dim() > 1
        and it.parameter.shape[0] >= MIN_TABLE_ROWS
    ]
    if not found:
        return None
    verb = "has" if len(found) == 1 else "have"
    names = ", ".join(
        f"{name_of(it.parameter, optimizer)} {list(it.parameter.shape)}" for it in found[:3]
    )
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    state_bytes = sum(len(it.storages) * it.parameter.nbytes for it in found)
    kind = type(optimizer).__name__
    return (
        f"{names}{more} {verb} at least {MIN_TABLE_ROWS:,} rows and a dense gradient: exact state "
        f"of {state_bytes:,} bytes. To compress embeddings and output heads, use "
        f'so.{kind}(so.param_groups(model), ...), or compress="tables" if the optimizer is built '
        "from parameters without their model. To keep all exact, pass "
        f'so.{kind}(..., memory="exact")'
    )
