"""Learning rates found by a grid, so that each method is compared at its own best."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from .data import Corpus
from .models import ModelSettings
from .train import DivergedError, TrainSettings, perplexity, train

_EXTENSIONS = 3


def tune(
    corpus: Corpus,
    model_settings: ModelSettings,
    settings: TrainSettings,
    *,
    rates: Sequence[float],
    words: int | None = None,
    on_run: Callable[[float, float], None] | None = None,
) -> dict[float, float]:
    """Validation perplexity by table learning rate, in rising order of the rates.

    A best rate at an end of the grid is no optimum, so the grid then grows at that end by the ratio
    of its last two rates, three times at most. A run that diverges counts as infinite. `words`
    limits the validation text; `on_run(rate, perplexity)` is called after each run.
    """
    if len(rates) < 2 or sorted(set(rates)) != list(rates):
        raise ValueError(f"rates must be at least two, distinct and rising, got {list(rates)}")

    def tried(rate: float) -> float:
        try:
            model = train(corpus, model_settings, replace(settings, table_lr=rate)).model
            found = perplexity(model, corpus.valid, words=words)
        except DivergedError:
            found = math.inf
        if on_run is not None:
            on_run(rate, found)
        return found

    results = {rate: tried(rate) for rate in rates}
    for _ in range(_EXTENSIONS):
        ordered = sorted(results)
        best = best_rate(results)
        if best == ordered[0]:
            rate = ordered[0] * ordered[0] / ordered[1]
        elif best == ordered[-1]:
            rate = ordered[-1] * ordered[-1] / ordered[-2]
        else:
            break
        rate = float(f"{rate:.2g}")
        results[rate] = tried(rate)
    return dict(sorted(results.items()))


def best_rate(results: dict[float, float]) -> float:
    """The rate of the lowest perplexity."""
    return min(results, key=lambda rate: results[rate])
