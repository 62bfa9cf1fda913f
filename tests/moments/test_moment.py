"""What all moments have in common."""

import pickle

import backends
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moment_runs import ADAM, by_element, by_row, estimated, moved, opened, random_rows

import sketchoptim as so
from sketchoptim.moments import Average
from sketchoptim.moments._moment import row_sums

STORAGES = {
    "exact": so.Exact(),
    "row-wise": so.RowWise(),
    "rank-one": so.RankOne(),
    "top-singular": so.TopSingular(),
    "linear": by_element(),
    "paper": by_element(decay="paper"),
    "bucket": by_element(decay="bucket"),
    "conservative": by_element(conservative=True),
    "linear-row": by_row(),
    "paper-row": by_row(decay="paper"),
    "bucket-row": by_row(decay="bucket"),
    "conservative-row": by_row(conservative=True),
}
# Which of them sum over rows, so that chunks and order change the last bits.
SUMS_OVER_ROWS = {"rank-one", "top-singular", "linear", "linear-row"}


@pytest.mark.parametrize("fill", [0.0, 0.25])
@pytest.mark.parametrize("name", STORAGES)
def test_a_fresh_moment_estimates_its_fill_for_every_row(name, fill):
    estimates = estimated(opened(STORAGES[name], fill=fill), torch.arange(40))
    torch.testing.assert_close(estimates, torch.full_like(estimates, fill))


@pytest.mark.parametrize("name", STORAGES)
def test_an_estimate_is_a_number_an_element_or_a_number_a_row(name):
    generator = torch.Generator().manual_seed(0)
    ids, values = random_rows(generator)
    estimates = moved(opened(STORAGES[name]), ids, values, ADAM)
    is_by_row = name.endswith("-row") or name == "row-wise"
    assert estimates.shape == (len(ids), 1 if is_by_row else 3)


@pytest.mark.parametrize("name", STORAGES)
def test_an_estimate_between_steps_is_what_a_step_that_moves_nothing_gives(name):
    moment = opened(STORAGES[name])
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 4):
        moved(moment, *random_rows(generator), ADAM, step=step)
    ids = torch.tensor([39, 0, 7])
    before = {part: tensor.clone() for part, tensor in moment.tensors.items()}
    found = moment.estimate(ids)
    for part, tensor in before.items():
        assert torch.equal(moment.tensors[part], tensor)
    torch.testing.assert_close(found, estimated(moment, ids))


@pytest.mark.parametrize("touched", [3, 40], ids=["few rows", "all rows"])
@pytest.mark.parametrize("name", STORAGES)
def test_between_steps_a_moment_keeps_its_state_and_nothing_of_the_step(name, touched):
    moment = opened(STORAGES[name])
    before = len(pickle.dumps(moment))
    moved(moment, torch.arange(touched), torch.ones(touched, 3), ADAM)
    held = len(pickle.dumps(moment)) - before
    assert held <= len(pickle.dumps({"average": moment.average}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", STORAGES)
def test_estimates_come_in_the_dtype_of_the_values(name, dtype):
    ids, values = random_rows(torch.Generator().manual_seed(0))
    estimates = moved(opened(STORAGES[name], dtype=dtype), ids, values.to(dtype), ADAM)
    assert estimates.dtype == dtype


@pytest.mark.parametrize("name", STORAGES)
def test_a_step_without_rows_leaves_a_usable_moment(name):
    moment = opened(STORAGES[name])
    ids, values = random_rows(torch.Generator().manual_seed(0))
    moved(moment, ids, values, ADAM)
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0, 3)
    moment.begin_(ADAM, touched=0)
    moment.end_()
    moment.maintain_(2)
    assert moved(moment, *nothing, ADAM, step=3).shape[0] == 0
    assert moved(moment, ids, values, ADAM, step=4).isfinite().all()


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0,)], ids=str)
@pytest.mark.parametrize("name", STORAGES)
def test_a_parameter_without_elements_is_stepped_without_complaint(name, shape):
    parameter = torch.nn.Parameter(torch.zeros(shape))
    memory = so.Memory(None, STORAGES[name])
    optimizer = so.Adam([{"params": [parameter], "memory": memory}])
    with backends.stepping_by(None):
        for _ in range(2):
            parameter.grad = torch.zeros(shape)
            optimizer.step()
    state = optimizer.state[parameter]
    assert state["step"] == 2
    assert all(value.isfinite().all() for value in state.values() if torch.is_tensor(value))


@pytest.mark.parametrize("average", [ADAM, Average(1.0, 1.0), Average(0.9, 0.7)], ids=str)
@pytest.mark.parametrize("name", STORAGES)
def test_second_moments_stay_finite_and_non_negative(name, average):
    moment, generator = opened(STORAGES[name]), torch.Generator().manual_seed(1)
    for step in range(1, 40):
        ids, values = random_rows(generator)
        estimates = moved(moment, ids, values * 10.0 ** (step % 9 - 4), average, step=step)
        assert estimates.isfinite().all()
        assert (estimates >= 0).all()


@pytest.mark.parametrize("name", STORAGES)
def test_chunks_do_not_change_a_step(name):
    whole, cut = (opened(STORAGES[name]) for _ in range(2))
    generator = torch.Generator().manual_seed(2)
    for step in range(1, 20):
        ids, values = random_rows(generator)
        first = int(torch.randint(0, len(ids) + 1, (), generator=generator))
        expected = moved(whole, ids, values, ADAM, step=step)
        found = moved(cut, ids, values, ADAM, step=step, sizes=[first, len(ids) - first])
        if name in SUMS_OVER_ROWS:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(found, expected)


@given(st.integers(1, 4), st.sampled_from([1, 7, 2**14, 2**14 + 1, 40_000]), st.integers(0, 9))
def test_row_sums_are_sums_over_rows(count, dim, seed):
    values = torch.rand(count, dim, generator=torch.Generator().manual_seed(seed))
    expected = values.double().sum(1, keepdim=True)
    torch.testing.assert_close(row_sums(values).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [3, 70_000])
def test_a_row_has_the_same_sum_alone_as_among_others(dim):
    values = torch.rand(3, dim, generator=torch.Generator().manual_seed(0))
    together = row_sums(values)
    for row in range(3):
        assert torch.equal(row_sums(values[row : row + 1]), together[row : row + 1])


def test_a_sum_that_has_overflowed_stays_so():
    infinite = torch.tensor(float("inf"))
    assert Average(1.0, 1.0).after(infinite, torch.tensor(2.0)) == infinite
