"""Contract 9, what works with torch.optim works here: copies, printing and going away."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from tiny_runs import OPTIMIZERS, PRESET_PLANS, Plan, Run, batches, differences
from torch import nn


@pytest.mark.parametrize("kind", OPTIMIZERS.values())
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_is_an_optimizer_of_the_same_kind_that_still_takes_groups(kind, copied):
    run = Run.start(Plan(kind, "paper-mv")).train(batches(1))
    model, optimizer = copied((run.model, run.optimizer))
    assert type(optimizer) is kind
    assert repr(optimizer) == repr(run.optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "memory": "paper-mv"})
    with pytest.raises(ValueError, match="centered must be False"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "centered": True})
    Run(model, optimizer).train(batches(1))


def test_state_follows_the_order_of_parameters_and_not_the_model():
    """What an optimizer does depends on its parameters' numbers alone."""
    first, second = Run.start(PRESET_PLANS["lean-0.1"]), Run.start(PRESET_PLANS["lean-0.1"], seed=3)
    second.model.load_state_dict(first.model.state_dict())
    assert differences(first.train(batches(3)).bits(), second.train(batches(3)).bits()) == []


def test_it_prints_its_groups():
    text = repr(Run.start(PRESET_PLANS["lean-0.1"]).optimizer)
    assert "Parameter Group 2" in text
    assert "lr: 0.05" in text


def test_an_unused_optimizer_goes_away_with_its_tables():
    """Nothing global holds on to parameters or state."""
    run = Run.start(PRESET_PLANS["paper-mv"]).train(batches(2))
    held = [weakref.ref(run.optimizer), weakref.ref(run.model.table.weight)]
    del run
    gc.collect()
    assert [reference() for reference in held] == [None, None]
