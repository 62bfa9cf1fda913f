"""The machine that executes PTX: it computes what the kernel's Python says, and finds faults."""

import random

import pytest
import torch
from gpu_steps import IS_INTERPRETED
from torch import Tensor

if IS_INTERPRETED:
    pytest.skip("the interpreter's process cannot compile", allow_module_level=True)

import gpu_ptx
import ptx
import triton
import triton.language as tl

from sketchoptim.ops._gpu_launches import OPTIONS, Launch

TARGETS = ("sm_80", "sm_90")
each_target = pytest.mark.parametrize("target", TARGETS)


def launch(kernel, *grid: int, **arguments: object) -> Launch:
    return Launch(kernel, grid, arguments, OPTIONS)


@triton.jit
def reduce_rows(x, sums, orders, counts, total, DIM: tl.constexpr, ROWS: tl.constexpr):
    """Shared memory, shuffles, barriers, a loop whose length differs, and atomic instructions."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, DIM)
    tile = tl.load(x + row[:, None] * DIM + columns[None, :])
    tl.store(sums + row, tl.sum(tile, 1))
    turned = tl.trans(tile)
    tl.store(orders + row[None, :] * DIM + columns[:, None], turned * 2.0)
    for _ in range(tl.load(counts + tl.program_id(0))):
        tl.atomic_add(total, 1)


@each_target
def test_a_kernel_of_many_warps_computes_what_torch_does(target):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (64, 128), generator=generator) / 8
    sums, orders = torch.zeros(64), torch.zeros(64, 128)
    counts, total = torch.tensor([3, 0, 5, 2]), torch.zeros(1, dtype=torch.int32)
    arguments = {"x": x, "sums": sums, "orders": orders, "counts": counts, "total": total}
    it = launch(reduce_rows, 4, **arguments, DIM=128, ROWS=16)
    counted = gpu_ptx.execute(it, target)
    assert torch.equal(sums, x.sum(1))
    assert torch.equal(orders, x * 2)
    assert total == 10
    assert counted.atomics >= 10
    assert counted.longest_program == 2


@triton.jit
def arithmetic(a, b, floats, doubles, whole, halves, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(floats + at, tl.div_rn(x, y))
    tl.store(floats + COUNT + at, tl.sqrt_rn(tl.abs(x)))
    tl.store(floats + 2 * COUNT + at, x * y - x)
    tl.store(doubles + at, x.to(tl.float64) / y.to(tl.float64))
    bits = x.to(tl.int32, bitcast=True).to(tl.int64) * y.to(tl.int32, bitcast=True)
    tl.store(whole + at, (bits >> 7) ^ (bits << 3))
    tl.store(halves + at, x.to(tl.float16))


@each_target
def test_arithmetic_is_rounded_as_ieee_754_says(target):
    draw = random.Random(0)
    special = [0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"), 1e-45, 1e-39, 3.4e38]
    pairs = [(one, other) for one in special for other in special]
    pairs += [(draw.gauss(0, 1), draw.gauss(0, 1e3)) for _ in range(128 - len(pairs))]
    a, b = torch.tensor(pairs).T.contiguous()
    floats, doubles = torch.zeros(3, 128), torch.zeros(128, dtype=torch.float64)
    whole, halves = torch.zeros(128, dtype=torch.int64), torch.zeros(128, dtype=torch.float16)
    arguments = {"a": a, "b": b, "floats": floats, "doubles": doubles}
    it = launch(arithmetic, 1, **arguments, whole=whole, halves=halves, COUNT=128)
    gpu_ptx.execute(it, target)
    roots = a.abs().double().sqrt().float()  # a root in float64 rounds to that in float32
    bits = a.view(torch.int32).long() * b.view(torch.int32)
    assert_same(floats, torch.stack([a / b, roots, a * b - a]))
    assert_same(doubles, a.double() / b.double())
    assert torch.equal(whole, (bits >> 7) ^ (bits << 3))
    assert_same(halves, a.half())


def assert_same(found: Tensor, expected: Tensor) -> None:
    """The same bits, but for those of NaN."""
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(found.signbit() & ~found.isnan(), expected.signbit() & ~found.isnan())


# -- planted faults --------------------------------------------------------------------------------


@triton.jit
def add_without_atomics(total, x, COUNT: tl.constexpr):
    """Every program adds its share to one number."""
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    share = tl.sum(tl.load(x + at), 0)
    old = tl.load(total)
    tl.debug_barrier()  # within a program, all loads come first
    tl.store(total, old + share)


@triton.jit
def add_with_atomics(total, x, COUNT: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.atomic_add(total, tl.sum(tl.load(x + at), 0))


@each_target
def test_a_planted_race_between_programs_is_found(target):
    total, x = torch.zeros(4, dtype=torch.int32), torch.ones(1024, dtype=torch.int32)
    with pytest.raises(ptx.Fault, match="race between two programs"):
        gpu_ptx.execute(launch(add_without_atomics, 8, total=total, x=x, COUNT=128), target)
    total.zero_()
    gpu_ptx.execute(launch(add_with_atomics, 8, total=total, x=x, COUNT=128), target)
    assert total[0] == 1024


@triton.jit
def exchange_halves(x, HALF: tl.constexpr, HAS_BARRIER: tl.constexpr):
    """Each thread stores where one of another warp loads."""
    at = tl.arange(0, 2 * HALF)
    found = tl.load(x + at)
    if HAS_BARRIER:
        tl.debug_barrier()
    tl.store(x + (at + HALF) % (2 * HALF), found)


@each_target
def test_a_planted_race_between_warps_is_found(target):
    x = torch.arange(256, dtype=torch.int32)
    with pytest.raises(ptx.Fault, match="race between two warps"):
        gpu_ptx.execute(launch(exchange_halves, 1, x=x, HALF=128, HAS_BARRIER=False), target)
    x = torch.arange(256, dtype=torch.int32)
    gpu_ptx.execute(launch(exchange_halves, 1, x=x, HALF=128, HAS_BARRIER=True), target)
    assert torch.equal(x, torch.arange(256, dtype=torch.int32).roll(128))


@triton.jit
def store_to_one_place(x, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(x + at // 2, at)


def test_lanes_that_store_different_numbers_to_one_place_are_found():
    x = torch.zeros(32, dtype=torch.int32)
    with pytest.raises(ptx.Fault, match="race between two lanes"):
        gpu_ptx.execute(launch(store_to_one_place, 1, x=x, COUNT=32), "sm_80")


@triton.jit
def copy(source, target, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at))


def copied(source: Tensor, found: Tensor, block: int) -> Launch:
    return launch(copy, 1, source=source, target=found, BLOCK=block)


@each_target
def test_a_planted_access_out_of_bounds_is_found(target):
    source, found = torch.arange(1024.0), torch.zeros(1024)
    gpu_ptx.execute(copied(source, found, 512), target)
    assert torch.equal(found[:512], source[:512])
    with pytest.raises(ptx.Fault, match="out of bounds"):
        gpu_ptx.execute(copied(source[:508], found, 512), target)


@each_target
def test_a_planted_misalignment_is_found(target):
    """Of an address that is no multiple of 16 bytes, which the compiler was promised."""
    with pytest.raises(ptx.Fault, match="misaligned"):
        gpu_ptx.execute(copied(torch.arange(1024.0)[1:], torch.zeros(1024), 512), target)


@triton.jit
def divide(x, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(x + at, 1.0 / tl.load(x + at))


def test_an_instruction_that_is_not_rounded_as_ieee_754_says_is_refused():
    with pytest.raises(NotImplementedError, match="the instruction div_full_f32"):
        gpu_ptx.execute(launch(divide, 1, x=torch.ones(32), COUNT=32), "sm_80")
