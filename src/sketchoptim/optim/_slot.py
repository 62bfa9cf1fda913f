"""One parameter of an optimizer: its state, opened, and its steps."""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import moments, ops
from ..moments import Moments, Name, Parts
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
        # The memory of the tensor, since torch and NumPy take long to get at it.
        self.count = ctypes.c_float.from_address(state["step"].data_ptr())
        self.began_after: int = state.get("began_after", 0)  # so many steps without the moments
        self.shape, self.dtype, self.device = parameter.shape, parameter.dtype, parameter.device
        self.place, self.is_contiguous = _place(parameter), parameter.is_contiguous()
        self.is_empty = parameter.numel() == 0
        tensors = {key: it for key, it in state.items() if isinstance(it, Tensor)}
        self.places = [(key, it, _place(it)) for key, it in tensors.items()]
        self.stepper: ops.Stepper | None = None
        # What was made of its group when that was last looked at.
        self.options: object = None
        self.group_memory: Memory | None = None
        self.is_for_torch = self.is_as_meant = False
        self.is_warned = False  # of the reference
        self.is_new = True

    def keeps(self, memory: Memory, storages: dict[Name, Storage]) -> bool:
        """Whether it keeps its moments in this way."""
        return memory is self.memory and storages == self.storages

    def is_in_place(self, state: State | None) -> bool:
        """Whether parameter and state are those of the step before, where they were."""
        parameter = self.parameter
        if (
            state is not self.state
            or parameter.dtype is not self.dtype
            or parameter.shape != self.shape
            or parameter.is_contiguous() != self.is_contiguous
            or (self.place and parameter.data_ptr() != self.place)
        ):
            return False
        for key, tensor, place in self.places:
            if state.get(key) is not tensor or (place and tensor.data_ptr() != place):
                return False
        return True

    def prepare(self, gradient: Tensor, rule: Rule) -> ops.Step:
        """The next step of the parameter, along its gradient, checked."""
        if self.stepper is None or not self.stepper.takes(gradient):
            opened = Moments(self.opened.get("first"), self.opened.get("second"))
            self.stepper = ops.stepper(self.parameter, gradient, opened, warns=not self.is_warned)
            self.is_warned |= not self.stepper.takes(gradient)
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
        slot.count.value = self.number
        if not slot.is_empty:
            self.step.run_()
        for name, moment in slot.opened.items():
            if moment.maintain_(self.number):
                state |= {f"{name}_{part}": tensor for part, tensor in moment.tensors.items()}


def parts(state: State, name: Name) -> Parts:
    """The tensors of one moment, by the name of their part."""
    prefix = f"{name}_"
    return {key.removeprefix(prefix): it for key, it in state.items() if key.startswith(prefix)}


def _place(tensor: Tensor) -> int:
    """Where the tensor's numbers are in memory; 0 where it has none of its own."""
    return tensor.data_ptr() if type(tensor) in (Tensor, torch.nn.Parameter) else 0
