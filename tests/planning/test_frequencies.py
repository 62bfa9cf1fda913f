"""Row frequencies: measured or assumed, in classes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sketchoptim.planning._frequencies import RowFrequencies


def total(frequencies: RowFrequencies) -> float:
    return sum(n * share for n, share in zip(frequencies.rows, frequencies.shares, strict=True))


@given(rows=st.integers(1, 10**10), exponent=st.floats(0, 3))
def test_zipf_has_every_row_and_all_of_the_mass(rows, exponent):
    found = RowFrequencies.zipf(rows, exponent=exponent)
    assert found.total_rows == rows
    assert total(found) == pytest.approx(1)
    assert all(a >= b * 0.999 for a, b in zip(found.shares, found.shares[1:], strict=False))
    assert len(found.rows) < 260


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.5])
def test_classes_have_the_mass_of_their_ranks(exponent):
    found = RowFrequencies.zipf(5000, exponent=exponent)
    true = np.arange(1, 5001) ** -exponent
    ends = np.cumsum(found.rows)
    masses = [n * share for n, share in zip(found.rows, found.shares, strict=True)]
    expected = np.add.reduceat(true / true.sum(), np.r_[0, ends[:-1]])
    assert masses == pytest.approx(expected.tolist(), rel=0.02)


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.3])
def test_the_exponent_of_zipf_is_found_again(exponent):
    assert RowFrequencies.zipf(10**6, exponent=exponent).exponent == pytest.approx(
        exponent, abs=0.02
    )


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300).filter(any))
def test_counts_keep_their_rows_and_their_mass(counts):
    found = RowFrequencies.of_counts(np.array(counts))
    assert found.total_rows == len(counts)
    assert total(found) == pytest.approx(1)
    unseen = sum(n for n, share in zip(found.rows, found.shares, strict=True) if share == 0)
    assert unseen == counts.count(0)
    assert found.shares[0] == pytest.approx(max(counts) / sum(counts))


@pytest.mark.parametrize("form", [list, np.array, lambda numbers: torch.tensor(numbers).float()])
def test_counts_and_ids_may_be_lists_and_arrays(form):
    expected = RowFrequencies.of_counts(torch.tensor([1, 2, 0, 3, 0]))
    assert RowFrequencies.of_counts(form([1, 2, 0, 3, 0])) == expected
    assert RowFrequencies.of_ids([[3, 3, 1], [3, 0, 1]], rows=5) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RowFrequencies.zipf(0), "rows must be >= 1, got 0"),
        (lambda: RowFrequencies.zipf(3, exponent=-1), "exponent must be finite and >= 0, got -1"),
        (lambda: RowFrequencies.of_counts(np.zeros(3)), "not all 0"),
        (lambda: RowFrequencies.of_counts(np.array([1.0, np.nan])), "counts must be finite"),
        (lambda: RowFrequencies.of_counts(np.ones((2, 2))), r"shape \[rows\], got \[2, 2\]"),
        (lambda: RowFrequencies.of_ids(torch.tensor([5]), rows=5), "between 0 and 4, got 5 to 5"),
        (lambda: RowFrequencies.of_ids(torch.tensor([0.5]), rows=5), "ids must be whole numbers"),
    ],
)
def test_bad_frequencies_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
