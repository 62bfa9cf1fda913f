"""The parts of the benchmark: single steps, how they scale, whole training steps."""

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import nn

from .bags import BagsResult, train_bags
from .cases import Axis, Case, Settings, Sweep
from .gradients import Batch, WordFrequencies
from .heads import HeadResult, train_heads
from .measure import (
    CacheFlusher,
    Entrant,
    Key,
    StreamAddition,
    Timing,
    measure_in_turn,
)
from .methods import BASELINE, ROWS, Rival, Stepper, select_rivals
from .training import MANY_TABLES, TrainingResult, train_language_model, train_tables
from .updates import UpdateTimes, dense_steps, small_tables

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One method's step on one gradient."""

    method: str
    title: str
    timing: Timing
    state_bytes: int
    ideal_bytes: float
    """The least that a step moves; see `Rival.ideal_bytes`."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All methods on one gradient."""

    rows: int
    dim: int
    kind: Literal["coalesced", "raw"]
    entries: int
    touched: float
    """Distinct rows, averaged over the batches."""
    streaming_bandwidth: float
    """Bytes a second of `StreamAddition`."""
    row_bandwidth: float
    """Bytes a second of `RowAddition`."""
    results: tuple[StepResult, ...]

    def ratio(self, result: StepResult) -> float:
        """Its median time over the baseline's."""
        baseline = next(r for r in self.results if r.method == BASELINE)
        return result.timing.median / baseline.timing.median


@dataclass(frozen=True, kw_only=True)
class FixedCost:
    """A step on nearly nothing, with cold caches (the interpreter's too) and with warm ones."""

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


