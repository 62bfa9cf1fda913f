"""Runs the grid, and prints its tables and its verdict. README.md has the rule.

    python -m experiments.studies.defaults run --tasks node2vec --methods lean,row-wise
    python -m experiments.studies.defaults run --methods "1 columns" --rates best --seeds 0,1,2
    python -m experiments.studies.defaults table

A run that is in the file is not repeated, so that a command can be stopped and started again.
"""

import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from . import packages, words
from .methods import Rates
from .tasks import Task

MEASURED = Path(__file__).parents[2] / "measured" / "defaults.jsonl"
TASKS = {
    "transformer": Task(words.small_transformer, "loss", True, (0.01, 0.03, 0.1), 0.003),
    "treebank": Task(words.treebank_lstm, "loss", True, (0.003, 0.01, 0.03), 0.003),
    "skip-gram": Task(words.skip_gram, "loss", True, (0.003, 0.01, 0.03), 0.003),
    "node2vec": Task(packages.node2vec, "accuracy", False, (0.03, 0.1, 0.3), 0.003),
    "recbole": Task(packages.recbole_bpr, "NDCG@10", False, (0.001, 0.003, 0.01), 0.003),
    "umls": Task(packages.umls, "reciprocal rank", False, (0.003, 0.01, 0.03), 0.003),
    "kinships": Task(packages.kinships, "reciprocal rank", False, (0.003, 0.01, 0.03), 0.003),
}
METHODS = (
    "lean", "1 columns", "1/8 columns", "row-wise", "1", "row-wise columns", "1/2 columns", "1/2",
)  # fmt: skip
FACTORS = {"best": 1.0, "third": 1 / 3, "triple": 3.0}

app = typer.Typer(help=__doc__, no_args_is_help=True, rich_markup_mode=None)
File = Annotated[Path, typer.Option(help="Where runs are kept, one in a line.")]


class Run(NamedTuple):
    """One training run, by what tells it from others."""

    task: str
    method: str
    rate: float
    seed: int


class Grid:
    """The runs that are kept in a file, and those that are still to do."""

    def __init__(self, file: Path) -> None:
        self.file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self.kept = {
            Run(it["task"], it["method"], it["rate"], it["seed"]): it
            for it in map(json.loads, lines)
        }

    def value(self, task: str, method: str, rate: float, seed: int = 0) -> float:
        """The result of a run, which is done first if it is not kept."""
        run = Run(task, method, rate, seed)
        if run not in self.kept:
            self.kept[run] = self._done(run)
        return float(self.kept[run]["value"])

    def _done(self, run: Run) -> dict[str, Any]:
        task, began = TASKS[run.task], time.process_time()
        result = task.run(run.method, Rates(run.rate, task.rest), run.seed)
        line = {
            **run._asdict(),
            "metric": task.metric,
            "value": result.value,
            "state_bytes": result.state_bytes,
            "cpu_seconds": round(time.process_time() - began, 1),
            "commit": _commit(),
            "torch": torch.__version__,
            "command": "python -m experiments.studies.defaults " + " ".join(sys.argv[1:]),
        }
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"{run.task:12} {run.method:24} {run.rate:<9g} {run.seed} {result.value:.4f}",
            flush=True,
        )
        return line

    def best_rate(self, task: str) -> float:
        """Adam's, with the first seed; the grid grows until it is not at an end."""
        rates, sign = list(TASKS[task].rates), 1 if TASKS[task].is_loss else -1
        while True:
            best = min(rates, key=lambda rate: sign * self.value(task, "adam", rate))
            if best not in (rates[0], rates[-1]):
                return best
            rates = (
                [round(best / 3, 7), *rates] if best == rates[0] else [*rates, round(best * 3, 7)]
            )

    def of_adam(self, task: str) -> dict[str, float]:
        """The rates of the grid, by name, as multiples of Adam's best."""
        best = self.best_rate(task)
        return {name: round(best * factor, 7) for name, factor in FACTORS.items()}


@app.callback()
def _commands() -> None: ...


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@app.command()
def run(
    tasks: str = ",".join(TASKS),
    methods: str = ",".join(METHODS),
    rates: str = ",".join(FACTORS),
    seeds: str = "0",
    file: File = MEASURED,
) -> None:
    """Trains what is not kept yet, all tasks by the first method before the second."""
    torch.set_num_threads(1)
    grid = Grid(file)
    for name in rates.split(","):
        for method in methods.split(","):
            for task in tasks.split(","):
                for seed in map(int, seeds.split(",")):
                    grid.value(task, method, grid.of_adam(task)[name], seed)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is stepped by the reference kernels")
        app()
