"""Tables and figures of docs/results.md, from the folders that `experiments reproduce` wrote.

    python -m experiments.studies.results_page build/wikitext2_converged-small build/gowalla-mf-full

Prints a table in Markdown and the CPU hours of all runs for each folder, and draws quality against
bytes of state, and quality against processor time, with a panel for each folder.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sketchoptim.diagnostics._text_table import readable_bytes

from ..errors import run_study
from ..recipes import load_recipe
from ..report.table import mean_sd

_COLUMNS = 2
_MOST = 1.35  # worst result over the best one that a panel shows


class Row(NamedTuple):
    """One method of a folder, with a number for each seed."""

    name: str
    title: str
    table_lr: float
    by_rate: list[tuple[float, float | None]]
    """Each rate of the tables that was tried, and its quality on validation data."""
    results: list[dict[str, Any]]

    def values(self, key: str) -> list[float]:
        """A number of each seed; infinite where the training diverged."""
        return [math.inf if it.get(key) is None else float(it[key]) for it in self.results]


class Table(NamedTuple):
    """The methods of a folder."""

    title: str
    metric: str
    rows: list[Row]
    cpu_hours: float
    runs: int


def main(arguments: list[str] | None = None) -> None:
    """Prints and draws."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, help="written by experiments reproduce")
    parser.add_argument("--recipes", type=Path, default=Path("experiments/studies"))
    parser.add_argument("--output", type=Path, help="folder for the figures; default: none drawn")
    options = parser.parse_args(arguments)
    tables = [read_table(folder, options.recipes) for folder in options.folders]
    for table in tables:
        print(markdown(table))
    print(
        f"{sum(it.runs for it in tables)} runs, {sum(it.cpu_hours for it in tables):.1f} CPU hours"
    )
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        panels(tables, draw_states, options.output / "quality_state.png")
        timed = [it for it in tables if any(row.results[0]["evaluations"] for row in it.rows)]
        panels(timed, draw_times, options.output / "quality_time.png")


def read_table(folder: Path, recipes: Path) -> Table:
    """The findings of a folder, and the time of all its runs, also those that a sweep discards."""
    found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    own = recipes / f"{found['recipe']}.toml"
    recipe = load_recipe(str(own) if own.exists() else found["recipe"])
    rows = [
        Row(
            it["name"], it["title"], it["table_lr"],
            [(rate, valid) for rate, _, valid in it["valid_by_rate"]], it["results"],
        )
        for it in found["findings"]
    ]  # fmt: skip
    runs = [json.loads(path.read_text("utf-8")) for path in folder.glob("runs/*/result.json")]
    hours = sum(run["cpu_seconds"] for run in runs) / 3600
    return Table(recipe.title, recipe.metric, rows, hours, len(runs))


def markdown(table: Table) -> str:
    """The table, with a column for each further measure."""
    first = table.rows[0].results[0]
    further = sorted(key for key in first if key.startswith("test_"))
    names = [key.removeprefix("test_").replace("_", " ") for key in further]
    columns = ["method", "seeds", f"test {table.metric}", *names]
    columns += ["valid, by rate of the tables", "state of tables", "peak memory", "lr of tables"]
    lines = [f"### {table.title}", " | ".join(columns), " | ".join("---" for _ in columns)]
    for row in table.rows:
        rates = ", ".join(f"{_short(valid)} at {rate:g}" for rate, valid in row.by_rate)
        peak = statistics.median(row.values("peak_memory_bytes"))
        cells = [row.title, str(len(row.results)), mean_sd(row.values("test"))]
        cells += [mean_sd(row.values(key), digits=4) for key in further]
        cells += [rates, readable_bytes(statistics.median(row.values("table_state_bytes")))]
        cells += [readable_bytes(peak) if math.isfinite(peak) else "", f"{row.table_lr:g}"]
        lines.append(" | ".join(cells))
    lines = [lines[0], *(f"| {line} |" for line in lines[1:])]
    return "\n".join([*lines, f"{table.runs} runs, {table.cpu_hours:.2f} CPU hours", ""])


def _short(valid: float | None) -> str:
    return "diverged" if valid is None else f"{valid:.2f}"


def panels(tables: list[Table], draw: Any, path: Path) -> None:
    """One panel for each table."""
    lines = math.ceil(len(tables) / _COLUMNS)
    figure = Figure(figsize=(10.0, 3.9 * lines), layout="constrained")
    all_axes = figure.subplots(lines, _COLUMNS, squeeze=False).flatten()
    for axes in all_axes[len(tables) :]:
        axes.set_axis_off()
    for axes, table in zip(all_axes, tables, strict=False):
        draw(axes, table)
        axes.set_title(table.title, fontsize=10, loc="left")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def draw_states(axes: Axes, table: Table) -> None:
    """Mean and standard deviation of test quality over the bytes of state, with names."""
    means = [statistics.mean(row.values("test")) for row in table.rows]
    best = min(means)
    for row, mean in zip(table.rows, means, strict=True):
        if mean > _MOST * best:
            continue
        values = row.values("test")
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        size = max(1.0, statistics.median(row.values("table_state_bytes")))
        is_lean = row.name.startswith("lean")
        color = "tab:blue" if is_lean else "tab:red"
        axes.errorbar([size], [mean], [deviation], fmt="o", capsize=3, color=color)
        axes.annotate(
            row.title, (size, mean), textcoords="offset points",
            xytext=(6, 3) if is_lean else (-6, 3), ha="left" if is_lean else "right", fontsize=7,
        )  # fmt: skip
    axes.set(xscale="log", xlabel="bytes of state of the tables", ylabel=f"test {table.metric}")


def draw_times(axes: Axes, table: Table) -> None:
    """Validation quality of the first seed over processor time."""
    best = min(it["quality"] for row in table.rows for it in row.results[0]["evaluations"])
    for row in table.rows:
        points = row.results[0]["evaluations"]
        if not points or min(it["quality"] for it in points) > _MOST * best:
            continue
        style: dict[str, Any] = {"linewidth": 2.2} if row.name == "lean" else {"linewidth": 1.1}
        times = [it["cpu_seconds"] for it in points]
        axes.plot(times, [it["quality"] for it in points], label=row.title, **style)
    axes.set(xlabel="seconds of processor time", ylabel=f"validation {table.metric}")
    axes.set_ylim(0.98 * best, 1.6 * best)
    axes.legend(frameon=False, fontsize=7)


if __name__ == "__main__":
    run_study(main)
