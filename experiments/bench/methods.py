"""What is compared: our optimizers, torch's, FBGEMM's, and a sketch in plain torch operations.

All of them update the same parameter, each with its own state, so that a table of a gigabyte
exists once. A step is all between the gradient and the updated parameter, Python included.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, assert_never

import torch
from torch import Tensor, nn

import sketchoptim as so
from sketchoptim import Exact, Memory, Sketched, moments
from sketchoptim.moments import Name, Part, Table
from sketchoptim.ops import reference_only
from sketchoptim.storage import PRESETS, Decay, Storage

from . import fbgemm
from .gradients import Batch

BASELINE = "sparse-adam"
RATE = 1e-4  # small, so that thousands of random steps hardly change the weights


class Stepper(Protocol):
    """One rival on one table."""

    def prepare(self, batch: Batch) -> None:
        """Prepares the step; not timed."""

    def step(self) -> None:
        """Takes the step; timed."""

    def state_bytes(self) -> int:
        """Bytes of state, after a step."""


class OptimizerStepper:
    """Any torch.optim.Optimizer: ``optimizer.step()`` with the gradient in place."""

    def __init__(self, parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        self.parameter, self.optimizer = parameter, optimizer

    def prepare(self, batch: Batch) -> None:
        self.parameter.grad = batch.gradient

    def step(self) -> None:
        self.optimizer.step()

    def state_bytes(self) -> int:
        state = self.optimizer.state[self.parameter]
        return sum(value.nbytes for value in state.values() if isinstance(value, Tensor))


class TorchOperations(OptimizerStepper):
    """Our optimizer on its reference kernels, which are torch operations."""

    def step(self) -> None:
        with reference_only():
            self.optimizer.step()


class RowAddition:
    """The bandwidth of rows: adds a coalesced gradient to its rows with torch's own loop.

    One pass that reads the gradient and reads and writes the rows, as every optimizer must.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.table, self.gradient = parameter.detach(), torch.empty(0)

    def prepare(self, batch: Batch) -> None:
        self.gradient = batch.distinct

    def step(self) -> None:
        self.table.add_(self.gradient, alpha=-RATE)

    def state_bytes(self) -> int:
        return 0


