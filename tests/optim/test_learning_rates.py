"""Contract 9, what works with torch.optim works here: schedulers and learning rates."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import OPTIMIZERS, PRESET_PLANS, Plan, Run, batches, differences
from torch import nn
from torch.optim import lr_scheduler

import sketchoptim as so

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=8),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
}


def check_schedules_alike(name: str, schedule_of: Callable[..., Any], **options: Any) -> None:
    """Ours and torch's optimizer have the same rates and weights, to the bit, after every step."""
    torch.manual_seed(0)
    ours, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    runs = []
    for module, model in ((so, ours), (torch.optim, theirs)):
        optimizer = getattr(module, name)(model.parameters(), **copy.deepcopy(options))
        runs.append((model, optimizer, schedule_of(optimizer)))
    generator = torch.Generator().manual_seed(2)
    rates = set()
    for _ in range(6):
        inputs = torch.randn(5, 4, generator=generator)
        for model, optimizer, schedule in runs:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            schedule.step()
        mine, other = (optimizer.param_groups[0] for _, optimizer, _ in runs)
        shared = (mine.keys() & other.keys()) - {"params"}
        assert {key: mine[key] for key in shared} == {key: other[key] for key in shared}
        assert torch.equal(ours.weight, theirs.weight)
        rates.add(float(mine["lr"]))
    assert len(rates) > 1


@pytest.mark.parametrize("schedule_of", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_scheduler_gives_the_rates_and_the_steps_it_gives_torch(schedule_of):
    check_schedules_alike("Adam", schedule_of, lr=0.05)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_scheduler_steers_a_rate_that_is_a_tensor_as_with_torch(name):
    check_schedules_alike(name, SCHEDULERS["StepLR"], lr=torch.tensor(0.05))


def test_a_scheduler_that_cycles_the_momentum_steers_it_as_with_torch():
    check_schedules_alike("SGD", SCHEDULERS["OneCycleLR"], lr=0.05, momentum=0.9)


def test_a_plateau_scheduler_lowers_the_rate():
    run = Run.start(PRESET_PLANS["lean-0.1"])
    schedule = lr_scheduler.ReduceLROnPlateau(run.optimizer, factor=0.25, patience=0)
    for loss in (1.0, 2.0):
        run.train(batches(1))
        schedule.step(loss)
    assert [group["lr"] for group in run.optimizer.param_groups] == [0.05 / 4] * 3


@pytest.mark.parametrize("memory", ["lean-0.1", "exact", "rank-one"])
def test_a_rate_of_zero_leaves_the_parameters(memory):
    run = Run.start(Plan(so.Adam, memory, {"lr": 0.0}))
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    run.train(batches(3))
    assert all(map(torch.equal, run.model.parameters(), before))


@pytest.mark.parametrize("kind", OPTIMIZERS.values())
def test_a_tensor_for_a_rate_steps_like_the_number(kind):
    number = Run.start(Plan(kind, "paper-mv", {"lr": 0.25})).train(batches(3))
    tensor = Run.start(Plan(kind, "paper-mv", {"lr": torch.tensor(0.25)})).train(batches(3))
    found = differences(number.bits(), tensor.bits())
    assert sorted(found) == [f"group {i}: lr" for i in range(3)]


# -- numbers of other kinds ------------------------------------------------------------------------

KINDS: dict[str, Callable[[float], Any]] = {
    "NumPy": np.float32,
    "a tensor with a dimension": lambda number: torch.tensor([number]),
}
NUMBERS: dict[str, dict[str, float]] = {
    "Adam": {"weight_decay": 0.25, "eps": 0.5},
    "AdamW": {"weight_decay": 0.25, "eps": 0.5},
    "RMSprop": {"alpha": 0.5, "weight_decay": 0.25, "eps": 0.5},
    "Adagrad": {"lr_decay": 0.5, "weight_decay": 0.25, "eps": 0.5},
    "SGD": {"momentum": 0.75, "dampening": 0.25, "weight_decay": 0.25},
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("memory", ["lean-0.1", "exact"])
@pytest.mark.parametrize("convert", KINDS.values(), ids=KINDS)
def test_options_may_be_numbers_of_any_kind(kind, memory, convert):
    memory = "paper-mv" if (kind, memory) == ("SGD", "lean-0.1") else memory
    numbers = {"lr": 0.125, **NUMBERS[kind]}
    plain = Run.start(Plan(OPTIMIZERS[kind], memory, numbers)).train(batches(3))
    converted = {name: convert(number) for name, number in numbers.items()}
    other = Run.start(Plan(OPTIMIZERS[kind], memory, converted)).train(batches(3))
    different = differences(other.bits(), plain.bits())
    assert all(name.startswith("group ") for name in different)  # where the options themselves are


def test_a_scheduler_may_give_numbers_of_numpy():
    run = Run.start(PRESET_PLANS["lean-0.1"])
    lr_scheduler.LambdaLR(run.optimizer, lambda epoch: np.float32(0.5))
    run.train(batches(1))
    assert run.optimizer.state[run.model.table.weight]["step"] == 1
