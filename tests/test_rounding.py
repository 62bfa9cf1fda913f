"""Stochastic rounding: golden numbers, bits that are unrelated, and numbers that stay unbiased."""

import math

import pytest
import rounding_specification as specification
import torch
from hypothesis import given
from hypothesis import strategies as st

from sketchoptim import _rounding

LAST_BIT = 2.0**-7  # of a bfloat16 between 1 and 2


@pytest.mark.parametrize(("key", "row_id"), specification.NOISE)
def test_noise_is_the_golden_one(key, row_id):
    expected = specification.NOISE[key, row_id]
    columns = specification.COLUMNS
    assert tuple(specification.noise_of(key, row_id, column) for column in columns) == expected
    found = _rounding.noise(key, torch.tensor([row_id]), max(columns) + 1)
    assert tuple(found[0, list(columns)].tolist()) == expected


@given(
    st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**32 - 1), max_size=5), st.integers(1, 40)
)
def test_noise_follows_the_specification(key, ids, dim):
    found = _rounding.noise(key, torch.tensor(ids, dtype=torch.int64), dim)
    expected = [[specification.noise_of(key, i, column) for column in range(dim)] for i in ids]
    assert found.dtype == torch.int32
    assert found.shape == (len(ids), dim)
    assert found.tolist() == expected


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_rounding_is_unbiased(share, sign):
    x = torch.full((200, 100), sign * (1 + share * LAST_BIT))
    rounded = _rounding.to_bfloat16(x, _rounding.noise(3, torch.arange(200), 100))
    magnitudes = rounded.float() * sign
    assert set(magnitudes.unique().tolist()) == {1.0, 1.0 + LAST_BIT}
    ups = (magnitudes > 1).double().mean().item()
    assert abs(ups - share) < 4 * math.sqrt(share * (1 - share) / x.numel())


HALVES = [torch.bfloat16, torch.float16]
# The distance of neighbours: of a normal number just above 1, and of subnormal ones.
NEIGHBOURS = [
    (torch.bfloat16, 1.0, LAST_BIT),
    (torch.bfloat16, 2.0**-130, 2.0**-133),
    (torch.float16, 1.0, 2.0**-10),
    (torch.float16, 2.0**-14, 2.0**-24),
    (torch.float16, 5 * 2.0**-24, 2.0**-24),
    (torch.float16, 0.0, 2.0**-24),
]


@pytest.mark.parametrize(("dtype", "low", "distance"), NEIGHBOURS)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_weights_go_to_the_upper_neighbour_as_often_as_their_mean_needs(
    dtype, low, distance, share
):
    x = torch.full((200, 100), low + share * distance)
    rounded = _rounding.to_half(-x, dtype, _rounding.noise(5, torch.arange(200), 100))
    magnitudes = -rounded.double()
    assert set(magnitudes.unique().tolist()) == {low, low + distance}
    ups = (magnitudes > low).double().mean().item()
    assert abs(ups - share) < 4 * math.sqrt(share * (1 - share) / x.numel())


@pytest.mark.parametrize("dtype", HALVES)
def test_weights_that_a_dtype_has_are_not_rounded(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for noise in (0, 2**16 - 1):
        rounded = _rounding.to_half(every.float(), dtype, torch.tensor(noise, dtype=torch.int32))
        torch.testing.assert_close(rounded, every, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_weights_beyond_the_largest_number_are_rounded_to_nearest(dtype, sign):
    largest = torch.finfo(dtype).max
    x = torch.linspace(largest * 0.999, min(largest * 1.01, 3.4e38), 1001) * sign
    x = torch.cat([x, torch.tensor([math.inf, math.nan]) * sign])
    is_beyond = ~(x.abs() <= largest)
    assert 0 < is_beyond.sum() < x.numel()
    for noise in (0, 2**16 - 1):
        rounded = _rounding.to_half(x, dtype, torch.tensor(noise, dtype=torch.int32))
        assert rounded[~is_beyond].isfinite().all()
        torch.testing.assert_close(
            rounded[is_beyond], x[is_beyond].to(dtype), rtol=0, atol=0, equal_nan=True
        )


@given(st.lists(st.floats(width=16), min_size=1, max_size=20))
def test_a_number_that_bfloat16_has_is_not_rounded(numbers):
    x = torch.tensor(numbers).bfloat16()
    noise = torch.full((len(numbers),), 2**16 - 1, dtype=torch.int32)
    torch.testing.assert_close(
        _rounding.to_bfloat16(x.float(), noise), x, rtol=0, atol=0, equal_nan=True
    )
