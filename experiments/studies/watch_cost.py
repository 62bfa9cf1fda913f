"""The cost of watching: the time of a diagnosis over that of the steps until the next one.

    python -m experiments.studies.watch_cost

Trains the WikiText-2 model of the other studies and diagnoses its optimizer between steps, so that
both are timed in one process under the same load. Prints medians.
"""

import argparse
import inspect
import statistics
import time
from pathlib import Path

import torch

import sketchoptim as so
from sketchoptim.diagnostics import watch

from ..corpora import Corpus
from ..errors import run_study
from ..models import ModelSettings
from ..recipes import load_recipe
from ..settings import TrainSettings
from ..tasks import NextWords
from ..training import Training

MODEL = ModelSettings(dim=256, hidden=256, samples=1024)
WIKITEXT2 = load_recipe("wikitext2-adam").sizes["small"].data
EVERY = inspect.signature(watch).parameters["every"].default
STEPS_PER_LOOK = 4


def main(arguments: list[str] | None = None) -> None:
    """Times each method and prints a line for it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="WikiText-2; default: below SKETCHOPTIM_DATA")
    parser.add_argument("--methods", nargs="+", default=["lean", "exact", "paper-mv"])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    corpus = WIKITEXT2.read(options.data)
    for method in options.methods:
        step, look = measure(corpus, method, options.steps)
        print(
            f"{method}: a step takes {1e3 * step:.1f} ms, a diagnosis {1e3 * look:.1f} ms; "
            f"every {EVERY} steps it costs {look / (EVERY * step):.3%} of the time",
            flush=True,
        )


def measure(corpus: Corpus, method: str, steps: int) -> tuple[float, float]:
    """The median seconds of a step and of a diagnosis."""
    settings = TrainSettings(method=method, table_lr=0.03, steps=steps)
    training = Training(NextWords(corpus, MODEL), settings)
    (optimizer,) = training.optimizers
    look_seconds: list[float] = []
    last: so.Diagnosis | None = None
    for _ in training.steps():
        if training.step % STEPS_PER_LOOK == 0:
            started = time.perf_counter()
            last = so.diagnose(optimizer, since=last)
            look_seconds.append(time.perf_counter() - started)
    return statistics.median(training.step_seconds), statistics.median(look_seconds)


if __name__ == "__main__":
    run_study(main)
