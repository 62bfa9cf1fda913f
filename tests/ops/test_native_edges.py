"""The ends of what the kernels take: sizes, ids, memory around them, torch's defaults."""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from backends import LEVELS, needs_native, stepping_by
from gradients import sparse
from step_cases import DTYPES, Case, run
from torch import Tensor

import sketchoptim as so
from sketchoptim.moments import Average, Moments, Table, create, open_moment
from sketchoptim.ops import LARGEST_GRADIENT, Calls, FusedRule, find_kernels
from sketchoptim.storage import PRESETS, Sketched

pytestmark = needs_native

BY_ELEMENT = [Sketched(granularity="element", decay=decay) for decay in ("linear", "paper")]
MEMORIES = {
    "lean-0.1": PRESETS["lean-0.1"],
    "exact": PRESETS["exact"],
    "row-wise": PRESETS["row-wise"],
    "plain by row": so.Memory(None, Sketched(width=7)),
    **{f"{sketch.decay} by element": so.Memory(sketch, sketch) for sketch in BY_ELEMENT},
    "ratio": so.Memory(BY_ELEMENT[0], BY_ELEMENT[0], form="ratio"),
}
every_memory = pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)


# -- buffers -------------------------------------------------------------------------------------

GUARD = 48  # elements: more than the widest vector on either side


