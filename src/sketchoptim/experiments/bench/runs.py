"""The three parts of the benchmark: single steps, how they scale, whole training steps."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

import sketchoptim as so

from ...nn import SampledSoftmax
from .cases import Axis, Case, Settings, Sweep, TrainingShape
from .gradients import Batch, WordLaw
from .measure import CacheFlusher, Entrant, Key, StreamAddition, Timing, interleaved, laps
from .methods import BASELINE, ROWS, Rival, Stepper, chosen

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One method's step on one gradient."""

    method: str
    title: str
    timing: Timing
    state_bytes: int
    ideal_bytes: float
    """What a step moves at least; see `Rival.ideal_bytes`."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All methods on one gradient."""

    rows: int
    dim: int
    kind: Literal["coalesced", "raw"]
    entries: int
    touched: float
    """Distinct rows, in the mean over the batches."""
    streaming_bandwidth: float
    """Bytes a second of the triad."""
    row_bandwidth: float
    """Bytes a second of adding the gradient to its rows and nothing else."""
    results: tuple[StepResult, ...]

    def ratio(self, result: StepResult) -> float:
        """Its median time over the baseline's."""
        baseline = next(r for r in self.results if r.method == BASELINE)
        return result.timing.median / baseline.timing.median


@dataclass(frozen=True, kw_only=True)
class FixedCost:
    """A step on nearly nothing, with the caches flushed, interpreter included, and without."""

    method: str
    cold: Timing
    warm: Timing


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """Times by method along one axis."""

    axis: Axis
    fixed: str
    values: tuple[int, ...]
    timings: dict[str, tuple[Timing, ...]]


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """One optimizer's whole training step, and its three parts."""

    shape: TrainingShape
    method: str
    total: Timing
    forward: Timing
    backward: Timing
    optimizer: Timing


