"""Contract 8: gradients that are not finite are refused or skipped, and change nothing."""

import copy
import math

import pytest
import tiny_runs
import torch
from gradients import unchecked
from refusals import dense, refuse_step, trained, trained_with
from tiny_runs import MEMORIES, OPTIMIZERS, PRESET_PLANS, Plan, Run, batches, differences
from torch import Tensor, nn

import sketchoptim as so

NAN, INF = math.nan, math.inf

COMPRESSED_PLANS = {name: plan for name, plan in PRESET_PLANS.items() if name != "exact"}
# By the kernels, by row and by element, and by the reference.
EACH_WAY = {name: COMPRESSED_PLANS[name] for name in ("lean-0.1", "paper-mv", "rank-one")}
# Every way to keep a second moment; when a sketch is cleaned or folded does not matter here.
SECONDS = {
    name: memory
    for name, memory in MEMORIES.items()
    if not name.startswith(("exact", "ratio")) and "cleaned" not in name
}

NONFINITE = {
    "NaN": NAN,
    "inf": INF,
    "-inf": -INF,
    "a square that overflows": 1e20,
    "a square that is just finite": 1.8e19,
    "the largest float32": torch.finfo(torch.float32).max,
}
REFUSAL = 'must be finite and within .* nonfinite="skip" skips and counts'


def spoiled(gradient: Tensor, value: float) -> Tensor:
    """A copy of the gradient with the value in its last place."""
    gradient = copy.deepcopy(gradient)
    dense(gradient).view(-1)[-1] = value
    return gradient


@pytest.mark.parametrize("where", ["table", "head"], ids=["sparse", "dense"])
@pytest.mark.parametrize("memory", COMPRESSED_PLANS)
def test_a_compressed_moment_refuses_a_gradient_that_is_not_finite(memory, where):
    run = trained_with(memory)
    run.backward(batches(1)[0])
    parameter = getattr(run.model, where).weight
    parameter.grad = spoiled(parameter.grad, NAN)
    refuse_step(run, ValueError, REFUSAL)


