"""Contract 9, what works with torch.optim works here: torch.compile."""

import itertools

import pytest
import torch
from tiny_runs import PRESET_PLANS, Plan, Run, batches, differences
from torch import Tensor

import sketchoptim as so

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated:DeprecationWarning"),
    pytest.mark.usefixtures("fresh_dynamo"),
]


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("kind", "memory"),
    [*itertools.product([so.Adam], ["lean-0.1", "exact", "paper-mv"]), (so.SGD, "paper-mv")],
)
def test_a_compiled_training_step_gives_the_bits_of_a_plain_one(kind, memory):
    plain, compiled = Run.start(Plan(kind, memory)), Run.start(Plan(kind, memory))

    def step(ids: Tensor) -> Tensor:
        loss = compiled.backward(ids)
        compiled.optimizer.step()
        return loss

    fast = torch.compile(step, backend="eager")
    for ids in batches(3):
        fast(ids)
    assert differences(compiled.bits(), plain.train(batches(3)).bits()) == []


def test_a_training_step_compiled_ahead_of_time_gives_the_same_bits():
    plain, compiled = Run.start(PRESET_PLANS["lean-0.1"]), Run.start(PRESET_PLANS["lean-0.1"])
    fast = torch.compile(lambda ids: compiled.train([ids]), backend="aot_eager")
    for ids in batches(3):
        fast(ids)
    assert differences(compiled.bits(), plain.train(batches(3)).bits()) == []


def test_a_compiled_model_trains():
    plain, compiled = Run.start(PRESET_PLANS["lean-0.1"]), Run.start(PRESET_PLANS["lean-0.1"])
    compiled.model.forward = torch.compile(compiled.model.forward, backend="aot_eager")
    assert differences(compiled.train(batches(3)).bits(), plain.train(batches(3)).bits()) == []
