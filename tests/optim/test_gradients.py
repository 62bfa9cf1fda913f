"""Contract 9, what works with torch.optim works here: gradients of every kind."""

import copy
import warnings

import pytest
import tiny_runs
import torch
from gradients import sparse
from tiny_runs import OPTIMIZERS, PRESET_PLANS, Plan, Run, batches, differences
from torch import Tensor, nn

import sketchoptim as so

# By the kernels, by torch's functions and by the reference; the dense layers too.
EACH_WAY = {name: PRESET_PLANS[name] for name in ("lean-0.1", "exact", "paper-mv", "rank-one")}


def losses(run: Run, ids_of_steps: list[Tensor]) -> list[float]:
    found = []
    for ids in ids_of_steps:
        found.append(run.backward(ids).item())
        run.optimizer.step()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@tiny_runs.each(PRESET_PLANS)
def test_it_trains_in_every_precision(plan, dtype):
    # float16 cannot hold the default eps, with torch.optim neither.
    run = Run.start(Plan(so.Adam, plan.memory, {"eps": 1e-4}), dtype=dtype)
    (ids,) = batches(1)
    found = losses(run, [ids] * 12)
    assert found[-1] < 0.5 * found[0]
    assert all(parameter.dtype == dtype for parameter in run.model.parameters())


# -- scaled and accumulated ------------------------------------------------------------------------


@tiny_runs.each(EACH_WAY)
def test_a_grad_scaler_unscales_skips_and_goes_on(plan):
    """A scale of a power of two changes no bit of a gradient, so the runs are equal."""
    scaled, straight = Run.start(plan), Run.start(plan)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=100)
    for number, ids in enumerate(batches(4)):
        scaled.optimizer.zero_grad()
        scaler.scale(scaled.model.loss(ids)).backward()
        if number == 1:
            scaled.model.table.weight.grad._values()[0, 0] = torch.inf
        before = scaled.bits()
        scaler.step(scaled.optimizer)
        scaler.update()
        if number == 1:
            assert differences(scaled.bits(), before) == []
            assert scaler.get_scale() == 8.0
        else:
            straight.train([ids])
    assert differences(scaled.bits(), straight.bits()) == []


def test_a_grad_scaler_lets_us_clip_in_between():
    run = Run.start(PRESET_PLANS["lean-0.1"])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    run.optimizer.zero_grad()
    scaler.scale(run.model.loss(batches(1)[0])).backward()
    scaler.unscale_(run.optimizer)
    norm = so.clip_grad_norm_(run.model.parameters(), 0.01)
    assert norm < 100
    scaler.step(run.optimizer)
    assert run.optimizer.state[run.model.table.weight]["step"] == 1


def test_autocast_around_the_model_gives_gradients_it_takes():
    run = Run.start(PRESET_PLANS["lean-0.1"])
    (ids,) = batches(1)
    found = []
    for _ in range(12):
        run.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run.model.loss(ids)
        loss.backward()
        run.optimizer.step()
        found.append(loss.item())
    assert found[-1] < 0.5 * found[0]


@tiny_runs.each(EACH_WAY)
def test_gradients_of_several_backward_passes_add_up(plan):
    """Accumulated in p.grad, whose rows then repeat, they are the sum's gradient."""
    parts, whole = Run.start(plan), Run.start(plan)
    for ids in batches(3):
        parts.optimizer.zero_grad()
        for piece in ids.split(2):
            parts.model.loss(piece).mul(len(piece)).backward()
        parts.optimizer.step()
        whole.optimizer.zero_grad()
        whole.model.loss(ids).mul(len(ids)).backward()
        whole.optimizer.step()
    for ours, theirs in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", OPTIMIZERS.values())
@pytest.mark.parametrize("memory", ["exact", "paper-mv"])
def test_maximize_climbs_what_minimizing_the_negative_descends(kind, memory):
    up = Run.start(Plan(kind, memory, {"maximize": True}))
    down = Run.start(Plan(kind, memory))
    for ids in batches(3):
        up.optimizer.zero_grad()
        up.model.loss(ids).backward()
        up.optimizer.step()
        down.optimizer.zero_grad()
        down.model.loss(ids).neg().backward()
        down.optimizer.step()
    found = differences(up.bits(), down.bits())
    assert sorted(found) == [f"group {i}: maximize" for i in range(3)]


# -- absent and empty ------------------------------------------------------------------------------


def test_a_parameter_without_a_gradient_is_left_out():
    run = Run.start(PRESET_PLANS["lean-0.1"]).train(batches(2))
    before = run.bits()
    run.train(batches(2), uses_late=False)
    changed = differences(run.bits(), before)
    assert not [name for name in changed if name.startswith("late")]
    assert "table.weight" in changed


