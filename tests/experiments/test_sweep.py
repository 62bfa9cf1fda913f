import math

import pytest

from experiments.sweep import best_rate, tune
from experiments.training import DivergedError


def test_an_optimum_inside_the_grid_is_taken():
    found = tune(lambda rate: abs(rate - 0.01), rates=(0.001, 0.01, 0.1))
    assert list(found) == [0.001, 0.01, 0.1]
    assert best_rate(found) == 0.01


def test_the_grid_grows_where_its_best_rate_is_at_an_end():
    assert list(tune(lambda rate: abs(rate - 1), rates=(0.01, 0.1))) == [0.01, 0.1, 1.0, 10.0]
    assert list(tune(lambda rate: abs(rate - 0.001), rates=(0.01, 0.1))) == [1e-4, 1e-3, 0.01, 0.1]


def test_the_grid_grows_three_times_at_most():
    assert list(tune(lambda rate: rate, rates=(0.01, 0.1))) == [1e-5, 1e-4, 1e-3, 0.01, 0.1]


def test_a_diverged_trial_counts_as_infinite():
    def trial(rate: float) -> float:
        if rate > 0.05:
            raise DivergedError
        return abs(rate - 0.01)

    found = tune(trial, rates=(0.001, 0.01, 0.1))
    assert found[0.1] == math.inf
    assert best_rate(found) == 0.01


@pytest.mark.parametrize("rates", [(), (0.1,), (0.1, 0.01), (0.1, 0.1)])
def test_a_bad_grid_gets_a_clear_error(rates):
    with pytest.raises(ValueError, match="rates must be at least two, distinct and ascending"):
        tune(lambda rate: rate, rates=rates)
