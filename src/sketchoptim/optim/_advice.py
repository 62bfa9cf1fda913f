"""Warnings about the way parameters are stepped; each says what to do."""

from collections.abc import Iterator

from .._names import name_of
from .._warning import warn
from ..deferred import is_row_sparse
from ._algorithm import EXACT, Algorithm
from ._binding import Binding
from ._step import Step

# Tables with fewer rows are not worth compressing.
MIN_TABLE_ROWS = 1000


def warn_(
    optimizer: Algorithm,
    steps: list[Step],
    fresh: list[Binding],
    said: set[tuple[int, str]],
) -> None:
    """Says what there is to say of steps and of new bindings, unless it was said before."""
    found = [
        (id(step.binding.parameter), kind, message)
        for step in steps
        if step.fallback_reason or step.binding.is_watched
        for kind, message in step_warnings(step)
    ]
    exact_tables = exact_tables_warning(optimizer, fresh) if fresh else None
    if exact_tables is not None:
        found.append((0, "exact tables", exact_tables))
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


def exact_tables_warning(optimizer: Algorithm, bindings: list[Binding]) -> str | None:
    """What to tell of large tables that are exact because their gradients are dense, or None.

    Not where a group, or the optimizer itself, was asked to be exact.
    """
    found = [
        it
        for it in bindings
        if it.memory is EXACT
        and it.group_memory != EXACT
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
        f"so.{kind}(so.param_groups(model), ...). To keep all exact, say so: "
        f'so.{kind}(..., memory="exact")'
    )
