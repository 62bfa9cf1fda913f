"""What the rule of README.md makes of the kept runs: tables in Markdown, and a verdict."""

import statistics
from collections.abc import Callable
from typing import NamedTuple

from sketchoptim._formatting import readable_bytes

from .runs import TASKS, Grid

_SEEDS = (0, 1, 2)
_MARGIN = 0.01  # of Adam's result
_TRIED = 3  # rates of a method
_FEWEST_ROWS = 1000  # of the largest table, in the second round


class Cell(NamedTuple):
    """A method at one rate, over seeds."""

    values: tuple[float, ...]
    state_bytes: int

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.values) if len(self.values) == len(_SEEDS) else 0.0

    def __str__(self) -> str:
        if len(self.values) < len(_SEEDS):
            return f"{self.mean:.4f} ({len(self.values)})"
        return f"{self.mean:.4f} ± {self.deviation:.4f}"


class Round(NamedTuple):
    """One form of the rule: its tasks, and which of Adam's rates a method is compared at."""

    title: str
    tasks: list[str]
    adam_rate: Callable[[Grid, str], float]


class Outcome(NamedTuple):
    """A method in one task, compared with Adam."""

    rate: float
    adam: dict[float, Cell]
    """By rate."""
    own: dict[float, Cell]
    """The method's, by rate."""
    is_loss: bool

    def _is_behind(self, cell: Cell, adam: Cell) -> bool:
        behind = (cell.mean - adam.mean) * (1 if self.is_loss else -1)
        deviation = max(adam.deviation, cell.deviation)
        return behind > max(2 * deviation, _MARGIN * abs(adam.mean))

    def best(self, cells: dict[float, Cell]) -> float:
        """The rate with the best mean."""
        return min(cells, key=lambda rate: cells[rate].mean * (1 if self.is_loss else -1))

    @property
    def passes_first(self) -> bool | None:
        """Whether it is not behind at Adam's rate; None if it was not run there."""
        if self.rate not in self.own:
            return None
        return not self._is_behind(self.own[self.rate], self.adam[self.rate])

    @property
    def passes_second(self) -> bool | None:
        """Whether it is not behind at its own best rate; None if a rate is left to try."""
        if not self.own:
            return None
        cell, adam = self.own[self.best(self.own)], self.adam[self.best(self.adam)]
        if self._is_behind(cell, adam):
            return None if len(self.own) < _TRIED else False
        return True


def rounds(grid: Grid) -> list[Round]:
    """The rule as it was written first, and the second round's."""
    tasks = [task for task in TASKS if grid.has(task)]
    large = [task for task in tasks if max(TASKS[task].rows) >= _FEWEST_ROWS]
    return [
        Round("First round: Adam's best rate with seed 0", tasks, Grid.best_rate),
        Round("Second round: Adam's least rate within 1 % of its best", large, _least_rate),
    ]


def _least_rate(grid: Grid, task: str) -> float:
    """The least of Adam's rates whose mean is not behind that of its best by more than 1 %."""
    cells = _cells(grid, task, "adam")
    found = Outcome(0.0, cells, {}, TASKS[task].is_loss)
    best = cells[found.best(cells)].mean
    return min(rate for rate, it in cells.items() if abs(it.mean - best) <= _MARGIN * abs(best))


def _cells(grid: Grid, task: str, method: str) -> dict[float, Cell]:
    lines: dict[float, list[tuple[float, int]]] = {}
    for rate, seed, line in grid.lines(task, method):
        if seed in _SEEDS:
            lines.setdefault(rate, []).append((float(line["value"]), int(line["state_bytes"])))
    return {
        rate: Cell(tuple(value for value, _ in found), found[0][1]) for rate, found in lines.items()
    }


def markdown(grid: Grid, methods: list[str]) -> str:
    """For each round the results at Adam's rate with the verdict; and the bytes of state."""
    parts = [f"{it.title}:\n\n{_round_table(grid, methods, it)}" for it in rounds(grid)]
    return "\n".join([*parts, f"State of the tables:\n\n{_state_table(grid, methods)}"])


def _round_table(grid: Grid, methods: list[str], one: Round) -> str:
    def outcome(task: str, method: str) -> Outcome:
        adam, own = _cells(grid, task, "adam"), _cells(grid, task, method)
        return Outcome(one.adam_rate(grid, task), adam, own, TASKS[task].is_loss)

    adam = [outcome(task, "adam") for task in one.tasks]
    rows = [["Adam", *(f"{it.adam[it.rate]} at {it.rate:g}" for it in adam), ""]]
    for name in methods:
        found = {task: outcome(task, name) for task in one.tasks}
        rows.append([name, *map(_at_rate, found.values()), _verdict(found)])
    heading = [f"{task}, {TASKS[task].metric}" for task in one.tasks]
    return _table(["method", *heading, "is behind in"], rows)


def _state_table(grid: Grid, methods: list[str]) -> str:
    def state(task: str, method: str) -> str:
        cells = _cells(grid, task, method).values()
        return next((readable_bytes(it.state_bytes) for it in cells), "")

    tasks = [task for task in TASKS if grid.has(task)]
    rows = [[name, *(state(task, name) for task in tasks)] for name in ("adam", *methods)]
    return _table(["method", *tasks], rows)


def _table(heading: list[str], rows: list[list[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _at_rate(found: Outcome) -> str:
    """The result at Adam's rate, and the one at its own best if that is another one."""
    if not found.own:
        return ""
    best = found.best(found.own)
    cells = [str(found.own[found.rate])] if found.rate in found.own else []
    cells += [f"{found.own[best]} at {best:g}"] if best != found.rate else []
    return "; ".join(cells)


def _verdict(found: dict[str, Outcome]) -> str:
    """Tasks in which it is behind, at Adam's rate or also at its own best one."""
    words = []
    for task, it in found.items():
        if it.passes_second is False:
            words.append(f"{task} at every rate")
        elif it.passes_first is False:
            words.append(task)
    missing = [task for task, it in found.items() if it.passes_first is None]
    words += [f"not run: {', '.join(missing)}"] if missing else []
    return ", ".join(words) or "none"
