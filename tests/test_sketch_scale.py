"""The lazily applied scale: a factor of any size, as often as you like."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from sketch_cases import (
    Size,
    build,
    every_kind,
    readings,
    sized_streams,
)


@every_kind
@given(st.data(), st.integers(-60, 60))
def test_scaling_equals_scaling_every_value(kind, data, exponent):
    size, seed, (stream,) = data.draw(sized_streams(kind, 1))
    scaled = build(kind, size, seed).add_(*stream).scale_(2.0**exponent)
    direct = build(kind, size, seed).add_(*stream.times(2.0**exponent))
    assert torch.equal(readings(scaled), readings(direct))


@every_kind
@given(st.data(), st.lists(st.floats(1e-6, 1e6), max_size=5))
def test_scaling_by_any_factors_equals_scaling_every_value(kind, data, factors):
    size, seed, (stream,) = data.draw(sized_streams(kind, 1))
    scaled = build(kind, size, seed).add_(*stream)
    for factor in factors:
        scaled.scale_(factor)
    direct = build(kind, size, seed).add_(*stream).counters.double() * math.prod(factors)
    torch.testing.assert_close(readings(scaled).double(), direct, rtol=1e-5, atol=0)


@given(st.data(), st.floats(-1e6, -1e-6))
def test_a_count_sketch_takes_negative_factors(data, factor):
    size, seed, (stream,) = data.draw(sized_streams("count-sketch", 1))
    sketch = build("count-sketch", size, seed).add_(*stream)
    expected = sketch.query(stream.ids) * factor
    torch.testing.assert_close(sketch.scale_(factor).query(stream.ids), expected, rtol=1e-5, atol=0)


@every_kind
@pytest.mark.parametrize("decay", [0.999, 0.9, 0.5, 1e-3])
def test_decaying_thousands_of_times_stays_exact(kind, decay):
    ids, values = torch.arange(4), torch.tensor([[1.0], [2.0], [3.0], [0.5]])
    decayed, true = build(kind, Size(3, 4096, 1)), torch.zeros(4, 1, dtype=torch.float64)
    for step in range(4000):
        decayed.scale_(decay)
        true *= decay
        if step % 5 == 0:
            decayed.add_(ids, values)
            true += values
    assert 2.0**-24 <= decayed.scale.item() <= 1
    torch.testing.assert_close(decayed.query(ids).double(), true, rtol=1e-4, atol=1e-35)


@every_kind
def test_growing_and_shrinking_a_hundred_orders_of_magnitude_comes_back(kind):
    ids, values = torch.arange(4), torch.tensor([[1.0], [2.0], [3.0], [0.5]])
    there = build(kind, Size(3, 4096, 1)).add_(ids, values * 2.0**-60)
    for _ in range(170):
        there.scale_(2.0)
    assert torch.equal(there.query(ids), values * 2.0**110)
    for _ in range(170):
        there.scale_(0.5)
    assert torch.equal(there.query(ids), values * 2.0**-60)


@every_kind
@pytest.mark.parametrize("factor", [1e-30, 1e30, 2.0**-120, 2.0**120])
def test_an_extreme_factor_that_float32_can_hold_is_exact(kind, factor):
    ids, values = torch.arange(3), torch.tensor([[1.0], [2.0], [3.0]])
    scaled = build(kind, Size(3, 4096, 1)).add_(ids, values).scale_(factor)
    assert 2.0**-24 <= scaled.scale.item() <= 1
    expected = (values.double() * factor).float()
    torch.testing.assert_close(scaled.query(ids), expected, rtol=1e-6, atol=0)


@every_kind
@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.0**80]), st.integers(-130, 130))))
@example([(2.0**80, -24), (2.0**80, 48)])  # a stored 2^104 under a scale of 2^24
def test_an_estimate_stays_finite_whatever_factors_are_taken(kind, history):
    found, ids = build(kind, Size(3, 4, 1)), torch.tensor([1])
    for value, exponent in history:
        before = found.add_(ids, torch.tensor([[value]])).query(ids).item()
        try:
            found.scale_(2.0**exponent)
        except ValueError:
            assert before * 2.0**exponent >= 2.0**127
            assert found.query(ids).item() == before
        assert math.isfinite(found.query(ids).item())


@every_kind
@pytest.mark.parametrize("factor", [0.0, -0.0, 1e-200, 5e-324])
def test_a_factor_of_nothing_empties_the_sketch(kind, factor):
    emptied = build(kind, Size(3, 8, 2)).add_(torch.arange(5), torch.ones(5, 2)).scale_(factor)
    assert not emptied.query(torch.arange(5)).any()
    refilled = emptied.add_(torch.arange(1), torch.tensor([[3.0, 4.0]]))
    torch.testing.assert_close(refilled.query(torch.arange(1)), torch.tensor([[3.0, 4.0]]))


@every_kind
@pytest.mark.parametrize("factor", [1e39, 1e300])
def test_an_empty_sketch_stays_empty_under_any_factor(kind, factor):
    scaled = build(kind, Size(3, 8, 2)).scale_(factor)
    assert torch.equal(scaled.query(torch.arange(5)), torch.zeros(5, 2))
