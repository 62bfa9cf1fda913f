"""The hash and the noise of rounding in C++: the golden numbers that every backend has to give."""

import hash_specification as specification
import pytest
import rounding_specification
import torch
from backends import LEVELS, library, needs_native
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sketchoptim import _hashing, _rounding

pytestmark = [needs_native, pytest.mark.parametrize("level", LEVELS)]


def native_hash(level: str, words: Tensor, ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Buckets and signs, ``[depth, k]`` each."""
    buckets = torch.empty(words.shape[0], ids.numel(), dtype=torch.int64)
    signs = torch.empty(words.shape[0], ids.numel())
    library(level).sketchoptim_hash(
        words.data_ptr(),
        words.shape[0],
        width,
        ids.data_ptr(),
        ids.numel(),
        buckets.data_ptr(),
        signs.data_ptr(),
    )
    return buckets, signs


@pytest.mark.parametrize("key", list(specification.WORDS))
def test_buckets_and_signs_are_the_golden_ones(level, key):
    seed, parameter, row = key
    words, ids = _hashing.seeded(seed, parameter, row + 1), torch.tensor(specification.IDS)
    for column, width in enumerate(specification.WIDTHS):
        expected = [specification.BUCKETS[key][row_id][column] for row_id in specification.IDS]
        buckets, signs = native_hash(level, words, ids, width)
        assert buckets[row].tolist() == expected
        assert signs[row].tolist() == list(specification.SIGNS[key])


@given(
    words=st.lists(
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=4, max_size=4), min_size=1, max_size=4
    ),
    ids=st.lists(st.integers(0, 2**32 - 1), max_size=20),
    width=st.integers(1, _hashing.MAX_WIDTH),
)
def test_any_hash_is_that_of_the_reference(level, words, ids, width):
    words = torch.tensor(words, dtype=torch.int64)
    ids = torch.tensor(ids, dtype=torch.int64)
    buckets, signs = native_hash(level, words, ids, width)
    assert torch.equal(buckets, _hashing.buckets(words, ids, width))
    assert torch.equal(signs, _hashing.signs(words, ids))


def native_noise(level: str, key: int, ids: Tensor, dim: int) -> Tensor:
    """The bits by which rows are rounded, int32 ``[k, dim]``."""
    noise = torch.empty(ids.numel(), dim, dtype=torch.int32)
    library(level).sketchoptim_noise(key, ids.data_ptr(), ids.numel(), dim, noise.data_ptr())
    return noise


@pytest.mark.parametrize(("key", "row_id"), rounding_specification.NOISE)
def test_noise_is_the_golden_one(level, key, row_id):
    columns = list(rounding_specification.COLUMNS)
    noise = native_noise(level, key, torch.tensor([row_id]), max(columns) + 1)
    assert tuple(noise[0, columns].tolist()) == rounding_specification.NOISE[key, row_id]


@given(
    key=st.integers(0, 2**32 - 1),
    ids=st.lists(st.integers(0, 2**32 - 1), max_size=20),
    dim=st.integers(1, 40),
)
def test_any_noise_is_that_of_the_reference(level, key, ids, dim):
    ids = torch.tensor(ids, dtype=torch.int64)
    assert torch.equal(native_noise(level, key, ids, dim), _rounding.noise(key, ids, dim))
