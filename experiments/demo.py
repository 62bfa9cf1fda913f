"""The demo: a language model over Python's own sources, with torch's SparseAdam and with lean.

experiments demo
"""

import html
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from sketchoptim._formatting import readable_bytes

from .drawing import plain_numbers
from .locks import locked
from .recipes import Contestant, load_recipe
from .report.page import html_document, picture_tags
from .report.plots import save_pngs
from .reproduction import Findings, Reproduction, reproduce, run_folder, train_launcher

_COLORS = ("#8a8a8a", "#1f77b4")
_BAR = 40  # characters of the longest bar in the terminal


def run_demo(
    *,
    steps: int | None = None,
    seed: int = 0,
    threads: int = 1,
    sources: Path | None = None,
    resume: bool = False,
    output: Path = Path("build/demo"),
    command: str = "experiments demo",
    console: Console,
) -> Reproduction:
    """The findings about both methods, after printing them side by side and writing the page.

    Runs of an earlier demo in `output` are removed and trained again, unless `resume`.
    """
    recipe = load_recipe("demo")
    setting = recipe.sizes["small"]
    with console.status("reading Python's own source files"):
        corpus = setting.data.read(sources)
    console.print(
        f"{corpus.train.numel():,} words of Python source, {len(corpus.vocabulary):,} distinct; "
        f"{steps or setting.train.steps:,} steps a method"
    )
    with locked(output):
        launch = train_launcher(
            "demo",
            setting,
            "small",
            steps=steps,
            data=sources,
            threads=threads,
            output=output,
            console=console,
        )

        def launch_again(contestant: Contestant, *rates_and_seed: Any) -> dict[str, Any]:
            folder = run_folder(output, contestant, *rates_and_seed)
            with locked(folder):
                shutil.rmtree(folder)
            return launch(contestant, *rates_and_seed)

        reproduction = reproduce(
            recipe,
            "small",
            seeds=[seed],
            command=command,
            launch=launch if resume else launch_again,
            output=output,
            console=console,
        )
        _print_comparison(reproduction, console)
        console.print(f"report: {_write_page(reproduction, output)}", markup=False)
    return reproduction


def summary(reproduction: Reproduction) -> str:
    """One sentence: the state that lean saved, and what it cost in quality and time."""
    exact, lean = reproduction.findings
    for finding in (exact, lean):
        if "diverged" in finding.results[0]:
            return f"{finding.title} diverged: {finding.results[0]['diverged']}."
    sizes = [finding.median("table_state_bytes") for finding in (exact, lean)]
    qualities = [finding.median("valid") for finding in (exact, lean)]
    times = [1e3 * finding.median("step_seconds") for finding in (exact, lean)]
    steps = lean.results[0]["steps"]
    metric = reproduction.recipe.metric
    return (
        f"lean keeps {readable_bytes(sizes[1])} of optimizer state for the tables instead of "
        f"{exact.title}'s {readable_bytes(sizes[0])} ({sizes[1] / sizes[0]:.2%}); after "
        f"{steps:,} steps its validation {metric} is {qualities[1]:.1f} against "
        f"{qualities[0]:.1f} ({_change(*qualities)}), and a step takes {times[1]:.0f} ms against "
        f"{times[0]:.0f} ms ({_change(*times)})."
    )


def _change(before: float, after: float) -> str:
    share = after / before - 1
    if abs(share) < 0.005:
        return "the same"
    return f"{abs(share):.0%} {'more' if share > 0 else 'less'}"


def _comparison(reproduction: Reproduction) -> tuple[list[str], list[list[str]]]:
    """Headings and rows, for the terminal and for the page."""
    metric = reproduction.recipe.metric
    columns = ["method", f"validation {metric}", "state of tables", "peak memory", "ms a step"]
    return columns, [
        [
            finding.title,
            _cell(finding.median("valid"), "{:.1f}".format),
            _cell(finding.median("table_state_bytes"), readable_bytes),
            _cell(finding.median("peak_memory_bytes"), readable_bytes),
            _cell(1e3 * finding.median("step_seconds"), "{:.0f}".format),
        ]
        for finding in reproduction.findings
    ]


def _cell(value: float, form: Callable[[float], str]) -> str:
    return form(value) if math.isfinite(value) else "diverged"


def _print_comparison(reproduction: Reproduction, console: Console) -> None:
    columns, rows = _comparison(reproduction)
    table = Table(box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    sizes = [finding.median("table_state_bytes") for finding in reproduction.findings]
    width = max(len(finding.title) for finding in reproduction.findings)
    longest = min(_BAR, console.width - width - 16)
    console.print("optimizer state of the tables")
    for finding, size in zip(reproduction.findings, sizes, strict=True):
        bar = "█" * round(longest * size / max(sizes)) or "▏"
        console.print(f"  {finding.title:{width}} {bar} {readable_bytes(size)}", markup=False)
    console.print()
    console.print(summary(reproduction), markup=False, highlight=False)


def figures(reproduction: Reproduction) -> dict[str, tuple[str, Figure]]:
    """Caption and picture by file name: the curve of the table's measure, and linear bars."""
    metric = reproduction.recipe.metric
    style: dict[Any, Any] = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with rc_context(style):
        return {
            "curve": (f"Validation {metric} over steps", _curve(reproduction.findings, metric)),
            "state": ("Optimizer state of the tables", _bars(reproduction.findings)),
        }


def _curve(findings: list[Findings], metric: str) -> Figure:
    figure = Figure(figsize=(4.6, 3.4), layout="constrained")
    axes = figure.subplots()
    for finding, color in zip(findings, _COLORS, strict=True):
        result = finding.results[0]
        points = {point["step"]: point["quality"] for point in result["evaluations"]}
        if result["valid"] is not None:
            points[result["steps"]] = result["valid"]  # the number in the table
        axes.plot(list(points), list(points.values()), color=color, label=finding.title, marker=".")
    axes.set(xlabel="steps", ylabel=f"validation {metric}", yscale="log")
    plain_numbers(axes.yaxis)
    axes.grid(alpha=0.25, which="both")
    axes.legend(frameon=False)
    return figure


def _bars(findings: list[Findings]) -> Figure:
    figure = Figure(figsize=(4.6, 1.6), layout="constrained")
    axes = figure.subplots()
    sizes = [finding.median("table_state_bytes") for finding in findings]
    bars = axes.barh([finding.title for finding in findings], sizes, color=_COLORS)
    axes.bar_label(bars, [readable_bytes(size) for size in sizes], padding=3)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(sizes))
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    return figure


def _write_page(reproduction: Reproduction, folder: Path) -> Path:
    """The path of the page, after writing it, and its pictures as PNG files next to it."""
    pictures = figures(reproduction)
    save_pngs(pictures, folder)
    columns, rows = _comparison(reproduction)
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    about = html.escape(reproduction.recipe.sizes[reproduction.size].about)
    main = f"""<p>{html.escape(summary(reproduction))}</p>
<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
<div class="figures">{picture_tags(pictures)}</div>
<p>{about}. Both methods start from the same weights, are trained on the same words in the
same order, and take the same steps, each at the best learning rate of its own grid.</p>
<pre>{html.escape(reproduction.command)}</pre>"""
    path = folder / "report.html"
    path.write_text(html_document(reproduction.recipe.title, main), encoding="utf-8")
    return path
