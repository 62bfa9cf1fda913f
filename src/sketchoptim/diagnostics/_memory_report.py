"""Bytes of state by parameter and moment, compared with those of exact storage."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .. import moments
from .._formatting import text_table
from .._names import named_parameters
from ..moments import Table
from ..optim._shards import local
from ..optim._state import parts_of
from ..optim.base import Optimizer
from ..storage import PRESETS


@dataclass(frozen=True)
class ParameterMemory:
    """What one parameter's state takes."""

    name: str
    shape: tuple[int, ...]
    parameter_bytes: int
    moment_bytes: dict[str, int]
    """By moment: "first", "second"; a dropped moment takes nothing."""
    exact_bytes: int
    """What the algorithm's moments would take in the parameter's shape and dtype; 0 if frozen."""

    @property
    def state_bytes(self) -> int:
        return sum(self.moment_bytes.values())


@dataclass(frozen=True)
class MemoryReport:
    """The state of all parameters of an optimizer; printing it gives a table."""

    parameters: tuple[ParameterMemory, ...]

    @property
    def state_bytes(self) -> int:
        return sum(parameter.state_bytes for parameter in self.parameters)

    @property
    def exact_bytes(self) -> int:
        return sum(parameter.exact_bytes for parameter in self.parameters)

    @property
    def ratio(self) -> float:
        """State over exact state; 1.0 where exact state is empty."""
        return self.state_bytes / self.exact_bytes if self.exact_bytes else 1.0

    def __str__(self) -> str:
        header = ("parameter", "shape", "first", "second", "state", "exact", "share")
        lines: list[tuple[str, ...]] = [header]
        for parameter in self.parameters:
            first, second = (parameter.moment_bytes.get(key, 0) for key in ("first", "second"))
            shape = " x ".join(f"{size:,}" for size in parameter.shape)
            sizes = (first, second, parameter.state_bytes, parameter.exact_bytes)
            share = parameter.state_bytes / parameter.exact_bytes if parameter.exact_bytes else 1.0
            lines.append((parameter.name, shape, *(f"{n:,}" for n in sizes), f"{share:.3%}"))
        totals = (f"{self.state_bytes:,}", f"{self.exact_bytes:,}", f"{self.ratio:.3%}")
        lines.append(("total", "", "", "", *totals))
        return text_table(lines, left=2)


def memory_report(optimizer: Optimizer | Iterable[Optimizer]) -> MemoryReport:
    """The bytes that the state of an optimizer takes now, or of several, by parameter and moment.

    A parameter gets its state with its first gradient; before that, its state takes no bytes. Where
    processes divide a parameter among them, its bytes are those of this process.
    """
    several = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    for one in several:
        if not isinstance(one, Optimizer):
            raise TypeError(f"optimizer must be one of sketchoptim's, got {type(one).__name__}")
    return MemoryReport(tuple(found for one in several for found in _parameters(one)))


def _parameters(optimizer: Optimizer) -> Iterator[ParameterMemory]:
    for name, parameter, group in named_parameters(optimizer):
        state, held = optimizer.state.get(parameter, {}), local(parameter)
        moment_bytes: dict[str, int] = {
            moment: sum(tensor.nbytes for tensor in parts_of(state, moment).values())
            for moment in optimizer.moment_names
        }
        exact_bytes = 0
        if state or parameter.requires_grad:
            table = Table(held.shape, held.dtype, held.device)
            exact = optimizer.storages(group, PRESETS["exact"])
            exact_bytes = sum(
                part.nbytes(table.dtype)
                for moment, storage in exact.items()
                for part in moments.declare(storage, moment, table)
            )
        yield ParameterMemory(
            name=name,
            shape=tuple(parameter.shape),
            parameter_bytes=held.nbytes,
            moment_bytes=moment_bytes,
            exact_bytes=exact_bytes,
        )
