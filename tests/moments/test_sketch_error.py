"""What a sketch says of its own error, beside the error that it has."""

import math

import pytest
import torch
from moment_runs import moved, opened

import sketchoptim as so
from sketchoptim import _hashing
from sketchoptim.moments import Average, SketchError, estimate_error

ROWS, DIM, TOUCHED, STEPS = 10_000, 8, 300, 120
FIRST, SECOND = Average(0.9, 1 - 0.9), Average(0.999, 1 - 0.999)

LINEAR = {
    "conservative, n / 8": ("second", {"ratio": 1 / 8, "conservative": True}),
    "conservative, n / 32": ("second", {"ratio": 1 / 32, "conservative": True}),
    "conservative by element": (
        "second",
        {"ratio": 1 / 20, "conservative": True, "granularity": "element"},
    ),
    "count-min by row": ("second", {"ratio": 1 / 8}),
    "count-min, a fifth": ("second", {"granularity": "element"}),
    "count-min, a fiftieth": ("second", {"ratio": 1 / 50, "granularity": "element"}),
    "count-min, bfloat16": ("second", {"granularity": "element", "dtype": torch.bfloat16}),
    "count-min of depth 4": ("second", {"depth": 4, "granularity": "element"}),
    "count-sketch, a fifth": ("first", {"granularity": "element"}),
    "count-sketch, a fiftieth": ("first", {"ratio": 1 / 50, "granularity": "element"}),
    "count-sketch of depth 5": ("first", {"depth": 5, "granularity": "element"}),
}


def trained(name, options, *, exponent=1.0, seed=0):
    """A sketched moment after some steps of Zipf-distributed rows, and the exact one."""
    storage = so.Sketched(seed=seed, **options)
    sketched = opened(storage, name, rows=ROWS, dim=DIM)
    exact = torch.zeros(ROWS, DIM)
    generator = torch.Generator().manual_seed(seed)
    odds = 1 / torch.arange(1, ROWS + 1, dtype=torch.float64) ** exponent
    size = torch.rand(ROWS, generator=generator) * 2 + 0.2
    for step in range(1, STEPS + 1):
        drawn = torch.multinomial(odds, TOUCHED, replacement=True, generator=generator)
        ids, counts = drawn.unique(return_counts=True)
        values = torch.randn(len(ids), DIM, generator=generator)
        values *= (size[ids] * counts.sqrt()).unsqueeze(1)
        average, values = (FIRST, values + 0.3) if name == "first" else (SECOND, values.square())
        moved(sketched, ids, values, average, step=step)
        if storage.decay == "linear":
            exact *= average.decay
            exact[ids] += average.weight * values
        else:
            exact[ids] = average.after(exact[ids], values)
    return sketched, exact.mean(1, keepdim=True) if storage.granularity == "row" else exact


def true_error(sketched, exact) -> SketchError:
    truth = exact.double()
    error = sketched.sketch.estimate(torch.arange(ROWS)).double() - truth
    scale = math.sqrt(ROWS)
    return SketchError(ROWS, error.norm().item() / scale, truth.norm().item() / scale)


def assert_within(factor, found, true):
    assert true.absolute / factor < found.absolute < true.absolute * factor
    assert true.relative / factor < found.relative < true.relative * factor


@pytest.mark.parametrize("exponent", [1.0, 1.2])
@pytest.mark.parametrize("case", LINEAR)
def test_the_estimate_is_near_the_true_error(case, exponent):
    sketched, exact = trained(*LINEAR[case], exponent=exponent)
    assert_within(1.3, estimate_error(sketched.sketch, ROWS), true_error(sketched, exact))


@pytest.mark.parametrize("name", ["first", "second"])
def test_the_estimate_covers_the_form_of_the_paper(name):
    sketched, exact = trained(name, {"granularity": "element", "decay": "paper"})
    assert_within(1.6, estimate_error(sketched.sketch, ROWS), true_error(sketched, exact))


@pytest.mark.parametrize("kind", [so.CountSketch, so.CountMinSketch])
def test_a_few_rows_in_a_wide_sketch_have_no_error(kind):
    sketch = kind(3, 5_000, 1).add_(torch.arange(5), torch.ones(5, 1))
    found = estimate_error(sketch, 5)
    assert found.relative == found.absolute == 0.0
    assert found.row_norm == pytest.approx(1.0, rel=1e-3)


def test_an_empty_sketch_has_no_error():
    assert estimate_error(so.CountSketch(3, 16, 2), ROWS) == SketchError(ROWS, 0.0, 0.0)


def test_what_a_table_was_filled_with_is_no_error():
    sketch = opened(so.Sketched(width=64), fill=0.5).sketch.scale_(0.3)
    assert estimate_error(sketch, ROWS) == SketchError(ROWS, 0.0, 0.0)


def test_noise_without_a_truth_to_be_seen_is_infinitely_wrong():
    sketch = so.CountMinSketch(3, 1, 1).add_(torch.arange(9), torch.ones(9, 1))
    assert estimate_error(sketch, 9).relative == math.inf


@pytest.mark.parametrize("kind", [so.CountSketch, so.CountMinSketch])
def test_the_estimate_scales_with_the_sketch_and_changes_nothing(kind):
    sketch = kind(3, 32, 4)
    sketch.add_(torch.arange(500), torch.rand(500, 4, generator=torch.Generator().manual_seed(0)))
    before = sketch.counters.clone()
    found = estimate_error(sketch, 500)
    assert torch.equal(sketch.counters, before)
    scaled = estimate_error(sketch.scale_(0.25), 500)
    assert scaled.absolute == pytest.approx(found.absolute / 4)
    assert scaled.relative == pytest.approx(found.relative)


def test_the_estimate_has_the_same_bits_for_every_number_of_threads():
    sketch = so.CountMinSketch(3, 70_000, 1)
    ids = torch.arange(200_000)
    sketch.add_(ids, torch.rand(200_000, 1, generator=torch.Generator().manual_seed(0)))
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(estimate_error(sketch, 200_000))
    torch.set_num_threads(1)
    assert found[0] == found[1] == found[2]


def test_ids_up_to_the_last_are_left_to_phantoms():
    sketch = so.CountMinSketch(3, 64, 1).add_(torch.arange(100), torch.ones(100, 1))
    assert estimate_error(sketch, _hashing.MAX_ID + 1).row_error > 0


@pytest.mark.parametrize("rows", [0, 2**32 + 1])
def test_an_impossible_number_of_rows_is_refused(rows):
    with pytest.raises(ValueError, match=rf"rows must be between 1 and 2\*\*32, got {rows}"):
        estimate_error(so.CountSketch(3, 16, 2), rows)


def test_a_tensor_is_no_sketch():
    with pytest.raises(TypeError, match="sketch must be a CountSketch or CountMinSketch"):
        estimate_error(torch.ones(3), 3)
