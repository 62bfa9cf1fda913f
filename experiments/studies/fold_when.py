"""WikiText-2: tables that start with a counter a row and halve as their own error allows.

    python benchmarks/fold_when.py --data ../shared/data/wikitext-2 --bounds 0.1 0.5

Lean with `fold_when` at each bound, beside lean at its fixed eighth. Prints the width of each table
with its estimated error whenever it has folded, and the validation perplexity at the end.
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path

import torch

import sketchoptim as so
from sketchoptim.optim.base import Optimizer

from ..corpora import Corpus, read_wikitext
from ..methods import Method
from ..models import LanguageModel, ModelSettings
from ..settings import TrainSettings
from ..tasks import NextWords, perplexity
from ..training import Training

MODEL = ModelSettings(dim=256, hidden=256, samples=1024)
TABLE_LR = 0.03
VALID_WORDS = 40_000


def main(arguments: list[str] | None = None) -> None:
    """Trains under each bound, then lean, and prints what happened."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    data = os.environ.get("SKETCHOPTIM_DATA", "../shared/data")
    parser.add_argument("--data", type=Path, default=Path(data) / "wikitext-2", help="folder")
    parser.add_argument("--bounds", type=float, nargs="*", default=[0.5])
    parser.add_argument("--steps", type=int, default=2100, help="folds come after every 1000")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    corpus = read_wikitext(options.data)
    lean = so.Memory.of("lean")
    assert isinstance(lean.second, so.Sketched)
    methods = [Method(name="lean")]
    for bound in options.bounds:
        folding = so.Memory(second=replace(lean.second, ratio=1.0, fold_when=bound))
        methods.append(Method(name=f"fold_when={bound:g}", memory=folding))
    for method in methods:
        follow(corpus, method, options.steps)


def follow(corpus: Corpus, method: Method, steps: int) -> None:
    """Trains, and prints each change of the tables' widths."""
    settings = TrainSettings(method=method, table_lr=TABLE_LR, steps=steps)
    training = Training(NextWords(corpus, MODEL), settings)
    (optimizer,) = training.optimizers
    last: tuple[int, ...] = ()
    for _ in training.steps():
        states = [optimizer.state[table] for table in training.model.named_tables().values()]
        widths = tuple(state["second_table"].shape[1] for state in states)
        if widths != last or training.step == steps:
            last = widths
            print(
                f"{method.name}: step {training.step}: {widths_and_errors(optimizer)}", flush=True
            )
    assert isinstance(training.model, LanguageModel)
    found = perplexity(training.model, corpus.valid, words=VALID_WORDS)
    state_bytes = training.run().table_state_bytes
    print(f"{method.name}: perplexity {found:.1f}, {state_bytes:,} bytes", flush=True)


def widths_and_errors(optimizer: Optimizer) -> str:
    """Each table with its storage and its own estimate of its relative error."""
    return "; ".join(
        f"{found.parameter} {found.kept}, error {found.error.relative:.3f}"
        for found in so.diagnose(optimizer).findings
        if found.error is not None
    )


if __name__ == "__main__":
    main()
