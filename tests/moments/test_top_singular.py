"""The best rank-one approximation in l2."""

import backends
import pytest
import torch
from gradients import STREAMS, dense_stream, start
from hypothesis import given
from hypothesis import strategies as st
from moment_runs import moved, opened, random_rows

import sketchoptim as so
from sketchoptim.moments import Average

SUM = Average(1.0, 1.0)


def approximation(matrix, storage, name="second"):
    count, dim = matrix.shape
    return moved(opened(storage, name, rows=count, dim=dim), torch.arange(count), matrix, SUM)


@given(st.integers(0, 1000), st.booleans())
def test_the_error_is_that_of_the_singular_value_decomposition(seed, is_signed):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(6, 4, generator=generator)
    matrix = matrix if is_signed else matrix.abs()
    found = approximation(matrix, so.TopSingular(), "first" if is_signed else "second")
    least = torch.linalg.svdvals(matrix)[1:].norm()
    torch.testing.assert_close((found - matrix).norm(), least, rtol=1e-4, atol=1e-5)


@given(st.integers(0, 1000))
def test_in_l2_it_is_at_least_as_close_as_row_and_column_sums(seed):
    matrix = torch.rand(6, 4, generator=torch.Generator().manual_seed(seed))
    best, other = (approximation(matrix, storage) for storage in (so.TopSingular(), so.RankOne()))
    assert (best - matrix).norm() <= (other - matrix).norm() * (1 + 1e-5)


@pytest.mark.parametrize("name", ["first", "second"])
def test_the_columns_keep_their_unit_length_and_their_side(name):
    moment, generator = opened(so.TopSingular(), name), torch.Generator().manual_seed(0)
    for step in range(1, 60):
        before = moment.columns.clone()
        ids, values = random_rows(generator, is_signed=name == "first")
        moved(moment, ids, values, Average(0.9, 1 - 0.9), step=step)
        torch.testing.assert_close(moment.columns.norm(), torch.tensor(1.0))
        assert moment.columns @ before >= -1e-6


@pytest.mark.parametrize("kind", STREAMS)
def test_gradients_of_zero_move_nothing_and_spoil_nothing(kind):
    shape = (12, 3)
    parameter = torch.nn.Parameter(start(shape))
    memory = so.Memory(so.TopSingular(), so.TopSingular())
    optimizer = so.Adam([{"params": [parameter], "memory": memory}])
    parameter.grad = next(STREAMS[kind](shape, 1)) * 0
    optimizer.step()
    assert torch.equal(parameter, start(shape))


@pytest.mark.parametrize("shape", [(2, 500), (33_000, 8)], ids=str)
def test_the_number_of_threads_changes_no_bit(shape):
    """Shapes at which products, eigenvectors and sums of float64 depend on it in torch."""
    gradients = list(dense_stream(shape, 2))
    results = []
    for threads in (1, 2):
        parameter = torch.nn.Parameter(start(shape).double())
        memory = so.Memory(so.TopSingular(), so.TopSingular())
        optimizer = so.Adam([{"params": [parameter], "memory": memory}])
        with backends.stepping_by(None, threads=threads):
            for gradient in gradients:
                parameter.grad = gradient.double()
                optimizer.step()
        results.append(parameter.detach())
    assert torch.equal(*results)