def test_frozen_parameters_stay_as_they_are():
    run = Run.start(PRESET_PLANS["lean-0.1"])
    run.model.table.weight.requires_grad_(False)
    run.model.head.bias.requires_grad_(False)
    before = run.bits()
    run.train(batches(2))
    changed = differences(run.bits(), before)
    assert not [name for name in changed if name.startswith(("table", "head.bias"))]
    assert "late.weight" in changed
    run.model.table.weight.requires_grad_(True)  # thawed, it starts
    run.train(batches(1))
    assert run.optimizer.state[run.model.table.weight]["step"] == 1


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_sparse_and_dense_gradients(set_to_none):
    run = Run.start(PRESET_PLANS["lean-0.1"]).train(batches(1))
    run.optimizer.zero_grad(set_to_none=set_to_none)
    for parameter in run.model.parameters():
        assert (parameter.grad is None) == set_to_none
        if not set_to_none:
            assert parameter.grad.to_dense().count_nonzero() == 0
    run.model.loss(batches(1)[0]).backward()
    run.optimizer.step()
    assert run.optimizer.state[run.model.table.weight]["step"] == 2


@tiny_runs.each(EACH_WAY)
def test_an_empty_gradient_moves_no_row(plan):
    """As a batch gives that holds nothing but padding."""
    run = Run.start(plan).train(batches(2))
    run.optimizer.zero_grad()
    weight = run.model.table.weight
    ids = torch.empty(0, dtype=torch.int64)
    weight.grad = sparse(ids, torch.empty(0, tiny_runs.DIM), weight.shape)
    before = weight.detach().clone()
    run.optimizer.step()
    assert torch.equal(weight, before)
    assert run.optimizer.state[weight]["step"] == 3
    run.train(batches(1))
    assert weight.isfinite().all()


@tiny_runs.each(EACH_WAY)
def test_an_empty_gradient_can_be_the_first(plan):
    torch.manual_seed(0)
    table = nn.Embedding(10, 4, sparse=True, padding_idx=0)
    optimizer = so.Adam(table.parameters(), lr=0.1, memory=plan.memory)
    before = table.weight.detach().clone()
    table(torch.tensor([0, 0])).sum().backward()
    optimizer.step()
    assert torch.equal(table.weight, before)
    optimizer.zero_grad()
    table(torch.tensor([0, 3])).sum().backward()
    optimizer.step()
    changed = (table.weight != before).any(1).nonzero().flatten().tolist()
    assert changed == [3]


# -- what autograd sees ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_coalesced", [True, False], ids=["coalesced", "uncoalesced"])
@tiny_runs.each(EACH_WAY)
def test_gradients_are_never_written_into(plan, is_coalesced):
    run = Run.start(plan)
    run.backward(batches(1)[0])
    if is_coalesced:
        for table in (run.model.table, run.model.late):
            table.weight.grad = table.weight.grad.coalesce()
    gradients = [parameter.grad for parameter in run.model.parameters()]
    copies = copy.deepcopy(gradients)
    run.optimizer.step()
    for parameter, gradient, kept in zip(run.model.parameters(), gradients, copies, strict=True):
        assert parameter.grad is gradient
        if gradient.is_sparse:
            assert gradient.is_coalesced() == is_coalesced
            assert torch.equal(gradient._indices(), kept._indices())
            assert torch.equal(gradient._values(), kept._values())
        else:
            assert torch.equal(gradient, kept)


def test_a_second_backward_through_old_weights_is_refused_as_with_torch():
    """Autograd is told that a step writes into the parameters."""
    run = Run.start(PRESET_PLANS["lean-0.1"])
    output = run.model.head(run.model.table(torch.tensor([1, 2]))).square().sum()
    output.backward(retain_graph=True)
    run.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


@tiny_runs.each(EACH_WAY)
def test_a_step_raises_the_version_of_what_it_writes(plan):
    run = Run.start(plan)
    run.backward(batches(1)[0])
    versions = [parameter._version for parameter in run.model.parameters()]
    run.optimizer.step()
    assert all(p._version > v for p, v in zip(run.model.parameters(), versions, strict=True))


@tiny_runs.each(EACH_WAY)
def test_gradients_that_are_part_of_a_graph_are_taken(plan):
    run, twin = Run.start(plan), Run.start(plan).train(batches(1))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
        loss = nn.functional.cross_entropy(
            run.model(batches(1)[0]), batches(1)[0][:, 0] % tiny_runs.CLASSES
        )
        dense = [run.model.head.weight, run.model.head.bias]
        for parameter, gradient in zip(
            dense, torch.autograd.grad(loss, dense, create_graph=True), strict=True
        ):
            parameter.grad = gradient
        for table in (run.model.table.weight, run.model.late.weight):
            (table.grad,) = torch.autograd.grad(loss, [table], retain_graph=True)
    run.optimizer.step()
    assert differences(run.bits(), twin.bits()) == []
    assert run.model.head.weight.grad_fn is None


@tiny_runs.each(PRESET_PLANS)
def test_strided_parameters_move_like_contiguous_ones(plan):
    """A transposed or sliced tensor is a parameter like any other."""
    start = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
    found = []
    for data in (start.clone(), start.t().contiguous().t(), start.repeat(1, 2)[:, :6]):
        parameter = nn.Parameter(data)
        optimizer = so.Adam([{"params": [parameter], "memory": plan.memory}], lr=0.1)
        for gradient in (rows.to_sparse(1), rows.t().contiguous().t(), rows):
            parameter.grad = None
            parameter.grad = gradient
            optimizer.step()
        found.append(parameter.detach().clone())
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])
