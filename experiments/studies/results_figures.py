"""The figures of docs/results.md, from the files in experiments/measured.

    python -m experiments.studies.results_figures

`earlier.csv` has the means and deviations of runs that were not kept. A row there replaces the kept
seeds of its method, which are not all seeds. `step_times.csv` has the page's table of times, and
`paper_setting.csv` the losses of two runs that were stopped early.
"""

import argparse
import csv
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..errors import run_study
from .defaults.runs import TASKS, Grid
from .results_page import best_row, read_runs

MEASURED = Path(__file__).parents[1] / "measured"
_LEAST = -20.0  # percent of Adam's result; points further behind are drawn here


class Look(NamedTuple):
    """How a method is drawn and named in all figures."""

    title: str
    color: str
    marker: str


LOOKS = {
    "exact": Look("Adam or AdamW", "#4477aa", "o"),
    "exact-third": Look("Adam at a third of its rate", "#4477aa", "^"),
    "no-first": Look("no first moment, exact", "#66ccee", "s"),
    "adagrad": Look("Adagrad, tuned start", "#ccbb44", "D"),
    "row-wise": Look("row-wise", "#ee6677", "v"),
    "counters-1": Look("1 counter a row", "#aa3377", "X"),
    "paper": Look("the paper's CS-V, NMF-V, V-only", "#228833", "P"),
    "lean-0.1": Look("lean without columns", "#999999", "*"),
    "lean": Look("lean, the default", "black", "*"),
}
_SAME = {"adamw": "exact", "cs-v": "paper", "nmf-v": "paper", "v-only": "paper"}


class Point(NamedTuple):
    """A method's result."""

    method: str
    mean: float
    deviation: float
    state_bytes: float


class Panel(NamedTuple):
    """One task: the file of its runs, and the measure that is drawn."""

    title: str
    file: str
    key: str
    label: str


LONGEST = (
    Panel("WikiText-2, LSTM, 12 passes", "wikitext2_converged-full", "test", "perplexity"),
    Panel("Transformer, three passes", "transformer_converged-small", "test", "perplexity"),
    Panel("Gowalla, 60 passes", "gowalla-sixty", "test_recall", "missed at 20, %"),
    Panel(
        "Debian's files, four passes", "sampled-four", "test_recall_at_10", "missed at 10, %"
    ),
    Panel("Debian's files, four passes", "sampled-four", "test_recall_at_1", "missed at 1, %"),
    Panel("MACH, three passes", "mach-three", "test_recall_at_100", "missed at 100, %"),
)  # fmt: skip

# Title, file of kept runs, rate of the tables, and whether the metric is a perplexity.
OWN_RATE = (
    ("Transformer, half a pass", "transformer-half", 0.033, True),
    ("Gowalla, 20 passes", "gowalla-columns", 0.03, False),
    ("Debian's files, two passes", "sampled-columns", 0.01, False),
    ("MACH, one pass", "mach-one", 0.03, False),
)
# Task of the study of defaults, its title, and Adam's rate by the rule's second round.
SMALL = (
    ("transformer", "small Transformer, tied", 0.1),
    ("treebank", "LSTM, Penn Treebank sample", 0.09),
    ("skip-gram", "skip-gram", 0.01),
    ("node2vec", "Node2Vec", 0.03),
    ("recbole", "BPR, ml-100k", 0.003),
)
_NAMES = {  # methods of the study of defaults
    "lean-0.1": "lean",
    "row-wise": "row-wise",
    "lean": "1/8 columns and row-wise below 4096",
}


