"""The runs of the grid: those that are kept in a file, and those that are still to do."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import packages, words
from .methods import Rates, memory, rule_of
from .tasks import Task

MEASURED = Path(__file__).parents[2] / "measured" / "defaults.jsonl"
TASKS = {
    "transformer": Task(
        words.small_transformer, "loss", True, (0.01, 0.03, 0.1), 0.003, (4_000,)
    ),
    "treebank": Task(
        words.treebank_lstm, "loss", True, (0.003, 0.01, 0.03), 0.003, (10_000, 10_000)
    ),
    "skip-gram": Task(
        words.skip_gram, "loss", True, (0.003, 0.01, 0.03), 0.003, (12_000, 12_000)
    ),
    "node2vec": Task(
        packages.node2vec, "accuracy", False, (0.03, 0.1, 0.3), 0.003, (2_400,)
    ),
    "recbole": Task(
        packages.recbole_bpr, "NDCG@10", False, (0.001, 0.003, 0.01), 0.003, (944, 1_683)
    ),
    "umls": Task(
        packages.umls, "reciprocal rank", False, (0.003, 0.01, 0.03), 0.003, (135, 46)
    ),
    "kinships": Task(
        packages.kinships, "reciprocal rank", False, (0.003, 0.01, 0.03), 0.003, (104, 25)
    ),
}  # fmt: skip
FACTORS = {"best": 1.0, "third": 1 / 3, "triple": 3.0}


class Run(NamedTuple):
    """The identity of one training run."""

    task: str
    method: tuple[Any, ...]
    """The memory of each table and the rule: names that mean the same are the same run."""
    rate: float
    seed: int

    @classmethod
    def of(cls, task: str, method: str, rate: float, seed: int) -> "Run":
        memories = (memory(method, rows) for rows in TASKS[task].rows)
        return cls(task, (*memories, rule_of(method)), rate, seed)


class Grid:
    """The runs that are kept in a file, and those that are still to do."""

    def __init__(self, file: Path) -> None:
        self.file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self.kept = {
            Run.of(it["task"], it["method"], it["rate"], it["seed"]): it
            for it in map(json.loads, lines)
        }

    def has(self, task: str) -> bool:
        """Whether Adam was run at the rates of a task."""
        return all(Run.of(task, "adam", rate, 0) in self.kept for rate in TASKS[task].rates)

    def lines(self, task: str, method: str) -> Iterator[tuple[float, int, dict[str, Any]]]:
        """Rate, seed and line of the kept runs of a method."""
        wanted = Run.of(task, method, 0.0, 0)
        for run, line in self.kept.items():
            if run[:2] == wanted[:2]:
                yield run.rate, run.seed, line

    def value(self, task: str, method: str, rate: float, seed: int = 0) -> float:
        """The result of a run, which is done first if it is not kept."""
        run = Run.of(task, method, rate, seed)
        if run not in self.kept:
            self.kept[run] = self._done(task, method, rate, seed)
        return float(self.kept[run]["value"])

    def _done(self, name: str, method: str, rate: float, seed: int) -> dict[str, Any]:
        task, began = TASKS[name], time.process_time()
        result = task.run(method, Rates(rate, task.rest), seed)
        line = {
            "task": name,
            "method": method,
            "rate": rate,
            "seed": seed,
            "metric": task.metric,
            "value": result.value,
            "state_bytes": result.state_bytes,
            "cpu_seconds": round(time.process_time() - began, 1),
            "commit": commit(),
            "torch": torch.__version__,
            "command": "python -m experiments.studies.defaults " + " ".join(sys.argv[1:]),
        }
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{name:12} {method:24} {rate:<9g} {seed} {result.value:.4f}", flush=True)
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


@cache
def commit() -> str:
    """The commit that is checked out."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
