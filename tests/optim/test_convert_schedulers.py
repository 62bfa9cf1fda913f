"""Groups and schedulers come along from torch.optim to ours and back."""

import pytest
import torch
from torch.optim import lr_scheduler
from torch_runs import dense_model, started, tables_of, train

import sketchoptim as so


def test_groups_keep_their_options_and_names():
    model = dense_model()
    groups = [
        {"params": list(tables_of(model).items()), "lr": 0.1, "note": "mine"},
        {"params": [("head", model.head.weight)], "betas": (0.8, 0.9), "eps": 1e-5},
    ]
    theirs = torch.optim.Adam(groups, lr=0.01, weight_decay=0.1, foreach=True)
    lr_scheduler.StepLR(theirs, 1)
    ours = so.from_torch(theirs, schedulers=[])
    for before, after in zip(theirs.param_groups, ours.param_groups, strict=True):
        assert {key: after[key] for key in before if key != "params"} == {
            key: before[key] for key in before if key != "params"
        }
        assert all(p is q for p, q in zip(before["params"], after["params"], strict=True))
    assert ours.param_groups[0]["note"] == "mine"
    ours.add_param_group({"params": [("bias", model.head.bias)]})
    assert (ours.param_groups[2]["lr"], ours.param_groups[2]["weight_decay"]) == (0.01, 0.1)
    back = so.to_torch(ours)
    assert back.param_groups[0]["note"] == "mine"
    assert back.param_groups[2]["param_names"] == ["bias"]
    assert "memory" not in back.param_groups[0]


def test_a_tensor_learning_rate_stays_the_same_tensor():
    lr = torch.tensor(0.1)
    theirs = torch.optim.Adam(dense_model().parameters(), lr=lr)
    assert so.from_torch(theirs).param_groups[0]["lr"] is lr


def chained(optimizer):
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.StepLR(optimizer, 3)]
    )


def sequential(optimizer):
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    return lr_scheduler.SequentialLR(
        optimizer, [warm, lr_scheduler.ExponentialLR(optimizer, 0.9)], milestones=[4]
    )


SCHEDULERS = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "chained": chained,
    "sequential": sequential,
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
}


@pytest.mark.parametrize("done", [0, 3])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on_steering(name, done):
    def run(*, converts):
        model = dense_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scheduler = SCHEDULERS[name](optimizer)
        train(model, optimizer, done, scheduler=scheduler)
        if converts:
            optimizer = so.from_torch(optimizer, schedulers=[scheduler])
            train(model, optimizer, 2, scheduler=scheduler)
            optimizer = so.to_torch(optimizer, schedulers=[scheduler])
        else:
            train(model, optimizer, 2, scheduler=scheduler)
        rates = []
        for _ in range(5):
            train(model, optimizer, 1, scheduler=scheduler)
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    assert run(converts=True) == run(converts=False)


def test_a_plateau_scheduler_goes_on_steering():
    _, theirs, _ = started(torch.optim.Adam, {}, sparse=False)
    scheduler = lr_scheduler.ReduceLROnPlateau(theirs, patience=0, factor=0.5)
    scheduler.step(1.0)
    ours = so.from_torch(theirs, schedulers=[scheduler])
    scheduler.step(2.0)
    assert ours.param_groups[0]["lr"] == 0.025
    assert theirs.param_groups[0]["lr"] == 0.05
