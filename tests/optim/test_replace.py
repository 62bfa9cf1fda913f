"""Tables that grow while they are trained: `replace_parameters` carries the state over."""

import copy

import pytest
import tiny_runs
import torch
from saved_runs import reloaded
from tiny_runs import PLANS, Run, batches, bits, differences
from torch import nn

import sketchoptim as so
from sketchoptim.optim._binding import live_moments

MORE = 24


def grown(parameter: nn.Parameter) -> nn.Parameter:
    new = torch.zeros(len(parameter) + MORE, *parameter.shape[1:], dtype=parameter.dtype)
    new[: len(parameter)] = parameter.detach()
    return nn.Parameter(new)


def grow_tables(run: Run) -> None:
    """All tables get more rows, and the optimizer the new parameters."""
    model, replacements = run.model, {}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            new = grown(module.weight)
            replacements[module.weight] = module.weight = new
    assert len(so.replace_parameters(run.optimizer, replacements)) == len(replacements) >= 2


@tiny_runs.each(PLANS)
def test_old_rows_train_on_as_if_the_table_had_not_grown(plan):
    unbroken = Run.start(plan).train(batches(6))
    run = Run.start(plan).train(batches(3))
    grow_tables(run)
    run.train(batches(6)[3:])
    for old, new in zip(unbroken.model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(new[: len(old)], old)
        assert not new[len(old) :].any()


@tiny_runs.each(PLANS)
def test_added_rows_start_as_those_of_a_fresh_moment(plan):
    """In every storage but a sketch, where they share counters."""
    run = Run.start(plan).train(batches(3))
    grow_tables(run)
    group = run.optimizer.param_groups[0]
    for table in group["params"]:
        assert run.optimizer.state[table]["shape"].tolist() == list(table.shape)
        for moment in live_moments(run.optimizer, table, group):
            if moment is not None and moment.sketch is None:
                found = moment.estimate(torch.arange(len(table) - MORE, len(table)))
                expected = torch.full_like(found, run.optimizer.fill(group))
                torch.testing.assert_close(found, expected, rtol=0.5, atol=0.0)


@tiny_runs.each(PLANS)
def test_a_grown_table_is_saved_and_loaded(plan):
    run = Run.start(plan).train(batches(3))
    grow_tables(run)
    model = copy.deepcopy(run.model)
    again = Run(model, plan.build(model))
    (saved,) = reloaded(run.optimizer.state_dict())
    again.optimizer.load_state_dict(saved)
    assert differences(again.train(batches(2)).bits(), run.train(batches(2)).bits()) == []


@pytest.mark.parametrize("dim", [16, 60, 300])
def test_added_rows_of_8_bit_state_start_from_zero_in_a_block_that_they_share(dim):
    old = nn.Parameter(torch.zeros(1001, dim))
    optimizer = so.Adam([{"params": [old], "memory": "8-bit"}])
    old.grad = torch.randn(1001, dim, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    before = live_moments(optimizer, old, optimizer.param_groups[0])
    new = grown(old)
    so.replace_parameters(optimizer, {old: new})
    after = live_moments(optimizer, new, optimizer.param_groups[0])
    for moment, earlier in zip(after, before, strict=True):
        ids = torch.arange(1001)
        assert torch.equal(moment.estimate(ids), earlier.estimate(ids))
        assert not moment.estimate(torch.arange(1001, 1001 + MORE)).any()


def test_a_model_is_followed_by_the_names_of_its_parameters():
    model = nn.Sequential(nn.Embedding(2000, 4), nn.Linear(4, 4))
    optimizer = so.Adam(model, lr=0.1)
    model[1](model[0](torch.arange(9))).sum().backward()
    optimizer.step()
    kept = optimizer.state[model[1].weight]
    assert so.replace_parameters(optimizer, model) == []
    model[0].weight = grown(model[0].weight)
    assert so.replace_parameters(optimizer, model) == ["0.weight"]
    assert optimizer.param_groups[0]["params"] == [model[0].weight]
    assert set(optimizer.state) == set(model.parameters())
    assert torch.equal(optimizer.state[model[1].weight]["first_values"], kept["first_values"])


def a_run() -> tuple[nn.Parameter, so.Adam]:
    old = nn.Parameter(torch.ones(40, 4))
    optimizer = so.Adam([("table", old)], memory="lean")
    old.grad = torch.ones(40, 4).to_sparse(1)
    optimizer.step()
    return old, optimizer


@pytest.mark.parametrize(
    ("new", "error", "match"),
    [
        (torch.ones(39, 4), ValueError, "'table' must have its shape, .* or more rows, got .39, 4"),
        (torch.ones(50, 5), ValueError, "or more rows"),
        (torch.ones(200), ValueError, "or more rows"),
        (torch.ones(50, 4).double(), ValueError, "must be torch.float32 on cpu, got torch.float64"),
        (torch.ones(50, 4, device="meta"), ValueError, "got torch.float32 on meta"),
        (torch.ones(50, 4).to_sparse(), TypeError, "dense tensors"),
    ],
)
def test_a_refused_replacement_changes_nothing(new, error, match):
    old, optimizer = a_run()
    before = bits(optimizer, [("table", old)])
    with pytest.raises(error, match=match):
        so.replace_parameters(optimizer, {old: new})
    assert differences(bits(optimizer, [("table", old)]), before) == []
    assert optimizer.param_groups[0]["params"][0] is old


def test_what_is_not_in_the_optimizer_is_refused():
    _, optimizer = a_run()
    other = nn.Parameter(torch.ones(40, 4))
    with pytest.raises(ValueError, match="must be one of the optimizer, and is not"):
        so.replace_parameters(optimizer, {other: nn.Parameter(torch.ones(41, 4))})
    two = [("one", nn.Parameter(torch.ones(3))), ("two", nn.Parameter(torch.ones(3)))]
    with pytest.raises(ValueError, match="must not be in the optimizer, but is 'two'"):
        so.replace_parameters(so.Adam(two), {two[0][1]: two[1][1]})
    with pytest.raises(ValueError, match="must have parameters with names of the model"):
        so.replace_parameters(optimizer, nn.Linear(2, 2))
    with pytest.raises(TypeError, match="optimizer must be one of sketchoptim's"):
        so.replace_parameters(torch.optim.SGD([other]), {})
