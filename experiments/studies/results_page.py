"""Tables of docs/results, from the runs that `experiments reproduce` made.

    python -m experiments.studies.results_page gowalla-mf=build/gowalla-mf-full

Each argument is a recipe and its runs: the folder of `experiments reproduce`, finished or not, or a
file of kept runs. Prints a table in Markdown for each of them, and the CPU hours of all runs. With
--keep it adds the runs of folders to files of kept runs, one for each folder, with a line for each
run: its settings, its results and its evaluations. `experiments/measured` has those of the pages.
`results_figures` draws from them.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from sketchoptim._files import replace_file
from sketchoptim._formatting import readable_bytes

from ..checkpoints import read_json
from ..errors import run_study
from ..recipes import Recipe, load_recipe
from ..report.table import mean_sd


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
    """Prints the tables, and keeps the runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=_pair, metavar="RECIPE=PATH")
    parser.add_argument("--keep", type=Path, help="folder of files of kept runs to add the runs to")
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


if __name__ == "__main__":
    run_study(main)
