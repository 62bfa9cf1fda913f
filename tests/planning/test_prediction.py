"""Errors told beforehand, against sketches that are really run."""

import dataclasses
import math

import pytest
import torch

import sketchoptim as so
from sketchoptim.planning._frequencies import RowFrequencies
from sketchoptim.planning._prediction import Workload, occurrence_energy, predicted_error

ROWS, DIM, IDS, DECAY, STEPS = 3000, 64, 200, 0.99, 250


def usual(frequencies: RowFrequencies) -> Workload:
    return Workload(frequencies=frequencies, ids_per_step=IDS, decay=DECAY, steps=STEPS)


TEXT = usual(RowFrequencies.zipf(ROWS))


def measured_error(storage: so.Sketched, *, seed: int) -> tuple[float, float]:
    """The error of a sketch that takes the gradients a prediction assumes, over its last steps."""
    generator = torch.Generator().manual_seed(seed)
    _, width, _ = storage.counters_shape(ROWS, 1)
    sketch = so.CountMinSketch(3, width, 1, conservative=storage.conservative, seed=seed)
    shares = 1.0 / torch.arange(1, ROWS + 1)
    shares /= shares.sum()
    occurrence = torch.from_numpy(occurrence_energy(IDS * shares.numpy(), dim=DIM)).float()
    truth = torch.zeros(ROWS, 1)
    errors, medians = [], []
    for step in range(STEPS):
        drawn = torch.multinomial(shares, IDS, replacement=True, generator=generator)
        ids, which = drawn.unique(return_inverse=True)
        spread = torch.empty(IDS).log_normal_(-2.0, 2.0, generator=generator)
        energies = torch.zeros(ids.numel()).index_add_(0, which, occurrence[drawn] * spread)
        energies = energies.unsqueeze(1)
        if storage.granularity == "element":
            energies *= torch.randn(ids.numel(), 1, generator=generator).square()
        sketch.scale_(DECAY)
        sketch.add_(ids, energies)
        truth *= DECAY
        truth[ids] += energies
        if step >= STEPS - 30:
            estimate, exact = sketch.query(ids), truth[ids]
            errors.append(((estimate - exact).norm() / exact.norm()).item())
            medians.append((estimate / exact - 1).median().item())
    return sum(errors) / len(errors), sum(medians) / len(medians)


@pytest.mark.parametrize("granularity", ["row", "element"])
@pytest.mark.parametrize("conservative", [True, False])
@pytest.mark.parametrize("ratio", [1 / 40, 1 / 8, 1 / 2])
def test_a_prediction_is_within_a_factor_of_2_of_a_run(ratio, conservative, granularity):
    storage = so.Sketched(ratio=ratio, conservative=conservative, granularity=granularity)
    found = predicted_error(storage, TEXT, dim=DIM)
    relative, median = measured_error(storage, seed=1)
    assert relative / 2 < found.relative < 2 * relative
    if median > 0.05:
        assert median / 2 < found.median < 2 * median


def test_a_prediction_hardly_depends_on_the_random_numbers_it_is_made_with():
    storage = so.Sketched(ratio=1 / 8, conservative=True)
    found = [predicted_error(storage, TEXT, dim=DIM, seed=seed).relative for seed in range(8)]
    assert max(found) < 1.6 * min(found)


def test_wider_sketches_are_predicted_to_be_better():
    errors = [
        predicted_error(so.Sketched(width=width, conservative=True), TEXT, dim=DIM).relative
        for width in (16, 64, 256, 1024)
    ]
    assert errors == sorted(errors, reverse=True)


def test_a_conservative_sketch_is_predicted_to_be_better():
    plain, conservative = (
        predicted_error(so.Sketched(width=100, conservative=is_so), TEXT, dim=DIM)
        for is_so in (False, True)
    )
    assert conservative.relative < plain.relative
    assert conservative.median < plain.median


def test_skewed_tables_are_predicted_to_be_easier():
    errors = [
        predicted_error(
            so.Sketched(width=100, conservative=True),
            usual(RowFrequencies.zipf(ROWS, exponent=exponent)),
            dim=DIM,
        ).relative
        for exponent in (0.0, 0.5, 1.0, 1.5)
    ]
    assert errors == sorted(errors, reverse=True)


def test_a_billion_rows_are_predicted_as_well():
    storage = so.Sketched(ratio=1 / 512, conservative=True)
    workload = Workload(
        frequencies=RowFrequencies.zipf(10**9), ids_per_step=10**5, decay=0.999, steps=10**6
    )
    found = predicted_error(storage, workload, dim=DIM)
    assert 0 < found.relative < 1
    assert math.isfinite(found.median)


def test_a_table_of_one_row_has_no_error():
    workload = Workload(frequencies=RowFrequencies.zipf(1), ids_per_step=3, decay=1.0, steps=5)
    found = predicted_error(so.Sketched(width=1000), workload, dim=4)
    assert found.relative == found.median == 0


def test_rows_that_are_never_touched_do_not_matter():
    counts = torch.cat([torch.ones(50), torch.zeros(950)])
    with_them, without = (
        predicted_error(so.Sketched(width=20), usual(RowFrequencies.of_counts(c)), dim=DIM)
        for c in (counts, counts[:50])
    )
    assert with_them == without


def test_other_decays_are_not_predicted():
    paper = so.Sketched(granularity="element", decay="paper")
    with pytest.raises(ValueError, match="decay=\"linear\" to be predicted, got 'paper'"):
        predicted_error(paper, TEXT, dim=DIM)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ids_per_step": 0}, ValueError, "ids_per_step must be >= 1, got 0"),
        ({"steps": 1.5}, TypeError, "steps must be an int, got 1.5"),
        ({"decay": 1.1}, ValueError, r"must be in \[0, 1\], got 1.1"),
        ({"decay": math.nan}, ValueError, r"must be in \[0, 1\], got nan"),
    ],
)
def test_a_workload_out_of_range_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(TEXT, **options)
