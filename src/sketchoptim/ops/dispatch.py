"""Who does a step: the native kernel where there is one, else the reference."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from ..moments import Moment, Name
from ..storage import Storage
from . import cpu
from .reference import ReferenceStep
from .rule import Rule


class Step(Protocol):
    """A step that has been looked at and can be done; until `run_`, nothing has changed."""

    touched: int
    """How many rows it moves."""

    def is_finite(self) -> bool:
        """Whether every gradient that would reach the moments is finite, and its square is too."""

    def run_(self, first: Moment | None, second: Moment | None) -> None:
        """Moves the moments and the touched rows of the parameter."""


def prepare(
    parameter: Tensor, gradient: Tensor, storages: Mapping[Name, Storage], rule: Rule
) -> Step:
    """The step for a parameter whose moments live in `storages`, by the fastest backend."""
    if cpu.supports(parameter, gradient, storages):
        return cpu.NativeStep(parameter, gradient, storages, rule)
    return ReferenceStep(parameter, gradient, rule)
