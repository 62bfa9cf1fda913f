"""The error that sketches estimate of themselves on real text, compared with the true one."""

import os
from pathlib import Path

import pytest

import sketchoptim as so
from experiments.corpora import read_wikitext
from experiments.methods import Method
from experiments.models import ModelSettings
from experiments.settings import TrainSettings
from experiments.tasks import NextWords
from experiments.training import Training
from sketchoptim.diagnostics import Shadow

DATA = Path(os.environ.get("SKETCHOPTIM_DATA", "")) / "wikitext-2"

pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason="SKETCHOPTIM_DATA names no folder that has wikitext-2 in it"
)

LINEAR = so.Sketched(granularity="element", ratio=1 / 50)
MEMORIES = {
    "lean": so.Memory.of("lean"),
    "lean, a fiftieth": so.Memory(second=so.Sketched(ratio=1 / 50, conservative=True)),
    "linear, a fiftieth": so.Memory(first=LINEAR, second=LINEAR, clip=1.0),
}
# By how much an estimate may be off. It depends on the seed of the hash: over the seeds 0 to 7 of
# these memories, estimate over error was 0.82 to 1.17 for first moments, and 0.51 to 3.53 for
# second ones. This test has seed 0.
FACTORS = {"first": 1.3, "second": 4.0}


@pytest.fixture(scope="module")
def corpus():
    return read_wikitext(DATA)


@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_the_estimate_is_near_the_error_against_the_shadow(corpus, memory):
    steps = 40
    settings = TrainSettings(
        method=Method(name="sketched", memory=memory), table_lr=0.03, steps=steps
    )
    model = ModelSettings(dim=32, hidden=32, samples=256)
    training = Training(NextWords(corpus, model), settings)
    optimizer, _ = training.optimizers  # of the tables, and of the layers between them
    weights = [it for it in training.model.named_tables().values() if it.dim() > 1]
    shadow = Shadow(optimizer, weights, every=steps, rivals={})
    for _ in training.steps():
        pass
    estimates = {
        (found.parameter, found.quantity): found.error for found in so.diagnose(optimizer).findings
    }
    assert shadow.records
    for record in shadow.records:
        estimate, factor = estimates[record.parameter, record.moment], FACTORS[record.moment]
        for found, true in (
            (estimate.absolute, record.all_error), (estimate.relative, record.all_relative),
        ):  # fmt: skip
            assert true / factor < found < true * factor
