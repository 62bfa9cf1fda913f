"""The results as pictures."""

from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..drawing import plain_numbers
from .methods import BY_NAME
from .report import Report
from .runs import Comparison, SweepResult
from .training import TrainingResult

_MARKERS = "osD^vP"
_AXES = {
    "rows": "rows of the table",
    "touched": "rows that the gradient touches",
    "dim": "columns",
    "depth": "hash rows of the sketch",
    "threads": "threads",
}
# A method has the same color in all panels.
_COLORS = {name: colormaps["tab20"](number) for number, name in enumerate(BY_NAME)}
_LANGUAGE_MODEL = "Training an embedding and a sampled softmax"
_TABLES = "Training tables whose rows are concatenated"
_PARTS = (("forward", "tab:gray"), ("backward", "tab:olive"), ("optimizer", "tab:red"))


def save_plots(report: Report, folder: Path) -> list[Path]:
    """The paths of the pictures written, one for each part that was run."""
    pictures = {
        "steps.png": _steps(report) if report.steps else None,
        "scaling.png": _scaling(report) if report.scaling else None,
        "training.png": _training(report, report.training, _LANGUAGE_MODEL)
        if report.training
        else None,
        "tables.png": _training(report, report.tables, _TABLES) if report.tables else None,
    }
    written = []
    for name, figure in pictures.items():
        if figure is not None:
            figure.savefig(folder / name, dpi=120)
            written.append(folder / name)
    return written


def _steps(report: Report) -> Figure:
    """Ratios to SparseAdam: one line for each method, one marker for each gradient."""
    kinds = {
        "coalesced gradients": [c for c in report.steps if c.kind == "coalesced"],
        "raw gradients, duplicates included": [c for c in report.steps if c.kind == "raw"],
    }
    titles = [result.title for result in report.steps[0].results]
    figure = Figure(figsize=(13, 3 + 0.36 * len(titles)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True, sharex=True)
    for panel, (name, comparisons) in zip(panels, kinds.items(), strict=True):
        for number, comparison in enumerate(comparisons):
            ratios = [comparison.ratio(result) for result in comparison.results]
            marker = _MARKERS[number % len(_MARKERS)]
            panel.plot(ratios, titles, marker, label=_label(comparison), alpha=0.8)
        panel.axvline(1.0, color="black", linewidth=0.8)
        panel.set_xscale("log")
        plain_numbers(panel.xaxis)
        panel.set_xlabel("time of a step / SparseAdam's (log scale; left is faster)")
        panel.set_title(name)
        panel.grid(alpha=0.3, which="both")
        panel.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
    panels[0].invert_yaxis()
    figure.suptitle(f"One optimizer step, cold caches, ids: {report.ids}\n{report.conditions}")
    return figure


def _label(comparison: Comparison) -> str:
    return f"{comparison.rows:,} x {comparison.dim}, {comparison.entries:,} rows"


def _scaling(report: Report) -> Figure:
    """Milliseconds along each axis."""
    count = len(report.scaling)
    columns = min(count, 3)
    lines = -(-count // columns)
    figure = Figure(figsize=(5 * columns, 4.2 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel, sweep in zip(panels, report.scaling, strict=False):
        _draw_sweep(panel, sweep)
    for panel in panels[count:]:
        panel.set_visible(False)
    figure.suptitle(
        "How a step grows: coalesced gradients, cold caches, medians and quartiles\n"
        + report.conditions
    )
    return figure


def _draw_sweep(panel: Axes, sweep: SweepResult) -> None:
    positions = list(range(len(sweep.values)))
    for marker, (name, timings) in zip(_MARKERS, sweep.timings.items(), strict=False):
        medians = [1e3 * timing.median for timing in timings]
        spread = [
            [1e3 * (timing.median - timing.lower_quartile) for timing in timings],
            [1e3 * (timing.upper_quartile - timing.median) for timing in timings],
        ]
        panel.errorbar(
            positions,
            medians,
            spread,
            color=_COLORS[name],
            marker=marker,
            label=BY_NAME[name].title,
            capsize=2,
        )
    panel.set_xticks(positions, [f"{value:,}" for value in sweep.values])
    panel.set_yscale("log")
    plain_numbers(panel.yaxis)
    panel.set_xlabel(_AXES[sweep.axis])
    panel.set_ylabel("ms a step (log scale)")
    panel.set_title(sweep.fixed, fontsize="medium")
    panel.grid(alpha=0.3, which="both")
    panel.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)


def _training(report: Report, shapes: list[list[TrainingResult]], title: str) -> Figure:
    """Stacked bars of forward, backward and optimizer."""
    count = len(shapes)
    figure = Figure(figsize=(8 * count, 4.6), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False).flatten()
    for panel, results in zip(panels, shapes, strict=True):
        _draw_training(panel, results)
    figure.suptitle(f"{title}\n{report.conditions}")
    return figure


def _draw_training(panel: Axes, results: list[TrainingResult]) -> None:
    names = [result.title for result in results]
    starts = [0.0] * len(results)
    for part, color in _PARTS:
        timings = [getattr(result, part) for result in results]
        lengths = [1e3 * timing.median if timing else 0.0 for timing in timings]
        panel.barh(names, lengths, left=starts, label=part, color=color)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    panel.invert_yaxis()
    panel.set_title(str(results[0].shape), fontsize="small")
    panel.set_xlabel("ms a step (medians of the parts)")
    panel.grid(alpha=0.3, axis="x")
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=len(_PARTS))
