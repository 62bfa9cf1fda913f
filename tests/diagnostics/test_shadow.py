"""Exact moments beside the compressed ones."""

import pytest
import torch
from gradients import sparse_stream, start
from tiny_runs import PRESET_PLANS, Run, batches, differences
from torch import nn

import sketchoptim as so
from sketchoptim.diagnostics import Shadow

SHAPE = (60, 4)


def shadowed(memory, *, steps=6, every=1, kind=so.Adam, rivals=None, **options):
    parameter = nn.Parameter(start(SHAPE))
    optimizer = kind([("table", parameter)], memory=memory, **options)
    shadow = Shadow(optimizer, [parameter], every=every, rivals=rivals)
    for gradient in sparse_stream(SHAPE, steps):
        parameter.grad = gradient
        optimizer.step()
    return optimizer, parameter, shadow


def last(shadow, moment, method):
    return [it for it in shadow.records if (it.moment, it.method) == (moment, method)][-1]


def wide(**options):
    return so.Sketched(width=50_000, granularity="element", **options)


def test_the_exact_shadow_is_the_exact_optimizer():
    parameter = nn.Parameter(start(SHAPE))
    optimizer = so.Adam([parameter], memory="exact")
    rival = {"other": so.Sketched(width=8, granularity="element", decay="paper")}
    shadow = Shadow(optimizer, [parameter], every=1, rivals=rival)
    truths = []
    for gradient in sparse_stream(SHAPE, 5):
        parameter.grad = gradient
        optimizer.step()
        truths.append(optimizer.state[parameter]["second_values"].double().norm().item())
    found = [it.all_norm for it in shadow.records if it.moment == "second"]
    assert found == pytest.approx(truths, rel=1e-6)


@pytest.mark.parametrize("decay", ["linear", "paper", "bucket"])
def test_a_sketch_without_collisions_has_no_error(decay):
    memory = so.Memory(wide(decay=decay), wide(decay=decay))
    _, _, shadow = shadowed(memory)
    for moment in ("first", "second"):
        kept = last(shadow, moment, "kept")
        assert kept.all_relative < 1e-5
        assert kept.touched_relative < 1e-5
        assert kept.all_norm > 0


def test_one_number_a_row_is_held_against_the_mean_of_the_row():
    memory = so.Memory(second=so.Sketched(width=50_000, conservative=True))
    _, _, shadow = shadowed(memory)
    kept = last(shadow, "second", "kept")
    assert kept.columns == 1
    assert kept.all_relative < 1e-5


def test_errors_are_those_of_the_estimates():
    optimizer, parameter, shadow = shadowed("paper-v-only", steps=4)
    exact = nn.Parameter(start(SHAPE))
    twin = so.RMSprop([exact], alpha=0.999, memory="exact")
    for gradient in sparse_stream(SHAPE, 4):
        exact.grad = gradient
        twin.step()
    truth = twin.state[exact]["second_values"].double()
    estimate = so.to_torch(optimizer, torch.optim.SparseAdam).state[parameter]["exp_avg_sq"]
    error = estimate.double() - truth
    touched = parameter.grad.coalesce().indices()[0]
    kept = last(shadow, "second", "kept")
    assert kept.all_error == pytest.approx(error.norm().item(), rel=1e-4)
    assert kept.all_norm == pytest.approx(truth.norm().item(), rel=1e-4)
    assert kept.touched_error == pytest.approx(error[touched].norm().item(), rel=1e-4)
    assert kept.touched_norm == pytest.approx(truth[touched].norm().item(), rel=1e-4)
    assert kept.all_relative == kept.all_error / kept.all_norm


def test_rivals_keep_about_as_many_numbers_as_rank_one_factors():
    _, _, shadow = shadowed("paper-mv")
    factors = sum(SHAPE)
    floats = {(it.moment, it.method): it.floats for it in shadow.records}
    assert floats["second", "rank-one"] == floats["second", "top-singular"] == factors
    assert floats["first", "top-singular"] == factors
    assert ("first", "rank-one") not in floats
    for moment in ("first", "second"):
        assert factors - 3 * SHAPE[1] < floats[moment, "sketch"] <= factors


