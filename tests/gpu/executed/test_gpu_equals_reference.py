"""Every kernel of the GPU, interpreted on the CPU, against the reference."""

import random
from dataclasses import replace
from unittest import mock

import gpu_cases
import pytest
import step_cases
import torch
from gpu_steps import needs_execution, stepping_by_gpu_kernels, stepping_by_reference
from step_cases import DTYPES, Case, Outcome, run
from torch import Tensor

import sketchoptim as so

pytestmark = needs_execution


def both(case: Case) -> tuple[Outcome, Outcome]:
    """The outcomes of the kernels and of the reference, after checking who took the steps."""
    with stepping_by_gpu_kernels() as taken:
        found = run(case)
    assert taken.kernels == case.steps
    with stepping_by_reference() as taken:
        expected = run(case)
    assert taken.reference == case.steps
    return found, expected


def assert_same_bits(found: Outcome, expected: Outcome) -> None:
    assert found.tensors().keys() == expected.tensors().keys()
    for name, tensor in expected.tensors().items():
        assert torch.equal(found.tensors()[name], tensor), name


def assert_close(found: Outcome, expected: Outcome) -> None:
    """Equal but for a few units in the last place of the parameter's dtype, at its largest number.

    Rounding a sum the other way moves a moment, which moves a parameter; codes move to a neighbour.
    """
    assert found.tensors().keys() == expected.tensors().keys()
    last_place = torch.finfo(expected.parameter.dtype).eps
    for name, tensor in expected.tensors().items():
        largest = tensor.abs().max().item() if tensor.numel() else 0
        if tensor.dtype == torch.uint8:
            assert (found.tensors()[name].int() - tensor.int()).abs().max() <= 1
        elif not tensor.is_floating_point():
            assert torch.equal(found.tensors()[name], tensor)
        else:
            torch.testing.assert_close(
                found.tensors()[name], tensor, rtol=8 * last_place, atol=8 * last_place * largest
            )


def eighths(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Multiples of 1/8 between -1 and 1: every sum of them and of their squares is exact."""
    return torch.randint(-8, 9, shape, generator=generator) / 8


def assert_equals_reference(case: Case) -> None:
    with mock.patch.object(step_cases, "_numbers", eighths):
        found, expected = both(case)
    # Weights, which are no multiples of 1/8, join the gradients whose squares are summed.
    if case.is_by_row and case.options["weight_decay"] and case.shape[1] > 1:
        assert_close(found, expected)
    else:
        assert_same_bits(found, expected)


@pytest.mark.parametrize("seed", range(100))
def test_order_free_storages_equal_the_reference(seed):
    assert_equals_reference(gpu_cases.order_free(random.Random(seed)))


@pytest.mark.parametrize("seed", range(60))
def test_sketches_whose_rows_come_in_order_equal_the_reference(seed):
    case = gpu_cases.in_order(random.Random(1000 + seed))
    assert_equals_reference(replace(case, steps=1 + seed % 2))


@pytest.mark.parametrize("seed", range(40))
def test_factors_of_columns_equal_the_reference(seed):
    """But for rounding: sums of quotients are associated otherwise."""
    case = gpu_cases.with_columns(random.Random(3000 + seed))
    with mock.patch.object(step_cases, "_numbers", eighths):
        assert_close(*both(replace(case, steps=3)))


def test_factors_of_columns_of_rows_wider_than_a_tile_equal_the_reference():
    memory = so.Memory(None, so.RowWise(columns=True))
    assert_close(*both(Case("Adam", memory, (6, 1500), entries=7, options={"eps": 0.5})))


@pytest.mark.parametrize("seed", range(40))
def test_8_bit_moments_equal_the_reference(seed):
    assert_equals_reference(gpu_cases.coded(random.Random(2000 + seed)))


@pytest.mark.parametrize("pattern", ["many", "hot", "coalesced", "dense"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_whose_sums_are_rounded_stay_close_to_the_reference(pattern, dtype):
    memory = replace(so.storage.PRESETS["lean-0.1"], clip=10.0)
    options = {"weight_decay": 0.125}
    case = Case("Adam", memory, (40, 70), dtype, pattern, steps=3, options=options)
    assert_close(*both(case))


@pytest.mark.parametrize("decay", [0.25, 1e-30])
def test_a_scale_that_gets_small_moves_into_the_counters(decay):
    case = Case(
        "Adam",
        so.storage.PRESETS["lean-0.1"],
        (40, 4),
        entries=10,
        steps=15,
        options={"betas": (0.9, decay), "weight_decay": 0.0},
    )
    assert_equals_reference(case)


def test_hundreds_of_equal_ids_among_rows_in_order_equal_the_reference():
    memory = so.Memory(None, so.Sketched(width=3, granularity="element", decay="paper"))
    case = Case("Adam", memory, (6, 3), pattern="hot", entries=4, steps=1)
    case.options["weight_decay"] = 0.0
    assert_equals_reference(case)


def test_codes_beside_a_sketch_whose_rows_come_in_order_equal_the_reference():
    memory = so.Memory(
        so.Quantized(block=100), so.Sketched(width=3, granularity="element", decay="paper")
    )
    case = Case("Adam", memory, (30, 250), entries=3, steps=1, options={"weight_decay": 0.0})
    assert_equals_reference(case)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("optimizer", ["Adam", "RMSprop"])
def test_weights_whose_second_moment_overflows_stay_as_in_the_reference(optimizer):
    """The root of infinity divides by the bias correction, and the quotient by it is zero."""
    outcomes = []
    for stepping in (stepping_by_gpu_kernels, stepping_by_reference):
        table = torch.nn.Parameter(torch.ones(40, 6))
        memory = so.Memory(so.Exact() if optimizer == "Adam" else None, so.Exact(), clip=1.0)
        with stepping():
            group = {"params": [table], "memory": memory}
            stepped = getattr(so, optimizer)([group], lr=0.125)
            table.grad = torch.ones(40, 6)
            table.grad[1, 2] = 1e20
            stepped.step()
        outcomes.append(table.detach())
    assert outcomes[0][1, 2] == 1
    assert torch.equal(*outcomes)


def test_rows_wider_than_a_tile_equal_the_reference():
    case = Case("Adam", so.storage.PRESETS["lean-0.1"], (6, 1500), entries=7, options={"eps": 0.5})
    case.options["weight_decay"] = 0.0
    assert_equals_reference(case)