def guarded(tensor: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """A copy of the tensor with guards before and behind it, and the memory with the guards."""
    whole = torch.full((tensor.numel() + 2 * GUARD,), fill).to(tensor.dtype)
    whole[GUARD:-GUARD] = tensor.flatten()
    return whole[GUARD:-GUARD].view(tensor.shape), whole


def check_guards(case: Case) -> None:
    """Steps on tensors with guards around them, none of which is written to or reaches a number."""
    rows, dim = case.shape
    generator = torch.Generator().manual_seed(0)
    start, around = guarded(torch.zeros(case.shape, dtype=case.dtype), 7.0)
    parameter = torch.nn.Parameter(start)
    optimizer = so.Adam([{"params": [parameter], "memory": case.memory}])
    guards = {"parameter": around}
    is_dense = case.pattern == "dense"
    values = torch.randn(rows if is_dense else 20, dim, generator=generator).to(case.dtype)
    ids = torch.randint(rows, (20,), generator=generator)
    if case.pattern == "ends":
        ids = ids % 2 * (rows - 1)
    for step in range(2):
        # Where a guard of NaN is read, the step is refused or the parameter is NaN.
        gradient, guards["gradient"] = guarded(values, torch.nan)
        parameter.grad = gradient if is_dense else sparse(ids, gradient, case.shape)
        with stepping_by(LEVELS[-1]) as taken:
            optimizer.step()
        assert taken.native == 1
        if step == 0:
            state = optimizer.state[parameter]
            for name, tensor in list(state.items()):
                if name.startswith(("first_", "second_")) and tensor.numel() > 1:
                    state[name], guards[name] = guarded(tensor, 7.0)
    assert len(guards) > 2
    assert parameter.isfinite().all()
    for name, whole in guards.items():
        edges = torch.cat([whole[:GUARD], whole[-GUARD:]])
        assert edges.isnan().all() if name == "gradient" else (edges == 7.0).all(), (name, case)


@every_memory
@pytest.mark.parametrize("pattern", ["many", "ends", "dense"])
def test_nothing_outside_the_tensors_is_read_or_written(memory, pattern):
    for dtype, dim in itertools.product(DTYPES, (1, 17, 40)):
        clipped = replace(memory, clip=1.0)
        check_guards(Case("Adam", clipped, shape=(9, dim), dtype=dtype, pattern=pattern))


@every_memory
def test_an_empty_gradient_moves_nothing(memory):
    case = Case("Adam", memory, pattern="none", steps=1)
    with stepping_by(LEVELS[-1], threads=2) as taken:
        native = run(case)
    assert taken.native == 1
    with stepping_by(None):
        reference = run(case)
    assert torch.equal(native.parameter, run(replace(case, steps=0)).parameter)
    for name, expected in reference.tensors().items():
        assert torch.equal(native.tensors()[name], expected), name


@every_memory
def test_a_parameter_without_elements_is_stepped(memory):
    for shape, pattern in itertools.product([(0, 5), (0,), (5, 0)], ("dense", "none")):
        case = Case("Adam", replace(memory, clip=1.0), shape=shape, pattern=pattern, steps=2)
        with stepping_by(LEVELS[-1], threads=2):
            outcome = run(case)
        assert outcome.parameter.shape == shape
        assert outcome.state["step"] == 2


def lean_moments(parameter: Tensor) -> Moments:
    storage = Sketched(conservative=True)
    table = Table(parameter.shape, parameter.dtype, parameter.device)
    return Moments(None, open_moment(storage, "second", create(storage, "second", table)))


RULE = FusedRule(step_size=1.0, second=Average(0.9, 0.1))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dim", [1, 16, 70, 256])
def test_a_check_finds_the_one_number_that_is_too_large(level, dim):
    """Among numbers as large as they may be, whose squares add up to far more than one's square."""
    parameter = torch.zeros(2, dim)
    above = torch.tensor(LARGEST_GRADIENT).nextafter(torch.tensor(math.inf))
    with stepping_by(level):
        kernels, _ = find_kernels(parameter, lean_moments(parameter))

    def is_finite(values: Tensor) -> bool:
        gradient = sparse(torch.tensor([1]), values, parameter.shape)
        return Calls().check_([kernels.prepare(gradient, RULE, is_checked=True, rounding_key=None)])

    values = torch.full((1, dim), -LARGEST_GRADIENT)
    assert is_finite(values)
    for column in {0, dim // 2, dim - 1}:
        for wrong in (above, -above, math.inf, -math.inf, math.nan):
            spoilt = values.clone()
            spoilt[0, column] = wrong
            assert not is_finite(spoilt)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("copies", [1, 2, 5])
def test_a_step_keeps_less_than_two_copies_of_the_touched_rows(dtype, copies):
    rows, dim = 50, 512
    ids = torch.arange(rows).repeat(copies).flip(0)
    values = torch.ones(ids.numel(), dim, dtype=dtype)
    parameter = torch.zeros(rows, dim, dtype=dtype)
    gradient = sparse(ids, values, (rows, dim))
    with stepping_by(LEVELS[-1]):
        kernels, _ = find_kernels(parameter, lean_moments(parameter))
        calls = Calls()
        assert calls.check_([kernels.prepare(gradient, RULE, is_checked=True, rounding_key=None)])
    assert 0 < sum(it.nbytes for it in calls._memory) < 2 * parameter.nbytes


def test_a_table_of_more_elements_than_32_bits_count_is_stepped_at_both_ends():
    rows, dim = 2**21 + 1, 1024
    parameter = torch.nn.Parameter(torch.empty(rows, dim, dtype=torch.bfloat16))  # never touched
    ids = torch.tensor([rows - 1, 0, rows - 1])
    with torch.no_grad():
        parameter[ids] = 1.0
    optimizer = so.Adam([{"params": [parameter], "memory": "lean-0.1"}], lr=0.5)
    parameter.grad = sparse(ids, torch.ones(3, dim, dtype=torch.bfloat16), (rows, dim))
    with stepping_by(LEVELS[-1], threads=2) as taken:
        optimizer.step()
    assert taken.native == 1
    assert (parameter[[0, rows - 1]] == 0.5).all()


# -- torch's defaults ----------------------------------------------------------------------------


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(name: str) -> Iterator[None]:
    with torch.device(name):
        yield


# A meta tensor has no memory, so whatever ends up there by mistake is found out at once.
DEFAULTS = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: default_device("meta"),
}


@pytest.mark.parametrize("memory", ["lean-0.1", "exact", "paper-mv"])
@pytest.mark.parametrize("default", DEFAULTS.values(), ids=DEFAULTS)
def test_defaults_of_dtype_and_device_change_nothing(memory, default):
    found = []
    for context in (nullcontext, default):
        parameter = torch.nn.Parameter(torch.ones(9, 5))
        optimizer = so.Adam([{"params": [parameter], "memory": memory}])
        values = torch.arange(20.0).view(4, 5)
        parameter.grad = sparse(torch.tensor([3, 1, 3, 0]), values, (9, 5))
        with context(), stepping_by(LEVELS[-1]) as taken:
            optimizer.step()
            optimizer.step()
        assert taken.native == 2
        found.append({"parameter": parameter.detach(), **optimizer.state[parameter]})
    for name, expected in found[0].items():
        if isinstance(expected, Tensor):
            assert found[1][name].dtype == expected.dtype, name
            assert torch.equal(found[1][name], expected), name


def test_lazily_negated_values_of_a_sparse_gradient_count_as_what_they_mean():
    ids, values = torch.tensor([3, 1, 3]), torch.arange(15.0).view(3, 5)
    moved = []
    for negated in (torch._neg_view(values), -values):
        parameter = torch.nn.Parameter(torch.zeros(9, 5))
        parameter.grad = sparse(ids, negated, (9, 5))
        with stepping_by(LEVELS[-1]) as taken:
            so.Adam([parameter]).step()
        assert taken.native == 1
        moved.append(parameter.detach())
    assert moved[0].any()
    assert torch.equal(*moved)
