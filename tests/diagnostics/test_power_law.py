"""How mass is spread over rows and elements, chunk by chunk."""

import pytest
import torch
from gradients import sparse
from hypothesis import given
from hypothesis import strategies as st

from sketchoptim import _rows
from sketchoptim.diagnostics._power_law import TOP, PowerLaw, Spread, power_law, power_law_of


def sorted_midpoint(magnitudes, total):
    """By sorting: the share of the heaviest numbers that first reaches half of the mass."""
    ordered = magnitudes.double().flatten().sort(descending=True).values
    reached = ordered.cumsum(0)
    return (torch.searchsorted(reached, reached[-1] / 2).item() + 1) / total


def zipf(count, exponent, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.arange(1, count + 1)[torch.randperm(count, generator=generator)] ** -exponent


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.5])
def test_the_midpoint_is_that_of_a_sort(exponent):
    values = zipf(50_000, exponent)
    spread = Spread()
    for part in values.split(7_000):
        spread.add_(part)
    expected = sorted_midpoint(values, 50_000)  # of whole numbers
    assert spread.midpoint(50_000) == pytest.approx(expected, rel=0.02, abs=1 / 50_000)


def test_numbers_that_were_never_added_are_zero():
    spread = Spread()
    spread.add_(torch.ones(100))
    assert spread.midpoint(1000) == pytest.approx(0.05)


def test_without_mass_all_are_alike():
    assert Spread().midpoint(10) == 0.5
    assert power_law(torch.zeros(4, 2)) == PowerLaw(0.5, 0.5, (), ())


@given(st.lists(st.floats(2**-60, 2**60, width=32), min_size=1, max_size=200))
def test_the_curve_falls_and_counts_every_number(numbers):
    spread = Spread()
    spread.add_(torch.tensor(numbers))
    ranks, magnitudes = spread.curve()
    assert ranks == sorted(set(ranks))
    assert ranks[-1] == len(numbers)
    assert magnitudes == sorted(magnitudes, reverse=True)
    assert magnitudes[0] == pytest.approx(max(numbers), rel=1 / 64)
    assert magnitudes[-1] == pytest.approx(min(numbers), rel=1 / 64)


def test_rows_and_elements_are_measured_apart(monkeypatch):
    monkeypatch.setattr(_rows, "CHUNK_ELEMENTS", 64)
    tensor = zipf(600, 1.0).unsqueeze(1) * zipf(20, 0.8, seed=1)
    found = power_law(-tensor)
    assert found.row_midpoint == pytest.approx(sorted_midpoint(tensor.sum(1), 600), rel=0.02)
    assert found.element_midpoint == pytest.approx(sorted_midpoint(tensor, 12_000), rel=0.02)
    expected = tensor.sum(1).topk(TOP)
    assert found.top_rows == tuple(expected.indices.tolist())
    assert found.top_masses == pytest.approx(expected.values.tolist())


def test_a_sparse_gradient_counts_the_rows_it_does_not_touch_as_zero():
    gradient = sparse(torch.tensor([7, 3, 7]), torch.tensor([[1.0], [3.0], [1.0]]), (40, 1))
    found = power_law(gradient)
    assert found.top_rows == (3, 7)
    assert found.top_masses == (3.0, 2.0)
    assert found.row_midpoint == pytest.approx(2.5 / 3 / 40)
    assert found == power_law(gradient.to_dense())


def test_one_number_a_row_has_no_elements():
    chunks = [(torch.arange(4), torch.ones(4, 1)), (torch.arange(4, 8), torch.ones(4, 1))]
    found = power_law_of(chunks, rows=8, dim=5)
    assert found.element_midpoint is None
    assert found.row_midpoint == pytest.approx(0.5)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
def test_tensors_of_any_shape_are_rows_of_what_follows(shape):
    found = power_law(torch.ones(shape))
    assert found.row_midpoint == pytest.approx(0.5)
    assert sorted(found.top_rows) == list(range(shape[0] if shape else 1))


def test_the_share_of_top_rows_that_stayed():
    earlier, later = (PowerLaw(0.5, 0.5, top, ()) for top in ((1, 2, 3, 4), (4, 9, 1)))
    assert later.kept_since(earlier) == 0.5
    assert later.kept_since(PowerLaw(0.5, 0.5, (), ())) is None
