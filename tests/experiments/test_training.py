import math

import pytest
import torch

from experiments.corpora import Corpus, Vocabulary
from experiments.methods import Method
from experiments.models import LanguageModel, ModelSettings
from experiments.settings import TrainSettings
from experiments.tasks import NextWords, perplexity
from experiments.training import DivergedError, Training, build_optimizers, train
from sketchoptim.storage import PRESETS

MODEL = ModelSettings(dim=8, hidden=16, samples=32)
METHODS = [*PRESETS, "adagrad-exact", "adagrad-lean", "rmsprop-row-wise", "sgd-lean"]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """Counting to 49 over and over: as predictable as a text can be."""
    words = [str(number % 49) for number in range(4900)]
    vocabulary = Vocabulary.from_words(words)
    return Corpus.from_words(vocabulary, train=words, valid=words[:490], test=words[:98])


def settings(**changes) -> TrainSettings:
    values = {"table_lr": 0.05, "body_lr": 0.02, "steps": 50, "batch": 8, "length": 10, **changes}
    return TrainSettings(**values)


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_drops_under_every_method(corpus, method):
    rate = {"adagrad": 1.0, "sgd": 3.0}.get(method.partition("-")[0], 0.1)
    losses = train(corpus, MODEL, settings(method=method, table_lr=rate)).losses
    assert losses[-1] < 0.8 * losses[0]


def test_the_same_seed_gives_the_same_run_bit_for_bit(corpus):
    first, second = (train(corpus, MODEL, settings(steps=20)) for _ in range(2))
    assert first.losses == second.losses
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_training_leaves_the_global_random_numbers_alone(corpus):
    before = torch.get_rng_state()
    train(corpus, MODEL, settings(steps=2))
    assert torch.equal(torch.get_rng_state(), before)


def test_methods_start_from_the_same_weights_and_see_the_same_words(corpus):
    exact, lean = (
        train(corpus, MODEL, settings(method=method, steps=2)).losses
        for method in ("exact", "lean")
    )
    assert exact[0] == lean[0]


def test_state_is_counted_for_tables_and_for_everything(corpus):
    classes = len(corpus.vocabulary)
    table_elements = classes * (8 + 16 + 1)
    exact, lean = (
        train(corpus, MODEL, settings(method=method, steps=1)) for method in ("exact", "lean-0.1")
    )
    body_elements = sum(weight.numel() for weight in exact.model.named_body().values())
    assert exact.table_state_bytes == 2 * 4 * table_elements
    assert exact.state_bytes == 2 * 4 * (table_elements + body_elements)
    assert lean.table_state_bytes < exact.table_state_bytes / 20
    assert lean.state_bytes == lean.table_state_bytes + 2 * 4 * body_elements


def test_a_method_may_have_another_memory_for_some_tables():
    method = Method(name="mixed", memory="lean", memories={"softmax.": "row-wise"})
    model = LanguageModel(30, MODEL)
    tables, _ = build_optimizers(model, settings(method=method))
    found = {name: it["memory"] for it in tables.param_groups for name in it["param_names"]}
    assert found.keys() == model.named_tables().keys()
    for name, memory in found.items():
        preset = "row-wise" if name.startswith("softmax.") else "lean"
        assert memory == PRESETS[preset], name
    with pytest.raises(ValueError, match='memory must be "exact" with optimizer "sparse-adam"'):
        Method(name="mixed", optimizer="sparse-adam", memory="exact", memories={"a": "lean"})


def test_sparse_adam_is_torchs_and_trains_as_ours_does_with_exact_moments(corpus):
    tables, _ = build_optimizers(LanguageModel(30, MODEL), settings(method="sparse-adam"))
    assert type(tables) is torch.optim.SparseAdam
    theirs, ours = (
        train(corpus, MODEL, settings(method=method, steps=20))
        for method in ("sparse-adam", "exact")
    )
    assert theirs.losses == pytest.approx(ours.losses, rel=1e-4)
    assert theirs.table_state_bytes == ours.table_state_bytes
    assert theirs.state_bytes == ours.state_bytes


def test_sparse_adam_has_no_compressed_moments_and_takes_no_dense_gradients():
    with pytest.raises(
        ValueError, match=r"memory must be \"exact\" with optimizer \"sparse-adam\""
    ):
        Method(name="mine", optimizer="sparse-adam", memory="lean")
    with pytest.raises(ValueError, match="body_optimizer must take dense gradients"):
        settings(body_optimizer="sparse-adam")


def test_learning_rates_fall_to_zero_in_equal_steps(corpus, monkeypatch):
    made = []

    def kept(*arguments):
        made.extend(build_optimizers(*arguments))
        return made

    monkeypatch.setattr("experiments.training.build_optimizers", kept)
    seen = []
    train(
        corpus,
        MODEL,
        settings(steps=4),
        on_step=lambda step, loss: seen.append([one.param_groups[0]["lr"] for one in made]),
    )
    assert [table for table, _ in seen] == pytest.approx([0.0375, 0.025, 0.0125, 0.0])
    assert [body for _, body in seen] == pytest.approx([0.015, 0.01, 0.005, 0.0])


def test_a_full_softmax_leaves_the_output_table_to_the_body():
    model = LanguageModel(30, ModelSettings(dim=8, hidden=16, samples=0))
    assert model.named_tables().keys() == {"embedding.weight"}
    assert {"softmax.table.weight", "softmax.bias_table.weight"} <= model.named_body().keys()


