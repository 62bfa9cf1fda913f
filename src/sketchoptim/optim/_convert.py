"""Conversion of an optimizer of torch.optim to one of ours, and back, in the middle of a run."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from .._names import keys_of, named_parameters
from .._rows import of_gradient, row_chunks
from .._sketch import LARGEST_VALUE
from ..deferred import is_row_sparse
from ..moments import Moment, Name
from ..storage import Memory
from ._adam import Adam, AdamW
from ._algorithm import EXACT, Group
from ._binding import fresh_state, live_moments
from ._catalogue import OPTIMIZERS
from ._checks import TORCH_FLAGS
from ._schedulers import checked_schedulers, hand_over_
from ._state import State
from .base import Optimizer

# By kind of torch.optim: ours, and torch's keys of the moments.
_KINDS: dict[type[torch.optim.Optimizer], tuple[type[Optimizer], dict[Name, str]]] = {
    theirs: (ours, keys)
    for ours in OPTIMIZERS.values()
    for theirs, keys in ours.torch_twins.items()
}
_TAKE_NO_SPARSE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop)
_OUR_OPTIONS = {"memory", "compress", "nonfinite", "rounding"}


@torch.no_grad()
def from_torch(
    optimizer: torch.optim.Optimizer,
    memory: str | Memory = "lean",
    *,
    tables: Iterable[Tensor | str] = (),
    schedulers: Sequence[LRScheduler] | None = None,
) -> Optimizer:
    """Our optimizer in place of a live one of torch.optim, with its state carried over.

    Adam, AdamW, SparseAdam, Adagrad, RMSprop and SGD become `Adam`, `AdamW`, `Adam`, `Adagrad`,
    `RMSprop` and `SGD`: the same groups with all their options, the same step counts, and the
    moments as `memory` keeps them. Parameters whose gradients are sparse are compressed, those in
    `tables` too; all others stay exact to the bit. The given optimizer stays as it was and shares
    no state with ours, so drop it to free what it holds. Where anything is refused, nothing has
    changed.

    `amsgrad`, `centered`, `differentiable` and RMSprop's momentum are refused. SGD does not count
    its steps, so ours counts from 1. Hooks on the given optimizer stay with it.

    Args:
        optimizer: Of torch.optim, at any point of its run.
        memory: As in our optimizers, for tables.
        tables: Parameters, or their names, to compress although their gradients are dense.
            Adagrad's are named here too if there is no gradient, which would show which they are.
        schedulers: Those that steer the given optimizer; from now on they steer ours.

    >>> table = torch.nn.Embedding(10_000, 64, sparse=True)
    >>> exact = torch.optim.SparseAdam(table.parameters(), lr=0.01)
    >>> table(torch.tensor([1, 2])).sum().backward()
    >>> exact.step()
    >>> lean = from_torch(exact)
    >>> lean.state[table.weight]["step"].item(), lean.state[table.weight]["second_counters"].numel()
    (1.0, 1248)
    """
    kind, keys = _kind_of(optimizer)
    moved = checked_schedulers(optimizer, schedulers)
    named_tables = _checked_members("tables", tables, optimizer)
    groups = [_our_group(number, group) for number, group in enumerate(optimizer.param_groups)]
    ours = kind(groups, memory=memory)
    for name in ours.defaults.keys() & optimizer.defaults.keys():
        ours.defaults[name] = optimizer.defaults[name]
    keys_of_ours = keys_of(ours)
    for group in ours.param_groups:
        for parameter in group["params"]:
            theirs = optimizer.state.get(parameter, {})
            step = _steps_done(theirs, keys)
            if step == 0 and parameter not in named_tables:
                continue  # what it is, is settled by its first gradient
            is_table = parameter in named_tables or _is_table(optimizer, parameter, theirs, group)
            in_force = group["memory"] if is_table else EXACT
            ours.state[parameter] = fresh_state(
                ours, parameter, group, in_force, keys_of_ours[parameter]
            )
            ours.state[parameter]["step"].fill_(step)
            for moment in live_moments(ours, parameter, group):
                if moment is not None and theirs.get(keys[moment.name]) is not None:
                    _load_(moment, theirs[keys[moment.name]], ours.fill(group))
    hand_over_(moved, optimizer, ours)
    return ours


@torch.no_grad()
def to_torch(
    optimizer: Optimizer,
    kind: type[torch.optim.Optimizer] | None = None,
    *,
    parameters: Iterable[Tensor | str] | None = None,
    schedulers: Sequence[LRScheduler] | None = None,
) -> torch.optim.Optimizer:
    """An optimizer of torch.optim in place of one of ours, with exact state from the estimates.

    One number for a row stands for every element of it, and a dropped first moment starts from
    zero. With ``memory="exact"`` the way there and back changes no bit. Ours stays as it was and
    shares no state with the new one; where anything is refused, nothing has changed.

    torch.optim has no Adam for sparse and dense gradients together. Divide one of ours that has
    both::

        tables = so.to_torch(optimizer, torch.optim.SparseAdam, parameters=[embedding.weight])
        body = so.to_torch(optimizer, parameters=body.parameters())

    Args:
        optimizer: One of ours.
        kind: Of torch.optim; by default that of the same name. `Adam` may become SparseAdam.
        parameters: Of the optimizer, those to take over, or their names; all by default.
        schedulers: Those that steer the given optimizer; from now on they steer the new one.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be one of sketchoptim's, got {type(optimizer).__name__}")
    kind = _checked_kind(optimizer, kind)
    moved = checked_schedulers(optimizer, schedulers)
    wanted = [p for _, p, _ in named_parameters(optimizer)] if parameters is None else parameters
    taken = _checked_members("parameters", wanted, optimizer)
    groups = [
        _their_group(number, group, kind, taken)
        for number, group in enumerate(optimizer.param_groups)
        if not taken.isdisjoint(group["params"])
    ]
    build: Any = kind  # whose constructors, unlike that of their base, need no defaults
    theirs: torch.optim.Optimizer = build(groups)
    for name in theirs.defaults.keys() & optimizer.defaults.keys():
        theirs.defaults[name] = optimizer.defaults[name]
    keys = _KINDS[kind][1]
    for group in optimizer.param_groups:
        for parameter in taken.intersection(group["params"]):
            if optimizer.state.get(parameter):
                theirs.state[parameter] = _exact_state(optimizer, parameter, group, kind, keys)
    hand_over_(moved, optimizer, theirs)
    return theirs