class Bench:
    """The settings, the law of the ids and the buffers that all parts share."""

    def __init__(
        self, settings: Settings, law: WordLaw, *, absent: dict[str, str], say: Say
    ) -> None:
        self.settings, self.law, self.absent, self.say = settings, law, absent, say
        self.rivals = tuple(c for c in chosen(settings.methods) if c.name not in absent)
        self.flusher = CacheFlusher()

    # -- single steps ------------------------------------------------------------------------

    def steps(self) -> Iterator[Comparison]:
        """Each table's comparisons: its coalesced gradients, then its raw one."""

        def table(case: Case) -> tuple[int, int]:
            return case.rows, case.dim

        for (rows, dim), cases in groupby(sorted(self.settings.cases, key=table), key=table):
            self.say(f"building {len(self.rivals)} optimizers over {rows:,} x {dim}")
            methods = self._built((*self.rivals, ROWS), rows, dim)
            for case in sorted(cases, key=lambda case: case.touched):
                batches = [
                    self.law.coalesced(rows, dim, case.touched, seed=seed) for seed in self._seeds()
                ]
                yield self._compared(methods, batches)
            batches = [
                self.law.raw(rows, dim, self.settings.tokens, seed=seed) for seed in self._seeds()
            ]
            yield self._compared(methods, batches)
            del methods, batches
            gc.collect()  # gigabytes, before the next table takes as many

    def _compared(self, methods: dict[str, Stepper], batches: list[Batch]) -> Comparison:
        (rows, dim), entries = batches[0].gradient.shape, batches[0].entries
        touched = sum(batch.touched for batch in batches) / len(batches)
        kind: Literal["coalesced", "raw"] = "coalesced" if batches[0].is_coalesced else "raw"
        self.say(f"{rows:,} x {dim}: steps on {entries:,} {kind} rows")
        stream = StreamAddition()
        timings = self._measured(
            {name: self._entrant(m, batches) for name, m in {**methods, "stream": stream}.items()}
        )
        sizes = {"rows": rows, "dim": dim, "touched": round(touched)}
        row_bytes = ROWS.ideal_bytes(**sizes, entries=sizes["touched"])
        return Comparison(
            rows=rows,
            dim=dim,
            kind=kind,
            entries=entries,
            touched=touched,
            streaming_bandwidth=stream.moved_bytes() / timings["stream"].median,
            row_bandwidth=row_bytes / timings[ROWS.name].median,
            results=tuple(
                StepResult(
                    method=rival.name,
                    title=rival.title,
                    timing=timings[rival.name],
                    state_bytes=methods[rival.name].state_bytes(),
                    ideal_bytes=rival.ideal_bytes(**sizes, entries=entries),
                )
                for rival in self.rivals
            ),
        )

    def fixed_costs(self) -> list[FixedCost]:
        """What a step costs besides its rows, of which this one has four short ones."""
        self.say("steps on nearly nothing")
        rows, dim = 1_000, 16
        methods = self._built(self.rivals, rows, dim)
        law = WordLaw.zipf(rows=rows)
        batches = [law.coalesced(rows, dim, 4, seed=seed) for seed in self._seeds()]
        entrants = {name: self._entrant(method, batches) for name, method in methods.items()}
        cold = self._measured(entrants)
        warm = self._measured(entrants, is_cold=False)
        return [FixedCost(method=name, cold=cold[name], warm=warm[name]) for name in methods]

    # -- scaling -----------------------------------------------------------------------------

    def scaling(self) -> Iterator[SweepResult]:
        """Each sweep, with the methods that it names and the settings allow."""
        allowed = {rival.name: rival for rival in self.rivals}
        for sweep in self.settings.sweeps:
            rivals = [allowed[name] for name in sweep.methods if name in allowed]
            is_timed = sweep.axis != "threads" or self.settings.clock == "wall"
            if rivals and is_timed:
                self.say(f"how a step grows with {sweep.axis}")
                yield self._swept(sweep, rivals)
                gc.collect()

    def _swept(self, sweep: Sweep, rivals: list[Rival]) -> SweepResult:
        """All values at once, in turn, so that the machine treats them alike."""
        tables: dict[tuple[int, int, int], dict[str, Stepper]] = {}
        entrants: dict[tuple[str, int], Entrant] = {}
        values = []
        for value, point in sweep.points():
            count = point.threads if sweep.axis == "threads" else self.settings.threads
            if count > self.settings.cores:
                continue
            values.append(value)
            table = (point.rows, point.dim, point.depth)
            if table not in tables:
                deep = tuple(rival.with_depth(point.depth) for rival in rivals)
                tables[table] = self._built(deep, point.rows, point.dim)
            batches = [
                self.law.coalesced(point.rows, point.dim, point.touched, seed=seed)
                for seed in self._seeds()
            ]
            for name, method in tables[table].items():
                entrants[name, value] = Entrant(method, batches, count)
        timings = self._measured(entrants)
        others = [name for name in ("rows", "dim", "touched") if name != sweep.axis]
        return SweepResult(
            axis=sweep.axis,
            fixed=", ".join(f"{name} {getattr(sweep.base, name):,}" for name in others),
            values=tuple(values),
            timings={c.name: tuple(timings[c.name, value] for value in values) for c in rivals},
        )

    # -- training ----------------------------------------------------------------------------

    def training(self) -> Iterator[list[TrainingResult]]:
        """Whole training steps: the same weights and words, by optimizers that take turns."""
        for shape in self.settings.training:
            self.say(f"training steps: {shape}")
            yield self._trained(shape)
            gc.collect()

    def _trained(self, shape: TrainingShape) -> list[TrainingResult]:
        torch.manual_seed(self.settings.seed)
        embedding = nn.Embedding(shape.rows, shape.dim, sparse=True)
        nn.init.uniform_(embedding.weight, -0.1, 0.1)
        head = SampledSoftmax(shape.dim, shape.rows, samples=shape.samples, bias=True)
        parameters = [*embedding.parameters(), *head.parameters()]
        optimizers: dict[str, torch.optim.Optimizer] = {
            BASELINE: torch.optim.SparseAdam(parameters),
            "exact": so.Adam(parameters, memory="exact"),
            "lean": so.Adam(parameters, memory="lean"),
        }
        generator = np.random.default_rng(self.settings.seed)
        times: dict[str, list[list[float]]] = {name: [] for name in optimizers}
        # the first of these builds state and does not count
        for _ in range(1 + max(self.settings.least, round(self.settings.seconds * 8))):
            for name, optimizer in optimizers.items():
                words = self.law.tokens(shape.rows, shape.tokens, generator)
                labels = self.law.tokens(shape.rows, shape.tokens, generator)
                optimizer.zero_grad()
                step = _TrainingStep(embedding, head, words, labels)
                tasks = (step.forward, step.backward, optimizer.step)
                times[name].append(laps(tasks, clock=self.settings.clock))
        return [
            TrainingResult(
                shape=shape,
                method=name,
                total=Timing.of([sum(parts) for parts in taken[1:]]),
                forward=Timing.of([parts[0] for parts in taken[1:]]),
                backward=Timing.of([parts[1] for parts in taken[1:]]),
                optimizer=Timing.of([parts[2] for parts in taken[1:]]),
            )
            for name, taken in times.items()
        ]

    # -- shared ------------------------------------------------------------------------------

    def _seeds(self) -> range:
        return range(self.settings.seed, self.settings.seed + self.settings.batches)

    def _built(self, rivals: tuple[Rival, ...], rows: int, dim: int) -> dict[str, Stepper]:
        """The rivals over one parameter that they share."""
        parameter = nn.Parameter(torch.empty(rows, dim).uniform_(-0.1, 0.1))
        return {rival.name: rival.build(parameter, rival.memory) for rival in rivals}

    def _entrant(self, method: Stepper, batches: list[Batch]) -> Entrant:
        return Entrant(method, batches, self.settings.threads)

    def _measured(self, entrants: dict[Key, Entrant], *, is_cold: bool = True) -> dict[Key, Timing]:
        return interleaved(
            entrants,
            seconds=self.settings.seconds,
            least=self.settings.least,
            clock=self.settings.clock,
            flusher=self.flusher if is_cold else None,
        )


class _TrainingStep:
    """The two passes that lead to a gradient."""

    def __init__(
        self, embedding: nn.Embedding, head: SampledSoftmax, words: Tensor, labels: Tensor
    ) -> None:
        self.embedding, self.head, self.words, self.labels = embedding, head, words, labels
        self.loss = torch.empty(0)

    def forward(self) -> None:
        self.loss = self.head(self.embedding(self.words), self.labels)

    def backward(self) -> None:
        self.loss.backward()
