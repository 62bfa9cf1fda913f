"""What the rule of README.md makes of the kept runs: tables in Markdown, and a verdict."""

import statistics
from typing import NamedTuple

from sketchoptim._formatting import readable_bytes

from .runs import FACTORS, TASKS, Grid

SEEDS = (0, 1, 2)
_MARGIN = 0.01  # of Adam's result


class Cell(NamedTuple):
    """A method at one rate, over seeds."""

    values: tuple[float, ...]
    state_bytes: int

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.values) if len(self.values) == len(SEEDS) else 0.0

    def __str__(self) -> str:
        count = "" if len(self.values) == len(SEEDS) else f" ({len(self.values)})"
        return f"{self.mean:.4f}{count}"


class Outcome(NamedTuple):
    """A method in one task, compared with Adam."""

    adam: Cell
    at_rates: dict[str, Cell]
    """By name of the rate; those that were run."""
    is_loss: bool

    def behind(self, cell: Cell) -> float:
        """By how much a cell is worse than Adam at its best rate; negative if it is better."""
        return (cell.mean - self.adam.mean) * (1 if self.is_loss else -1)

    @property
    def best(self) -> str:
        """The name of the method's own best rate."""
        return min(self.at_rates, key=lambda name: self.behind(self.at_rates[name]))

    def margin(self, cell: Cell) -> float:
        """What a method may be behind by."""
        deviation = max(self.adam.deviation, cell.deviation)
        return max(2 * deviation, _MARGIN * abs(self.adam.mean))

    def passes(self, name: str) -> bool | None:
        """Whether it is not behind at a rate; None if it was not run there."""
        cell = self.at_rates.get(name)
        return None if cell is None else self.behind(cell) <= self.margin(cell)

    @property
    def passes_first(self) -> bool | None:
        """At Adam's best rate."""
        return self.passes("best")

    @property
    def passes_second(self) -> bool | None:
        """At its own best rate; it cannot be told of a method that failed at the rates so far."""
        passed = self.passes(self.best) if self.at_rates else None
        return passed or (False if len(self.at_rates) == len(FACTORS) else None)


def outcome(grid: Grid, task: str, method: str) -> Outcome:
    """What is kept of a method in a task."""
    rates = grid.of_adam(task)
    cells = {name: _cell(grid, task, method, rate) for name, rate in rates.items()}
    adam = _cell(grid, task, "adam", rates["best"])
    assert adam is not None  # best_rate
    kept = {name: cell for name, cell in cells.items() if cell is not None}
    return Outcome(adam, kept, TASKS[task].is_loss)


def _cell(grid: Grid, task: str, method: str, rate: float) -> Cell | None:
    lines = [it for seed in SEEDS if (it := grid.kept_line(task, method, rate, seed))]
    if not lines:
        return None
    return Cell(tuple(float(it["value"]) for it in lines), int(lines[0]["state_bytes"]))


def markdown(grid: Grid, methods: list[str]) -> str:
    """Three tables: results at Adam's rate, results at the best rate, state and verdict."""
    tasks = [task for task in TASKS if grid.has(task)]
    found = {method: {task: outcome(grid, task, method) for task in tasks} for method in methods}
    heading = [f"{task}, {TASKS[task].metric}" for task in tasks]
    rates = [f"{grid.best_rate(task):g}" for task in tasks]
    adam = [_with_deviation(found[methods[0]][task].adam) for task in tasks]
    parts = [
        "At Adam's best rate:\n",
        _table(
            ["method", *heading],
            [["the rate", *rates], ["Adam", *adam]]
            + [[name, *(_at_adams(found[name][task]) for task in tasks)] for name in methods],
        ),
        "At the best of that rate, a third of it and three times it:\n",
        _table(
            ["method", *heading],
            [["Adam", *adam]]
            + [[name, *(_at_own(found[name][task]) for task in tasks)] for name in methods],
        ),
        "State of the tables, and the rule:\n",
        _table(
            ["method", *tasks, "passes 1", "passes 2"],
            [
                [name, *(_state(found[name][task]) for task in tasks), *_verdicts(found[name])]
                for name in methods
            ],
        ),
    ]
    return "\n".join(parts)


def _table(heading: list[str], rows: list[list[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _with_deviation(cell: Cell) -> str:
    return f"{cell} ± {cell.deviation:.4f}" if cell.deviation else str(cell)


def _marked(text: str, passes: bool | None) -> str:
    return f"{text}, behind" if passes is False else text


def _at_adams(found: Outcome) -> str:
    cell = found.at_rates.get("best")
    return "" if cell is None else _marked(_with_deviation(cell), found.passes_first)


def _at_own(found: Outcome) -> str:
    if not found.at_rates:
        return ""
    times = {"best": "", "third": " at 1/3", "triple": " at 3"}[found.best]
    return _marked(f"{found.at_rates[found.best]}{times}", found.passes_second)


def _state(found: Outcome) -> str:
    cells = list(found.at_rates.values())
    return readable_bytes(cells[0].state_bytes) if cells else ""


def _verdicts(found: dict[str, Outcome]) -> tuple[str, str]:
    def verdict(passed: dict[str, bool | None]) -> str:
        behind = [task for task, it in passed.items() if it is False]
        missing = [task for task, it in passed.items() if it is None]
        if behind:
            return f"no: {', '.join(behind)}"
        return f"open: {', '.join(missing)}" if missing else "yes"

    return (
        verdict({task: it.passes_first for task, it in found.items()}),
        verdict({task: it.passes_second for task, it in found.items()}),
    )
