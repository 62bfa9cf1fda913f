"""Whole training steps of embedding bags: the tables of a recommender are looked up and moved."""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sketchoptim as so
from sketchoptim import Memory, Sketched
from sketchoptim.storage import PRESETS

from .cases import BagsShape, Clock, Settings
from .fbgemm import absence_reason, fbgemm_tables
from .gradients import TYPICAL_GRADIENT, WordFrequencies
from .measure import CacheFlusher, Timing, lap_seconds, no_garbage_collection, threads
from .methods import RATE

Batch = tuple[Tensor, Tensor]
"""Ids of all tables, and where each bag begins, with one offset more."""

METHODS = {
    "fbgemm": "FBGEMM, row-wise Adagrad",
    "sparse": "nn.EmbeddingBag(sparse=True), lean",
    "armed": "the same after so.defer_gradients, lean",
    "bags": "so.nn.EmbeddingBags, lean with columns",
    "bags-plain": "so.nn.EmbeddingBags, lean without columns",
}


@dataclass(frozen=True, kw_only=True)
class BagsResult:
    """One method's whole training step."""

    shape: BagsShape
    has_network: bool
    threads: int
    clock: Clock
    method: str
    title: str
    total: Timing
    forward: Timing
    backward: Timing
    optimizer: Timing
    """Next to nothing if the backward pass updates the rows and there is no network."""
    ratios: dict[str, float]
    """The median over rounds of its time over another method's."""


def train_bags(
    shape: BagsShape, settings: Settings, flusher: CacheFlusher
) -> Iterator[list[BagsResult]]:
    """Whole steps of all methods: on one and on two threads, with a small network and without.

    The methods take turns. FBGEMM, `nn.EmbeddingBag` and `so.nn.EmbeddingBags` have weights of
    their own; armed layers have those of `nn.EmbeddingBag`.
    """
    torch.manual_seed(settings.seed)
    batches = _draw(shape, settings)
    lookups = _lookups(shape)
    for count in (1, 2)[: settings.cores]:
        for has_network in (True, False):
            steps = {
                name: BagsStep(shape, lookup, memory, has_network=has_network)
                for name, (lookup, memory) in lookups.items()
            }
            with threads(count), no_garbage_collection():
                yield _measure(steps, batches, shape, settings, flusher, has_network=has_network)


def _draw(shape: BagsShape, settings: Settings) -> list[Batch]:
    """Several batches of ids by Zipf's law, in bags of up to twice the mean size."""
    frequencies = WordFrequencies.zipf(rows=max(shape.tables.rows))
    generator = np.random.default_rng(settings.seed)
    batches = []
    for _ in range(settings.batches):
        sizes = np.full((len(shape.tables.rows), shape.tables.batch), shape.ids_a_bag)
        if shape.ids_a_bag > 1:
            sizes = generator.integers(0, 2 * shape.ids_a_bag + 1, sizes.shape)
        ids = [
            frequencies.tokens(rows, int(own.sum()), generator)
            for rows, own in zip(shape.tables.rows, sizes, strict=True)
        ]
        offsets = np.concatenate([[0], sizes.reshape(-1).cumsum()])
        batches.append((torch.cat(ids), torch.from_numpy(offsets)))
    return batches


def _lookups(shape: BagsShape) -> dict[str, tuple["Lookup", Memory | None]]:
    """What each method looks rows up in, and its memory; None for FBGEMM."""
    sizes, dim, lean = shape.tables.rows, shape.tables.dim, PRESETS["lean"]
    assert isinstance(lean.second, Sketched)
    with_columns, without = (
        Memory(first=None, second=dataclasses.replace(lean.second, columns=columns))
        for columns in (True, False)
    )
    separate = [nn.EmbeddingBag(it, dim, mode="sum", sparse=True) for it in sizes]
    armed = nn.ModuleList(
        nn.EmbeddingBag(it, dim, mode="sum", sparse=True, device="meta") for it in sizes
    )
    for own, other in zip(armed, separate, strict=True):
        own.weight = other.weight
    so.defer_gradients(armed)
    bags = so.nn.EmbeddingBags(
        {f"table_{number}": (rows, dim) for number, rows in enumerate(sizes)}
    )
    found: dict[str, tuple[Lookup, Memory | None]] = {
        "sparse": (_Separate(separate), lean),
        "armed": (_Separate(armed), lean),
        "bags": (_Together(bags, list(bags.parameters())), with_columns),
        "bags-plain": (_Together(bags, list(bags.parameters())), without),
    }
    if absence_reason() is None:
        tables: Any = fbgemm_tables([(rows, dim) for rows in sizes], lr=RATE)
        for weight in tables.split_embedding_weights():
            weight.uniform_(-0.01, 0.01)  # zeros that were never written have no memory
        found["fbgemm"] = (_Together(tables, []), None)
    return {name: found[name] for name in METHODS if name in found}


