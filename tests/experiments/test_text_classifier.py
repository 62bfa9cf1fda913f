import lzma
import os
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from experiments.corpora import read_labelled
from experiments.recipes import load_recipe
from experiments.settings import TrainSettings
from experiments.tasks import ClassOfText
from experiments.text_classifier import TextClassifierSettings
from experiments.training import Training
from sketchoptim.nn import recall

DATA = Path(os.environ.get("SKETCHOPTIM_DATA", Path(__file__).parents[3] / "shared" / "data"))
FOLDER = DATA / "debian-contents"
OUTPUTS = ("mach", "sampled", "lsh")
WORDS = ("bin", "lib", "share", "doc", "man", "etc", "var", "cache", "fonts", "icons")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Paths whose first two words tell the class, among a hundred."""
    folder = tmp_path_factory.mktemp("labelled")
    paths = [(f"{a}/{b}/{n}", f"{a}-{b}") for n in range(9) for a in WORDS for b in WORDS]
    for part, lines in (("train", paths), ("test", paths[::7])):
        text = "".join(f"{path}\t{label}\n" for path, label in lines)
        (folder / f"{part}.tsv").write_text(text, encoding="utf-8")
    sizes = {"members": 3, "buckets": 20, "samples": 30, "active": 10}
    settings = TextClassifierSettings(features=500, dim=32, at=3, **sizes)
    return ClassOfText(read_labelled(folder, held_out=0.1), settings)


def with_output(task: ClassOfText, output: str) -> ClassOfText:
    return replace(task, settings=replace(task.settings, output=output))


def settings(**changes) -> TrainSettings:
    return TrainSettings(**{"table_lr": 0.05, "body_lr": 0.02, "steps": 80, "batch": 64, **changes})


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("method", ["lean", "exact"])
def test_a_text_classifier_learns_classes_from_texts(task, output, method):
    task = with_output(task, output)
    training = Training(task, settings(method=method))
    before = task.measure(training.model, "test", limit=100)
    list(training.steps())
    assert before > 70
    assert task.measure(training.model, "test", limit=100) < 20


def test_recall_can_be_over_some_candidates_and_the_right_classes(task):
    few = replace(task, settings=replace(task.settings, candidates=10))
    model = few.model()
    best, right = few.rank(model, "test", 3, limit=20)
    allowed = {*few._candidates(right).tolist()}
    assert len(allowed) <= 30
    assert {*right.tolist()} <= allowed
    assert {*best.flatten().tolist()} <= allowed


def test_candidates_are_refused_where_all_classes_are_ranked():
    with pytest.raises(ValueError, match="candidates need output = \"mach\", got 'sampled'"):
        TextClassifierSettings(output="sampled", candidates=10)


def test_a_pass_takes_every_text_once(task):
    size, batch = len(task.texts.train), 90
    assert size == 810
    assert task.batches(batch=batch, length=1) == 9
    classes = torch.cat([task.batch(number, batch=batch, length=1)[1] for number in range(9)])
    assert torch.equal(classes.sort().values, task.texts.train.labels.long().sort().values)


@pytest.mark.parametrize("output", OUTPUTS)
def test_another_seed_gives_other_weights(task, output):
    task = with_output(task, output)
    first, again, other = (next(Training(task, settings(seed=seed)).steps()) for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("output", OUTPUTS)
def test_the_tables_are_the_parameters_with_sparse_gradients(task, output):
    task = with_output(task, output)
    model = task.model()
    loss, _ = model.loss(*task.batch(0, batch=8, length=1), None, generator=None)
    loss.backward()
    sparse = {name for name, weight in model.named_parameters() if weight.grad.is_sparse}
    assert sparse == model.named_tables().keys()


def test_members_rank_by_the_aggregation_asked_for(task):
    training = Training(task, settings(steps=20))
    list(training.steps())
    mean, logits = (
        task.rank(training.model, "test", 5, limit=50, aggregation=name)[0]
        for name in ("mean", "logits")
    )
    assert mean.shape == logits.shape == (50, 5)
    assert not torch.equal(mean, logits)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"members": 0}, "members must be >= 1, got 0"),
        ({"output": "softmax"}, "output must be one of .*'mach'.*, got 'softmax'"),
    ],
)
def test_bad_sizes_get_a_clear_error(options, error):
    with pytest.raises(ValueError, match=error):
        TextClassifierSettings(**options)


@pytest.mark.skipif(
    not FOLDER.is_dir(),
    reason=f"Debian's contents are not at {FOLDER}; set SKETCHOPTIM_DATA to their parent folder",
)
def test_mach_finds_the_packages_of_debians_files(tmp_path):
    with lzma.open(FOLDER / "train.tsv.xz", "rt", encoding="utf-8") as file:
        lines = list(islice(file, 60_000))
    for part, some in (("train", lines[:-2000]), ("test", lines[-2000:])):
        (tmp_path / f"{part}.tsv").write_text("".join(some), encoding="utf-8")
    sizes = TextClassifierSettings(dim=64, members=3, buckets=512)
    task = ClassOfText(read_labelled(tmp_path), sizes)
    recipe = load_recipe("amazon-mach")
    at_10, state = [], []
    for name in ("exact", "lean"):
        method = recipe.contestants[name].method
        training = Training(task, settings(method=method, steps=60, batch=256, clip_norm=1e6))
        list(training.steps())
        found, right = task.rank(training.model, "test", 10, limit=2000, aggregation="logits")
        at_10.append(recall(found, right))
        state.append(training.run().table_state_bytes)
    assert min(at_10) > 0.35
    assert at_10[1] > at_10[0] - 0.05
    assert state[1] < state[0] / 500
