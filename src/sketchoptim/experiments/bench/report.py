"""What comes out: tables for the terminal, and everything there is as JSON."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from ..machine import readable_bytes
from .cases import Settings
from .measure import Timing
from .methods import BASELINE, BY_NAME
from .runs import Comparison, FixedCost, SweepResult, TrainingResult


@dataclasses.dataclass(kw_only=True)
class Report:
    """All results of a run and what they depend on."""

    settings: Settings
    ids: str
    machine: dict[str, object]
    versions: dict[str, str]
    absent: dict[str, str]
    peak_memory_bytes: int = 0
    load_average_at_the_end: float = 0.0
    steps: list[Comparison] = dataclasses.field(default_factory=list)
    fixed_costs: list[FixedCost] = dataclasses.field(default_factory=list)
    scaling: list[SweepResult] = dataclasses.field(default_factory=list)
    training: list[list[TrainingResult]] = dataclasses.field(default_factory=list)

    @property
    def conditions(self) -> str:
        """Threads and clock, for headings."""
        threads = self.settings.threads
        return f"{threads} thread{'s' if threads > 1 else ''}, {self.settings.clock} time"

    def as_dict(self) -> dict[str, Any]:
        """The report in dicts, lists, strings and numbers; times are seconds."""
        plain = dataclasses.asdict(self)
        for comparison, kept in zip(self.steps, plain["steps"], strict=True):
            for result, row in zip(comparison.results, kept["results"], strict=True):
                row["ratio_to_sparse_adam"] = comparison.ratio(result)
        return plain

    def save(self, path: Path) -> None:
        """Writes the report as JSON."""
        path.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")


def comparison_table(comparison: Comparison, report: Report) -> Table:
    """One row a method: time, its ratio to the baseline, and its traffic against the memory's."""
    entries = f"{comparison.entries:,} {comparison.kind} rows"
    if comparison.kind == "raw":
        entries += f" ({comparison.touched:,.0f} distinct)"
    table = _table(
        f"{comparison.rows:,} x {comparison.dim}, {entries}, "
        f"{report.conditions}; memory: {_rate(comparison.streaming_bandwidth)} in streams, "
        f"{_rate(comparison.row_bandwidth)} in these rows",
        "method",
        *("median", "quartiles", "x SparseAdam", "state"),
        *("ideal", "rate", "of streams", "of rows"),
    )
    for result in comparison.results:
        rate = result.ideal_bytes / result.timing.median
        table.add_row(
            result.title,
            _milliseconds(result.timing.median),
            _quartiles(result.timing),
            f"{comparison.ratio(result):.3f}",
            readable_bytes(result.state_bytes),
            readable_bytes(round(result.ideal_bytes)),
            _rate(rate),
            f"{rate / comparison.streaming_bandwidth:.0%}",
            f"{rate / comparison.row_bandwidth:.0%}",
        )
    _add_absent(table, report)
    return table


def ratio_table(report: Report) -> Table:
    """Ratios to SparseAdam: one row a method, one column a gradient."""
    columns = [f"{c.rows:,}\nx {c.dim}\n{c.entries:,}\n{c.kind}" for c in report.steps]
    table = _table("time of a step over SparseAdam's", "method", *columns)
    for index, result in enumerate(report.steps[0].results):
        ratios = [f"{c.ratio(c.results[index]):.3f}" for c in report.steps]
        table.add_row(result.title, *ratios)
    _add_absent(table, report)
    return table


def _add_absent(table: Table, report: Report) -> None:
    for name in report.absent:
        table.add_row(BY_NAME[name].title, "absent")


def fixed_cost_table(costs: list[FixedCost]) -> Table:
    """One row a method: a step on four short rows, in microseconds."""
    table = _table("a step on four short rows", "method", "cold caches", "warm caches")
    for cost in costs:
        times = (f"{1e6 * timing.median:.0f} us" for timing in (cost.cold, cost.warm))
        table.add_row(BY_NAME[cost.method].title, *times)
    return table


def sweep_table(sweep: SweepResult) -> Table:
    """One row a method, one column a value; the last column compares the two ends."""
    values = [f"{value:,}" for value in sweep.values]
    ends = f"{values[-1]} / {values[0]}"
    table = _table(f"time against {sweep.axis}; {sweep.fixed}", "method", *values, ends)
    for name, timings in sweep.timings.items():
        table.add_row(
            BY_NAME[name].title,
            *(_milliseconds(timing.median) for timing in timings),
            f"x {timings[-1].median / timings[0].median:.2f}",
        )
    return table


def training_table(results: list[TrainingResult]) -> Table:
    """One row an optimizer: the whole step and where its time goes."""
    table = _table(
        f"a whole training step: {results[0].shape}",
        *("optimizer", "step", "quartiles", "x SparseAdam"),
        *("forward", "backward", "optimizer", "x SparseAdam"),
    )
    baseline = next(result for result in results if result.method == BASELINE)
    for result in results:
        parts = (result.forward, result.backward, result.optimizer)
        table.add_row(
            BY_NAME[result.method].title,
            _milliseconds(result.total.median),
            _quartiles(result.total),
            f"{result.total.median / baseline.total.median:.3f}",
            *(_milliseconds(part.median) for part in parts),
            f"{result.optimizer.median / baseline.optimizer.median:.3f}",
        )
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _quartiles(timing: Timing) -> str:
    return f"{1e3 * timing.lower_quartile:.3g}-{1e3 * timing.upper_quartile:.3g}"


def _rate(bytes_a_second: float) -> str:
    return f"{bytes_a_second / 1e9:.1f} GB/s"
