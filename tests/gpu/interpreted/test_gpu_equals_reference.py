"""Every kernel of the GPU, interpreted on the CPU, against the reference."""

import random
from dataclasses import replace
from unittest import mock

import pytest
import step_cases
import torch
from gpu_steps import IS_INTERPRETED, stepping_by_gpu_kernels, stepping_by_reference
from step_cases import Case, Outcome, run
from torch import Tensor

import sketchoptim as so
from sketchoptim.storage import Storage

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIMIZERS = ("Adam", "AdamW", "RMSprop", "Adagrad", "SGD")


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


def sketch(
    draw: random.Random, granularity: str, *forms: str, dtype: torch.dtype | None = None
) -> so.Sketched:
    form = draw.choice(forms)
    return so.Sketched(
        width=draw.choice([1, 3, 64]),
        depth=draw.choice([1, 2, 3, 3, 3, 4, 5]),
        granularity=granularity,  # type: ignore[arg-type]
        decay="linear" if form == "conservative" else form,  # type: ignore[arg-type]
        conservative=form == "conservative",
        dtype=dtype or draw.choice([torch.float32, torch.bfloat16]),
    )


def options(draw: random.Random, optimizer: str) -> dict[str, object]:
    chosen: dict[str, object] = {
        "maximize": draw.random() < 0.3,
        "weight_decay": draw.choice([0.0, 0.0, 0.125]),
    }
    match optimizer:
        case "Adam" | "AdamW":
            chosen["betas"] = draw.choice([(0.9, 0.999), (0.5, 0.75), (0.0, 0.0)])
        case "RMSprop":
            chosen["alpha"] = draw.choice([0.99, 0.0])
        case "Adagrad":
            chosen["lr_decay"] = draw.choice([0.0, 0.5])
            chosen["initial_accumulator_value"] = draw.choice([0.0, 1.0])
        case "SGD":
            momentum = draw.choice([0.0, 0.5, 0.9])
            is_nesterov = momentum > 0 and draw.random() < 0.5
            chosen |= {"momentum": momentum, "nesterov": is_nesterov}
            chosen["dampening"] = 0.0 if is_nesterov else draw.choice([0.0, 0.5])
    return chosen


def random_case(
    draw: random.Random,
    memory: so.Memory,
    *,
    rows: tuple[int, ...],
    entries: tuple[int, ...],
    dims: tuple[int, ...] = (1, 2, 15, 16, 33),
    patterns: tuple[str, ...] = step_cases.PATTERNS,
) -> Case:
    """A run of two steps with this memory, by an optimizer that has such moments."""
    optimizer = draw.choice(("Adam", "AdamW") if memory.form == "ratio" else OPTIMIZERS)
    return Case(
        optimizer=optimizer,
        # A clip: else torch.optim would step what is exact and dense, and float16 could overflow.
        memory=replace(memory, clip=draw.choice([0.5, 10.0])),
        shape=(draw.choice(rows), draw.choice(dims)),
        dtype=draw.choice(DTYPES),
        pattern=draw.choice(patterns),
        entries=draw.choice(entries),
        steps=2,
        seed=draw.randrange(2**32),
        options=options(draw, optimizer),
    )


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
    draw = random.Random(seed)
    first: Storage | None = draw.choice([None, None, so.Exact()])
    second = draw.choice(
        [
            so.Exact(),
            so.RowWise(),
            sketch(draw, "row", "conservative", dtype=torch.float32),
            sketch(draw, "row", "conservative", dtype=torch.float32),
        ]
    )
    memory = so.Memory(first, second)
    case = random_case(draw, memory, rows=(1, 2, 5, 40, 200), entries=(1, 2, 10, 60))
    assert_equals_reference(case)


@pytest.mark.parametrize("seed", range(60))
def test_sketches_whose_rows_come_in_order_equal_the_reference(seed):
    draw = random.Random(1000 + seed)
    forms = ("linear", "paper", "bucket")
    first = draw.choice([None, so.Exact(), sketch(draw, "element", *forms)])
    second = draw.choice(
        [sketch(draw, "row", *forms, "conservative"), sketch(draw, "element", *forms)]
    )
    if draw.random() < 0.2:
        linear = sketch(draw, "element", "linear")
        memory = so.Memory(linear, linear, form="ratio")
    else:
        memory = so.Memory(first, second)
    # Without hundreds of equal ids: the interpreter takes a millisecond for each of them.
    patterns = tuple(pattern for pattern in step_cases.PATTERNS if pattern != "hot")
    case = random_case(
        draw, memory, rows=(1, 3, 5), entries=(1, 4), dims=(1, 2, 17), patterns=patterns
    )
    assert_equals_reference(replace(case, steps=1 + seed % 2))


@pytest.mark.parametrize("seed", range(40))
def test_8_bit_moments_equal_the_reference(seed):
    draw = random.Random(2000 + seed)
    coded = so.Quantized(block=draw.choice([64, 100, 256]))
    first = draw.choice([None, coded, so.Exact()])
    second = coded if first is not coded else draw.choice([coded, so.Exact()])
    dim = draw.choice([1, 3, 20, 64, 70, 300])
    shape_rows = (draw.choice([2, 4200 // dim]),)
    memory = so.Memory(first, second)
    case = random_case(draw, memory, rows=shape_rows, entries=(1, 8), dims=(dim,))
    assert_equals_reference(case)


@pytest.mark.parametrize("pattern", ["many", "hot", "coalesced", "dense"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_whose_sums_are_rounded_stay_close_to_the_reference(pattern, dtype):
    memory = replace(so.storage.PRESETS["lean"], clip=10.0)
    options = {"weight_decay": 0.125}
    case = Case("Adam", memory, (40, 70), dtype, pattern, steps=3, options=options)
    assert_close(*both(case))


@pytest.mark.parametrize("decay", [0.25, 1e-30])
def test_a_scale_that_gets_small_moves_into_the_counters(decay):
    case = Case(
        "Adam",
        so.storage.PRESETS["lean"],
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


def test_rows_wider_than_a_tile_equal_the_reference():
    case = Case("Adam", so.storage.PRESETS["lean"], (6, 1500), entries=7, options={"eps": 0.5})
    case.options["weight_decay"] = 0.0
    assert_equals_reference(case)
