"""The demo: a language model over Python's own sources, by exact Adam and by the default.

sketchoptim demo
"""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .data import Corpus, read_python_sources
from .models import ModelSettings
from .train import Method, Run, TrainSettings, perplexity, train

MODEL = ModelSettings(dim=256, hidden=256, samples=1024)
STEPS = 500
HELD_OUT_WORDS = 20_000
# best of a grid on the validation files: python benchmarks/demo_rates.py
TABLE_RATES: dict[Method, float] = {"exact": 0.1, "lean": 0.1}
_TITLES: dict[Method, str] = {"exact": "exact Adam", "lean": "lean (default)"}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What the demo measured of one method."""

    method: Method
    perplexity: float
    run: Run


def run_demo(
    *, steps: int = STEPS, seed: int = 0, sources: Path | None = None, console: Console
) -> list[Comparison]:
    """The comparisons of exact Adam and lean, after printing them side by side."""
    with console.status("reading Python's own source files"):
        corpus = read_python_sources(sources)
    classes = len(corpus.vocabulary)
    console.print(
        f"{corpus.train.numel():,} words of Python source, {classes:,} distinct; "
        f"two tables of {classes:,} x {MODEL.dim}, {steps:,} steps a method"
    )
    comparisons = [
        compared(corpus, method, steps=steps, seed=seed, console=console) for method in TABLE_RATES
    ]
    console.print(as_table(comparisons))
    return comparisons


def compared(
    corpus: Corpus, method: Method, *, steps: int, seed: int, console: Console
) -> Comparison:
    """One method trained and measured on files it has not seen, with a progress bar meanwhile."""
    settings = TrainSettings(method=method, table_lr=TABLE_RATES[method], steps=steps, seed=seed)
    with progress(console) as bar:
        task = bar.add_task(_TITLES[method], total=steps, loss="")

        def show(step: int, loss: float) -> None:
            bar.update(task, completed=step, loss=f"loss {loss:.3f}")

        run = train(corpus, MODEL, settings, on_step=show)
        bar.update(task, loss="measuring on held-out files")
        found = perplexity(run.model, corpus.test, words=HELD_OUT_WORDS)
        bar.update(task, loss=f"loss {run.losses[-1]:.3f}")
    return Comparison(method=method, perplexity=found, run=run)


def progress(console: Console) -> Progress:
    """A progress bar with room for the loss and the time left."""
    return Progress(
        TextColumn("{task.description:<15}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
        console=console,
    )


def as_table(comparisons: list[Comparison]) -> Table:
    """Quality, memory and time, one row a method."""
    table = Table(title="the same model, data and steps; only the tables' optimizer state differs")
    table.add_column("method")
    for column in ("perplexity", "table state", "of exact", "all state", "ms a step"):
        table.add_column(column, justify="right")
    exact_bytes = comparisons[0].run.table_state_bytes
    for comparison in comparisons:
        run = comparison.run
        table.add_row(
            _TITLES[comparison.method],
            f"{comparison.perplexity:.1f}",
            readable_bytes(run.table_state_bytes),
            f"{run.table_state_bytes / exact_bytes:.3%}",
            readable_bytes(run.state_bytes),
            f"{1e3 * run.step_seconds:.1f}",
        )
    return table


def readable_bytes(count: int) -> str:
    """A number of bytes in the unit that suits it: '56.1 KB'."""
    size = float(count)
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} GB"
