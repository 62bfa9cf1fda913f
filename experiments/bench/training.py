"""Whole training steps: forward, backward and optimizer, of models that are nearly all tables."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from sketchoptim.nn import SampledSoftmax

from .cases import Settings, TablesShape, TrainingShape
from .fbgemm import fbgemm_tables
from .gradients import TYPICAL_GRADIENT, WordFrequencies
from .measure import CacheFlusher, Timing, lap_seconds
from .methods import BASELINE, BY_NAME, RATE

LANGUAGE_MODEL = (BASELINE, "exact", "lean")
MANY_TABLES = (BASELINE, "sparse-sgd", "fbgemm", "sgd", "lean", "lean-unchecked")
_JOINT = {"lean": "lean-joint", "lean-unchecked": "lean-unchecked-joint"}
_TITLES = {name: rival.title for name, rival in BY_NAME.items()} | {
    joint: f"{BY_NAME[name].title}, one table" for name, joint in _JOINT.items()
}


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """One optimizer's whole training step, and its three parts."""

    shape: TrainingShape | TablesShape
    method: str
    title: str
    total: Timing
    forward: Timing
    backward: Timing
    optimizer: Timing | None
    """None where the backward pass updates the rows."""


class TrainingStep(Protocol):
    """A model with its optimizer."""

    def prepare(self, number: int) -> None:
        """Chooses the inputs of a step; not timed."""

    def parts(self) -> list[Callable[[], None]]:
        """Forward, backward and, unless the backward pass did it, the optimizer's step; timed."""


def train_language_model(
    shape: TrainingShape, settings: Settings, frequencies: WordFrequencies
) -> list[TrainingResult]:
    """Whole steps of an embedding under a sampled softmax, on the same weights."""
    torch.manual_seed(settings.seed)
    embedding = nn.Embedding(shape.rows, shape.dim, sparse=True)
    nn.init.uniform_(embedding.weight, -0.1, 0.1)
    head = SampledSoftmax(shape.dim, shape.rows, samples=shape.samples, bias=True)
    generator = np.random.default_rng(settings.seed)

    def draw(_: int) -> tuple[Tensor, Tensor]:
        words, labels = (frequencies.tokens(shape.rows, shape.tokens, generator) for _ in range(2))
        return words, labels

    parameters = [*embedding.parameters(), *head.parameters()]
    steps: dict[str, TrainingStep] = {
        name: _LanguageModel(embedding, head, _optimizer(name, parameters), draw)
        for name in LANGUAGE_MODEL
    }
    return _measure(steps, shape, settings, flusher=None)


def train_tables(
    shape: TablesShape, settings: Settings, names: tuple[str, ...], flusher: CacheFlusher
) -> list[TrainingResult]:
    """Whole steps of tables whose rows are concatenated with a dense vector, as in a DLRM.

    The baseline, torch's and our optimizers share the weights of one ``nn.EmbeddingBag`` for each
    table. FBGEMM has weights of its own, and so have the methods
    that end in "joint": one table with the rows of all.
    """
    batches = _draw_bags(shape, settings)
    gradient = torch.randn(shape.batch, shape.dim * (1 + len(shape.rows))) * TYPICAL_GRADIENT
    bags = [nn.EmbeddingBag(rows, shape.dim, mode="sum", sparse=True) for rows in shape.rows]
    parameters = [parameter for bag in bags for parameter in bag.parameters()]
    steps: dict[str, TrainingStep] = {}
    for name in names:
        if name == "fbgemm":
            steps[name] = _Tables(shape, batches, gradient, _Fbgemm(shape), optimizer=None)
            continue
        steps[name] = _Tables(
            shape, batches, gradient, _Separate(bags, shape.batch), _optimizer(name, parameters)
        )
    joint = _Joint(shape)
    for name in filter(_JOINT.__contains__, names):
        optimizer = _optimizer(name, list(joint.table.parameters()))
        steps[_JOINT[name]] = _Tables(shape, batches, gradient, joint, optimizer)
    return _measure(steps, shape, settings, flusher=flusher)


def _draw_bags(shape: TablesShape, settings: Settings) -> list[list[Tensor]]:
    """For each of several batches one id for each example, by table, by Zipf's law."""
    frequencies = WordFrequencies.zipf(rows=max(shape.rows))
    generator = np.random.default_rng(settings.seed)
    return [
        [frequencies.tokens(rows, shape.batch, generator) for rows in shape.rows]
        for _ in range(settings.batches)
    ]


