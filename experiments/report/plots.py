"""The pictures: quality over steps and over time, memory."""

import io
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sketchoptim._formatting import readable_bytes

from ..drawing import plain_numbers
from ..reproduction import Findings, Reproduction

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,  # a recipe's "$" is a dollar
}
_LONG_TITLE = 32  # longer ones do not fit next to one another below a picture
_CLOCKS = {"seconds": "seconds of training", "cpu_seconds": "seconds of processor time in training"}


def figures(reproduction: Reproduction) -> dict[str, tuple[str, Figure]]:
    """Caption and picture by file name."""
    metric = reproduction.recipe.metric
    first = reproduction.findings[0].results[0]
    seed = first["about"]["train"]["seed"]
    with rc_context(_STYLE):
        pictures = {"loss": (f"Training loss over steps, seed {seed}", _losses(reproduction))}
        if reproduction.is_measured and first["evaluations"]:
            by_step = _quality(reproduction, "step", "steps")
            pictures["steps"] = (f"Validation {metric} over steps", by_step)
            label = _CLOCKS[reproduction.clock]
            pictures["time"] = (
                f"Validation {metric} over {label}",
                _quality(reproduction, reproduction.clock, label),
            )
        if reproduction.is_measured:
            pictures["trade-off"] = (
                f"Test {metric} against optimizer state of the tables",
                _trade_off(reproduction),
            )
        pictures["state"] = (
            "Optimizer state of the tables, on a logarithmic scale",
            _bars(reproduction, "table_state_bytes", is_log=True),
        )
        pictures["memory"] = (
            "Peak memory of the whole process",
            _bars(reproduction, "peak_memory_bytes", is_log=False),
        )
    return pictures


def save_pngs(pictures: dict[str, tuple[str, Figure]], folder: Path) -> list[Path]:
    """The paths of the files written, one for each picture."""
    paths = [folder / f"{name}.png" for name in pictures]
    for path, (_, figure) in zip(paths, pictures.values(), strict=True):
        figure.savefig(path, dpi=160)
    return paths


def as_svg(figure: Figure) -> bytes:
    """The picture as SVG, the same bytes whenever it is pictures again."""
    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "sketchoptim"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _losses(reproduction: Reproduction) -> Figure:
    def draw(axes: Axes, finding: Findings, style: dict[str, Any]) -> None:
        for result in finding.results[:1]:
            steps, losses = zip(*result["losses"], strict=True)
            _plot(axes, steps, losses, style)

    figure = _lines(reproduction, draw)
    figure.axes[0].set(xlabel="steps", ylabel="training loss")
    # a method that diverges leaves the picture, and the others their space
    curves = [
        [loss for _, loss in finding.results[0]["losses"]] for finding in reproduction.findings
    ]
    lowest, highest = min(map(min, curves)), max(map(max, curves))
    start = max(curve[0] for curve in curves)
    figure.axes[0].set_ylim(0.95 * lowest, 1.05 * min(highest, start))
    return figure


def _quality(reproduction: Reproduction, key: str, label: str) -> Figure:
    def draw(axes: Axes, finding: Findings, style: dict[str, Any]) -> None:
        for number, result in enumerate(finding.results):
            points = result["evaluations"]
            if number:
                style = {**style, "label": "_"}
            values = [point["quality"] for point in points]
            _plot(axes, [point[key] for point in points], values, style)

    figure = _lines(reproduction, draw)
    figure.axes[0].set(
        xlabel=label, ylabel=f"validation {reproduction.recipe.metric}", yscale="log"
    )
    plain_numbers(figure.axes[0].yaxis)
    return figure


def _trade_off(reproduction: Reproduction) -> Figure:
    """Mean and standard deviation of the quality over the bytes of state, one point a method."""

    def draw(axes: Axes, finding: Findings, style: dict[str, Any]) -> None:
        found = finding.values("test")
        if not all(map(math.isfinite, found)):
            return
        deviation = statistics.stdev(found) if len(found) > 1 else 0.0
        size = max(1.0, finding.median("table_state_bytes"))  # a logarithmic axis has no zero
        axes.errorbar([size], [statistics.mean(found)], [deviation], fmt="o", capsize=3, **style)

    figure = _lines(reproduction, draw)
    figure.axes[0].set(
        xlabel="bytes of optimizer state of the tables",
        ylabel=f"test {reproduction.recipe.metric}",
        xscale="log",
    )
    return figure


def _plot(axes: Axes, x: Sequence[float], y: Sequence[float], style: dict[str, Any]) -> None:
    axes.plot(x, y, marker="o" if len(x) == 1 else "", **style)  # one point makes no line


def _lines(
    reproduction: Reproduction, draw: Callable[[Axes, Findings, dict[str, Any]], None]
) -> Figure:
    figure = Figure(figsize=(4.6, 3.9), layout="constrained")
    axes = figure.subplots()
    for finding, color in zip(reproduction.findings, _colors(reproduction), strict=True):
        width = 2.4 if finding.name == "lean" else 1.2
        draw(axes, finding, {"label": finding.title, "color": color, "linewidth": width})
    axes.grid(alpha=0.25, which="both")
    longest = max(len(finding.title) for finding in reproduction.findings)
    columns = 1 if longest > _LONG_TITLE else 2
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
    return figure


def _bars(reproduction: Reproduction, key: str, *, is_log: bool) -> Figure:
    shown = [
        (finding, color)
        for finding, color in zip(reproduction.findings, _colors(reproduction), strict=True)
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
        if is_log and not size:  # a logarithmic axis has no zero, so that the bar has no label
            axes.text(
                0.01, number, "0 B", va="center", size=8, transform=axes.get_yaxis_transform()
            )
    axes.invert_yaxis()
    # matplotlib finds no limits for a single bar on a logarithmic axis
    shown_sizes = [size for size in sizes if size > 0] or [1.0]
    low, high = min(shown_sizes) / 10, max(shown_sizes)
    axes.set_xlim(*((low, high * (high / low) ** 0.3) if is_log else (0, 1.3 * high)))
    axes.set_xscale("log" if is_log else "linear")
    axes.set_xticks([], minor=True)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    return figure


def _colors(reproduction: Reproduction) -> list[object]:
    return [colormaps["tab10"](number % 10) for number in range(len(reproduction.findings))]
