"""The table learning rates of `experiments demo`, each the best of a grid on held-out files.

    python -m experiments.studies.demo_rates

Prints validation perplexity by rate. The best ones are in `experiments/recipes/demo.toml`.
"""

import argparse
from dataclasses import replace

import torch

from ..errors import run_study
from ..methods import Method
from ..models import ModelSettings
from ..recipes import load_recipe
from ..sweep import best_rate, tune
from ..tasks import perplexity
from ..training import train

GRID = (0.01, 0.03, 0.1)


def main() -> None:
    """Tunes every method of the demo."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    recipe = load_recipe("demo")
    setting = recipe.sizes["small"]
    assert isinstance(setting.model, ModelSettings)
    model, corpus = setting.model, setting.data.read()
    for name, contestant in recipe.contestants.items():

        def trial(rate: float, method: Method = contestant.method) -> float:
            settings = replace(setting.train, method=method, table_lr=rate, evaluate_every=0)
            run = train(corpus, model, settings)
            return perplexity(run.model, corpus.valid, words=setting.test_words)

        found = tune(trial, rates=GRID)
        table = ", ".join(f"{rate:g}: {result:.1f}" for rate, result in found.items())
        print(f"{name}: best {best_rate(found):g} of {table}", flush=True)


if __name__ == "__main__":
    run_study(main)
