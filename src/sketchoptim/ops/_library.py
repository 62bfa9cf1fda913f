"""The step as one operator that torch.compile carries through a graph without looking inside.

`torch.ops.sketchoptim.step_` takes what the optimizers take, in tensors and one string, so that a
compiled training step of one's own can hold it: the gradient as row ids and values, moments as the
tensors that `moments.create` made, the rule as a vector of numbers. `so.Adam` and the others do not
go through it: their step is not compiled, and calls the kernel directly.
"""

import json
import math
from typing import Any

import torch
from torch import Tensor

from ..moments import (
    Average,
    ExactMoment,
    Moment,
    Moments,
    Name,
    Parts,
    Table,
    create,
    open_moment,
)
from ..storage import Memory, Storage
from ._dispatch import stepper
from ._rule import Rule

_library = torch.library.Library("sketchoptim", "DEF")
_library.define(
    "step_(Tensor(a!) parameter, Tensor ids, Tensor values, Tensor(b!)[] first, "
    "Tensor(c!)[] second, Tensor rule, str memory) -> ()"
)

_NUMBERS = ("step_size", "second_root", "eps", "weight_decay", "shrink", "nesterov", "clip")
_FLAGS = ("maximize", "is_ratio")


def rule_to_tensor(rule: Rule) -> Tensor:
    """The rule as the vector that the operator takes; NaN stands for None."""
    averages = [
        number for average in (rule.first, rule.second) for number in average or (None,) * 2
    ]
    numbers = [*averages, *(getattr(rule, name) for name in (*_NUMBERS, *_FLAGS))]
    flat = [math.nan if number is None else float(number) for number in numbers]
    return torch.tensor(flat, dtype=torch.float64, device="cpu")


def rule_from_tensor(vector: Tensor) -> Rule:
    """The rule that `rule_to_tensor` made a vector of."""
    numbers = [None if math.isnan(number) else number for number in vector.tolist()]
    averages = [
        None if decay is None or weight is None else Average(decay, weight)
        for decay, weight in (numbers[0:2], numbers[2:4])
    ]
    named: dict[str, Any] = dict(zip((*_NUMBERS, *_FLAGS), numbers[4:], strict=True))
    flags = {name: bool(named.pop(name)) for name in _FLAGS}
    return Rule(first=averages[0], second=averages[1], **named, **flags)


def _step_(
    parameter: Tensor,
    ids: Tensor,
    values: Tensor,
    first: list[Tensor],
    second: list[Tensor],
    rule: Tensor,
    memory: str,
) -> None:
    choice = Memory.from_dict(json.loads(memory))
    opened: dict[Name, Moment] = {}
    given: dict[Name, list[Tensor]] = {"first": first, "second": second}
    for name, tensors in given.items():
        storage = getattr(choice, name)
        if storage is not None and tensors:
            opened[name] = open_moment(storage, name, _named(name, storage, tensors))
    gradient = torch.sparse_coo_tensor(
        ids.long().unsqueeze(0), values, parameter.shape, check_invariants=False
    )
    moments = Moments(opened.get("first"), opened.get("second"))
    step = stepper(parameter, gradient, moments).prepare(gradient, rule_from_tensor(rule))
    is_exact = all(isinstance(moment, ExactMoment) for moment in opened.values())
    if not is_exact and not step.is_finite():  # as of the optimizers
        raise ValueError("values must be finite and their squares too; the step is refused")
    step.run_()


def _named(name: Name, storage: Storage, tensors: list[Tensor]) -> Parts:
    """The tensors by the names of their parts: they come as `moments.create` made them."""
    table = Table(torch.Size((1, 1)), torch.float32, torch.device("meta"), 0)
    for fill in (0.0, 1.0):  # with a fill, there may be one more
        parts = list(create(storage, table, fill=fill))
        if len(parts) == len(tensors):
            return dict(zip(parts, tensors, strict=True))
    raise ValueError(
        f"{name} must be the tensors {parts} of moments.create(), in this order, "
        f"got {len(tensors)} tensors"
    )


_library.impl("step_", _step_, "CompositeExplicitAutograd")
torch.library.register_fake("sketchoptim::step_", lambda *_: None, lib=_library)
