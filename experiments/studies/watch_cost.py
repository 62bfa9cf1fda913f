"""What watching costs: the time of a look over that of the steps until the next one.

    python benchmarks/watch.py --data ../shared/data/wikitext-2

Trains the WikiText-2 model of the other benchmarks and diagnoses its optimizer between steps, so
that both are timed in one process under the same load; medians of all steps and looks.
"""

import argparse
import inspect
import os
import statistics
import time
from pathlib import Path

import torch

import sketchoptim as so
from sketchoptim.diagnostics import watch

from ..corpora import Corpus, read_wikitext
from ..models import ModelSettings
from ..settings import TrainSettings
from ..tasks import NextWords
from ..training import Training

MODEL = ModelSettings(dim=256, hidden=256, samples=1024)
EVERY = inspect.signature(watch).parameters["every"].default
STEPS_A_LOOK = 4


def main(arguments: list[str] | None = None) -> None:
    """Times each method and prints a line for it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    data = os.environ.get("SKETCHOPTIM_DATA", "../shared/data")
    parser.add_argument("--data", type=Path, default=Path(data) / "wikitext-2", help="folder")
    parser.add_argument("--methods", nargs="+", default=["lean", "exact", "paper-mv"])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    corpus = read_wikitext(options.data)
    for method in options.methods:
        step, look = measured(corpus, method, options.steps)
        print(
            f"{method}: a step takes {1e3 * step:.1f} ms, a look {1e3 * look:.1f} ms; "
            f"every {EVERY} steps it costs {look / (EVERY * step):.3%} of the time",
            flush=True,
        )


def measured(corpus: Corpus, method: str, steps: int) -> tuple[float, float]:
    """The median seconds of a step and of a look."""
    settings = TrainSettings(method=method, table_lr=0.03, steps=steps)
    training = Training(NextWords(corpus, MODEL), settings)
    (optimizer,) = training.optimizers
    look_seconds: list[float] = []
    last: so.Diagnosis | None = None
    for _ in training.steps():
        if training.step % STEPS_A_LOOK == 0:
            started = time.perf_counter()
            last = so.diagnose(optimizer, since=last)
            look_seconds.append(time.perf_counter() - started)
    return statistics.median(training.step_seconds), statistics.median(look_seconds)


if __name__ == "__main__":
    main()
