"""ZeroRedundancyOptimizer and optimizers in the backward pass: one process's results."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import on_ranks
from replicas import check_same_on_every_rank, local_part
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sketchoptim as so

with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of torch.jit
    from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward

ROWS, DIM, STEPS = 300, 8, 5


class Pairs(nn.Module):
    """Scores of pairs of ids, each with a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, DIM, sparse=True)
        self.items = nn.Embedding(ROWS + 50, DIM, sparse=True)
        self.linear = nn.Linear(2 * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        both = torch.cat([self.users(ids), self.items(ids + 50)], 1)
        return (self.linear(both).squeeze(1) - ids % 2).square().mean()


def build() -> tuple[Pairs, list[dict[str, Any]]]:
    torch.manual_seed(0)
    model = Pairs()
    return model, so.param_groups(model, min_rows=ROWS)


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None, *, seed: int = 1) -> None:
    """Steps on this rank's part of batches; without an optimizer, the backward pass steps."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        ids = torch.randint(ROWS, (32,), generator=generator)
        model(local_part(ids) if dist.is_initialized() else ids).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def check_equal(model: nn.Module, other: nn.Module) -> None:
    for (name, left), right in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right), name


@on_ranks(2, 4)
def test_optimizer_shards_take_the_steps_of_a_whole_optimizer():
    (model, groups), (other, others) = build(), build()
    shards = ZeroRedundancyOptimizer(groups.unnamed(), so.Adam, lr=0.05)
    train(DistributedDataParallel(model), shards)
    train(DistributedDataParallel(other), so.Adam(others, lr=0.05))
    check_same_on_every_rank(model)
    check_equal(model, other)


@on_ranks(2)
def test_a_saved_run_of_optimizer_shards_goes_on_bit_for_bit(folder: Path):
    model, groups = build()
    shards = ZeroRedundancyOptimizer(groups.unnamed(), so.Adam, lr=0.05)
    replica = DistributedDataParallel(model)
    train(replica, shards)
    shards.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        torch.save([model.state_dict(), shards.state_dict()], folder / "saved.pt")
    dist.barrier()
    other, groups = build()
    resumed = ZeroRedundancyOptimizer(groups.unnamed(), so.Adam, lr=0.05)
    weights, state = torch.load(folder / "saved.pt")
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    train(replica, shards, seed=2)
    train(DistributedDataParallel(other), resumed, seed=2)
    check_equal(model, other)


@on_ranks(2)
def test_the_state_of_optimizer_shards_loads_into_a_whole_optimizer():
    model, groups = build()
    shards = ZeroRedundancyOptimizer(groups.unnamed(), so.Adam, lr=0.05)
    replica = DistributedDataParallel(model)
    train(replica, shards)
    shards.consolidate_state_dict(to=0)
    saved = [shards.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved)
    other, groups = build()
    other.load_state_dict(model.state_dict())
    whole = so.Adam(groups, lr=0.05)
    whole.load_state_dict(saved[0])
    train(replica, shards, seed=2)
    train(DistributedDataParallel(other), whole, seed=2)
    check_equal(model, other)


def test_steps_in_the_backward_pass_are_those_after_it():
    (model, groups), (other, others) = build(), build()
    for group in groups.unnamed():
        options = {"lr": 0.05, "memory": group["memory"]}
        _apply_optimizer_in_backward(so.Adam, group["params"], options)
    train(model, None)
    train(other, so.Adam(others, lr=0.05))
    check_equal(model, other)


def test_steps_in_a_gradient_hook_are_those_after_the_backward_pass():
    (model, groups), (other, others) = build(), build()
    for group in groups:
        for name, parameter in group["params"]:
            optimizer = so.Adam([{**group, "params": [(name, parameter)]}], lr=0.05)
            parameter.register_post_accumulate_grad_hook(stepper(optimizer))
    train(model, None)
    train(other, so.Adam(others, lr=0.05))
    check_equal(model, other)


def stepper(optimizer: so.Adam) -> Callable[[Tensor], None]:
    def step(parameter: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step
