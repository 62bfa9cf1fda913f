import math

import pytest

from sketchoptim.experiments import sweep
from sketchoptim.experiments.data import Corpus, Vocabulary
from sketchoptim.experiments.models import ModelSettings
from sketchoptim.experiments.train import DivergedError, Run, TrainSettings


@pytest.fixture
def tuned(monkeypatch):
    """Tunes with perplexities given as a function of the rate, instead of training."""

    def tune(perplexity_at, rates):
        def trained(corpus, model_settings, settings):
            if perplexity_at(settings.table_lr) == math.inf:
                raise DivergedError
            return Run(
                model=settings.table_lr,
                losses=[],
                step_seconds=0.0,
                update_seconds=0.0,
                table_state_bytes=0,
                state_bytes=0,
            )

        monkeypatch.setattr(sweep, "train", trained)
        monkeypatch.setattr(sweep, "perplexity", lambda rate, ids, words: perplexity_at(rate))
        corpus = Corpus.encoded(Vocabulary(("<unk>",)), train=[], valid=[], test=[])
        settings = TrainSettings(table_lr=1.0, steps=1)
        return sweep.tune(corpus, ModelSettings(), settings, rates=rates)

    return tune


def test_an_optimum_inside_the_grid_is_taken(tuned):
    found = tuned(lambda rate: abs(rate - 0.01), (0.001, 0.01, 0.1))
    assert list(found) == [0.001, 0.01, 0.1]
    assert sweep.best_rate(found) == 0.01


def test_the_grid_grows_where_its_best_rate_is_at_an_end(tuned):
    assert list(tuned(lambda rate: rate, (0.01, 0.1))) == [1e-05, 0.0001, 0.001, 0.01, 0.1]
    assert list(tuned(lambda rate: abs(rate - 1), (0.01, 0.1))) == [0.01, 0.1, 1.0, 10.0]


def test_a_diverged_run_counts_as_infinite(tuned):
    found = tuned(
        lambda rate: math.inf if rate > 0.05 else 100 * abs(rate - 0.01), (0.001, 0.01, 0.1)
    )
    assert found[0.1] == math.inf
    assert sweep.best_rate(found) == 0.01


@pytest.mark.parametrize("rates", [(), (0.1,), (0.1, 0.01), (0.1, 0.1)])
def test_a_bad_grid_gets_a_clear_error(tuned, rates):
    with pytest.raises(ValueError, match="rates must be at least two, distinct and rising"):
        tuned(lambda rate: rate, rates)
