"""The hash: golden numbers, what its family guarantees, and the laws that sketches rely on."""

import math
from functools import cache

import hash_specification as specification
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import sketchoptim as so
from sketchoptim import _hashing

KEYS = list(specification.WORDS)
LARGEST_ID = 2**32 - 1
# Pairs that a weak multiplicative hash would give away: neighbours, multiples, single bits.
PAIRS = [(0, 1), (1, 2), (7, 14), (0, 2**31), (2**31, 2**31 + 1), (0, LARGEST_ID), (12345, 9876543)]

words_tensors = st.lists(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=4, max_size=4), min_size=1, max_size=4
).map(lambda rows: torch.tensor(rows, dtype=torch.int64))
id_tensors = st.lists(st.integers(0, LARGEST_ID), max_size=20).map(
    lambda ids: torch.tensor(ids, dtype=torch.int64)
)


@cache
def random_words(rows: int, seed: int) -> Tensor:
    """Hash rows drawn uniformly from the whole family."""
    generator = torch.Generator().manual_seed(seed)
    low, high = -(2**31), 2**31
    halves = [torch.randint(low, high, (rows, 4), generator=generator) for _ in range(2)]
    return (halves[0] << 32) ^ (halves[1] & 0xFFFFFFFF)


@cache
def many_seeded_words() -> Tensor:
    """Hash rows as sketches get them, of neighbouring seeds and parameters."""
    return torch.cat([_hashing.seeded(seed, p, 4) for seed in range(64) for p in range(64)])


def unsigned(word: int) -> int:
    return word % 2**64


