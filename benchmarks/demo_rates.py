"""The table learning rates of `sketchoptim demo`, each the best of a grid on held-out files.

    python benchmarks/demo_rates.py

Prints validation perplexity by rate. The best ones stand in `experiments/demo.py`.
"""

import argparse

import torch

from sketchoptim.experiments.data import read_python_sources
from sketchoptim.experiments.demo import HELD_OUT_WORDS, MODEL, STEPS, TABLE_RATES
from sketchoptim.experiments.sweep import best_rate, tune
from sketchoptim.experiments.train import Method, TrainSettings, perplexity, train

GRID = (0.01, 0.03, 0.1)


def main() -> None:
    """Tunes every method of the demo."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    torch.set_num_threads(parser.parse_args().threads)
    corpus = read_python_sources()
    for method in TABLE_RATES:

        def trial(rate: float, method: Method = method) -> float:
            run = train(corpus, MODEL, TrainSettings(method=method, table_lr=rate, steps=STEPS))
            return perplexity(run.model, corpus.valid, words=HELD_OUT_WORDS)

        found = tune(trial, rates=GRID)
        table = ", ".join(f"{rate:g}: {result:.1f}" for rate, result in found.items())
        print(f"{method}: best {best_rate(found):g} of {table}", flush=True)


if __name__ == "__main__":
    main()
