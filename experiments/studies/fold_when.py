"""WikiText-2: sketches that start with a counter for each row and fold while their error allows.

    python -m experiments.studies.fold_when --bounds 0.1 0.5

Lean with `fold_when` at each bound, and lean at its fixed eighth. Prints the storage of each table
with its estimated error whenever one has folded, and the validation perplexity at the end.
"""

import argparse
from pathlib import Path

import torch

import sketchoptim as so
from sketchoptim.optim.base import Optimizer

from ..corpora import Corpus
from ..errors import run_study
from ..methods import Method
from ..models import LanguageModel, ModelSettings
from ..recipes import load_recipe
from ..settings import TrainSettings
from ..tasks import NextWords, perplexity
from ..training import Training

MODEL = ModelSettings(dim=256, hidden=256, samples=1024)
WIKITEXT2 = load_recipe("wikitext2-adam").sizes["small"].data
TABLE_LR = 0.03
VALID_WORDS = 40_000


def main(arguments: list[str] | None = None) -> None:
    """Trains lean, then under each bound, and prints the folds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="WikiText-2; default: below SKETCHOPTIM_DATA")
    parser.add_argument("--bounds", type=float, nargs="*", default=[0.5])
    parser.add_argument("--steps", type=int, default=2100, help="folds come after every 1000")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    corpus = WIKITEXT2.read(options.data)
    methods = [Method(name="lean")]
    for bound in options.bounds:
        folding = so.Memory(second=so.Sketched(ratio=1.0, conservative=True, fold_when=bound))
        methods.append(Method(name=f"fold-when-{bound:g}", memory=folding))
    for method in methods:
        follow(corpus, method, options.steps)


def follow(corpus: Corpus, method: Method, steps: int) -> None:
    """Trains, and prints each change of the tables' state."""
    settings = TrainSettings(method=method, table_lr=TABLE_LR, steps=steps)
    training = Training(NextWords(corpus, MODEL), settings)
    (optimizer,) = training.optimizers
    last = 0
    for _ in training.steps():
        state_bytes = sum(training.state_bytes().values())
        if state_bytes != last or training.step == steps:
            last = state_bytes
            found = describe_tables(optimizer)
            print(f"{method.name}: step {training.step}: {found}", flush=True)
    assert isinstance(training.model, LanguageModel)
    quality = perplexity(training.model, corpus.valid, words=VALID_WORDS)
    table_bytes = training.run().table_state_bytes
    print(f"{method.name}: perplexity {quality:.1f}, {table_bytes:,} bytes", flush=True)


def describe_tables(optimizer: Optimizer) -> str:
    """Each table with its storage and the estimate of its relative error."""
    return "; ".join(
        f"{found.parameter} {found.kept}, error {found.error.relative:.3f}"
        for found in so.diagnose(optimizer).findings
        if found.error is not None
    )


if __name__ == "__main__":
    run_study(main)
