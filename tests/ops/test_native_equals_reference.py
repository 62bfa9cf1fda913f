"""Every kernel against the reference, which is the definition of correct."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from backends import LEVELS, needs_native, step_once, stepping_by
from gradients import sparse
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from step_cases import Case, Outcome, cases, run
from torch import Tensor

import sketchoptim as so
from sketchoptim.moments import Average, Moments, Table, create, open_moment
from sketchoptim.ops import FusedRule, Reference, find_kernels
from sketchoptim.storage import PRESETS

pytestmark = needs_native

threads = st.sampled_from([1, 1, 1, 2, 3, 4])


def both(case: Case, *, threads: int = 1) -> tuple[Outcome, Outcome]:
    """The outcomes of the kernel and of the reference, after checking who took the steps."""
    with stepping_by(LEVELS[-1], threads=threads) as taken:
        native = run(case)
    assert (taken.native, taken.reference) == (case.steps, 0)
    with stepping_by(None) as taken:
        reference = run(case)
    assert (taken.native, taken.reference) == (0, case.steps)
    return native, reference


def assert_equal(native: Outcome, reference: Outcome) -> None:
    found, expected = native.tensors(), reference.tensors()
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=name)


def assert_close(native: Outcome, reference: Outcome, *, units: float) -> None:
    """Equal but for some units in the last place of the parameter's dtype, at its largest number.

    Rounding a sum the other way moves a moment, which moves a parameter, which through weight
    decay moves the next gradient.
    """
    found, expected = native.tensors(), reference.tensors()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if not tensor.is_floating_point() or not tensor.numel():
            assert torch.equal(found[name], tensor)
            continue
        last_place = torch.finfo(reference.parameter.dtype).eps
        largest = tensor.abs().max().item()
        assert math.isfinite(largest)
        torch.testing.assert_close(
            found[name], tensor, rtol=units * last_place, atol=units * last_place * largest
        )


@settings(max_examples=1000)
@given(cases(), threads)
def test_every_kernel_equals_the_reference(case: Case, threads: int) -> None:
    native, reference = both(case, threads=threads)
    if case.is_by_row:
        # The mean over a row is summed in another order, and a row is divided by a number once.
        # Without any decay the new moment is old + (new - old): it has the error of the old one.
        assume(case.options.get("betas") != (0.0, 0.0) and case.options.get("alpha") != 0.0)
        assert_close(native, reference, units=8)
    else:
        assert_equal(native, reference)


@settings(max_examples=300)
@given(cases(table_dtype=torch.bfloat16), threads)
def test_bfloat16_sketches_by_element_have_the_bits_of_the_reference(
    case: Case, threads: int
) -> None:
    assume(not case.is_by_row)
    assert_equal(*both(case, threads=threads))


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=100)
@given(st.data(), threads)
def test_moments_by_row_have_the_bits_of_the_reference_where_a_row_is_one_number(
    table_dtype: torch.dtype, data: st.DataObject, threads: int
) -> None:
    case = data.draw(cases(table_dtype=table_dtype, row_shapes=((), (1,), (1, 1))))
    # Otherwise the last bit of the parameter would join the next gradient.
    case = replace(case, options={**case.options, "weight_decay": 0.0})
    native, reference = both(case, threads=threads)
    for name, expected in reference.tensors().items():
        if name != "parameter":
            assert torch.equal(native.tensors()[name], expected)


@settings(max_examples=300)
@given(cases(), threads)
def test_a_step_along_a_gradient_that_nobody_checked_has_the_same_bits(case, threads):
    outcomes = []
    for nonfinite in ("raise", "unchecked"):
        with stepping_by(LEVELS[-1], threads=threads):
            outcomes.append(run(replace(case, options={**case.options, "nonfinite": nonfinite})))
    assert_equal(*outcomes)


WITH_KERNELS = sorted(set(PRESETS) - {"rank-one", "8-bit"})


@pytest.mark.parametrize(
    ("optimizer", "preset", "options"),
    [
        *(("Adam", preset, {}) for preset in WITH_KERNELS),
        *(
            (optimizer, preset, {})
            for optimizer in ("AdamW", "RMSprop", "Adagrad")
            for preset in ("lean-0.1", "paper-v-only")
        ),
        *(("SGD", preset, {"momentum": 0.9}) for preset in ("lean-0.1", "paper-mv", "exact")),
    ],
)
def test_every_preset_with_a_kernel_stays_with_the_reference_over_many_steps(
    optimizer: str, preset: str, options: dict[str, float]
) -> None:
    case = Case(optimizer, PRESETS[preset], shape=(300, 20), entries=80, steps=30, options=options)
    native, reference = both(case, threads=2)
    assert_close(native, reference, units=64)


WITH_COLUMNS = {
    "row-wise": so.RowWise(columns=True),
    "sketch": so.Sketched(width=9, conservative=True, columns=True),
    "bfloat16 sketch": so.Sketched(
        width=9, depth=2, conservative=True, columns=True, dtype=torch.bfloat16
    ),
}


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "Adagrad", "RMSprop"])
@pytest.mark.parametrize("pattern", ["dense", "coalesced", "many", "hot"])
@pytest.mark.parametrize("storage", WITH_COLUMNS)
def test_factors_of_columns_are_those_of_the_reference_with_the_same_bits_everywhere(
    storage, pattern, optimizer
):
    memory = so.Memory(second=WITH_COLUMNS[storage])
    for dtype, nonfinite in ((torch.float32, "raise"), (torch.bfloat16, "unchecked")):
        options = {"nonfinite": nonfinite, "weight_decay": 0.01}
        case = Case(optimizer, memory, (90, 37), dtype, pattern, steps=3, options=options)
        native, reference = both(case)
        assert_close(native, reference, units=128)
        for level in LEVELS:
            with stepping_by(level, threads=3):
                assert_equal(run(case), native)


@pytest.mark.parametrize("level", [*LEVELS, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_parts_of_a_table_step_as_the_whole(level, dtype):
    """Each part has a replica of the sketch, and the larger of two counters is the whole's."""
    rows, dim, cut = 60, 17, 23
    storage = so.Sketched(width=9, depth=3, conservative=True, dtype=torch.bfloat16)
    whole = torch.randn(rows, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradient = torch.randn(rows, dim, generator=torch.Generator().manual_seed(2)).to(dtype)
    table = Table(whole.shape, dtype, whole.device)
    rule = FusedRule(step_size=0.1, second=Average(0.9, 0.1), eps=1e-8)
    key = None if dtype == torch.float32 else 77

    def step(part: slice) -> tuple[Tensor, Tensor]:
        parameter, first_row = whole[part].clone(), part.start
        tensors = create(storage, "second", table, 0.5)
        held = range(part.start, part.stop)
        second = open_moment(storage, "second", tensors, held=held)
        with stepping_by(level, threads=2):
            kernels, _ = find_kernels(parameter, Moments(None, second), first_row=first_row)
            backend = kernels or Reference(parameter, Moments(None, second), first_row=first_row)
            assert (kernels is None) == (level is None)
            step_once(backend, gradient[part], rule, is_checked=True, rounding_key=key)
        return parameter, tensors["counters"]

    parameter, counters = step(slice(0, rows))
    parts, replicas = zip(step(slice(0, cut)), step(slice(cut, rows)), strict=True)
    assert torch.equal(torch.cat(parts), parameter)
    assert torch.equal(torch.maximum(*replicas), counters)


def step_on(parameter: Tensor, gradient: Tensor, memory: so.Memory, **options: Any) -> Outcome:
    """One step of Adam, which need not stay finite."""
    moved = torch.nn.Parameter(parameter.clone())
    optimizer = so.Adam([{"params": [moved], "memory": memory}], lr=0.125, **options)
    moved.grad = gradient
    optimizer.step()
    return Outcome(moved.detach(), dict(optimizer.state[moved]))


NOT_FINITE = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("number", NOT_FINITE)
def test_what_is_not_finite_goes_through_exact_moments_as_in_the_reference(clip, number):
    memory = so.Memory(so.Exact(), so.Exact(), clip=clip)
    values = torch.ones(3, 20)
    values[1, ::2] = number
    gradient = sparse(torch.tensor([1, 4, 1]), values, (5, 20))
    outcomes = []
    for level in (LEVELS[-1], None):
        with stepping_by(level):
            outcomes.append(step_on(torch.ones(5, 20), gradient, memory))
    native, reference = (outcome.tensors() for outcome in outcomes)
    for name, expected in reference.items():
        torch.testing.assert_close(native[name], expected, rtol=1e-6, atol=0, equal_nan=True)
    assert not native["parameter"].isfinite().all() or (clip is not None and math.isinf(number))


@pytest.mark.parametrize("preset", ["lean-0.1", "exact", "paper-mv"])
@pytest.mark.parametrize("number", NOT_FINITE)
def test_a_parameter_that_is_not_finite_reaches_no_moment_without_weight_decay(preset, number):
    parameter = torch.ones(60, 20)
    parameter[7] = number
    gradient = sparse(torch.tensor([7, 3, 7]), torch.ones(3, 20), (60, 20))
    with stepping_by(LEVELS[-1]) as taken:
        outcome = step_on(parameter, gradient, PRESETS[preset], maximize=True)
    assert taken.native == 1
    for name, tensor in outcome.state.items():
        assert not isinstance(tensor, Tensor) or tensor.isfinite().all(), name
