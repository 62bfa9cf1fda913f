"""A moment in a sketch."""

import itertools

import backends
import pytest
import torch
from gradients import sparse_stream, start
from hypothesis import given
from hypothesis import strategies as st
from moment_runs import ADAGRAD, ADAM, MOMENTUM, by_element, by_row, moved, opened, random_rows

import sketchoptim as so
from sketchoptim.moments._sketched import _waves

numbers = st.floats(-1e6, 1e6, width=32)


# -- item by item ----------------------------------------------------------------------------------


@given(st.sampled_from([1, 3, 5]), st.sampled_from([ADAM, MOMENTUM, ADAGRAD]), st.data())
def test_the_second_query_of_the_paper_is_free(depth, average, data):
    """What `update_` gives back has the bits of a query made after the row was written."""
    for name in ("first", "second"):
        moment = opened(by_element(depth=depth, decay="paper", width=3), name, rows=6, dim=2)
        for row in data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6)):
            vector = data.draw(st.lists(numbers, min_size=2, max_size=2))
            values = torch.tensor([vector]) if name == "first" else torch.tensor([vector]).abs()
            ids = torch.tensor([row])
            estimate = moved(moment, ids, values, average)
            assert torch.equal(estimate, moment.sketch.query(ids))


@given(st.sampled_from([2, 4]), st.lists(st.tuples(st.integers(0, 5), numbers), min_size=1))
def test_at_an_even_depth_the_second_query_is_free_but_for_rounding(depth, updates):
    moment = opened(by_element(depth=depth, decay="paper", width=3), "first", rows=6, dim=1)
    for row, number in updates:
        ids = torch.tensor([row])
        estimate = moved(moment, ids, torch.tensor([[number]]), ADAM)
        torch.testing.assert_close(estimate, moment.sketch.query(ids), rtol=1e-5, atol=1.0)


@pytest.mark.parametrize("average", [ADAM, MOMENTUM, ADAGRAD], ids=["adam", "momentum", "adagrad"])
@pytest.mark.parametrize("name", ["first", "second"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("decay", ["paper", "bucket"])
def test_waves_give_the_bits_of_one_row_at_a_time(decay, depth, name, average):
    storage = by_element(decay=decay, depth=depth)
    together, alone = (opened(storage, name) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 15):
        ids, values = random_rows(generator, is_signed=name == "first")
        expected = moved(alone, ids, values, average, step=step, sizes=[1] * len(ids))
        assert torch.equal(moved(together, ids, values, average, step=step), expected)
        assert torch.equal(together.sketch.counters, alone.sketch.counters)


@given(st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2), max_size=30))
def test_waves_take_each_row_once_and_after_the_rows_it_meets(addresses):
    buckets = torch.tensor(addresses, dtype=torch.int64).reshape(-1, 2).t()
    waves = [wave.tolist() for wave in _waves(buckets)]
    wave_of = {position: number for number, wave in enumerate(waves) for position in wave}
    assert sorted(itertools.chain(*waves)) == list(range(len(addresses)))
    for early, late in itertools.combinations(range(len(addresses)), 2):
        if any(a == b for a, b in zip(addresses[early], addresses[late], strict=True)):
            assert wave_of[early] < wave_of[late]


def test_rows_without_a_common_bucket_share_a_wave():
    buckets = torch.tensor([[0, 1, 0, 2], [5, 6, 7, 8]])
    assert [wave.tolist() for wave in _waves(buckets)] == [[0, 1, 3], [2]]


def test_a_light_row_lowers_a_heavy_one_in_the_bucket_form_only():
    """The failure that the authors' form has: a bucket holds an average of its rows."""
    values, found = torch.tensor([[1.0]] + [[1e-6]] * 14), {}
    for decay in ("paper", "bucket"):
        moment = opened(by_element(decay=decay), rows=15, dim=1)
        for step in range(1, 100):
            estimates = moved(moment, torch.arange(15), values, ADAM, step=step)
        found[decay] = estimates[0].item()
    assert found["bucket"] < 0.5
    assert found["paper"] == pytest.approx(1.0, rel=1e-3)


# -- cleaning and folding --------------------------------------------------------------------------


@pytest.mark.parametrize("decay", ["linear", "paper", "bucket"])
def test_cleaning_scales_the_table_after_every_so_many_steps(decay):
    cleaned = opened(by_element(decay=decay, clean_every=3, clean_by=0.25))
    before = {}
    ids, values = random_rows(torch.Generator().manual_seed(0))
    for step in range(1, 10):
        cleaned.begin_(ADAM, touched=len(ids))
        cleaned.gather_(ids, values)
        cleaned.update_(ids, values)
        cleaned.end_()
        before[step] = cleaned.sketch.query(ids)
        cleaned.maintain_(step)
        factor = 0.25 if step % 3 == 0 else 1.0
        torch.testing.assert_close(cleaned.sketch.query(ids), factor * before[step])


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_cleaned_table_may_be_emptied(name):
    moment = opened(by_element(clean_every=2, clean_by=0.0), name)
    ids, values = random_rows(torch.Generator().manual_seed(0))
    assert moved(moment, ids, values, ADAM, step=1).any()
    moved(moment, ids, values, ADAM, step=2)
    assert not moment.sketch.query(ids).any()


@pytest.mark.parametrize("decay", ["linear", "paper", "bucket"])
def test_a_table_folds_after_the_steps_it_is_told_to(decay):
    moment = opened(by_element(decay=decay, fold_at=(2, 5)), "first")
    widths, generator = [], torch.Generator().manual_seed(0)
    for step in range(1, 8):
        moved(moment, *random_rows(generator, is_signed=True), ADAM, step=step)
        widths.append(moment.tensors["counters"].shape[1])
    assert widths == [8, 4, 4, 4, 2, 2, 2]


@pytest.mark.parametrize("memory", [by_row(conservative=True, fold_at=(3,)), by_row(fold_at=(3,))])
@pytest.mark.parametrize("backend", [None, *backends.LEVELS[-1:]], ids=str)
def test_a_folded_table_keeps_training_and_takes_half_the_bytes(memory, backend):
    shape = (30, 3)
    parameter = torch.nn.Parameter(start(shape))
    optimizer = so.Adam([parameter], lr=0.1, memory=so.Memory(None, memory))
    sizes, places = [], []
    with backends.stepping_by(backend):
        for gradient in sparse_stream(shape, 5):
            parameter.grad = gradient
            optimizer.step()
            sizes.append(optimizer.state[parameter]["second_counters"].numel())
            places.append(parameter.detach().clone())
    assert sizes == [24, 24, 12, 12, 12]
    assert not torch.equal(places[3], places[2])
    assert parameter.isfinite().all()