class Bench:
    """The parts of the benchmark, with the settings and buffers that they share."""

    def __init__(
        self,
        settings: Settings,
        frequencies: WordFrequencies,
        *,
        absent: Mapping[str, str],
        say: Say,
    ) -> None:
        self.settings, self.frequencies, self.say = settings, frequencies, say
        self.rivals = tuple(c for c in select_rivals(settings.methods) if c.name not in absent)
        self.absent = frozenset(absent)
        self.flusher = CacheFlusher()

    # -- single steps ------------------------------------------------------------------------

    def steps(self) -> Iterator[Comparison]:
        """Each table's comparisons: its coalesced gradients, then its raw one."""

        def table(case: Case) -> tuple[int, int]:
            return case.rows, case.dim

        for (rows, dim), cases in groupby(sorted(self.settings.cases, key=table), key=table):
            self.say(f"building {len(self.rivals)} optimizers over {rows:,} x {dim}")
            methods = self._build((*self.rivals, ROWS), rows, dim)
            for case in sorted(cases, key=lambda case: case.touched):
                batches = [
                    self.frequencies.coalesced(rows, dim, case.touched, seed=seed)
                    for seed in self._seeds()
                ]
                yield self._compare(methods, batches)
            batches = [
                self.frequencies.raw(rows, dim, self.settings.tokens, seed=seed)
                for seed in self._seeds()
            ]
            yield self._compare(methods, batches)
            del methods, batches
            gc.collect()  # frees gigabytes before the next table needs them

    def _compare(self, methods: dict[str, Stepper], batches: list[Batch]) -> Comparison:
        (rows, dim), entries = batches[0].gradient.shape, batches[0].entries
        touched = sum(batch.touched for batch in batches) / len(batches)
        kind: Literal["coalesced", "raw"] = "coalesced" if batches[0].is_coalesced else "raw"
        self.say(f"{rows:,} x {dim}: steps on {entries:,} {kind} rows")
        stream = StreamAddition()
        timings = self._measure(
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
        """The time of a step on four short rows: what a step costs besides its rows."""
        self.say("steps on nearly nothing")
        rows, dim = 1_000, 16
        methods = self._build(self.rivals, rows, dim)
        frequencies = WordFrequencies.zipf(rows=rows)
        batches = [frequencies.coalesced(rows, dim, 4, seed=seed) for seed in self._seeds()]
        entrants = {name: self._entrant(method, batches) for name, method in methods.items()}
        cold = self._measure(entrants)
        warm = self._measure(entrants, is_cold=False)
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
                yield self._sweep(sweep, rivals)
                gc.collect()

    def _sweep(self, sweep: Sweep, rivals: list[Rival]) -> SweepResult:
        """The times at all values, which take turns, so that the machine treats them alike."""
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
                tables[table] = self._build(deep, point.rows, point.dim)
            batches = [
                self.frequencies.coalesced(point.rows, point.dim, point.touched, seed=seed)
                for seed in self._seeds()
            ]
            for name, method in tables[table].items():
                entrants[name, value] = _entrant(method, batches, count)
        timings = self._measure(entrants)
        others = [name for name in ("rows", "dim", "touched") if name != sweep.axis]
        return SweepResult(
            axis=sweep.axis,
            fixed=", ".join(f"{name} {getattr(sweep.base, name):,}" for name in others),
            values=tuple(values),
            timings={c.name: tuple(timings[c.name, value] for value in values) for c in rivals},
        )

    # -- training ----------------------------------------------------------------------------

    def training(self) -> Iterator[list[TrainingResult]]:
        """Whole training steps on the same weights, with optimizers that take turns."""
        for shape in self.settings.training:
            self.say(f"training steps: {shape}")
            yield train_language_model(shape, self.settings, self.frequencies)
            gc.collect()

    def tables(self) -> Iterator[list[TrainingResult]]:
        """Whole training steps of many tables."""
        allowed = {rival.name for rival in self.rivals}
        names = tuple(name for name in MANY_TABLES if name in allowed)
        for shape in self.settings.tables:
            self.say(f"training steps: {shape}")
            yield train_tables(shape, self.settings, names, self.flusher)
            gc.collect()

    # -- updates -----------------------------------------------------------------------------

    def many(self) -> Iterator[UpdateTimes]:
        """Steps over many small tables."""
        self.say("steps over small tables")
        return small_tables(self.settings, self.absent)

    def dense(self) -> Iterator[UpdateTimes]:
        """Steps along dense gradients."""
        self.say("steps along dense gradients")
        return dense_steps(self.settings)

    def heads(self) -> Iterator[list[HeadResult]]:
        """Whole training steps of a vocabulary head."""
        for shape in self.settings.heads:
            self.say(f"training steps: {shape}")
            yield train_heads(shape, self.settings)
            gc.collect()

    def bags(self) -> Iterator[list[BagsResult]]:
        """Whole training steps of embedding bags."""
        for shape in self.settings.bags:
            self.say(f"training steps: {shape}")
            yield from train_bags(shape, self.settings, self.flusher)
            gc.collect()

    # -- shared ------------------------------------------------------------------------------

    def _seeds(self) -> range:
        return range(self.settings.seed, self.settings.seed + self.settings.batches)

    def _build(self, rivals: tuple[Rival, ...], rows: int, dim: int) -> dict[str, Stepper]:
        """The rivals' optimizers, over one parameter."""
        parameter = nn.Parameter(torch.empty(rows, dim).uniform_(-0.1, 0.1))
        return {rival.name: rival.build(parameter, rival.memory) for rival in rivals}

    def _entrant(self, method: Stepper, batches: list[Batch]) -> Entrant:
        return _entrant(method, batches, self.settings.threads)

    def _measure(self, entrants: dict[Key, Entrant], *, is_cold: bool = True) -> dict[Key, Timing]:
        return measure_in_turn(
            entrants,
            seconds=self.settings.seconds,
            least=self.settings.least,
            clock=self.settings.clock,
            flusher=self.flusher if is_cold else None,
        )


def _entrant(method: Stepper, batches: list[Batch], threads: int) -> Entrant:
    """A method whose gradients take turns."""
    return Entrant(
        step=method.step,
        prepare=lambda turn: method.prepare(batches[turn % len(batches)]),
        threads=threads,
    )
