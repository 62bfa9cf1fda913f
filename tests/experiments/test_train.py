import math

import pytest
import torch

from sketchoptim.experiments.data import Corpus, Vocabulary
from sketchoptim.experiments.models import LanguageModel, ModelSettings
from sketchoptim.experiments.train import (
    DivergedError,
    Method,
    TrainSettings,
    build_optimizers,
    perplexity,
    train,
)

MODEL = ModelSettings(dim=8, hidden=16, samples=32)


@pytest.fixture(autouse=True)
def one_thread():
    """One thread, since threads only wait for each other in models this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """Counting to 49 over and over: as predictable as a text can be."""
    words = [str(number % 49) for number in range(4900)]
    vocabulary = Vocabulary.from_words(words)
    return Corpus.encoded(vocabulary, train=words, valid=words[:490], test=words[:98])


def settings(**changes) -> TrainSettings:
    values = {"table_lr": 0.05, "body_lr": 0.02, "steps": 50, "batch": 8, "length": 10, **changes}
    return TrainSettings(**values)


@pytest.mark.parametrize("method", Method.__args__)
def test_the_loss_drops_under_every_method(corpus, method):
    rate = 1.0 if method.startswith("adagrad") else 0.1
    losses = train(corpus, MODEL, settings(method=method, table_lr=rate)).losses
    assert losses[-1] < 0.8 * losses[0]


def test_a_trained_model_predicts_a_predictable_text(corpus):
    model = train(corpus, MODEL, settings(table_lr=0.1, steps=120)).model
    assert perplexity(model, corpus.valid) < 3 < len(corpus.vocabulary)


def test_the_same_seed_gives_the_same_run_bit_for_bit(corpus):
    first, second = (train(corpus, MODEL, settings(steps=20)) for _ in range(2))
    assert first.losses == second.losses
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_training_leaves_the_global_random_numbers_alone(corpus):
    before = torch.get_rng_state()
    train(corpus, MODEL, settings(steps=2))
    assert torch.equal(torch.get_rng_state(), before)


def test_another_seed_gives_another_run(corpus):
    first, second = (train(corpus, MODEL, settings(steps=2, seed=seed)).losses for seed in (0, 1))
    assert first != second


def test_methods_start_from_the_same_weights_and_see_the_same_words(corpus):
    exact, lean = (
        train(corpus, MODEL, settings(method=method, steps=2)).losses
        for method in ("exact", "lean")
    )
    assert exact[0] == lean[0]


def test_progress_is_reported_after_every_step(corpus):
    seen = []
    run = train(
        corpus, MODEL, settings(steps=3), on_step=lambda step, loss: seen.append((step, loss))
    )
    assert seen == list(enumerate(run.losses, start=1))


def test_state_is_counted_for_tables_and_for_everything(corpus):
    classes = len(corpus.vocabulary)
    table_elements = classes * (8 + 16 + 1)
    exact, lean = (
        train(corpus, MODEL, settings(method=method, steps=1)) for method in ("exact", "lean")
    )
    body_elements = sum(weight.numel() for weight in exact.model.named_body().values())
    assert exact.table_state_bytes == 2 * 4 * table_elements
    assert exact.state_bytes == 2 * 4 * (table_elements + body_elements)
    assert lean.table_state_bytes < exact.table_state_bytes / 20
    assert lean.state_bytes == lean.table_state_bytes + 2 * 4 * body_elements


def test_learning_rates_fall_to_zero_in_equal_steps(corpus, monkeypatch):
    made = []

    def kept(*arguments):
        made.extend(build_optimizers(*arguments))
        return made

    monkeypatch.setattr("sketchoptim.experiments.train.build_optimizers", kept)
    seen = []
    train(
        corpus,
        MODEL,
        settings(steps=4),
        on_step=lambda step, loss: seen.append([group["lr"] for group in made[0].param_groups]),
    )
    assert [table for table, _ in seen] == pytest.approx([0.0375, 0.025, 0.0125, 0.0])
    assert [body for _, body in seen] == pytest.approx([0.015, 0.01, 0.005, 0.0])


def test_tables_and_body_share_the_parameters_out():
    model = LanguageModel(30, MODEL)
    tables, body = model.named_tables(), model.named_body()
    assert tables.keys() == {"embedding.weight", "softmax.weight", "softmax.bias"}
    assert tables.keys() | body.keys() == dict(model.named_parameters()).keys()
    assert tables.keys().isdisjoint(body)


def test_perplexity_of_an_untrained_model_is_near_the_number_of_words(corpus):
    torch.manual_seed(0)
    found = perplexity(LanguageModel(len(corpus.vocabulary), MODEL), corpus.valid)
    assert found == pytest.approx(len(corpus.vocabulary), rel=0.1)


def test_perplexity_takes_a_part_of_the_text_on_demand(corpus):
    model = train(corpus, MODEL, settings(steps=5)).model
    assert perplexity(model, corpus.valid, words=98) == perplexity(model, corpus.valid[:98])


def test_a_diverging_run_stops_with_the_remedy(corpus, monkeypatch):
    monkeypatch.setattr(
        "sketchoptim.experiments.models.SampledSoftmax.forward",
        lambda self, hidden, labels, generator: hidden.sum() * math.nan,
    )
    with pytest.raises(
        DivergedError, match=r"loss became nan at step 1 .*; lower table_lr = 0\.05"
    ):
        train(corpus, MODEL, settings())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "sgd"}, "method must be one of 'exact', 'lean', .*, got 'sgd'"),
        ({"table_lr": 0.0}, r"table_lr must be finite and > 0, got 0\.0"),
        ({"body_lr": math.nan}, "body_lr must be finite and > 0, got nan"),
        ({"clip_norm": math.inf}, "clip_norm must be finite and > 0, got inf"),
        ({"steps": 0}, "steps must be >= 1, got 0"),
        ({"batch": -1}, "batch must be >= 1, got -1"),
        ({"length": 0}, "length must be >= 1, got 0"),
    ],
)
def test_bad_train_settings_get_a_clear_error(changes, message):
    with pytest.raises(ValueError, match=message):
        settings(**changes)


@pytest.mark.parametrize("name", ["dim", "hidden", "samples"])
def test_bad_model_settings_get_a_clear_error(name):
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        ModelSettings(**{name: 0})
