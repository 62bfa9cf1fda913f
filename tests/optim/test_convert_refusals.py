"""What cannot go from torch.optim to ours, or back, is refused and stays as it was."""

import math

import pytest
import torch
from tiny_runs import DIM, ROWS, TinyModel, bits, differences, seeded
from torch.optim import lr_scheduler
from torch_runs import dense_model, started, train

import sketchoptim as so

# torch.optim.Adagrad makes sparse tensors, of which torch warns once.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def refused(error, match, theirs, named, scheduler=None, **options):
    named = list(named)
    before = bits(theirs, named)
    with pytest.raises(error, match=match):
        so.from_torch(theirs, **options)
    assert differences(before, bits(theirs, named)) == []
    if scheduler is not None:
        assert scheduler.optimizer is theirs


def test_a_forgotten_scheduler_is_refused():
    _, theirs, named = started(torch.optim.Adam, {}, sparse=False)
    scheduler = lr_scheduler.StepLR(theirs, 1)
    refused(
        ValueError, r"must be handed over: give schedulers=\[", theirs, named.items(), scheduler
    )


def test_a_scheduler_of_another_optimizer_is_refused():
    model, theirs, named = started(torch.optim.Adam, {}, sparse=False)
    other = lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)
    match = "schedulers must steer the given optimizer; StepLR does not"
    refused(ValueError, match, theirs, named.items(), schedulers=[other])


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad must be False in group 0, got True"),
        (torch.optim.Adam, {"differentiable": True}, "differentiable must be False in group 0"),
        (torch.optim.RMSprop, {"centered": True}, "centered must be False in group 0"),
        (torch.optim.RMSprop, {"momentum": 0.9}, "momentum must be 0 in group 0, got 0.9"),
    ],
)
def test_an_option_that_ours_lacks_is_refused(kind, options, match):
    model = dense_model()
    theirs = kind(model.parameters(), **options)
    refused(ValueError, match, theirs, model.named_parameters())


def test_another_optimizer_is_refused():
    theirs = torch.optim.Adamax(dense_model().parameters())
    refused(TypeError, "optimizer must be one of torch.optim's Adam, .*, got Adamax", theirs, [])
    with pytest.raises(TypeError, match="must be one of sketchoptim's, got Adamax"):
        so.to_torch(theirs)


def test_a_memory_that_the_algorithm_cannot_use_is_refused_and_schedulers_stay():
    _, theirs, named = started(torch.optim.Adam, {}, sparse=False)
    scheduler = lr_scheduler.StepLR(theirs, 1)
    options = {"memory": so.Memory(first=so.Exact()), "schedulers": [scheduler]}
    match = "memory.second must be a storage for Adam"
    refused(ValueError, match, theirs, named.items(), scheduler, **options)


def test_the_form_that_keeps_averages_of_buckets_is_refused():
    _, theirs, named = started(torch.optim.SparseAdam, {}, sparse=True)
    one = so.Sketched(granularity="element", decay="bucket")
    match = 'decay="bucket" keeps averages of whole buckets'
    refused(ValueError, match, theirs, named.items(), memory=so.Memory(second=one))


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_state_that_would_poison_a_sketch_is_refused(value):
    _, theirs, named = started(torch.optim.SparseAdam, {}, sparse=True)
    theirs.state[named["late"]]["exp_avg_sq"][3, 1] = value
    refused(ValueError, rf"the second moment of .*\[{ROWS // 2}, {DIM}\]", theirs, named.items())
    so.from_torch(theirs, "exact")


def test_adagrad_without_gradients_needs_its_tables_named():
    _, theirs, named = started(torch.optim.Adagrad, {}, sparse=True)
    theirs.zero_grad()
    refused(ValueError, "must have a gradient to tell", theirs, named.items())
    ours = so.from_torch(theirs, tables=named.values())
    assert all(ours.state[p]["is_compressed"] for p in named.values())


def test_a_table_that_is_no_parameter_is_refused():
    _, theirs, named = started(torch.optim.Adam, {}, sparse=False)
    match = (
        r"tables must be parameters of the optimizer, or their names, got a tensor of shape \[2\]"
    )
    refused(ValueError, match, theirs, named.items(), tables=[torch.ones(2)])
    refused(ValueError, "or their names, got 'nope'", theirs, named.items(), tables=["nope"])


# -- back to torch ---------------------------------------------------------------------------------


def test_sparse_gradients_are_refused_where_torch_takes_none():
    model = seeded(TinyModel(), 0)
    ours = so.Adam(model.parameters())
    train(model, ours, 1)
    with pytest.raises(ValueError, match=r"torch.optim.Adam takes no sparse gradients.*kind="):
        so.to_torch(ours)


def test_a_kind_of_another_algorithm_is_refused():
    ours = so.Adam(dense_model().parameters())
    match = "kind must be torch.optim.Adam or torch.optim.SparseAdam for Adam, got"
    with pytest.raises(ValueError, match=match):
        so.to_torch(ours, torch.optim.SGD)


def test_weight_decay_is_refused_where_torch_has_none():
    ours = so.Adam(dense_model().parameters(), weight_decay=0.1)
    with pytest.raises(ValueError, match=r"weight_decay must be 0 in group 0, got 0.1"):
        so.to_torch(ours, torch.optim.SparseAdam)
