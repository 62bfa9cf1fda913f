"""What the log of the interpreter's programs finds."""

import random

import pytest
import torch
from gpu_steps import IS_INTERPRETED

if not IS_INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

import gpu_programs
import triton
import triton.language as tl

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
