"""Row sums times column sums."""

import pytest
import torch
from gradients import STREAMS, start
from hypothesis import given
from hypothesis import strategies as st
from moment_runs import moved, opened, random_rows

import sketchoptim as so
from sketchoptim.moments import Average

SUM = Average(1.0, 1.0)


def approximation(matrix):
    """What rank-one storage makes of a matrix."""
    count, dim = matrix.shape
    return moved(opened(so.RankOne(), rows=count, dim=dim), torch.arange(count), matrix, SUM)


def divergence(matrix, other):
    """The I-divergence, with 0 log 0 = 0."""
    return (torch.xlogy(matrix, matrix / other) - matrix + other).sum()


def test_a_table_of_zeros_has_estimates_of_zero():
    assert torch.equal(approximation(torch.zeros(4, 3)), torch.zeros(4, 3))


@pytest.mark.parametrize("kind", STREAMS)
def test_gradients_of_zero_move_nothing_and_spoil_nothing(kind):
    shape = (12, 3)
    parameter = torch.nn.Parameter(start(shape))
    optimizer = so.Adam([{"params": [parameter], "memory": "rank-one"}])
    parameter.grad = next(STREAMS[kind](shape, 1)) * 0
    optimizer.step()
    assert torch.equal(parameter, start(shape))


def test_a_matrix_of_rank_one_is_kept_exactly():
    matrix = torch.outer(torch.tensor([1.0, 0.0, 3.0, 2.0]), torch.tensor([0.5, 4.0, 1.0]))
    torch.testing.assert_close(approximation(matrix), matrix)


def test_sums_over_rows_and_columns_are_kept():
    matrix = torch.rand(7, 4, generator=torch.Generator().manual_seed(0))
    found = approximation(matrix)
    torch.testing.assert_close(found.sum(0), matrix.sum(0))
    torch.testing.assert_close(found.sum(1), matrix.sum(1))


@given(st.integers(0, 1000), st.floats(0.01, 1.0))
def test_no_other_factors_have_a_smaller_divergence(seed, size):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.rand(5, 3, generator=generator, dtype=torch.float64) + 0.01
    best = approximation(matrix.float()).double()
    factors = [torch.rand(n, 1, generator=generator, dtype=torch.float64) for n in (5, 3)]
    tilt = torch.exp(size * (factors[0] + factors[1].t() - 1))  # rank one, so the product is too
    assert divergence(matrix, best) <= divergence(matrix, best * tilt) + 1e-5


def test_rows_that_are_not_touched_decay_with_the_table():
    moment, average = opened(so.RankOne()), Average(0.5, 1.0)
    generator = torch.Generator().manual_seed(1)
    _, values = random_rows(generator)
    moved(moment, torch.tensor([0]), values[:1], average)
    for step in range(2, 5):
        moved(moment, torch.tensor([1]), values[:1], average, step=step)
    row_sum = moment.estimate(torch.tensor([0])).sum().item()
    assert row_sum == pytest.approx(values[0].sum().item() * 0.5**3)