def excess(observed: Tensor, expected: Tensor | float) -> float:
    """How many standard deviations the chi-square of the counts lies above what chance gives.

    By the cube root of Wilson and Hilferty, which is close to normal at any degree of freedom.
    """
    freedom = observed.numel() - 1
    chi_square = ((observed - expected).double().square() / expected).sum().item()
    spread = 2 / (9 * freedom)
    return ((chi_square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def joint_counts(first: Tensor, second: Tensor, width: int) -> Tensor:
    """How often each pair of buckets occurs, ``[width * width]``."""
    return torch.bincount((first * width + second).flatten(), minlength=width * width)


# -- golden numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
def test_seeded_words_are_the_golden_ones(key):
    seed, parameter, row = key
    words = _hashing.seeded(seed, parameter, row + 1)
    assert tuple(map(unsigned, words[row].tolist())) == specification.WORDS[key]


@pytest.mark.parametrize("key", KEYS)
def test_buckets_are_the_golden_ones(key):
    seed, parameter, row = key
    words, ids = _hashing.seeded(seed, parameter, row + 1), torch.tensor(specification.IDS)
    for column, width in enumerate(specification.WIDTHS):
        expected = [specification.BUCKETS[key][row_id][column] for row_id in specification.IDS]
        assert _hashing.buckets(words, ids, width)[row].tolist() == expected


@pytest.mark.parametrize("key", KEYS)
def test_signs_are_the_golden_ones(key):
    seed, parameter, row = key
    words, ids = _hashing.seeded(seed, parameter, row + 1), torch.tensor(specification.IDS)
    assert _hashing.signs(words, ids)[row].tolist() == list(specification.SIGNS[key])


@given(words_tensors, id_tensors, st.integers(1, _hashing.MAX_WIDTH))
def test_any_hash_follows_the_specification(words, ids, width):
    rows = [tuple(map(unsigned, row)) for row in words.tolist()]
    expected_buckets = [
        [specification.bucket_of(row, row_id, width) for row_id in ids.tolist()] for row in rows
    ]
    expected_signs = [
        [specification.sign_of(row, row_id) for row_id in ids.tolist()] for row in rows
    ]
    assert _hashing.buckets(words, ids, width).tolist() == expected_buckets
    assert _hashing.signs(words, ids).tolist() == expected_signs


# -- laws ----------------------------------------------------------------------------------------


@given(id_tensors)
def test_mixing_follows_the_specification(ids):
    assert [unsigned(word) for word in _hashing.mix(ids).tolist()] == [
        specification.mix(row_id) for row_id in ids.tolist()
    ]


@given(words_tensors, id_tensors, st.integers(1, _hashing.MAX_WIDTH // 2))
def test_halving_the_width_halves_the_bucket(words, ids, half):
    wide, narrow = _hashing.buckets(words, ids, 2 * half), _hashing.buckets(words, ids, half)
    assert torch.equal(narrow, wide // 2)


# -- the seed ------------------------------------------------------------------------------------


# Names that differ in their case, their length, a zero byte, or where an eight-byte word ends.
NAMES = ["", "\0", "a", "A", "a\0", "aaaaaaaa", "aaaaaaaaa", "aaaaaaaa\0", "0", "1", "ß", "\udcff"]


def test_each_name_and_number_has_words_of_its_own():
    parameters = [*NAMES, *(f"layers.{i}.weight" for i in range(100)), *range(100)]
    words = torch.cat([_hashing.seeded(0, parameter, 2) for parameter in parameters])
    assert words.unique().numel() == words.numel()


def test_each_seed_parameter_and_row_has_words_of_its_own():
    words = many_seeded_words()
    assert words.unique().numel() == words.numel()


def test_the_two_moments_of_a_parameter_share_their_words():
    sketched = so.Sketched(granularity="element", depth=3)
    tables = [torch.nn.Parameter(torch.zeros(50, 4)) for _ in range(2)]
    memory = so.Memory(first=sketched, second=sketched)
    optimizer = so.Adam([{"params": tables, "memory": memory}])
    for table in tables:
        table.grad = torch.ones(50, 4)
    optimizer.step()
    states = [optimizer.state[table] for table in tables]
    for state in states:
        assert torch.equal(state["first_words"], state["second_words"])
    assert not torch.isin(states[0]["first_words"], states[1]["first_words"]).any()


# -- statistics, over the choice of the words ----------------------------------------------------


@pytest.mark.parametrize(("rows", "width"), [(3000, 1000), (33278, 11093), (1000, 3000)])
@pytest.mark.parametrize("parameter", [0, "embedding.weight"])
def test_consecutive_ids_leave_as_many_buckets_empty_as_random_ones(rows, width, parameter):
    load = rows / width
    mean = width * (1 - 1 / width) ** rows
    deviation = math.sqrt(width * (math.exp(-load) - (1 + load) * math.exp(-2 * load)))
    ids = torch.arange(rows)
    empty = torch.tensor(
        [
            width - row.unique().numel()
            for seed in range(60)
            for row in _hashing.buckets(_hashing.seeded(seed, parameter, 3), ids, width)
        ]
    )
    excesses = (empty - mean) / deviation
    assert excesses.abs().max() < 4.5  # of 180 hash rows
    assert abs(excesses.mean().item()) < 4 / math.sqrt(180)


@pytest.mark.parametrize("width", [2, 3, 7, 64, 1000])
@pytest.mark.parametrize("row_id", [0, 1, 2**31, LARGEST_ID])
def test_an_id_is_uniform_over_the_buckets(width, row_id):
    words = random_words(100_000, seed=0)
    buckets = _hashing.buckets(words, torch.tensor([row_id]), width).flatten()
    assert excess(torch.bincount(buckets, minlength=width), 100_000 / width) < 4


@pytest.mark.parametrize("width", [2, 3, 16])
@pytest.mark.parametrize("pair", PAIRS)
def test_two_ids_fall_into_independent_buckets(pair, width):
    words = random_words(100_000, seed=1)
    first, second = _hashing.buckets(words, torch.tensor(pair), width).T
    assert excess(joint_counts(first, second, width), 100_000 / width**2) < 4


@pytest.mark.parametrize("pair", [(5, 5), *PAIRS])
def test_a_sign_is_independent_of_a_bucket(pair):
    words, width = random_words(100_000, seed=3), 8
    buckets = _hashing.buckets(words, torch.tensor(pair[:1]), width).flatten()
    negative = (_hashing.signs(words, torch.tensor(pair[1:])) < 0).long().flatten()
    counts = torch.bincount(buckets * 2 + negative, minlength=2 * width)
    assert excess(counts, 100_000 / (2 * width)) < 4


def test_two_hash_rows_of_a_sketch_are_independent():
    width = 16
    words = torch.stack([_hashing.seeded(seed, 0, 2) for seed in range(20_000)])
    for row_id in (0, 1, 4242):
        first, second = (
            _hashing.buckets(words[:, row], torch.tensor([row_id]), width) for row in range(2)
        )
        assert excess(joint_counts(first, second, width), 20_000 / width**2) < 4
