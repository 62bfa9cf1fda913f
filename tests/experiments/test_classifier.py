import pytest
import torch

from experiments.classifier import ClassifierSettings
from experiments.corpora import NoisyViews
from experiments.settings import TrainSettings
from experiments.tasks import ClassOfView
from experiments.training import Training


@pytest.fixture
def task():
    vectors = torch.randn(60, 16, generator=torch.Generator().manual_seed(0))
    settings = ClassifierSettings(bits=3, tables=4, negatives=8, rebuild_every=5)
    return ClassOfView(NoisyViews(vectors, noise=0.3), settings)


def settings(**changes) -> TrainSettings:
    return TrainSettings(**{"table_lr": 0.3, "steps": 60, "batch": 16, **changes})


@pytest.mark.parametrize("method", ["lean", "adagrad-paper-v-only"])
def test_a_classifier_learns_classes_from_noisy_views(task, method):
    training = Training(task, settings(method=method))
    before = task.measure(training.model, "test", limit=200)
    list(training.steps())
    assert before > 80
    assert task.measure(training.model, "test", limit=200) < 40


def test_a_pass_shows_every_class_once_on_average(task):
    assert task.batches(batch=16, length=1) == 4


@pytest.mark.parametrize("saved_at", [10, 13])
def test_a_saved_run_goes_on_bit_for_bit(task, saved_at):
    whole, restored = (Training(task, settings(steps=20)) for _ in range(2))
    for _ in whole.steps():
        if whole.step == saved_at:
            saved = {**whole.state_dict()}
            saved["model"] = {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in saved["model"].items()
            }
            saved["losses"] = [*whole.losses]
            restored.load_state_dict(saved)
    list(restored.steps())
    assert restored.losses == whole.losses
    assert torch.equal(restored.model.softmax.weight, whole.model.softmax.weight)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("bits", 0, "bits must be >= 1, got 0"),
        ("budget", 0, "budget must be >= 1, got 0"),
        ("negatives", -1, "negatives must be >= 0, got -1"),
    ],
)
def test_bad_classifier_settings_get_a_clear_error(name, value, message):
    with pytest.raises(ValueError, match=message):
        ClassifierSettings(**{name: value})