def main(arguments: list[str] | None = None) -> None:
    """Draws all figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("docs/figures"))
    folder = parser.parse_args(arguments).output
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, Callable[[], Figure]] = {
        "quality_state.png": quality_figure,
        "own_rate.png": own_rate_figure,
        "step_times.png": times_figure,
        "behind.png": behind_figure,
        "paper_setting.png": paper_figure,
    }
    with rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        for name, draw in drawn.items():
            draw().savefig(folder / name, dpi=130)
            print(folder / name)


def points(file: str, key: str) -> list[Point]:
    """The methods of a file at the rate that was best on validation data, by `key`."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in read_runs(MEASURED / f"{file}.jsonl"):
        runs.setdefault(run["about"]["train"]["method"]["name"], []).append(run)
    rows = {name: best_row(found) for name, found in runs.items()}
    found = {
        name: Point(
            name,
            statistics.fmean(row.values(key)),
            statistics.stdev(row.values(key)) if len(row.results) > 1 else 0.0,
            statistics.median(row.values("table_state_bytes")),
        )
        for name, row in rows.items()
    }
    for line in earlier(file, key):
        known = found.get(line["method"])
        state = float(line["state_bytes"] or (known.state_bytes if known else math.nan))
        deviation = float(line["sd"] or 0.0)
        found[line["method"]] = Point(line["method"], float(line["mean"]), deviation, state)
    return [_drawn(it) for it in found.values() if _SAME.get(it.method, it.method) in LOOKS]


def earlier(file: str, key: str) -> list[dict[str, str]]:
    """The rows of `earlier.csv` for a file and a measure."""
    with (MEASURED / "earlier.csv").open(newline="") as lines:
        return [it for it in csv.DictReader(lines) if (it["file"], it["metric"]) == (file, key)]


def _drawn(point: Point) -> Point:
    return point._replace(method=_SAME.get(point.method, point.method))


def quality_figure() -> Figure:
    """Test quality over bytes of state, a panel for each task; lower is better in all."""
    figure = Figure(figsize=(7.4, 9.6), layout="constrained")
    used: set[str] = set()
    for axes, panel in zip(figure.subplots(3, 2).flatten(), LONGEST, strict=True):
        used |= _draw_panel(axes, panel)
    _legend(figure, used, columns=2)
    return figure


def behind_figure() -> Figure:
    """The clear loss: what is missed at 1 on Debian's files."""
    figure = Figure(figsize=(8.0, 4.2), layout="constrained")
    panel = next(it for it in LONGEST if it.key == "test_recall_at_1")
    used = _draw_panel(figure.subplots(), panel)
    _legend(figure, used, columns=3)
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> set[str]:
    found = [it for it in points(panel.file, panel.key) if math.isfinite(it.state_bytes)]
    is_share = panel.key != "test"
    for it in found:
        look = LOOKS[it.method]
        mean, deviation = (
            (100 * (1 - it.mean), 100 * it.deviation) if is_share else (it.mean, it.deviation)
        )
        size = 15 if look.marker == "*" else 8
        axes.errorbar(
            [it.state_bytes], [mean], [deviation], capsize=3, fmt=look.marker, markersize=size,
            color=look.color, zorder=3 if it.method == "lean" else 2,
        )  # fmt: skip
    axes.set(xscale="log", xlabel="bytes of state of the tables", ylabel=f"test {panel.label}")
    axes.set_title(panel.title, fontsize=11, loc="left")
    axes.margins(x=0.12, y=0.15)
    axes.grid(alpha=0.25)
    return {it.method for it in found}


def _legend(figure: Figure, used: set[str], *, columns: int) -> None:
    handles = [
        Line2D([], [], linestyle="", marker=it.marker, color=it.color, label=it.title,
               markersize=13 if it.marker == "*" else 8)
        for name, it in LOOKS.items() if name in used
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)