MakeOptimizer = Callable[[list[nn.Parameter], Memory], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A method to compare: how to build it, and its memory, from which its traffic follows."""

    name: str
    title: str
    memory: Memory
    build: Callable[[nn.Parameter, Memory], Stepper]
    optimizer: MakeOptimizer | None = None
    """Its optimizer over any number of tables, where it has one."""
    memory_of_depth: Callable[[int], Memory] | None = None
    """Its memory with sketches of any depth; None where it has no sketches."""

    def with_depth(self, depth: int) -> "Rival":
        """The same with sketches of another depth."""
        if self.memory_of_depth is None:
            return self
        return dataclasses.replace(self, memory=self.memory_of_depth(depth))

    def ideal_bytes(self, *, rows: int, dim: int, entries: int, touched: int) -> float:
        """The least bytes that a step moves, from cold caches, with float32 weights.

        Each entry of the gradient and its id is read once; each touched row of the parameter and
        all state of these rows is read once and written once.
        """
        gradient = entries * (4 * dim + 8)
        parameter = 2 * 4 * touched * dim
        table = Table(torch.Size((rows, dim)), torch.float32, torch.device("cpu"))
        state = 0.0
        storages: dict[Name, Storage | None] = {
            "first": self.memory.first,
            "second": self.memory.second,
        }
        for name, storage in storages.items():
            if storage is not None:
                parts = moments.declare(storage, name, table)
                state += sum(2 * _touched_bytes(part, table, touched) for part in parts)
        return gradient + parameter + state


def _touched_bytes(part: Part, table: Table, touched: int) -> float:
    """Distinct bytes of a part that belong to `touched` rows; the expected number in a sketch."""
    if part.is_bookkeeping:  # hash words and a scale, which stay in the cache
        return 0.0
    size = float(part.nbytes(table.dtype))
    match part.by:
        case "row":
            return size * touched / table.rows
        case "bucket":
            _, width, _ = part.shape
            return size * (1 - (1 - 1 / width) ** touched)
        case "whole":
            return size
        case _:
            assert_never(part.by)


def _by_optimizer(
    name: str,
    title: str,
    memory: Memory,
    optimizer: MakeOptimizer,
    of_depth: Callable[[int], Memory] | None = None,
) -> Rival:
    return Rival(
        name=name,
        title=title,
        memory=memory,
        build=lambda p, memory: OptimizerStepper(p, optimizer([p], memory)),
        optimizer=optimizer,
        memory_of_depth=of_depth,
    )


def _ours(
    name: str,
    title: str,
    memory: Memory,
    of_depth: Callable[[int], Memory] | None = None,
    **options: Any,
) -> Rival:
    def adam(parameters: list[nn.Parameter], memory: Memory) -> torch.optim.Optimizer:
        return so.Adam(parameters, lr=RATE, memory=memory, **options)

    return _by_optimizer(name, f"so.Adam, {title}", memory, adam, of_depth)


def _torch_operations(parameter: nn.Parameter, memory: Memory) -> Stepper:
    return TorchOperations(parameter, so.Adam([parameter], lr=RATE, memory=memory))


def _lean(depth: int) -> Memory:
    return Memory(second=Sketched(ratio=0.125, depth=depth, conservative=True))


def _fifth(
    depth: int = 3, *, decay: Decay = "paper", dtype: torch.dtype = torch.float32
) -> Sketched:
    """A sketch by element with a fifth of the moment's numbers, as the paper's are."""
    return Sketched(granularity="element", ratio=0.2, depth=depth, decay=decay, dtype=dtype)


def _paper_v_only(depth: int) -> Memory:
    return Memory(second=_fifth(depth))


def _linear_v(depth: int) -> Memory:
    return Memory(second=_fifth(depth, decay="linear"))


_PAPER_MV_BF16 = Memory(first=_fifth(dtype=torch.bfloat16), second=_fifth(dtype=torch.bfloat16))
_LINEAR_MV = Memory(first=_fifth(decay="linear"), second=_fifth(decay="linear"))

RIVALS = (
    _by_optimizer(
        BASELINE,
        "torch SparseAdam",
        PRESETS["exact"],
        lambda tables, _: torch.optim.SparseAdam(tables, lr=RATE),
    ),
    _by_optimizer(
        "sparse-adagrad",
        "torch sparse Adagrad",
        Memory(second=Exact()),
        lambda tables, _: torch.optim.Adagrad(tables, lr=RATE),
    ),
    _by_optimizer(
        "sparse-sgd",
        "torch sparse SGD, stateless",
        Memory(),
        lambda tables, _: torch.optim.SGD(tables, lr=RATE),
    ),
    Rival(
        name="fbgemm",
        title="FBGEMM row-wise Adagrad",
        memory=PRESETS["row-wise"],
        build=lambda p, _: fbgemm.FbgemmStepper(p, lr=RATE),
    ),
    Rival(
        name="torch-ops-lean",
        title="torch operations, lean",
        memory=PRESETS["lean"],
        build=_torch_operations,
    ),
    Rival(
        name="torch-ops-mv",
        title="torch operations, linear MV",
        memory=_LINEAR_MV,
        build=_torch_operations,
    ),
    _by_optimizer(
        "sgd",
        "so.SGD, stateless",
        Memory(),
        lambda tables, _: so.SGD(tables, lr=RATE, momentum=0.0),
    ),
    _ours("lean", "lean", PRESETS["lean"], _lean),
    _ours("lean-unchecked", "lean, unchecked", PRESETS["lean"], nonfinite="unchecked"),
    _ours("row-wise", "row-wise", PRESETS["row-wise"]),
    _ours("exact", "exact", PRESETS["exact"]),
    _ours("paper-v-only", "paper V-only", PRESETS["paper-v-only"], _paper_v_only),
    _ours("paper-mv", "paper MV", PRESETS["paper-mv"]),
    _ours("paper-mv-bf16", "paper MV, bfloat16", _PAPER_MV_BF16),
    _ours("linear-v", "linear V", _linear_v(3), _linear_v),
    _ours("linear-mv", "linear MV", _LINEAR_MV),
)
BY_NAME = {rival.name: rival for rival in RIVALS}
ROWS = Rival(
    name="rows",
    title="adding to rows",
    memory=Memory(),
    build=lambda p, _: RowAddition(p),
)


def select_rivals(names: Sequence[str] | None) -> tuple[Rival, ...]:
    """The rivals of these names and the baseline, in the order of the reports."""
    if names is None:
        return RIVALS
    return tuple(c for c in RIVALS if c.name in names or c.name == BASELINE)


def absence_reasons(rivals: tuple[Rival, ...]) -> dict[str, str]:
    """By name, why rivals cannot be measured here."""
    is_asked_for = any(rival.name == "fbgemm" for rival in rivals)
    reason = fbgemm.absence_reason() if is_asked_for else None
    return {} if reason is None else {"fbgemm": reason}
