"""The comparison, one row for each method, as the terminal and the page show it."""

import math
import statistics
import textwrap
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from sketchoptim._formatting import readable_bytes

from ..reproduction import Findings, Reproduction

# Columns that a narrow terminal leaves out, in this order; the page has all.
_DISPENSABLE = ("lr of tables", "update", "valid", "ms a step", "peak", "paper", "s to")


def comparison_table(reproduction: Reproduction, console: Console) -> Table:
    """The table for the terminal: as many columns as fit on it without breaking a number."""
    columns, rows = comparison(reproduction)
    title = f"{reproduction.recipe.title} ({reproduction.size})"
    kept = list(range(len(columns)))
    for prefix in ("", *_DISPENSABLE):
        kept = [at for at in kept if not prefix or not columns[at].startswith(prefix)]
        table = Table(title=escape(title), box=box.SIMPLE_HEAD)
        for at in kept:
            heading = escape(textwrap.fill(columns[at], 12))
            table.add_column(heading, justify="right" if at else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(escape(row[at]) for at in kept))
        unbounded = console.options.update(max_width=10_000)
        if Measurement.get(console, unbounded, table).maximum <= console.width:
            break
    else:
        table.columns[0].no_wrap = False  # titles take several lines, numbers stay whole
    if len(kept) < len(columns):
        table.caption = "the page has more columns"
    return table


def comparison(reproduction: Reproduction) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: the paper's numbers, then ours, in words and units."""
    first = reproduction.findings[0]
    papers = list(dict.fromkeys(key for finding in reproduction.findings for key in finding.paper))
    metric = reproduction.recipe.metric
    columns = ["method", *(f"paper: {key}" for key in papers)]
    if reproduction.is_measured:
        parts = ["test", *(["valid"] if reproduction.has_validation else [])]
        columns += [f"{part} {metric}" for part in parts]
        further = further_measures(reproduction)
        columns += [f"test {name}" for name in further]
    columns += ["state of tables", f"of {first.title}'s", "peak memory", "ms a step", "update"]
    has_times = reproduction.is_measured and bool(times_to_target(reproduction, first))
    if has_times:
        columns.append(f"s to {first.title}'s best")
    columns.append("lr of tables, body")
    rows = []
    for finding in reproduction.findings:
        row = [finding.title, *(_number(finding.paper.get(key)) for key in papers)]
        if reproduction.is_measured:
            row += [mean_sd(finding.values(part)) for part in parts]
            row += [mean_sd(finding.values(f"test_{name}"), digits=4) for name in further]
        row += _costs(finding, first)
        if has_times:
            row.append(_seconds(times_to_target(reproduction, finding)))
        rows.append([*row, f"{finding.table_lr:g}, {finding.body_lr:g}"])
    return columns, rows


def further_measures(reproduction: Reproduction) -> list[str]:
    """The names of measures that some results have beside the recipe's metric."""
    prefix = "test_"
    found = (key for it in reproduction.findings for result in it.results for key in result)
    return sorted({key.removeprefix(prefix) for key in found if key.startswith(prefix)})


def _costs(finding: Findings, first: Findings) -> list[str]:
    state, peak, step, update = (
        finding.median(key)
        for key in ("table_state_bytes", "peak_memory_bytes", "step_seconds", "update_seconds")
    )
    if not math.isfinite(peak):  # the memory of a diverged run is not measured
        return [""] * 5
    whole = first.median("table_state_bytes")
    return [
        readable_bytes(state),
        f"{state / whole:.3%}" if whole else "",
        readable_bytes(peak),
        f"{1e3 * step:.1f}",
        f"{1e3 * update:.2f}",
    ]


def times_to_target(reproduction: Reproduction, finding: Findings) -> list[float]:
    """Seconds to the best validation result of the first method, one a seed; inf for never.

    Between two evaluations, the result is taken to change linearly with time. Empty where nothing
    was evaluated on the way.
    """
    times = []
    for result, baseline in zip(finding.results, reproduction.findings[0].results, strict=True):
        if not baseline["evaluations"]:
            return []
        target = min(evaluation["quality"] for evaluation in baseline["evaluations"])
        curve = [(point[reproduction.clock], point["quality"]) for point in result["evaluations"]]
        times.append(first_below(curve, target))
    return times


def first_below(curve: Sequence[tuple[float, float]], target: float) -> float:
    """Where a curve of (time, value) first reaches `target`, linearly between its points."""
    before: tuple[float, float] | None = None
    for time, value in curve:
        if value <= target:
            if before is None:
                return time
            share = (before[1] - target) / (before[1] - value)
            return before[0] + share * (time - before[0])
        before = time, value
    return math.inf


def mean_sd(values: list[float], *, digits: int | None = None) -> str:
    """'164.0 ± 1.2', the value alone when there is one, or 'diverged'.

    Without a number of `digits` after the point there is one, or two for values below 100.
    """
    if not all(map(math.isfinite, values)):
        return "diverged"
    mean = statistics.mean(values)
    if digits is None:
        digits = 2 if mean < 100 else 1
    shown = [mean] if len(values) == 1 else [mean, statistics.stdev(values)]
    return " ± ".join(_short(value, digits) for value in shown)


def _short(value: float, digits: int) -> str:
    """So many digits, or a power of ten where a run is far off and digits tell nothing."""
    return f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.1e}"


def _seconds(times: list[float]) -> str:
    median = statistics.median(times) if times else math.inf
    return f"{median:.1f}" if math.isfinite(median) else "never"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,g}"
