from dataclasses import replace

import pytest
import torch

import sketchoptim as so
from experiments.corpora import Corpus
from experiments.methods import Method
from experiments.settings import TrainSettings
from experiments.tasks import NextWords
from experiments.training import Training
from experiments.transformer import Transformer, TransformerSettings

MODEL = TransformerSettings(dim=16, layers=1, heads=2)


@pytest.fixture
def task() -> NextWords:
    """Every word is followed by the next one, in a circle."""
    words = torch.arange(3000) % 50
    return NextWords(Corpus(range(50), words, words, words), MODEL)


def settings(**changes) -> TrainSettings:
    train = {"table_lr": 0.03, "body_lr": 0.01, "body_optimizer": "adamw", "steps": 40}
    return TrainSettings(**{**train, "batch": 8, "length": 16, **changes})


def method(**options) -> Method:
    return Method(name="tried", optimizer="adamw", **options)


def test_a_word_does_not_depend_on_later_ones():
    model = Transformer(50, MODEL)
    words = torch.arange(8)[None]
    changed = words.clone()
    changed[0, 5] = 40
    hidden, other = (model(it)[0] for it in (words, changed))
    torch.testing.assert_close(hidden[:, :5], other[:, :5])
    assert not torch.allclose(hidden[:, 5:], other[:, 5:])


def test_tied_tables_are_one_parameter_and_others_are_two():
    assert len(Transformer(50, MODEL).named_tables()) == 1
    assert len(Transformer(50, TransformerSettings(dim=16, is_tied=False)).named_tables()) == 2


@pytest.mark.parametrize(
    "tried",
    [
        method(memory="exact"),
        method(memory="lean"),
        method(memory="lean", body_optimizer="muon"),
        method(memory="lean", body_memory="8-bit"),
    ],
    ids=["adamw", "lean", "muon", "8-bit"],
)
def test_a_transformer_learns_with_every_kind_of_optimizer(task, tried):
    training = Training(task, settings(method=tried))
    list(training.steps())
    assert task.measure(training.model, "test", limit=500) < 15


def test_adafactor_takes_rates_relative_to_the_size_of_the_weights(task):
    names = {"optimizer": "adafactor", "body_optimizer": "adafactor"}
    tried = Method(name="tried", memory="exact", **names)
    training = Training(task, settings(method=tried, table_lr=0.3, body_lr=0.1))
    list(training.steps())
    assert task.measure(training.model, "test", limit=500) < 15


def test_dense_gradients_of_tables_are_compressed(task):
    training = Training(task, settings(method=method(memory="lean"), steps=1))
    list(training.steps())
    assert training.run().table_state_bytes == 4 * (50 + 16)  # one number a row and one a column


def test_muon_trains_the_matrices_of_the_blocks_and_adamw_the_rest(task):
    training = Training(task, settings(method=method(body_optimizer="muon"), steps=1))
    tables, matrices, rest = training.optimizers
    assert isinstance(matrices, torch.optim.Muon)
    assert {weight.ndim for weight in matrices.param_groups[0]["params"]} == {2}
    assert isinstance(rest, so.AdamW)
    counts = [len(it.param_groups[0]["params"]) for it in (tables, matrices, rest)]
    assert sum(counts) == len(list(training.model.parameters()))


def test_heads_must_divide_the_columns():
    with pytest.raises(ValueError, match="dim must be a multiple of heads = 3, got 16"):
        TransformerSettings(dim=16, heads=3)


def test_a_transformer_learns_with_products_in_bfloat16(task):
    narrow = NextWords(task.corpus, replace(MODEL, products="bfloat16"))
    training = Training(narrow, settings(method=method(memory="lean")))
    list(training.steps())
    assert narrow.measure(training.model, "test", limit=500) < 15
