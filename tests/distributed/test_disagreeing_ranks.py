"""Processes that share parameters and would do different things with them all raise an error."""

import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import sketchoptim as so
from sketchoptim import ops
from sketchoptim.optim import _agreement

with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of torch.jit
    from torch.distributed.optim import ZeroRedundancyOptimizer

ROWS, DIM = 64, 8
REFERENCE = ".*is stepped by the reference kernels"


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


# -- rows divided over a mesh ----------------------------------------------------------------------


def divided_tables(count: int = 2) -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.ones(ROWS, DIM)
    tables = [nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])) for _ in range(count)]
    for table in tables:
        table.grad = distribute_tensor(torch.ones(ROWS, DIM), mesh, [Shard(0)])
    return tables


def refuse(optimizer: so.Adam, tables: list[nn.Parameter], pattern: str) -> None:
    """The step raises the same error here as in every other process, and nothing changes."""
    with pytest.raises(ValueError, match=pattern) as raised:
        optimizer.step()
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, str(raised.value))
    assert len(set(errors)) == 1
    for table in tables:
        local = table.to_local() if hasattr(table, "to_local") else table
        assert (local == 1).all()
    assert all(state["step"] == 0 for state in optimizer.state.values())


@on_ranks(2, 4)
def test_tables_in_another_order_are_refused():
    tables = divided_tables()
    named = list(zip("ab", tables, strict=True))
    groups = [{"params": named[::-1] if is_last() else named, "memory": "lean"}]
    refuse(so.Adam(groups), tables, r"name of parameter 0, .* is 'a' on rank 0 and 'b' on rank \d")


@on_ranks(2)
def test_another_number_of_tables_is_refused():
    tables = divided_tables()
    own = tables[:1] if is_last() else tables
    refuse(so.Adam([{"params": own, "memory": "lean"}]), tables, "there are 2 on rank 0 and 1 on")


@on_ranks(2, 4)
def test_other_options_are_refused():
    seeds = [so.Memory(second=so.Sketched(conservative=True, seed=int(is_last())))] * 2
    cases = {
        "memory": {"memory": "exact" if is_last() else "lean"},
        "memory of .*'seed': 0": {"memory": seeds[0]},
        "lr": {"memory": "lean", "lr": 0.1 if is_last() else 0.2},
        "betas": {"memory": "lean", "betas": (0.8 if is_last() else 0.9, 0.99)},
        "kernels": {"memory": "lean"},
    }
    for pattern, options in cases.items():
        tables = divided_tables()
        optimizer = so.Adam([{"params": tables, **options}])
        if pattern == "kernels" and is_last():
            with ops.reference_only():
                refuse(optimizer, tables, pattern)
        else:
            refuse(optimizer, tables, pattern)


@on_ranks(2)
def test_other_checkpoints_are_refused_at_the_next_step():
    (table,) = divided_tables(1)
    optimizer = so.Adam([{"params": [table], "memory": "lean"}])
    saved = [optimizer.state_dict()]
    optimizer.step()
    saved.append(optimizer.state_dict())
    table.data.fill_(1.0)
    optimizer.load_state_dict(saved[int(is_last())])
    before = table.to_local().clone()
    with pytest.raises(ValueError, match=r"step of parameter 0, .* is 0.0 on rank 0 and 1.0 on"):
        optimizer.step()
    assert torch.equal(table.to_local(), before)
    optimizer.load_state_dict(saved[1])
    optimizer.step()


@on_ranks(2, 4)
def test_a_first_step_with_a_rate_of_zero_and_a_gradient_missing_is_refused_everywhere():
    tables = divided_tables(1)
    optimizer = so.Adam([{"params": tables, "memory": "lean"}], lr=0.0)
    tables[0].grad.zero_()
    if is_last():
        tables[0].grad = None
    refuse(optimizer, tables, "must have a gradient in all processes or in none")


# -- replicas --------------------------------------------------------------------------------------


class Replicas:
    """A model with two tables under DistributedDataParallel, after a backward pass."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM, sparse=True) for _ in range(2))
        for table in self.tables:
            nn.init.ones_(table.weight)
        self.parameters = list(self.tables.parameters())
        self.model = DistributedDataParallel(_Sum(self.tables))
        self.model(torch.arange(5)).backward()


class _Sum(nn.Module):
    def __init__(self, tables: nn.ModuleList) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return sum(table(ids).sum() for table in self.tables)


@on_ranks(2, 4, ignore=[REFERENCE])
def test_a_replica_without_kernels_is_refused():
    replicas = Replicas()
    optimizer = so.Adam(replicas.model.named_parameters())
    pattern = r"kernels of parameter 0, .* 'native' on rank 0 and 'reference' on rank \d"
    if is_last():
        with ops.reference_only():
            refuse(optimizer, replicas.parameters, pattern)
    else:
        refuse(optimizer, replicas.parameters, pattern)


@on_ranks(2, 4)
def test_replicas_with_nameless_parameters_in_another_order_are_refused():
    replicas = Replicas()
    own = replicas.parameters[::-1] if is_last() else replicas.parameters
    refuse(so.Adam(own), replicas.parameters, r"name of parameter 0, .* is 0 on rank 0 and 1 on")


@on_ranks(2)
def test_replicas_that_loaded_other_checkpoints_are_refused():
    replicas = Replicas()
    optimizer = so.Adam(replicas.model.named_parameters())
    saved = [optimizer.state_dict()]
    optimizer.step()
    saved.append(optimizer.state_dict())
    optimizer.load_state_dict(saved[int(is_last())])
    with pytest.raises(ValueError, match=r"step of parameter 0"):
        optimizer.step()


@on_ranks(2)
def test_replicas_of_which_each_process_steps_its_own_are_not_compared():
    replicas = Replicas()
    ZeroRedundancyOptimizer(replicas.parameters, so.Adam, lr=0.1).step()
    assert not (replicas.parameters[1] == 1).all()


@on_ranks(2)
def test_a_replica_that_steps_alone_is_not_held_up():
    replicas, waited = Replicas(), _agreement._WAIT
    _agreement._WAIT = timedelta(seconds=0.2)
    try:
        if dist.get_rank() == 0:
            so.Adam(replicas.parameters).step()
    finally:
        _agreement._WAIT = waited
    assert (replicas.parameters[0][0] == 1).all() == (dist.get_rank() == 1)
