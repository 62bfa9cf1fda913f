"""The pictures: quality over steps and over time, memory."""

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..drawing import plain_numbers
from ..machine import readable_bytes
from ..reproduce import Findings, Reproduction

_STYLE: dict[Any, Any] = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
_CLOCKS = {"seconds": "seconds of training", "cpu_seconds": "seconds of processor time in training"}


def figures(made: Reproduction) -> dict[str, tuple[str, Figure]]:
    """By file name: what a picture shows, and the picture."""
    metric = made.recipe.metric
    with rc_context(_STYLE):
        drawn = {"loss": (f"Training loss over steps, {_seeds(made)}", _losses(made))}
        if made.is_measured and made.findings[0].results[0]["evaluations"]:
            drawn["steps"] = (f"Validation {metric} over steps", _quality(made, "step", "steps"))
            label = _CLOCKS[made.clock]
            drawn["time"] = (
                f"Validation {metric} over {label}",
                _quality(made, made.clock, label),
            )
        drawn["state"] = (
            "Optimizer state of the tables, on a logarithmic scale",
            _bars(made, "table_state_bytes", is_log=True),
        )
        drawn["memory"] = (
            "Peak memory of the whole process",
            _bars(made, "peak_memory_bytes", is_log=False),
        )
    return drawn


def save_pngs(drawn: dict[str, tuple[str, Figure]], folder: Path) -> list[Path]:
    """The files written, one a picture."""
    paths = [folder / f"{name}.png" for name in drawn]
    for path, (_, figure) in zip(paths, drawn.values(), strict=True):
        figure.savefig(path, dpi=160)
    return paths


def as_svg(figure: Figure) -> bytes:
    """The picture as SVG, the same bytes whenever it is drawn again."""
    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "sketchoptim"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _losses(made: Reproduction) -> Figure:
    def draw(axes: Axes, finding: Findings, style: dict[str, Any]) -> None:
        for result in finding.results[:1]:
            steps, losses = zip(*result["losses"], strict=True)
            _plot(axes, steps, losses, style)

    figure = _lines(made, draw)
    figure.axes[0].set(xlabel="steps", ylabel="training loss")
    # a method that diverges leaves the picture, and the others their space
    curves = [[loss for _, loss in finding.results[0]["losses"]] for finding in made.findings]
    lowest, highest = min(map(min, curves)), max(map(max, curves))
    start = max(curve[0] for curve in curves)
    figure.axes[0].set_ylim(0.95 * lowest, 1.05 * min(highest, start))
    return figure


def _quality(made: Reproduction, key: str, label: str) -> Figure:
    def draw(axes: Axes, finding: Findings, style: dict[str, Any]) -> None:
        for number, result in enumerate(finding.results):
            points = result["evaluations"]
            if number:
                style = {**style, "label": "_"}
            values = [point["quality"] for point in points]
            _plot(axes, [point[key] for point in points], values, style)

    figure = _lines(made, draw)
    figure.axes[0].set(xlabel=label, ylabel=f"validation {made.recipe.metric}", yscale="log")
    plain_numbers(figure.axes[0].yaxis)
    return figure


def _plot(axes: Axes, x: Sequence[float], y: Sequence[float], style: dict[str, Any]) -> None:
    axes.plot(x, y, marker="o" if len(x) == 1 else "", **style)  # a point is no line


def _lines(made: Reproduction, draw: Callable[[Axes, Findings, dict[str, Any]], None]) -> Figure:
    figure = Figure(figsize=(4.6, 3.9), layout="constrained")
    axes = figure.subplots()
    for finding, color in zip(made.findings, _colors(made), strict=True):
        width = 2.4 if finding.name == "lean" else 1.2
        draw(axes, finding, {"label": finding.title, "color": color, "linewidth": width})
    axes.grid(alpha=0.25, which="both")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def _bars(made: Reproduction, key: str, *, is_log: bool) -> Figure:
    shown = [
        (finding, color)
        for finding, color in zip(made.findings, _colors(made), strict=True)
        if math.isfinite(finding.median(key))
    ]
    figure = Figure(figsize=(4.6, 1.0 + 0.32 * len(shown)), layout="constrained")
    axes = figure.subplots()
    sizes = [finding.median(key) for finding, _ in shown]
    bars = axes.barh(
        [finding.title for finding, _ in shown], sizes, color=[color for _, color in shown]
    )
    axes.bar_label(bars, [readable_bytes(size) for size in sizes], padding=3, fontsize=8)
    for number, size in enumerate(sizes):
        if is_log and not size:  # has no place on the axis, so that its bar gets no label
            axes.text(
                0.01, number, "0 B", va="center", size=8, transform=axes.get_yaxis_transform()
            )
    axes.invert_yaxis()
    # limits of our own: there are none to be found from one bar on a logarithmic axis
    shown_sizes = [size for size in sizes if size > 0] or [1.0]
    low, high = min(shown_sizes) / 10, max(shown_sizes)
    axes.set_xlim(*((low, high * (high / low) ** 0.3) if is_log else (0, 1.3 * high)))
    axes.set_xscale("log" if is_log else "linear")
    axes.set_xticks([], minor=True)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    return figure


def _colors(made: Reproduction) -> list[object]:
    return [colormaps["tab10"](number % 10) for number in range(len(made.findings))]


def _seeds(made: Reproduction) -> str:
    seed = made.findings[0].results[0]["about"]["train"]["seed"]
    return f"seed {seed}"
