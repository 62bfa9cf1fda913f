"""The progress of a training, in one line that fits the console."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from sketchoptim._formatting import readable_bytes

from .training import Training

_TIME_WIDTH = len("0:00:00")
_NUMBERS_WIDTH = len("loss 10.000, table state 1.234 GB, 1,000,000 rows/s")
_BAR_WIDTH = 12


@contextmanager
def progress_bar(console: Console, training: Training) -> Iterator[Callable[[float], None]]:
    """A progress bar, and the function that updates it with the loss of each step.

    A narrow console shows no bar, fewer numbers, and of a long title only its beginning.
    """
    title = training.settings.resolved_method.title
    title_width = max(1, console.width // 4)
    if len(title) > title_width:
        title = f"{title[: title_width - 1]}…"
    counts_width = 2 * len(str(training.total_steps)) + 1
    # one blank after each of the first three columns, and another after the bar
    width = console.width - len(title) - counts_width - _TIME_WIDTH - 3
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}", markup=False),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}", markup=False),
    ]
    if width > _NUMBERS_WIDTH + _BAR_WIDTH:
        columns.insert(1, BarColumn(bar_width=_BAR_WIDTH))
        width -= _BAR_WIDTH + 1
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=training.total_steps, numbers="")
        state = ""

        def show(loss: float) -> None:
            nonlocal state
            if not state:  # complete after the first step, and constant from there on
                state = readable_bytes(training.table_state_bytes())
            rate = training.rows_a_step / training.step_seconds[-1]
            numbers = fitting(
                [f"loss {loss:.3f}", f"table state {state}", f"{rate:,.0f} rows/s"], width=width
            )
            progress.update(task, completed=training.step, numbers=numbers)

        yield show


def fitting(parts: list[str], *, width: int) -> str:
    """The first parts, joined by commas, as many as `width` characters have room for.

    Example:
        >>> fitting(["loss 3.1", "state 5 KB", "900 rows/s"], width=20)
        'loss 3.1, state 5 KB'
    """
    text = ""
    for part in parts:
        longer = f"{text}, {part}" if text else part
        if len(longer) > width:
            break
        text = longer
    return text
