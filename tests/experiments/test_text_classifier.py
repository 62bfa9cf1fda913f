import pytest
import torch

from sketchoptim.experiments.corpora import read_labelled
from sketchoptim.experiments.settings import TrainSettings
from sketchoptim.experiments.tasks import ClassOfText
from sketchoptim.experiments.text_classifier import MachSettings
from sketchoptim.experiments.train import Training

WORDS = ("bin", "lib", "share", "doc", "man", "etc", "var", "cache", "fonts", "icons")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Paths whose first two words tell the class, among a hundred."""
    folder = tmp_path_factory.mktemp("labelled")
    paths = [(f"{a}/{b}/{n}", f"{a}-{b}") for n in range(9) for a in WORDS for b in WORDS]
    for part, lines in (("train", paths), ("test", paths[::7])):
        text = "".join(f"{path}\t{label}\n" for path, label in lines)
        (folder / f"{part}.tsv").write_text(text, encoding="utf-8")
    settings = MachSettings(features=500, dim=32, members=3, buckets=20, at=3)
    return ClassOfText(read_labelled(folder, held_out=0.1), settings)


def settings(**changes) -> TrainSettings:
    return TrainSettings(**{"table_lr": 0.05, "body_lr": 0.02, "steps": 80, "batch": 64, **changes})


@pytest.mark.parametrize("method", ["lean", "exact"])
def test_a_text_classifier_learns_classes_from_texts(task, method):
    training = Training(task, settings(method=method))
    before = task.measured(training.model, "test", limit=100)
    list(training.steps())
    assert before > 70
    assert task.measured(training.model, "test", limit=100) < 20


def test_a_pass_takes_every_text_once(task):
    size, batch = len(task.texts.train), 90
    assert size == 810
    assert task.batches(batch=batch, length=1) == 9
    classes = torch.cat([task.batch(number, batch=batch, length=1)[1] for number in range(9)])
    assert torch.equal(classes.sort().values, task.texts.train.labels.long().sort().values)


def test_another_seed_gives_other_weights(task):
    first, again, other = (next(Training(task, settings(seed=seed)).steps()) for seed in (0, 0, 1))
    assert first == again != other


def test_bad_sizes_get_a_clear_error():
    with pytest.raises(ValueError, match="members must be >= 1, got 0"):
        MachSettings(members=0)
