"""One parameter of an optimizer: its state, opened, and its steps."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import moments, ops
from ..moments import Moments, Name
from ..ops import Rule
from ..storage import Exact, Memory, Storage

State = dict[str, Any]


class Slot:
    """What a parameter's steps share, kept between them while what it rests on stays in place."""

    def __init__(
        self, parameter: Tensor, memory: Memory, storages: dict[Name, Storage], state: State
    ) -> None:
        self.parameter, self.memory, self.storages = parameter, memory, storages
        self.state = state
        self.opened = {
            name: moments.open_moment(storage, name, parts(state, name))
            for name, storage in storages.items()
        }
        # A compressed moment would carry a NaN on to other rows, so it must never see one.
        self.is_exact = all(isinstance(storage, Exact) for storage in storages.values())
        self.count: Any = state["step"].numpy()  # the same memory
        self.layout = parameter.shape, parameter.dtype
        tensors = {key: it for key, it in state.items() if isinstance(it, Tensor)}
        self.places = [(key, it, _place(it)) for key, it in tensors.items()]
        self.place = _place(parameter)
        self.stepper: ops.Stepper | None = None

    def is_current(self, memory: Memory, storages: dict[Name, Storage], state: State) -> bool:
        """Whether parameter, state and memory are those of the step before, where they were."""
        return (
            memory is self.memory
            and storages == self.storages
            and state is self.state
            and _place(self.parameter) == self.place
            and self.layout == (self.parameter.shape, self.parameter.dtype)
            and all(state.get(key) is it and _place(it) == at for key, it, at in self.places)
        )

    def prepare(self, rule: Rule) -> ops.Step:
        """The next step of the parameter, checked."""
        gradient = self.parameter.grad
        assert gradient is not None
        if self.stepper is None or not self.stepper.takes(gradient):
            opened = Moments(self.opened.get("first"), self.opened.get("second"))
            self.stepper = ops.stepper(self.parameter, gradient, opened)
        return self.stepper.prepare(gradient, rule)


class Work(NamedTuple):
    """One parameter's step, checked and ready to be done."""

    slot: Slot
    rule: Rule
    step: ops.Step
    number: int
    is_skipped: bool

    def run_(self) -> None:
        """Moves the parameter and its moments, or counts a step that is skipped."""
        slot, state = self.slot, self.slot.state
        if self.is_skipped:
            state["skipped"] = state.get("skipped", 0) + 1
            return
        slot.count += 1
        if slot.parameter.numel():
            self.step.run_()
        for name, moment in slot.opened.items():
            moment.maintain_(self.number)
            state |= {f"{name}_{part}": tensor for part, tensor in moment.tensors.items()}


def parts(state: State, name: Name) -> dict[str, Tensor]:
    """The tensors of one moment, by the name of their part."""
    prefix = f"{name}_"
    return {key.removeprefix(prefix): it for key, it in state.items() if key.startswith(prefix)}


def _place(tensor: Tensor) -> int:
    """Where the tensor's numbers are in memory; 0 where it has none of its own."""
    return tensor.data_ptr() if type(tensor) in (Tensor, torch.nn.Parameter) else 0
