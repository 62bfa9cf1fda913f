"""Bytes of state by parameter and moment, compared with those of exact storage."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .. import moments
from .._formatting import text_table
from .._group_options import compresses_dense, is_shaped_like_table
from .._names import keyed_parameters
from ..deferred import DeferredGradient, gradient_bytes
from ..moments import Table
from ..optim._shards import local, table_of
from ..optim._state import parts_of
from ..optim.base import Group, Optimizer
from ..storage import PRESETS, Memory


@dataclass(frozen=True)
class ParameterMemory:
    """The bytes of one parameter's state."""

    name: str
    shape: tuple[int, ...]
    parameter_bytes: int
    moment_bytes: dict[str, int]
    """Bytes of each moment, "first" and "second"; 0 for a dropped one."""
    exact_bytes: int
    """What the algorithm's moments would take in the parameter's shape and dtype; 0 if frozen."""

    @property
    def state_bytes(self) -> int:
        return sum(self.moment_bytes.values())


@dataclass(frozen=True)
class LiveParameterMemory(ParameterMemory):
    """The bytes of an optimizer's parameter, with those of its gradient."""

    gradient_bytes: int
    """Bytes of its gradient now; 0 without one."""
    is_deferred: bool
    """Whether its gradient is deferred."""
    is_by_shape: bool
    """Whether `compress="tables"` compresses it, because it is shaped like a table."""
    is_assumed: bool
    """Whether it has neither state nor a gradient, so that sparse gradients are assumed."""


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


@dataclass(frozen=True)
class LiveMemoryReport(MemoryReport):
    """The report of an optimizer, with notes about gradients."""

    parameters: tuple[LiveParameterMemory, ...]

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *self._notes()])

    def _notes(self) -> Iterator[str]:
        deferred = [it for it in self.parameters if it.is_deferred]
        if deferred:
            taken, plain = (
                sum(getattr(it, name) for it in deferred)
                for name in ("gradient_bytes", "parameter_bytes")
            )
            names = ", ".join(it.name for it in deferred)
            yield f"deferred gradients take {taken:,} bytes instead of {plain:,}: {names}"
        by_shape = [it.name for it in self.parameters if it.is_by_shape]
        assumed = [it.name for it in self.parameters if it.is_assumed]
        if by_shape:
            yield f'compress="tables" compresses by shape: {", ".join(by_shape)}'
        if assumed:
            yield f"sparse gradients assumed, dense ones make exact state: {', '.join(assumed)}"


def memory_report(optimizer: Optimizer | Iterable[Optimizer]) -> LiveMemoryReport:
    """The bytes that the state of an optimizer takes, or of several, by parameter and moment.

    For a parameter without state, the bytes are those that its first step will make, also on the
    meta device. Without a gradient, a parameter that is shaped like a table is taken for one with
    sparse gradients, which the report notes. If processes divide a parameter among them, its bytes
    are those of this process. The bytes of gradients are those of this moment.
    """
    several = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    for one in several:
        if not isinstance(one, Optimizer):
            raise TypeError(f"optimizer must be one of sketchoptim's, got {type(one).__name__}")
    return LiveMemoryReport(tuple(found for one in several for found in _parameters(one)))


def _parameters(optimizer: Optimizer) -> Iterator[LiveParameterMemory]:
    for key, parameter, group in keyed_parameters(optimizer):
        state = optimizer.state.get(parameter, {})
        table = table_of(parameter, key, state)
        is_trained = bool(state) or parameter.requires_grad
        is_table = is_shaped_like_table(table.shape) and not group["memory"].is_exact
        is_by_shape = is_table and group.get("compress") == "tables"
        is_assumed = is_table and not state and parameter.grad is None and is_trained
        is_assumed = is_assumed and not compresses_dense(group, parameter)
        moment_bytes: dict[str, int] = dict.fromkeys(optimizer.moment_names, 0)
        if state:
            for moment in optimizer.moment_names:
                moment_bytes[moment] = sum(it.nbytes for it in parts_of(state, moment).values())
        elif is_trained:
            memory = group["memory"] if is_assumed else optimizer.memory_in_force(parameter, group)
            moment_bytes |= _bytes(optimizer, group, memory, table)
        exact = _bytes(optimizer, group, PRESETS["exact"], table) if is_trained else {}
        yield LiveParameterMemory(
            name=key if isinstance(key, str) else f"parameter {key}",
            shape=tuple(parameter.shape),
            parameter_bytes=local(parameter).nbytes,
            moment_bytes=moment_bytes,
            exact_bytes=sum(exact.values()),
            gradient_bytes=gradient_bytes(parameter.grad),
            is_deferred=isinstance(parameter.grad, DeferredGradient),
            is_by_shape=is_by_shape,
            is_assumed=is_assumed,
        )


def _bytes(optimizer: Optimizer, group: Group, memory: Memory, table: Table) -> dict[str, int]:
    """The bytes of each moment in a memory, as this process would hold them."""
    return {
        moment: sum(
            math.prod(part.held_shape(table)) * (part.dtype or table.dtype).itemsize
            for part in moments.declare(storage, moment, table, optimizer.fill(group))
        )
        for moment, storage in optimizer.storages(group, memory).items()
    }
