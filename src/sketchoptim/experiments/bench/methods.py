"""Who is compared: our optimizers, torch's, FBGEMM's, and a sketch in plain torch operations.

All of them move the same parameter, each with state of its own, so that a table of a gigabyte is
there once. A step is what a user waits for between a gradient and the moved parameter, Python
included.
"""

import dataclasses
import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import sketchoptim as so

from ...ops import reference_only
from ...storage import PRESETS, Exact, Memory, RowWise, Sketched, Storage
from .gradients import Batch

BASELINE = "sparse-adam"
_RATE = 1e-4  # small, so that thousands of random steps leave the weights what they are


class Stepper(Protocol):
    """One rival on one table."""

    def prepare(self, batch: Batch) -> None:
        """Everything before the step that is not timed."""

    def step(self) -> None:
        """What is timed."""

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
    """Ours as it runs where no library was built: the reference, in torch operations."""

    def step(self) -> None:
        with reference_only():
            self.optimizer.step()


class FbgemmStepper:
    """FBGEMM's table-batched exact row-wise Adagrad, which moves rows inside its backward pass.

    The forward pass, a lookup of one row a bag, is not timed. What is timed is
    ``output.backward(gradient)``: grouping equal ids, the state, the rows, and the autograd
    engine's call, which together stand for the others' ``optimizer.step()``.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        training, configs, common = _fbgemm_modules()
        self.tables: Any = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(*parameter.shape, common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)],
            optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=_RATE,
            eps=1e-8,
            bounds_check_mode=common.BoundsCheckMode.NONE,
        )
        self.output = self.values = torch.empty(0)

    def prepare(self, batch: Batch) -> None:
        self.values = batch.values
        self.output = self.tables(batch.ids, torch.arange(batch.entries + 1))

    def step(self) -> None:
        self.output.backward(self.values)

    def state_bytes(self) -> int:
        return int(self.tables.momentum1_host.nbytes)


def _fbgemm_modules() -> tuple[Any, Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its imports warn of their own deprecations
        importlib.import_module("fbgemm_gpu")
        return (
            importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training"),
            importlib.import_module("fbgemm_gpu.split_embedding_configs"),
            importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common"),
        )


class RowAddition:
    """The yardstick: adds a coalesced gradient to its rows with torch's loop of vector additions.

    One pass that reads the gradient and reads and writes rows where they are: what no optimizer
    can do without.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.table, self.gradient = parameter.detach(), torch.empty(0)

    def prepare(self, batch: Batch) -> None:
        self.gradient = batch.distinct

    def step(self) -> None:
        self.table.add_(self.gradient, alpha=-_RATE)

    def state_bytes(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A method to be: its name, and the state that it keeps, from which its traffic follows."""

    name: str
    title: str
    memory: Memory
    build: Callable[[nn.Parameter, Memory], Stepper]

    def with_depth(self, depth: int) -> "Rival":
        """The same with sketches of another depth."""
        return dataclasses.replace(self, memory=_resketched(self.memory, depth=depth))

    def ideal_bytes(self, *, rows: int, dim: int, entries: int, touched: int) -> float:
        """Bytes that a step moves at least, from cold caches, with float32 weights.

        Each entry of the gradient and its id is read once; each touched row of the parameter and
        each distinct piece of state is read once and written once.
        """
        gradient = entries * (4 * dim + 8)
        parameter = 2 * 4 * touched * dim
        state = sum(
            2 * _state_touched(storage, rows, dim, touched)
            for storage in (self.memory.first, self.memory.second)
        )
        return gradient + parameter + state


def _state_touched(storage: Storage | None, rows: int, dim: int, touched: int) -> float:
    """Distinct bytes of state that belong to so many rows; in a sketch, to be expected."""
    if isinstance(storage, Exact):
        return 4.0 * touched * dim
    if isinstance(storage, RowWise):
        return 4.0 * touched
    if isinstance(storage, Sketched):
        depth, width, length = storage.table_shape(rows, dim)
        buckets = width * (1 - (1 - 1 / width) ** touched)
        return depth * buckets * length * storage.dtype.itemsize
    assert storage is None
    return 0.0


def _ours(name: str, title: str, memory: Memory) -> Rival:
    return Rival(
        name=name,
        title=f"so.Adam, {title}",
        memory=memory,
        build=lambda p, memory: OptimizerStepper(p, so.Adam([p], lr=_RATE, memory=memory)),
    )


def _torch_operations(parameter: nn.Parameter, memory: Memory) -> Stepper:
    return TorchOperations(parameter, so.Adam([parameter], lr=_RATE, memory=memory))


def _resketched(memory: Memory, **options: Any) -> Memory:
    """The same memory with other options for its sketches."""

    def changed(storage: Storage | None) -> Storage | None:
        if isinstance(storage, Sketched):
            return dataclasses.replace(storage, **options)
        return storage

    return dataclasses.replace(memory, first=changed(memory.first), second=changed(memory.second))


_LINEAR = Sketched(granularity="element", ratio=0.2, depth=3, decay="linear")
_PAPER_MV_BF16 = _resketched(PRESETS["paper-mv"], dtype=torch.bfloat16)
_LINEAR_MV = Memory(first=_LINEAR, second=_LINEAR)

RIVALS = (
    Rival(
        name=BASELINE,
        title="torch SparseAdam",
        memory=PRESETS["exact"],
        build=lambda p, _: OptimizerStepper(p, torch.optim.SparseAdam([p], lr=_RATE)),
    ),
    Rival(
        name="sparse-adagrad",
        title="torch sparse Adagrad",
        memory=Memory(second=Exact()),
        build=lambda p, _: OptimizerStepper(p, torch.optim.Adagrad([p], lr=_RATE)),
    ),
    Rival(
        name="sparse-sgd",
        title="torch sparse SGD, stateless",
        memory=Memory(),
        build=lambda p, _: OptimizerStepper(p, torch.optim.SGD([p], lr=_RATE)),
    ),
    Rival(
        name="fbgemm",
        title="FBGEMM row-wise Adagrad",
        memory=PRESETS["row-wise"],
        build=lambda p, _: FbgemmStepper(p),
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
    Rival(
        name="sgd",
        title="so.SGD, stateless",
        memory=Memory(),
        build=lambda p, _: OptimizerStepper(p, so.SGD([p], lr=_RATE, momentum=0.0)),
    ),
    _ours("lean", "lean", PRESETS["lean"]),
    _ours("row-wise", "row-wise", PRESETS["row-wise"]),
    _ours("exact", "exact", PRESETS["exact"]),
    _ours("paper-v-only", "paper V-only", PRESETS["paper-v-only"]),
    _ours("paper-mv", "paper MV", PRESETS["paper-mv"]),
    _ours("paper-mv-bf16", "paper MV, bfloat16", _PAPER_MV_BF16),
    _ours("linear-v", "linear V", Memory(second=_LINEAR)),
    _ours("linear-mv", "linear MV", _LINEAR_MV),
)
BY_NAME = {rival.name: rival for rival in RIVALS}
ROWS = Rival(
    name="rows",
    title="adding to rows",
    memory=Memory(),
    build=lambda p, _: RowAddition(p),
)


def chosen(names: Sequence[str] | None) -> tuple[Rival, ...]:
    """The rivals of these names, in the order of the reports, and always the baseline."""
    if names is None:
        return RIVALS
    for name in names:
        if name not in BY_NAME:
            raise ValueError(f"method must be one of {', '.join(BY_NAME)}, got {name!r}")
    return tuple(c for c in RIVALS if c.name in names or c.name == BASELINE)


def absent(rivals: tuple[Rival, ...]) -> dict[str, str]:
    """Why rivals cannot take part, by name."""
    if all(rival.name != "fbgemm" for rival in rivals):
        return {}
    try:
        _fbgemm_modules()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "fbgemm_gpu":
            return {"fbgemm": f"installed, but it needs {error.name}"}
        return {"fbgemm": "not installed"}
    except OSError as error:
        return {"fbgemm": f"installed, but built for another torch: {error}"}
    return {}
