"""The results as tables for the terminal, each with the machine that they were measured on.

A table that is wider than the terminal becomes several, each with the column of the methods.
"""

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from sketchoptim._formatting import readable_bytes

from .bags import BagsResult
from .heads import HeadResult
from .measure import Timing
from .methods import BASELINE, BY_NAME
from .report import Report
from .runs import Comparison, SweepResult
from .training import TrainingResult
from .updates import UpdateTimes


def comparison_table(comparison: Comparison, report: Report, console: Console) -> Group:
    """One row for each method: its time, its ratio to the baseline, its traffic and bandwidth."""
    entries = f"{comparison.entries:,} {comparison.kind} rows"
    if comparison.kind == "raw":
        entries += f" ({comparison.touched:,.0f} distinct)"
    columns = ["method", "median", "quartiles", "x SparseAdam", "state"]
    columns += ["ideal", "rate", "of streams", "of rows"]
    rows = []
    for result in comparison.results:
        rate = result.ideal_bytes / result.timing.median
        rows.append(
            [
                result.title,
                _milliseconds(result.timing.median),
                _quartiles(result.timing),
                f"{comparison.ratio(result):.3f}",
                readable_bytes(result.state_bytes),
                readable_bytes(result.ideal_bytes),
                _rate(rate),
                f"{rate / comparison.streaming_bandwidth:.0%}",
                f"{rate / comparison.row_bandwidth:.0%}",
            ]
        )
    title = (
        f"{comparison.rows:,} x {comparison.dim}, {entries}; memory: "
        f"{_rate(comparison.streaming_bandwidth)} in streams, "
        f"{_rate(comparison.row_bandwidth)} in these rows"
    )
    return _tables(title, columns, [*rows, *_absent_rows(report)], report, console)


def ratio_table(report: Report, console: Console) -> Group:
    """Ratios to SparseAdam: one row for each method, one column for each gradient."""
    headings = [f"{c.rows:,}\nx {c.dim}\n{c.entries:,}\n{c.kind}" for c in report.steps]
    rows = [
        [result.title, *(f"{c.ratio(c.results[index]):.3f}" for c in report.steps)]
        for index, result in enumerate(report.steps[0].results)
    ]
    title = "time of a step over SparseAdam's"
    return _tables(title, ["method", *headings], [*rows, *_absent_rows(report)], report, console)


def fixed_cost_table(report: Report, console: Console) -> Group:
    """One row for each method: a step on four short rows, in microseconds."""
    columns = ["method", "cold caches", "warm caches"]
    rows = [
        [
            BY_NAME[cost.method].title,
            *(f"{1e6 * timing.median:.0f} us" for timing in (cost.cold, cost.warm)),
        ]
        for cost in report.fixed_costs
    ]
    return _tables("a step on four short rows", columns, rows, report, console)


def sweep_table(sweep: SweepResult, report: Report, console: Console) -> Group:
    """One row for each method, one column for each value; the last one compares both ends."""
    values = [f"{value:,}" for value in sweep.values]
    columns = ["method", *values, f"{values[-1]} / {values[0]}"]
    rows = [
        [
            BY_NAME[name].title,
            *(_milliseconds(timing.median) for timing in timings),
            f"x {timings[-1].median / timings[0].median:.2f}",
        ]
        for name, timings in sweep.timings.items()
    ]
    return _tables(f"time against {sweep.axis}; {sweep.fixed}", columns, rows, report, console)


def training_table(results: list[TrainingResult], report: Report, console: Console) -> Group:
    """One row for each optimizer: the whole step and its parts."""
    columns = ["optimizer", "step", "quartiles", "x SparseAdam"]
    columns += ["forward", "backward", "optimizer", "x SparseAdam"]
    baseline = next(result for result in results if result.method == BASELINE)
    rows = []
    for result in results:
        row = [
            result.title,
            _milliseconds(result.total.median),
            _quartiles(result.total),
            f"{result.total.median / baseline.total.median:.3f}",
            _milliseconds(result.forward.median),
            _milliseconds(result.backward.median),
        ]
        if result.optimizer is not None and baseline.optimizer is not None:
            ratio = result.optimizer.median / baseline.optimizer.median
            row += [_milliseconds(result.optimizer.median), f"{ratio:.3f}"]
        rows.append(row)
    title = f"a whole training step: {results[0].shape}"
    return _tables(title, columns, rows, report, console)