def test_an_exact_optimizer_shadows_rivals_alone():
    _, _, shadow = shadowed("exact")
    methods = {it.method for it in shadow.records}
    assert methods == {"sketch", "rank-one", "top-singular"}


def test_a_matrix_of_rank_one_has_no_error_in_rank_one():
    parameter = nn.Parameter(torch.zeros(30, 5))
    optimizer = so.Adagrad([parameter], memory="exact")
    shadow = Shadow(optimizer, [parameter], every=1)
    rows, columns = torch.linspace(1, 2, 30), torch.linspace(1, 3, 5)
    for factor in (1.0, 2.0, 0.5):
        parameter.grad = factor * torch.outer(rows, columns)
        optimizer.step()
    assert last(shadow, "second", "rank-one").all_relative < 1e-5
    assert last(shadow, "second", "top-singular").all_relative < 1e-5
    assert last(shadow, "second", "sketch").all_relative > 0.01


def test_what_adagrad_starts_from_is_in_the_shadow_too():
    options = {"kind": so.Adagrad, "initial_accumulator_value": 0.5}
    _, _, shadow = shadowed(so.Memory(second=wide()), **options)
    assert last(shadow, "second", "kept").all_relative < 1e-5


def test_climbing_is_followed():
    _, _, shadow = shadowed(so.Memory(wide(), wide()), maximize=True)
    assert last(shadow, "first", "kept").all_relative < 1e-5


def test_skipped_steps_are_skipped():
    parameter = nn.Parameter(start(SHAPE))
    memory = so.Memory(second=wide())
    optimizer = so.Adam([parameter], memory=memory, nonfinite="skip")
    shadow = Shadow(optimizer, [parameter], every=1)
    for number, gradient in enumerate(sparse_stream(SHAPE, 4)):
        parameter.grad = gradient * float("nan") if number == 1 else gradient
        optimizer.step()
    assert [it.step for it in shadow.records if it.method == "kept"] == [1, 2, 3]
    assert last(shadow, "second", "kept").all_relative < 1e-5


def test_rivals_may_be_named():
    rivals = {"narrow": so.Sketched(width=2), "wide": so.Sketched(width=64)}
    _, _, shadow = shadowed("lean", rivals=rivals)
    narrow, wider = (last(shadow, "second", name) for name in ("narrow", "wide"))
    assert narrow.all_error > wider.all_error


@pytest.mark.parametrize("plan", ["lean", "paper-mv", "exact"])
def test_a_shadow_changes_no_bit(plan):
    run = Run.start(PRESET_PLANS[plan])
    Shadow(run.optimizer, [run.model.table.weight, run.model.head.weight], every=2)
    run.train(batches(4))
    alone = Run.start(PRESET_PLANS[plan]).train(batches(4))
    assert differences(run.bits(), alone.bits()) == []


def test_records_come_every_so_many_steps_until_it_is_removed():
    optimizer, parameter, shadow = shadowed("lean", steps=5, every=2)
    assert sorted({it.step for it in shadow.records}) == [2, 4]
    shadow.remove()
    optimizer.step()
    assert sorted({it.step for it in shadow.records}) == [2, 4]
    assert parameter.grad is not None


def test_what_cannot_be_followed_is_refused():
    optimizer, parameter, _ = shadowed("lean", steps=1)
    with pytest.raises(ValueError, match="table has taken steps already"):
        Shadow(optimizer, [parameter])
    decaying = so.Adam([parameter], weight_decay=0.1)
    with pytest.raises(ValueError, match=r"weight_decay of parameter 0 must be 0, got 0\.1"):
        Shadow(decaying, [parameter])
    with pytest.raises(ValueError, match="parameters must be those of the optimizer"):
        Shadow(so.Adam([parameter]), [torch.ones(1)])
    with pytest.raises(ValueError, match='rivals must not be named "kept"'):
        Shadow(so.Adam([parameter]), [parameter], rivals={"kept": so.RowWise()})
    with pytest.raises(ValueError, match="every must be >= 1, got 0"):
        Shadow(so.Adam([parameter]), [parameter], every=0)
    with pytest.raises(TypeError, match="optimizer must be one of sketchoptim's, got SGD"):
        Shadow(torch.optim.SGD([parameter]), [parameter])
