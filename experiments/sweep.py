"""Learning rates from a grid, so that each method is compared at its best."""

import math
from collections.abc import Callable, Sequence

from .training import DivergedError

_EXTENSIONS = 3


def tune(trial: Callable[[float], float], *, rates: Sequence[float]) -> dict[float, float]:
    """The result of `trial(rate)`, lower is better, for each rate in ascending order.

    A best rate at an end of the grid may not be the optimum, so the grid then grows at that end by
    the ratio of its last two rates, at most three times. A trial that diverges counts as infinite.

    Example:
        >>> tune(lambda rate: abs(rate - 0.8), rates=[0.01, 0.1])
        {0.01: 0.79, 0.1: 0.7000000000000001, 1.0: 0.19999999999999996, 10.0: 9.2}
    """
    if len(rates) < 2 or sorted(set(rates)) != list(rates):
        raise ValueError(f"rates must be at least two, distinct and ascending, got {list(rates)}")

    def result_of(rate: float) -> float:
        try:
            return trial(rate)
        except DivergedError:
            return math.inf

    results = {rate: result_of(rate) for rate in rates}
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
        results[rate] = result_of(rate)
    return dict(sorted(results.items()))


def best_rate(results: dict[float, float]) -> float:
    """The rate of the lowest result."""
    return min(results, key=lambda rate: results[rate])