class _Together:
    """A module that takes the ids of all tables."""

    def __init__(self, tables: Callable[[Tensor, Tensor], Tensor], weights: list[Tensor]) -> None:
        self.tables, self.weights = tables, weights

    def given(self, examples: int, batch: Batch) -> Batch:
        return batch

    def __call__(self, given: Any) -> Tensor:
        return self.tables(*given)


class _Separate:
    """One module for each table."""

    def __init__(self, bags: Any) -> None:
        self.bags = bags
        self.weights: list[Tensor] = [bag.weight for bag in bags]

    def given(self, examples: int, batch: Batch) -> list[Batch]:
        """The ids and offsets of each table."""
        ids, offsets = batch
        starts = offsets[:-1].view(-1, examples)
        ends = offsets[examples::examples].tolist()
        begins = [0, *ends[:-1]]
        return [
            (ids[begin:end], own - begin)
            for begin, end, own in zip(begins, ends, starts, strict=True)
        ]

    def __call__(self, given: Any) -> Tensor:
        return torch.cat([bag(*own) for bag, own in zip(self.bags, given, strict=True)], 1)


Lookup = _Together | _Separate


class BagsStep:
    """Tables with their optimizer: under a small network, or under a given gradient.

    The network adds up the rows of all tables of an example, and one linear layer makes a click's
    logit of the sum.
    """

    def __init__(
        self, shape: BagsShape, lookup: Lookup, memory: Memory | None, *, has_network: bool
    ) -> None:
        self.tables, self.lookup = shape.tables, lookup
        self.network = nn.Linear(shape.tables.dim, 1) if has_network else None
        others = [] if self.network is None else [*self.network.parameters()]
        self.optimizer: torch.optim.Optimizer | None = None
        if memory is not None:
            groups: list[dict[str, Any]] = [{"params": lookup.weights, "memory": memory}]
            groups += [{"params": others}] if others else []
            self.optimizer = so.Adam(groups, lr=RATE)
        elif others:
            self.optimizer = torch.optim.Adam(others, lr=RATE)
        self.clicks = (torch.rand(shape.tables.batch) < 0.25).float()
        columns = shape.tables.dim * len(shape.tables.rows)
        self.gradient: Tensor | None = torch.randn(shape.tables.batch, columns) * TYPICAL_GRADIENT
        if has_network:
            self.gradient = None  # of a loss
        self.given: Any = None
        self.output = torch.empty(0)

    def prepare(self, batch: Batch) -> None:
        """Chooses the inputs of a step; not timed."""
        self.given = self.lookup.given(self.tables.batch, batch)

    def forward(self) -> None:
        output = self.lookup(self.given)
        if self.network is not None:
            sums = output.view(self.tables.batch, -1, self.tables.dim).sum(1)
            output = F.binary_cross_entropy_with_logits(self.network(sums)[:, 0], self.clicks)
        self.output = output

    def backward(self) -> None:
        self.output.backward(self.gradient)

    def update(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()

    def parts(self) -> list[Callable[[], None]]:
        """Forward, backward and update, and what ends the step."""
        return [self.forward, self.backward, self.update, self.end]

    def end(self) -> None:
        """Frees what belongs to one step."""
        self.output = torch.empty(0)
        if self.optimizer is not None:
            self.optimizer.zero_grad()


def _measure(
    steps: Mapping[str, BagsStep],
    batches: list[Batch],
    shape: BagsShape,
    settings: Settings,
    flusher: CacheFlusher,
    *,
    has_network: bool,
) -> list[BagsResult]:
    """The time of whole steps from cold caches; the first turns make the state, uncounted."""
    count = torch.get_num_threads()
    clock = settings.clock if count == 1 else "wall"
    times: dict[str, list[list[float]]] = {name: [] for name in steps}
    rounds = max(settings.least, round(settings.seconds * 8))
    for number in range(len(batches) + rounds):
        for name, step in steps.items():
            step.prepare(batches[number % len(batches)])
            flusher.flush_()
            times[name].append(lap_seconds(step.parts(), clock=clock))
    counted = {name: taken[len(batches) :] for name, taken in times.items()}
    totals = {name: [sum(parts) for parts in taken] for name, taken in counted.items()}
    return [
        BagsResult(
            shape=shape,
            has_network=has_network,
            threads=count,
            clock=clock,
            method=name,
            title=METHODS[name],
            total=Timing.of(totals[name]),
            forward=Timing.of([parts[0] for parts in taken]),
            backward=Timing.of([parts[1] for parts in taken]),
            optimizer=Timing.of([parts[2] + parts[3] for parts in taken]),
            ratios={
                other: statistics.median(
                    own / its for own, its in zip(totals[name], totals[other], strict=True)
                )
                for other in ("fbgemm", "sparse")
                if other in totals
            },
        )
        for name, taken in counted.items()
    ]