# -- checks, before anything is made or changed ---------------------------------------------------


def _kind_of(optimizer: torch.optim.Optimizer) -> tuple[type[Optimizer], dict[Name, str]]:
    if type(optimizer) not in _KINDS:
        allowed = ", ".join(kind.__name__ for kind in _KINDS)
        raise TypeError(
            f"optimizer must be one of torch.optim's {allowed}, got {type(optimizer).__name__}"
        )
    kind, keys = _KINDS[type(optimizer)]
    # As torch.optim has it: the option decides, whichever of the two classes was used.
    if kind is Adam and optimizer.param_groups[0].get("decoupled_weight_decay"):
        kind = AdamW
    return kind, keys


def _checked_kind(
    optimizer: Optimizer, kind: type[torch.optim.Optimizer] | None
) -> type[torch.optim.Optimizer]:
    allowed = [theirs for theirs, (ours, _) in _KINDS.items() if ours is type(optimizer)]
    if not allowed:
        raise TypeError(f"{type(optimizer).__name__} has no counterpart in torch.optim")
    kind = allowed[0] if kind is None else kind
    if kind not in allowed:
        names = " or ".join(f"torch.optim.{one.__name__}" for one in allowed)
        raise ValueError(f"kind must be {names} for {type(optimizer).__name__}, got {kind!r}")
    return kind


def _checked_members(
    option: str, given: Iterable[Tensor | str], optimizer: torch.optim.Optimizer
) -> set[Tensor]:
    everything = {p: name for name, p, _ in named_parameters(optimizer)}
    by_name = {name: p for p, name in everything.items()}
    members = set()
    for one in [given] if isinstance(given, str | Tensor) else given:
        parameter = by_name.get(one) if isinstance(one, str) else one
        if parameter is None or parameter not in everything:
            shown = f"a tensor of shape {list(one.shape)}" if isinstance(one, Tensor) else repr(one)
            raise ValueError(
                f"{option} must be parameters of the optimizer, or their names, got {shown}, which "
                "is none of them"
            )
        members.add(parameter)
    return members


