"""Tables and figures of docs/results.md, from the runs that `experiments reproduce` made.

    python -m experiments.studies.results_page gowalla-mf=build/gowalla-mf-full

Each argument is a recipe and its runs: the folder of `experiments reproduce`, finished or not, or a
file of kept runs. Prints a table in Markdown and the CPU hours of all runs for each of them. With
--keep it adds the runs of folders to files of kept runs, one for each folder, with a line for each
run: its settings, its results and its evaluations. `experiments/measured` has those of the page, so
that tables and figures can be made again without the hours of training. With --output it draws
quality against bytes of state, and where quality was measured during training, against processor
time and against examples, with a panel for each argument.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sketchoptim._files import replace_file
from sketchoptim._formatting import readable_bytes

from ..checkpoints import read_json
from ..errors import run_study
from ..recipes import Recipe, load_recipe
from ..report.table import mean_sd

_COLUMNS = 2
_MOST = 2.5  # worst result over the best one that a panel shows


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
    parser.add_argument("runs", nargs="+", type=_pair, metavar="RECIPE=PATH")
    parser.add_argument("--keep", type=Path, help="folder of files of kept runs to add the runs to")
    parser.add_argument("--output", type=Path, help="folder for the figures; default: none drawn")
    options = parser.parse_args(arguments)
    found = [(load_recipe(recipe), path) for recipe, path in options.runs]
    tables = [read_table(recipe, path) for recipe, path in found]
    if options.keep is not None:
        for _, path in found:
            keep_runs(path, options.keep / f"{path.stem}.jsonl")
    for table in tables:
        print(markdown(table))
    hours = sum(table.cpu_hours for table in tables)
    print(f"{sum(table.runs for table in tables)} runs, {hours:.1f} CPU hours")
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        panels(tables, draw_states, options.output / "quality_state.png")
        timed = [it for it in tables if any(row.results[0]["evaluations"] for row in it.rows)]
        if timed:
            panels(timed, draw_times, options.output / "quality_time.png")
            panels(timed, draw_examples, options.output / "quality_examples.png")


def _pair(text: str) -> tuple[str, Path]:
    recipe, equals, folder = text.rpartition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"must be RECIPE=PATH, got {text!r}")
    return recipe, Path(folder)


def read_runs(path: Path) -> list[dict[str, Any]]:
    """The finished runs of a folder of `experiments reproduce`, or of a file of kept runs."""
    if path.is_file():
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    results = sorted(path.glob("runs/*/result.json"))
    if not results:
        raise FileNotFoundError(f"no finished runs in {path / 'runs'}; run experiments reproduce")
    return [read_json(result) for result in results]


def keep_runs(path: Path, kept: Path) -> None:
    """Adds the runs of `path` to those in the file `kept`, where one replaces an earlier one of the
    same settings. The losses of single steps are left out.
    """
    runs = (read_runs(kept) if kept.exists() else []) + read_runs(path)
    by_settings = {json.dumps(run["about"]): run for run in runs}
    kept.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({name: value for name, value in run.items() if name != "losses"})
        for _, run in sorted(by_settings.items())
    ]
    replace_file(kept, lambda file: file.write("".join(f"{line}\n" for line in lines).encode()))


def read_table(recipe: Recipe, path: Path) -> Table:
    """The runs at `path`, by method, in the order of the recipe."""
    runs = read_runs(path)
    by_method: dict[str, list[dict[str, Any]]] = {name: [] for name in recipe.contestants}
    for run in runs:
        by_method.setdefault(run["about"]["train"]["method"]["name"], []).append(run)
    rows = [best_row(found) for found in by_method.values() if found]
    hours = sum(run["cpu_seconds"] for run in runs) / 3600
    return Table(recipe.title, recipe.metric, rows, hours, len(runs))


def best_row(runs: list[dict[str, Any]]) -> Row:
    """All seeds of a method at the rate that was best on validation data with the first seed."""
    first = min(run["about"]["train"]["seed"] for run in runs)
    by_rate = {
        run["about"]["train"]["table_lr"]: math.inf if "diverged" in run else run["valid"]
        for run in runs
        if run["about"]["train"]["seed"] == first
    }
    best = min(by_rate, key=lambda rate: by_rate[rate] or 0.0)  # the only one without validation
    settings = [(run["about"]["train"], run) for run in runs]
    chosen = sorted(
        ((it["seed"], run) for it, run in settings if it["table_lr"] == best), key=lambda it: it[0]
    )
    method = chosen[0][1]["about"]["train"]["method"]
    rates = sorted(by_rate.items())
    return Row(method["name"], method["title"], best, rates, [run for _, run in chosen])


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
    if valid is None:
        return "not measured"
    return f"{valid:.2f}" if math.isfinite(valid) else "diverged"


def panels(tables: list[Table], draw: Any, path: Path) -> None:
    """One panel for each table."""
    columns = min(_COLUMNS, len(tables))
    lines = math.ceil(len(tables) / columns)
    figure = Figure(figsize=(5.0 * columns, 3.9 * lines), layout="constrained")
    all_axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in all_axes[len(tables) :]:
        axes.set_axis_off()
    for axes, table in zip(all_axes, tables, strict=False):
        draw(axes, table)
        axes.set_title(table.title, fontsize=10, loc="left")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def draw_states(axes: Axes, table: Table) -> None:
    """Mean and standard deviation of test quality over the bytes of state."""
    means = [statistics.mean(row.values("test")) for row in table.rows]
    best = min(means)
    for row, mean, marker in zip(table.rows, means, cycle("os^vDPX<>hd"), strict=False):
        if mean > _MOST * best:
            continue
        values = row.values("test")
        style: dict[str, Any] = {"fmt": marker, "markersize": 6, "label": row.title}
        if row.name == "lean":
            style |= {"fmt": "*", "markersize": 14, "zorder": 5}
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        size = max(1.0, statistics.median(row.values("table_state_bytes")))
        axes.errorbar([size], [mean], [deviation], capsize=3, color=color(row, table), **style)
    axes.set(xscale="log", xlabel="bytes of state of the tables", ylabel=f"test {table.metric}")
    axes.legend(frameon=False, fontsize=7)


def draw_times(axes: Axes, table: Table) -> None:
    """Validation quality of the first seed over processor time, without the start."""
    _draw_curves(axes, table, lambda _, point: point["cpu_seconds"])
    axes.set_xlabel("seconds of processor time")


def draw_examples(axes: Axes, table: Table) -> None:
    """Validation quality of the first seed over the examples, or words, trained on."""
    _draw_curves(
        axes, table, lambda train, point: point["step"] * _step_examples(table, train) / 1e6
    )
    axes.set_xlabel(f"millions of {'words' if table.metric == 'perplexity' else 'examples'}")


def _step_examples(table: Table, train: dict[str, Any]) -> int:
    """How many of them one step has; only text is cut into lengths."""
    batch: int = train["batch"]
    return batch * train["length"] if table.metric == "perplexity" else batch


def _draw_curves(
    axes: Axes, table: Table, place: Callable[[dict[str, Any], dict[str, Any]], float]
) -> None:
    """Validation quality of the first seed over `place(train settings, evaluation)`."""
    runs = [(row, row.results[0]["evaluations"]) for row in table.rows]
    best = min(it["quality"] for _, points in runs for it in points)
    runs = [it for it in runs if it[1] and it[1][-1]["quality"] < _MOST * best]
    for row, points in runs:
        style: dict[str, Any] = {"linewidth": 2.4, "zorder": 5} if row.name == "lean" else {}
        train = row.results[0]["about"]["train"]
        places = [place(train, it) for it in points]
        qualities = [it["quality"] for it in points]
        axes.plot(places, qualities, color=color(row, table), label=row.title, **style)
    axes.set_ylabel(f"validation {table.metric}")
    later = [it["quality"] for _, points in runs for it in points[len(points) // 3 :]]
    axes.set_ylim(0.98 * best, 1.01 * max(later))
    axes.legend(frameon=False, fontsize=7)


def color(row: Row, table: Table) -> str:
    """Of a method, the same in both figures: black for lean."""
    others = [it.name for it in table.rows if it.name != "lean"]
    return "black" if row.name == "lean" else f"C{others.index(row.name)}"


if __name__ == "__main__":
    run_study(main)