@pytest.mark.parametrize("value", NONFINITE.values(), ids=NONFINITE.keys())
@pytest.mark.parametrize("memory", EACH_WAY)
def test_every_number_whose_square_would_overflow_is_refused(memory, value):
    run = trained_with(memory)
    run.backward(batches(1)[0])
    run.model.table.weight.grad = spoiled(run.model.table.weight.grad, value)
    refuse_step(run, ValueError, REFUSAL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@tiny_runs.each(EACH_WAY)
def test_gradients_in_other_precisions_are_refused_too(plan, dtype):
    run = Run.start(plan, dtype=dtype).train(batches(2))
    run.backward(batches(1)[0])
    weight = run.model.table.weight
    weight.grad = spoiled(weight.grad, INF)
    refuse_step(run, ValueError, "must be finite")


def test_a_sum_of_finite_duplicates_that_overflows_is_refused():
    run = trained()
    weight = run.model.table.weight
    values = torch.full((2, 6), 3e38)
    weight.grad = unchecked([4, 4], weight, values=values)
    refuse_step(run, ValueError, "must be finite")


def test_duplicates_that_cancel_are_finite():
    run = trained()
    weight = run.model.table.weight
    weight.grad = unchecked([4, 4], weight, values=torch.tensor([[1e30], [-1e30]]).expand(2, 6))
    run.model.late.weight.grad = None
    row = weight.detach()[4].clone()
    run.optimizer.step()
    assert torch.equal(weight.detach()[4], row)


def test_weight_decay_of_a_row_that_is_not_finite_is_refused():
    run = trained(weight_decay=0.1)
    run.backward(batches(1)[0])
    with torch.no_grad():
        run.model.table.weight[batches(1)[0].flatten()[0]] = INF
    refuse_step(run, ValueError, "must be finite")


@pytest.mark.parametrize("memory", SECONDS.values(), ids=SECONDS.keys())
@pytest.mark.parametrize("kind", ["RMSprop", "Adagrad"])
def test_the_largest_gradient_allowed_keeps_every_table_finite(kind, memory):
    """Also when all rows have it, step after step, until the lazy scale is at its smallest."""
    options = {"alpha": 0.5} if kind == "RMSprop" else {}
    table = nn.Parameter(torch.ones(30, 6))
    optimizer = OPTIMIZERS[kind]([{"params": [table], "memory": memory}], **options)
    table.grad = unchecked(list(range(30)), table, values=torch.full((30, 6), 2.0**40))
    for _ in range(24):
        optimizer.step()
    kept = [value for value in optimizer.state[table].values() if isinstance(value, Tensor)]
    assert all(tensor.isfinite().all() for tensor in kept)
    assert table.isfinite().all()


@tiny_runs.each(EACH_WAY)
def test_skipping_leaves_the_parameter_alone_and_counts(plan):
    plan = Plan(so.Adam, plan.memory, {"nonfinite": "skip"})
    run = Run.start(plan).train(batches(2))
    before = run.bits()
    for count in (1, 2):
        run.backward(batches(1)[0])
        weight = run.model.table.weight
        weight.grad = spoiled(weight.grad, NAN)
        run.optimizer.step()
        assert run.optimizer.state[weight]["skipped"] == count
    after = run.bits()
    changed = differences(after, before)
    assert [name for name in changed if name.startswith("table")] == ["table.weight: skipped"]
    for name in ("late.weight", "head.weight", "head.bias"):
        assert {name, f"{name}: step"} <= set(changed)


@tiny_runs.each(EACH_WAY)
def test_a_skipped_step_is_as_if_it_had_not_been(plan):
    plan = Plan(so.Adam, plan.memory, {"nonfinite": "skip"})
    skipping, straight = Run.start(plan).train(batches(2)), Run.start(plan).train(batches(2))
    skipping.optimizer.zero_grad()
    weight = skipping.model.table.weight
    weight.grad = unchecked([1, 2], weight, values=torch.full((2, 6), NAN))
    skipping.optimizer.step()
    found = differences(skipping.train(batches(2)).bits(), straight.train(batches(2)).bits())
    assert found == ["table.weight: skipped"]


def test_a_first_step_can_be_skipped():
    plan = Plan(so.Adam, "lean-0.1", {"nonfinite": "skip"})
    run = Run.start(plan)
    weight = run.model.table.weight
    weight.grad = unchecked([1], weight, values=torch.full((1, 6), NAN))
    before = weight.detach().clone()
    run.optimizer.step()
    assert torch.equal(weight, before)
    assert run.optimizer.state[weight]["skipped"] == 1
    assert run.optimizer.state[weight]["step"] == 0
    run.train(batches(1))
    assert run.optimizer.state[weight]["step"] == 1


TWINS = {
    "Adam": (so.Adam, torch.optim.Adam, {"weight_decay": 0.1}),
    "AdamW": (so.AdamW, torch.optim.AdamW, {}),
    "RMSprop": (so.RMSprop, torch.optim.RMSprop, {}),
    "Adagrad": (so.Adagrad, torch.optim.Adagrad, {}),
    "SGD": (so.SGD, torch.optim.SGD, {"momentum": 0.9}),
}


@pytest.mark.parametrize("value", [NAN, INF, 1e30])
@pytest.mark.parametrize(("ours", "theirs", "options"), TWINS.values(), ids=TWINS.keys())
def test_exact_storage_does_with_nonfinite_gradients_what_torch_does(ours, theirs, options, value):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    twin = copy.deepcopy(model)
    pairs = [(model, ours(model.parameters(), lr=0.1, **options))]
    pairs.append((twin, theirs(twin.parameters(), lr=0.1, **options)))
    for bad in (False, True, False):
        for layer, optimizer in pairs:
            optimizer.zero_grad()
            layer(torch.ones(2, 4)).square().sum().backward()
            if bad:
                layer.weight.grad[1, 2] = value
            optimizer.step()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
    assert not model.weight.isfinite().all() or value == 1e30