def own_rate_figure() -> Figure:
    """How far methods are ahead of Adam, in percent of its result, at Adam's best rate."""
    found = {title: _ahead_of_small(task, rate) for task, title, rate in SMALL}
    for title, file, rate, is_perplexity in OWN_RATE:
        found[title] = _ahead(file, rate, is_perplexity=is_perplexity)
    figure = Figure(figsize=(8.6, 4.8), layout="constrained")
    axes = figure.subplots()
    for at, ahead in enumerate(found.values()):
        for method in sorted(ahead, key=list(LOOKS).index):  # the default is drawn last
            percent, look = ahead[method], LOOKS[method]
            size = 180 if look.marker == "*" else 55
            axes.scatter(max(percent, _LEAST), at, s=size, marker=look.marker, color=look.color)
            if percent < _LEAST:
                axes.annotate(f"{percent:.0f} %", (_LEAST, at), (8, 6), textcoords="offset points")
    axes.axvspan(-1, 1, color="#4477aa", alpha=0.15, linewidth=0)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel("percent ahead of Adam in loss, in what is missed, or in the score")
    axes.grid(alpha=0.25)
    _legend(figure, {name for ahead in found.values() for name in ahead}, columns=3)
    return figure


def _ahead_of_small(task: str, rate: float) -> dict[str, float]:
    grid = Grid(MEASURED / "defaults.jsonl")

    def mean(method: str) -> float:
        return statistics.fmean(it["value"] for at, _, it in grid.lines(task, method) if at == rate)

    adam, sign = mean("adam"), -1 if TASKS[task].is_loss else 1
    return {name: 100 * sign * (mean(it) / adam - 1) for name, it in _NAMES.items()}


def _ahead(file: str, rate: float, *, is_perplexity: bool) -> dict[str, float]:
    path = MEASURED / f"{file}.jsonl"
    found = {
        train["method"]["name"]: run["valid"]
        for run in (read_runs(path) if path.exists() else [])
        if (train := run["about"]["train"])["table_lr"] == rate
    }
    found |= {it["method"]: float(it["mean"]) for it in earlier(file, "valid")}
    scale = math.log if is_perplexity else float
    adam = scale(found.pop("exact"))
    return {name: 100 * (1 - scale(it) / adam) for name, it in found.items() if name in LOOKS}


def step_times() -> list[dict[str, str]]:
    """The rows of `step_times.csv`."""
    with (MEASURED / "step_times.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


def paper_figure() -> Figure:
    """The training loss in the paper's setting at half size, a mean of 100 steps at each point."""
    with (MEASURED / "paper_setting.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    figure = Figure(figsize=(7.4, 3.8), layout="constrained")
    axes = figure.subplots()
    for name, look in (("adam", LOOKS["exact"]), ("cs_mv", LOOKS["paper"])):
        losses = [float(it[name]) for it in rows]  # one in 10 steps
        means = [statistics.fmean(losses[at - 10 : at]) for at in range(10, len(losses) + 1)]
        title = "Adam" if name == "adam" else "CS-MV, both moments in sketches"
        steps = [int(it["step"]) for it in rows[9:]]
        axes.plot(steps, means, color=look.color, linewidth=2.0, label=title)
    axes.set(xlabel="steps of 20 x 35 words", ylabel="training loss")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure


def times_figure() -> Figure:
    """Bars of the time of a step over that of its baseline."""
    rows = step_times()
    figure = Figure(figsize=(9.6, 0.55 * len(rows) + 1.0), layout="constrained")
    axes = figure.subplots()
    for at, row in enumerate(rows):
        for shift, level, color in ((-0.19, "avx512", "#4477aa"), (0.19, "avx2", "#aabbcc")):
            if row[level]:
                bars = axes.barh([at + shift], [float(row[level])], height=0.36, color=color)
                axes.bar_label(bars, [row[level]], padding=3, fontsize=10)
    axes.axvline(1.0, color="#ee6677", linewidth=1.5, zorder=0)
    axes.set_yticks(range(len(rows)), [f"{it['what']}\nover {it['baseline']}" for it in rows])
    axes.tick_params(axis="y", labelsize=9, length=0)
    axes.invert_yaxis()
    axes.set_xlabel("time over the baseline's; below 1 is faster")
    axes.legend(
        handles=[Line2D([], [], color="#4477aa", linewidth=7, label="AVX-512"),
                 Line2D([], [], color="#aabbcc", linewidth=7, label="AVX2")],
        frameon=False,
    )  # fmt: skip
    return figure


if __name__ == "__main__":
    run_study(main)
