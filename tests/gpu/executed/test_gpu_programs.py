"""Several programs in other orders have the same bits; what the log of their accesses finds."""

import random
from dataclasses import replace
from unittest import mock

import gpu_cases
import gpu_steps
import pytest
import torch
from gpu_steps import IS_INTERPRETED, stepping_by_gpu_kernels
from gradients import sparse

if not IS_INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

import gpu_programs
import triton
import triton.language as tl

import sketchoptim as so
from sketchoptim.ops._gpu_launches import Launch


@triton.jit
def add_up(total, x, COUNT: tl.constexpr, IS_ATOMIC: tl.constexpr):
    """Every program adds its share to one number."""
    share = tl.sum(tl.load(x + tl.program_id(0) * COUNT + tl.arange(0, COUNT)), 0)
    if IS_ATOMIC:
        tl.atomic_add(total, share)
    else:
        tl.store(total, tl.load(total) + share)


def run(kernel, programs: int, *, seed: int = 0, **arguments: object) -> None:
    launch = Launch(kernel, (programs,), arguments, {})
    draw = random.Random(seed)
    gpu_programs.run_checked(lambda it: it.kernel[it.grid](**it.arguments), launch, draw)


def add(x: torch.Tensor, *, is_atomic: bool) -> torch.Tensor:
    total = torch.zeros(1, dtype=torch.int32)
    run(add_up, 8, total=total, x=x, COUNT=32, IS_ATOMIC=is_atomic)
    return total


def test_a_planted_race_between_programs_is_found():
    x = torch.arange(256, dtype=torch.int32)
    assert add(x, is_atomic=True) == x.sum()
    with pytest.raises(gpu_programs.Fault, match="add_up: a race between two programs"):
        add(x, is_atomic=False)


def test_a_planted_access_out_of_bounds_is_found():
    with pytest.raises(gpu_programs.Fault, match="add_up: a read out of bounds"):
        add(torch.zeros(255, dtype=torch.int32), is_atomic=True)


@triton.jit
def number_programs(order, turn):
    tl.store(order + tl.atomic_add(turn, 1), tl.program_id(0))


def test_programs_do_not_run_in_their_order():
    orders = set()
    for seed in range(4):
        order, turn = torch.zeros(6, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        run(number_programs, 6, seed=seed, order=order, turn=turn)
        assert sorted(order.tolist()) == list(range(6))
        orders.add(tuple(order.tolist()))
    assert (5, 4, 3, 2, 1, 0) in orders
    assert (0, 1, 2, 3, 4, 5) not in orders
    assert len(orders) > 1


def trained(name: str, *, is_dense: bool, entries: int, tables: int) -> list[torch.Tensor]:
    """Tables and their state after a step whose programs take eight rows or entries each."""
    optimizer_name, memory = gpu_cases.MEMORIES[name]
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.ones(20, 3)) for _ in range(tables)]
    for parameter in parameters:
        parameter.grad = torch.randn(20, 3, generator=generator)
        if not is_dense:
            ids = torch.randint(20, (entries,), generator=generator)
            values = torch.randn(entries, 3, generator=generator)
            parameter.grad = sparse(ids, values, parameter.shape)
    group = {"params": parameters, "memory": replace(memory, clip=10.0)}
    options = {"momentum": 0.5} if optimizer_name == "SGD" else {}
    with mock.patch.object(gpu_steps, "INTERPRETED_TILE", 32), stepping_by_gpu_kernels():
        optimizer = getattr(so, optimizer_name)([group], lr=0.1, **options)
        optimizer.step()
        states = optimizer.state_dict()["state"].values()
    kept = [it for state in states for it in state.values() if isinstance(it, torch.Tensor)]
    return [*(parameter.detach() for parameter in parameters), *kept]


@pytest.mark.parametrize("is_dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize("name", gpu_cases.MEMORIES)
def test_programs_in_any_order_have_no_race_and_the_same_bits(name, is_dense):
    found, again = (trained(name, is_dense=is_dense, entries=12, tables=1) for _ in range(2))
    assert all(map(torch.equal, found, again))


@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize("name", ["lean-0.1", "columns", "8-bit"])
def test_sums_in_pieces_have_no_race_and_the_same_bits_in_any_order(name, tables):
    found, again = (trained(name, is_dense=False, entries=40, tables=tables) for _ in range(2))
    assert all(map(torch.equal, found, again))
