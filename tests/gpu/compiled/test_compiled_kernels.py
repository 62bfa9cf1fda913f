"""Every kernel, compiled for GPUs that are not there: registers, spills, access and rounding."""

import re

import pytest
import torch
from gpu_steps import IS_INTERPRETED

if IS_INTERPRETED:
    pytest.skip("the interpreter's process cannot compile", allow_module_level=True)

from gpu_cases import MEMORIES
from gpu_compile import TARGETS, compiled, launches_of

from sketchoptim.storage import PRESETS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
each_target = pytest.mark.parametrize("target", TARGETS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
each_memory = pytest.mark.parametrize(("optimizer", "memory"), MEMORIES.values(), ids=MEMORIES)

# Approximate divisions and roots, and products fused into sums, which the interpreter hides.
INEXACT = re.compile(r"\b(?:div\.(?:full|approx)|sqrt\.approx|rsqrt|rcp|fma\.rn\.f32|ex2)\b[\w.]*")
MOST_REGISTERS = 128


def assert_sound(launch, target):
    """No spills, few registers, and every quotient and root correctly rounded."""
    kernel = compiled(launch, target)
    name = launch.kernel.__name__
    assert kernel.spilled_bytes == 0, name
    assert kernel.registers <= MOST_REGISTERS, name
    assert kernel.shared_bytes <= 48 * 1024, name
    if target.startswith("sm"):
        assert INEXACT.findall(kernel.text) == [], name


@each_target
@each_dtype
@each_memory
def test_a_sparse_step_compiles_without_spills_and_approximations(target, dtype, optimizer, memory):
    for launch in launches_of(memory, optimizer=optimizer, dtype=dtype):
        assert_sound(launch, target)


@each_target
@pytest.mark.parametrize("dim", [64, 100, 512, 4096])
@pytest.mark.parametrize("preset", ["lean-0.1", "8-bit"])
def test_other_widths_compile_without_spills(target, dim, preset):
    for launch in launches_of(PRESETS[preset], dim=dim, dtype=torch.bfloat16):
        assert_sound(launch, target)


@each_target
@pytest.mark.parametrize("preset", ["lean-0.1", "8-bit"])
def test_a_dense_step_compiles_without_spills_and_approximations(target, preset):
    for launch in launches_of(PRESETS[preset], is_dense=True):
        assert_sound(launch, target)


@each_target
@each_dtype
@pytest.mark.parametrize("name", ["lean-0.1", "exact", "8-bit"])
def test_several_tables_at_once_compile_like_one(target, dtype, name):
    _, memory = MEMORIES[name]
    launches = launches_of(memory, dtype=dtype, tables=2)
    assert [launch.grid[1] for launch in launches] == [2] * 5
    for launch in launches:
        assert_sound(launch, target)
    accesses = re.findall(ROW_ACCESS[target], compiled(launches[3], target).text)
    assert len(accesses) >= 2


ROW_ACCESS = {
    "sm_80": r"(?:ld|st)\.global[\w.:]*\.v4\.b32",
    "sm_90": r"(?:ld|st)\.global[\w.:]*\.v4\.b32",
    # Its programs have twice the threads: rows of half precision are stored 64 bits at a time.
    "gfx942": r"global_(?:load_dwordx4|store_dwordx[24])",
}


@each_target
@each_dtype
@pytest.mark.parametrize("name", ["lean-0.1", "row-wise", "exact", "linear"])
def test_rows_are_read_and_written_128_bits_at_a_time(target, dtype, name):
    _, memory = MEMORIES[name]
    found = {launch.kernel.__name__: launch for launch in launches_of(memory, dtype=dtype)}
    checking = [] if name == "exact" else ["inspect"]  # exact moments take any gradient
    for kernel in (*checking, "move_rows"):
        accesses = re.findall(ROW_ACCESS[target], compiled(found[kernel], target).text)
        assert len(accesses) >= 2, kernel


@each_target
def test_counters_are_raised_by_one_atomic_instruction(target):
    launch = launches_of(PRESETS["lean-0.1"])[-2]
    text = compiled(launch, target).text
    single = r"atom\.global[\w.]*\.max\.s32" if target.startswith("sm") else "global_atomic_smax"
    assert re.search(single, text)
    assert "cmpswap" not in text
    assert ".cas." not in text


@each_target
def test_a_step_divides_and_takes_roots_as_ieee_754_rounds_them(target):
    text = compiled(launches_of(PRESETS["lean-0.1"])[-2], target).text
    exact = ("div.rn.f32", "sqrt.rn.f32") if target.startswith("sm") else ("v_div_fixup_f32",)
    for instruction in exact:
        assert instruction in text