def test_a_full_softmax_trains_on_the_loss_that_is_measured(corpus):
    torch.manual_seed(0)
    model = LanguageModel(49, ModelSettings(dim=8, hidden=16, samples=0))
    words, labels = corpus.batch(0, batch=4, length=10)
    loss, state = model.loss(words, labels, None, generator=torch.Generator())
    hidden, _ = model(words)
    assert loss.item() == pytest.approx(model.softmax.full_loss(hidden, labels).item())
    loss.backward()
    assert not model.softmax.weight.grad.is_sparse
    assert not state[0].requires_grad


def test_evaluations_are_made_on_time_and_do_not_change_the_run(corpus):
    plain = train(corpus, MODEL, settings(steps=6))
    evaluated = train(corpus, MODEL, settings(steps=6, evaluate_every=2, evaluate_words=98))
    assert [evaluation.step for evaluation in evaluated.evaluations] == [2, 4, 6]
    assert evaluated.evaluations[-1].quality == perplexity(evaluated.model, corpus.valid, words=98)
    assert plain.losses == evaluated.losses


def test_a_plateau_divides_the_learning_rates_by_four(corpus, monkeypatch):
    found = iter([9.0, 8.0, 8.5, 7.0])
    monkeypatch.setattr("experiments.tasks.perplexity", lambda *_, **__: next(found))
    training = Training(
        NextWords(corpus, MODEL), settings(steps=4, schedule="plateau", evaluate_every=1)
    )
    rates = [training.optimizers[0].param_groups[0]["lr"] for _ in training.steps()]
    assert rates == pytest.approx([0.05, 0.05, 0.0125, 0.0125])


def test_rates_rise_during_warmup_and_then_fall(corpus):
    training = Training(NextWords(corpus, MODEL), settings(steps=10, warmup=0.4))
    rates = [training.optimizers[0].param_groups[0]["lr"]]
    rates += [training.optimizers[0].param_groups[0]["lr"] for _ in training.steps()]
    steps = [0.25, 0.5, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    assert rates == pytest.approx([0.05 * step for step in steps])


def test_dropout_draws_from_the_seed_alone(corpus):
    model = ModelSettings(dim=8, hidden=16, samples=32, dropout=0.5)
    first, second, other = (
        train(corpus, model, settings(steps=3, seed=seed)).losses for seed in (0, 0, 1)
    )
    assert first == second != other


def test_perplexity_of_an_untrained_model_is_near_the_number_of_words(corpus):
    torch.manual_seed(0)
    found = perplexity(LanguageModel(len(corpus.vocabulary), MODEL), corpus.valid)
    assert found == pytest.approx(len(corpus.vocabulary), rel=0.1)


def test_a_diverging_run_stops_with_the_remedy(corpus, monkeypatch):
    monkeypatch.setattr(
        "experiments.models.SampledSoftmax.forward",
        lambda self, hidden, labels, generator: hidden.sum() * math.nan,
    )
    with pytest.raises(
        DivergedError, match=r"loss became nan at step 1 .*; lower table_lr = 0\.05"
    ):
        train(corpus, MODEL, settings())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "sgd"}, "method must be one of 'lean', 'lean-0.1', 'exact', .*, got 'sgd'"),
        ({"body_optimizer": "lion"}, r"body_optimizer must be one of \['adam', .*, got 'lion'"),
        ({"schedule": "cosine"}, 'schedule must be "linear" or "plateau", got \'cosine\''),
        ({"schedule": "plateau"}, 'schedule="plateau" needs evaluate_every'),
        ({"warmup": 1.0}, r"warmup must be in \[0, 1\), got 1\.0"),
        ({"warmup": 0.1, "schedule": "plateau", "evaluate_every": 1}, "warmup must be 0 with"),
        ({"epochs": 2}, "steps must be >= 1, or epochs instead, got steps=50, epochs=2"),
        ({"evaluate_every": -1}, "evaluate_every must be >= 0, got -1"),
        ({"table_lr": 0.0}, r"table_lr must be finite and > 0, got 0\.0"),
        ({"body_lr": math.nan}, "body_lr must be finite and > 0, got nan"),
        ({"clip_norm": math.inf}, "clip_norm must be finite and > 0, got inf"),
        ({"steps": 0}, "steps must be >= 1, or epochs instead, got steps=0, epochs=0"),
        ({"batch": -1}, "batch must be >= 1, got -1"),
        ({"length": 0}, "length must be >= 1, got 0"),
    ],
)
def test_bad_train_settings_get_a_clear_error(changes, message):
    with pytest.raises(ValueError, match=message):
        settings(**changes)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("dim", 0, "dim must be >= 1, got 0"),
        ("hidden", 0, "hidden must be >= 1, got 0"),
        ("layers", 0, "layers must be >= 1, got 0"),
        ("projection", -1, "projection must be >= 0, got -1"),
        ("samples", -1, "samples must be >= 0, got -1"),
        ("dropout", 1.0, r"dropout must be in \[0, 1\), got 1\.0"),
    ],
)
def test_bad_model_settings_get_a_clear_error(name, value, message):
    with pytest.raises(ValueError, match=message):
        ModelSettings(**{name: value})
