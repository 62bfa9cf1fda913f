"""Contract 9, what works with torch.optim works here: hooks and closures."""

import pytest
import torch
from tiny_runs import OPTIMIZERS, PRESET_PLANS, Plan, Run, TinyModel, batches, differences
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import sketchoptim as so


@pytest.mark.parametrize("kind", OPTIMIZERS.values())
def test_step_hooks_run_around_the_step(kind):
    run = Run.start(Plan(kind, "paper-mv"))
    run.backward(batches(1)[0])
    weight = run.model.table.weight
    before = weight.detach().clone()
    seen = []
    run.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: seen.append(torch.equal(weight, before))
    )
    handle = run.optimizer.register_step_post_hook(
        lambda optimizer, args, kwargs: seen.append(torch.equal(weight, before))
    )
    run.optimizer.step()
    assert seen == [True, False]
    handle.remove()
    run.optimizer.step()
    assert seen == [True, False, False]


@pytest.mark.parametrize(
    "register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook]
)
def test_a_hook_for_all_optimizers_sees_ours(register):
    seen: list[type] = []
    handle = register(lambda optimizer, args, kwargs: seen.append(type(optimizer)))
    try:
        for kind in OPTIMIZERS.values():
            Run.start(Plan(kind, "paper-mv")).train(batches(1))
    finally:
        handle.remove()
    Run.start(PRESET_PLANS["lean-0.1"]).train(batches(1))  # which the hook sees no more
    assert seen == [*OPTIMIZERS.values()]


def test_an_optimizer_in_the_backward_pass_frees_gradients_early():
    model, twin = TinyModel(), TinyModel()
    twin.load_state_dict(model.state_dict())
    own = {p: so.Adam([p], lr=0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    model.loss(batches(1)[0]).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    twin.loss(batches(1)[0]).backward()
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        so.Adam([other], lr=0.1).step()
        assert torch.equal(parameter, other)


def test_a_closure_is_called_once_with_gradients_on_and_its_loss_returned():
    plan = PRESET_PLANS["lean-0.1"]
    run, twin = Run.start(plan), Run.start(plan).train(batches(1))
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        return run.backward(batches(1)[0])

    with torch.no_grad():
        loss = run.optimizer.step(closure)
    assert calls == [True]
    assert loss.item() == Run.start(plan).backward(batches(1)[0]).item()
    assert differences(run.bits(), twin.bits()) == []


def test_a_step_without_a_closure_returns_none():
    run = Run.start(PRESET_PLANS["lean-0.1"])
    assert run.optimizer.step() is None
    run.backward(batches(1)[0])
    assert run.optimizer.step() is None