def _optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    rival = BY_NAME[name]
    assert rival.optimizer is not None
    return rival.optimizer(parameters, rival.memory)


def _measure(
    steps: Mapping[str, TrainingStep],
    shape: TrainingShape | TablesShape,
    settings: Settings,
    *,
    flusher: CacheFlusher | None,
) -> list[TrainingResult]:
    """The time of whole steps, which take turns; the first creates the state and is not counted."""
    times: dict[str, list[list[float]]] = {name: [] for name in steps}
    for number in range(1 + max(settings.least, round(settings.seconds * 8))):
        for name, step in steps.items():
            step.prepare(number)
            if flusher is not None:
                flusher.flush_()
            times[name].append(lap_seconds(step.parts(), clock=settings.clock))
    return [
        TrainingResult(
            shape=shape,
            method=name,
            title=_TITLES[name],
            total=Timing.of([sum(parts) for parts in taken[1:]]),
            forward=Timing.of([parts[0] for parts in taken[1:]]),
            backward=Timing.of([parts[1] for parts in taken[1:]]),
            optimizer=Timing.of([parts[2] for parts in taken[1:]]) if taken[0][2:] else None,
        )
        for name, taken in times.items()
    ]


class _LanguageModel:
    """An embedding under a sampled softmax."""

    def __init__(
        self,
        embedding: nn.Embedding,
        head: SampledSoftmax,
        optimizer: torch.optim.Optimizer,
        draw: Callable[[int], tuple[Tensor, Tensor]],
    ) -> None:
        self.embedding, self.head, self.optimizer, self.draw = embedding, head, optimizer, draw
        self.words = self.labels = self.loss = torch.empty(0)

    def prepare(self, number: int) -> None:
        self.words, self.labels = self.draw(number)
        self.optimizer.zero_grad()

    def forward(self) -> None:
        self.loss = self.head(self.embedding(self.words), self.labels)

    def backward(self) -> None:
        self.loss.backward()

    def parts(self) -> list[Callable[[], None]]:
        return [self.forward, self.backward, self.optimizer.step]


class _Tables:
    """Tables whose rows are concatenated with a dense vector, under a given gradient."""

    def __init__(
        self,
        shape: TablesShape,
        batches: list[list[Tensor]],
        gradient: Tensor,
        lookup: Callable[[list[Tensor]], list[Tensor]],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.batches, self.gradient = batches, gradient
        self.lookup, self.optimizer = lookup, optimizer
        # what the layers for dense features send to the interaction
        self.dense = torch.randn(shape.batch, shape.dim, requires_grad=True)
        self.ids = self.batches[0]
        self.output = torch.empty(0)

    def prepare(self, number: int) -> None:
        self.output = torch.empty(0)
        self.ids = self.batches[number % len(self.batches)]
        self.dense.grad = None
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def forward(self) -> None:
        self.output = torch.cat([self.dense, *self.lookup(self.ids)], 1)

    def backward(self) -> None:
        self.output.backward(self.gradient)

    def parts(self) -> list[Callable[[], None]]:
        step = [] if self.optimizer is None else [self.optimizer.step]
        return [self.forward, self.backward, *step]


class _Separate:
    """One ``nn.EmbeddingBag`` for each table."""

    def __init__(self, bags: list[nn.EmbeddingBag], batch: int) -> None:
        self.bags, self.starts = bags, torch.arange(batch)

    def __call__(self, ids: list[Tensor]) -> list[Tensor]:
        return [bag(one, self.starts) for bag, one in zip(self.bags, ids, strict=True)]


class _Joint:
    """One ``nn.Embedding`` with the rows of all tables, one table after the other."""

    def __init__(self, shape: TablesShape) -> None:
        *starts, total = accumulate(shape.rows, initial=0)
        self.starts = torch.tensor(starts)
        self.table = nn.Embedding(total, shape.dim, sparse=True)

    def __call__(self, ids: list[Tensor]) -> list[Tensor]:
        return [self.table(torch.stack(ids, 1) + self.starts).flatten(1)]


class _Fbgemm:
    """FBGEMM's batch of tables, which updates rows in its backward pass."""

    def __init__(self, shape: TablesShape) -> None:
        self.tables: Any = fbgemm_tables([(rows, shape.dim) for rows in shape.rows], lr=RATE)
        self.starts = torch.arange(shape.batch * len(shape.rows) + 1)

    def __call__(self, ids: list[Tensor]) -> list[Tensor]:
        return [self.tables(torch.cat(ids), self.starts)]
