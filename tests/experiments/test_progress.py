import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from experiments.methods import Method
from experiments.progress import progress_bar
from experiments.training import Training
from sketchoptim._formatting import readable_bytes


def shown_progress(setting, *, width: int, title: str = "lean (default)") -> tuple[str, str]:
    """The last line that a console of that width shows, and the summary's state of the tables."""
    console = Console(width=width, file=io.StringIO())
    settings = replace(setting.train, method=Method(name="lean", title=title))
    training = Training(setting.task(), settings)
    with progress_bar(console, training) as show:
        for loss in training.steps():
            show(loss)
    (line,) = console.file.getvalue().splitlines()
    return line, readable_bytes(training.run().table_state_bytes)


def test_progress_shows_steps_loss_rate_and_the_state_of_the_summary(setting):
    text, state = shown_progress(setting, width=140)
    for part in ("lean (default)", "12/12", "loss ", f"table state {state}", " rows/s"):
        assert part in text


@pytest.mark.parametrize("title", ["lean", "a title that is longer than all others, by far"])
def test_progress_fits_60_columns_with_loss_and_state(setting, title):
    line, state = shown_progress(setting, width=60, title=title)
    assert cell_len(line.rstrip()) <= 60
    for part in (title[:14], "12/12", "loss ", f"table state {state}"):
        assert part in line
