"""Who steps a parameter: the native kernel where there is one, else the reference."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor

from .._warning import warn
from ..moments import Moments
from . import cpu
from ._rule import Rule
from .reference import ReferenceStepper


class Step(Protocol):
    """A step that has been looked at and can be done; until `run_`, nothing has changed."""

    touched: int
    """How many rows it moves."""

    def is_finite(self) -> bool:
        """Whether every gradient that would reach the moments is finite, and its square is too."""

    def run_(self) -> None:
        """Moves the moments and the touched rows of the parameter."""


class Stepper(Protocol):
    """All that the steps of one parameter share, kept from step to step.

    It holds for the tensors that it was made with, as long as they stay where they are in memory.
    """

    def takes(self, gradient: Tensor) -> bool:
        """Whether it is the one to ask for a step along such a gradient."""

    def prepare(self, gradient: Tensor, rule: Rule) -> Step:
        """The next step, checked; one at a time."""


_is_reference_only = ContextVar("is_reference_only", default=False)


@contextmanager
def reference_only() -> Iterator[None]:
    """Steppers made within are the reference, as where no library was built."""
    token = _is_reference_only.set(True)
    try:
        yield
    finally:
        _is_reference_only.reset(token)


def stepper(
    parameter: Tensor, gradient: Tensor, moments: Moments, *, warns: bool = True
) -> Stepper:
    """The fastest stepper for a parameter with these moments and a gradient of this kind.

    Where something keeps the kernels from it that a user can mend, it warns and says what.
    """
    if not _is_reference_only.get() and cpu.has_kernels(parameter, moments):
        obstacle = cpu.obstacle(parameter, gradient, moments)
        if obstacle is None:
            return cpu.NativeStepper(parameter, moments)
        if warns:
            warn(
                f"the parameter of shape {list(parameter.shape)} is stepped by the reference "
                f"kernels, which are many times slower: {obstacle}"
            )
    return ReferenceStepper(parameter, moments)