def update_table(times: UpdateTimes, report: Report, console: Console) -> Group:
    """One row for each method: the time of a step, and over that of the first method."""
    first = next(iter(times.timings.values()))
    columns = ["method", "median", "quartiles", "x first", "least", "x first"]
    rows = [
        [
            title,
            _milliseconds(timing.median),
            _quartiles(timing),
            f"{timing.median / first.median:.3f}",
            _milliseconds(timing.least),
            f"{timing.least / first.least:.3f}",
        ]
        for title, timing in times.timings.items()
    ]
    return _tables(times.title, columns, rows, report, console)


def head_table(results: list[HeadResult], report: Report, console: Console) -> Group:
    """One row for each method: time and memory of a whole step, over those of the first."""
    columns = ["loss, optimizer", "step", "x plain", "least", "forward", "backward", "optimizer"]
    columns += ["peak", "x plain", "bytes/weight"]
    plain = results[0]
    rows = [
        [
            it.title,
            _milliseconds(it.total.median),
            f"{it.ratio:.3f}",
            f"{it.total.least / plain.total.least:.3f}",
            *(_milliseconds(part.median) for part in (it.forward, it.backward, it.optimizer)),
            f"{it.peak_bytes / 2**20:,.0f} MiB",
            f"{it.peak_bytes / plain.peak_bytes:.3f}",
            f"{it.bytes_a_weight:.3f}",
        ]
        for it in results
    ]
    title = f"a whole training step: {plain.shape}; peak beyond the resident model"
    return _tables(title, columns, rows, report, console)


def bags_table(results: list[BagsResult], report: Report, console: Console) -> Group:
    """One row for each method: the whole step over FBGEMM's and over sparse gradients'."""
    others = {"fbgemm": "x FBGEMM", "sparse": "x sparse"}
    columns = ["tables, optimizer", "step", *others.values(), "least, x FBGEMM"]
    columns += ["forward", "backward", "optimizer"]
    least = {it.method: it.total.least for it in results}
    rows = [
        [
            it.title,
            _milliseconds(it.total.median),
            *(f"{it.ratios[name]:.3f}" if name in it.ratios else "absent" for name in others),
            f"{it.total.least / least['fbgemm']:.3f}" if "fbgemm" in least else "absent",
            *(_milliseconds(part.median) for part in (it.forward, it.backward, it.optimizer)),
        ]
        for it in results
    ]
    first = results[0]
    network = "with a small network" if first.has_network else "without a network"
    title = f"a whole training step: {first.shape}, {network}"
    conditions = report.conditions_with(first.threads, first.clock)
    return _tables(title, columns, rows, report, console, conditions)


def _absent_rows(report: Report) -> list[list[str]]:
    return [[BY_NAME[name].title, "absent"] for name in report.absent]


def _tables(
    title: str,
    columns: list[str],
    rows: list[list[str]],
    report: Report,
    console: Console,
    conditions: str | None = None,
) -> Group:
    """Title, tables no wider than the console, and the conditions."""
    unbounded = console.options.update(max_width=10_000)
    tables: list[RenderableType] = []
    start = 1
    while start < len(columns):
        stop = start + 1
        table = _table([0, *range(start, stop)], columns, rows)
        while stop < len(columns):
            wider = _table([0, *range(start, stop + 1)], columns, rows)
            if Measurement.get(console, unbounded, wider).maximum > console.width:
                break
            table, stop = wider, stop + 1
        tables.append(table)
        start = stop
    shown = Text(conditions or report.conditions, style="dim")
    return Group(Text(title, style="bold"), *tables, shown, "")


def _table(chosen: Sequence[int], columns: list[str], rows: list[list[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for at in chosen:
        table.add_column(columns[at], justify="right" if at else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[at] if at < len(row) else "" for at in chosen))
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _quartiles(timing: Timing) -> str:
    return f"{1e3 * timing.lower_quartile:.3g}-{1e3 * timing.upper_quartile:.3g}"


def _rate(bytes_a_second: float) -> str:
    return f"{bytes_a_second / 1e9:.1f} GB/s"