def _our_group(number: int, group: Group) -> Group:
    """The group with the options that ours has, and any that a scheduler or a user added."""
    for flag, remedy in TORCH_FLAGS.items():
        if remedy and group.get(flag):
            raise ValueError(
                f"{flag} must be False in group {number}, got {group[flag]}: "
                f"no optimizer of sketchoptim has it; {remedy}"
            )
    if "alpha" in group and group["momentum"]:
        raise ValueError(
            f"momentum must be 0 in group {number}, got {group['momentum']}: "
            "RMSprop has none here; see Adam"
        )
    return _without(set(), group, group["params"])


def _their_group(
    number: int, group: Group, kind: type[torch.optim.Optimizer], taken: set[Tensor]
) -> Group:
    dropped = set(_OUR_OPTIONS)
    for parameter in taken.intersection(group["params"]):
        if kind in _TAKE_NO_SPARSE and parameter.grad is not None and is_row_sparse(parameter.grad):
            raise ValueError(
                f"torch.optim.{kind.__name__} takes no sparse gradients, but the parameter of "
                f"shape {list(parameter.shape)} has one; see kind= and parameters="
            )
    if kind is torch.optim.SparseAdam:
        if group["weight_decay"]:
            raise ValueError(
                f"weight_decay must be 0 in group {number}, got {group['weight_decay']}: "
                "torch.optim.SparseAdam has none"
            )
        dropped |= {"weight_decay", "decoupled_weight_decay", *TORCH_FLAGS}
    return _without(dropped, group, [p for p in group["params"] if p in taken])


def _without(dropped: set[str], group: Group, parameters: list[Tensor]) -> Group:
    """A copy of the group without some options; names, if any, go with their parameters."""
    kept = {key: it for key, it in group.items() if key not in dropped | {"params", "param_names"}}
    if "param_names" not in group:
        return {**kept, "params": parameters}
    names = dict(zip(group["params"], group["param_names"], strict=True))
    return {**kept, "params": [(names[parameter], parameter) for parameter in parameters]}


# -- state ----------------------------------------------------------------------------------------


def _steps_done(theirs: State, keys: dict[Name, str]) -> int:
    if "step" in theirs:
        return int(theirs["step"])
    # SGD does not count; a buffer shows that the first step, which does not dampen, is done.
    return int(any(theirs.get(key) is not None for key in keys.values()))


def _is_table(
    optimizer: torch.optim.Optimizer, parameter: Tensor, theirs: State, group: Group
) -> bool:
    """Whether the parameter gets sparse gradients."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        return True
    if isinstance(optimizer, _TAKE_NO_SPARSE) or group["memory"] == EXACT:
        return False
    if parameter.grad is not None:
        return is_row_sparse(parameter.grad)
    if isinstance(optimizer, torch.optim.SGD):
        return bool(theirs["momentum_buffer"].is_sparse)
    raise ValueError(
        f"the parameter of shape {list(parameter.shape)} must have a gradient to tell whether its "
        "gradients are sparse, got None: convert between backward() and zero_grad(), "
        "or name every such parameter in tables="
    )


def _load_(moment: Moment, values: Tensor, start: float) -> None:
    rows = of_gradient(values)
    if not moment.is_exact:
        least = 0.0 if moment.name == "second" else -LARGEST_VALUE
        for chunk in rows.chunks():
            if not chunk.gradient.numel():
                continue
            low, high = torch.aminmax(chunk.gradient)
            if not (low >= least and high <= LARGEST_VALUE):  # as a NaN is not
                raise ValueError(
                    f"the {moment.name} moment of the parameter of shape {list(values.shape)} must "
                    f"be between {least:.2g} and {LARGEST_VALUE:.2g}, got {low:.2g} to {high:.2g}"
                )
    moment.load_(rows, start=start)


def _exact_state(
    optimizer: Optimizer,
    parameter: Tensor,
    group: Group,
    kind: type[torch.optim.Optimizer],
    keys: dict[Name, str],
) -> State:
    step = optimizer.state[parameter]["step"]
    state: State = {}
    if kind is torch.optim.SparseAdam:
        state["step"] = int(step)
    elif kind is not torch.optim.SGD:
        state["step"] = step.float()
    kept = {it.name: it for it in live_moments(optimizer, parameter, group) if it is not None}
    for name, key in keys.items():
        if name not in kept and kind is torch.optim.SGD:
            continue  # without a buffer the next step starts one
        state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if name in kept:
            for part, ids in row_chunks(parameter):
                rows = kept[name].estimate(ids).expand(-1, parameter.shape[1:].numel())
                state[key][part] = rows.reshape(state[key][part].shape).to(parameter.dtype)
    return state
