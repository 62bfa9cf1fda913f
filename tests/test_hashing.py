"""The hash: golden numbers, what its family guarantees, and the laws that sketches rely on."""

import math
from functools import cache
from itertools import pairwise

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


def test_splitmix64_gives_its_published_outputs():
    assert specification.splitmix64(0) == 0xE220A8397B1DCDAF
    assert specification.splitmix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4
    assert specification.splitmix64(1234567) == 6457827717110365317


@pytest.mark.parametrize("key", KEYS)
def test_the_specification_gives_the_golden_words(key):
    assert specification.words_of(*key) == specification.WORDS[key]


@pytest.mark.parametrize("key", KEYS)
def test_the_specification_gives_the_golden_buckets_and_signs(key):
    words = specification.WORDS[key]
    for row_id, sign in zip(specification.IDS, specification.SIGNS[key], strict=True):
        buckets = [specification.bucket_of(words, row_id, w) for w in specification.WIDTHS]
        assert tuple(buckets) == specification.BUCKETS[key][row_id]
        assert specification.sign_of(words, row_id) == sign


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


@given(words_tensors, id_tensors, st.integers(1, _hashing.MAX_WIDTH))
def test_a_bucket_lies_below_the_width(words, ids, width):
    buckets = _hashing.buckets(words, ids, width)
    assert buckets.shape == (words.shape[0], ids.numel())
    assert ((buckets >= 0) & (buckets < width)).all()


@given(words_tensors, id_tensors, st.integers(1, _hashing.MAX_WIDTH // 2))
def test_halving_the_width_halves_the_bucket(words, ids, half):
    wide, narrow = _hashing.buckets(words, ids, 2 * half), _hashing.buckets(words, ids, half)
    assert torch.equal(narrow, wide // 2)


def test_signs_are_float32():
    signs = _hashing.signs(_hashing.seeded(0, 0, 3), torch.arange(100))
    assert signs.dtype == torch.float32
    assert set(signs.flatten().tolist()) == {-1.0, 1.0}


# -- the seed ------------------------------------------------------------------------------------


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**32), st.integers(1, 6))
def test_a_hash_row_does_not_depend_on_the_depth(seed, parameter, depth):
    longer = _hashing.seeded(seed, parameter, depth + 2)
    assert torch.equal(_hashing.seeded(seed, parameter, depth), longer[:depth])


# Names that differ in their case, their length, a zero byte, or where an eight-byte word ends.
NAMES = ["", "\0", "a", "A", "a\0", "aaaaaaaa", "aaaaaaaaa", "aaaaaaaa\0", "0", "1", "ß", "\udcff"]


def test_each_name_and_number_has_words_of_its_own():
    parameters = [*NAMES, *(f"layers.{i}.weight" for i in range(100)), *range(100)]
    words = torch.cat([_hashing.seeded(0, parameter, 2) for parameter in parameters])
    assert words.unique().numel() == words.numel()


def test_each_seed_parameter_and_row_has_words_of_its_own():
    words = many_seeded_words()
    assert words.unique().numel() == words.numel()


def test_seeded_words_have_unbiased_bits():
    words = many_seeded_words()
    bits = torch.stack([(words >> place) & 1 for place in range(64)])
    ones, trials = bits.sum(1), words.shape[0]  # of each bit of each of the four words
    assert ((ones - trials / 2) / math.sqrt(trials / 4)).abs().max() < 4.5


@pytest.mark.parametrize("moved", ["seed", "parameter", "row"])
def test_neighbouring_keys_give_unrelated_words(moved):
    rows = {
        "seed": lambda: torch.cat([_hashing.seeded(n, 0, 1) for n in range(2001)]),
        "parameter": lambda: torch.cat([_hashing.seeded(0, n, 1) for n in range(2001)]),
        "row": lambda: _hashing.seeded(0, 0, 2001),
    }[moved]()
    differing = [
        unsigned(old ^ new).bit_count()
        for before, after in pairwise(rows.tolist())
        for old, new in zip(before, after, strict=True)
    ]
    deviation = sum(differing) / len(differing) - 32
    assert abs(deviation) < 4 * math.sqrt(16 / len(differing))
    assert min(differing) > 8


@pytest.mark.parametrize("width", [2, 64, 1000])
def test_neighbouring_parameters_agree_on_a_bucket_by_chance_only(width):
    ids = torch.arange(200_000)
    here, there = (_hashing.buckets(_hashing.seeded(0, p, 3), ids, width) for p in (0, 1))
    agreements = (here == there).sum().item()
    expected = here.numel() / width
    assert abs(agreements - expected) < 4 * math.sqrt(expected)


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
            for seed in range(200)
            for row in _hashing.buckets(_hashing.seeded(seed, parameter, 3), ids, width)
        ]
    )
    excesses = (empty - mean) / deviation
    assert excesses.abs().max() < 4.5  # of 600 hash rows
    assert abs(excesses.mean().item()) < 4 / math.sqrt(600)


@pytest.mark.parametrize("width", [2, 3, 7, 64, 1000])
@pytest.mark.parametrize("row_id", [0, 1, 2**31, LARGEST_ID])
def test_an_id_is_uniform_over_the_buckets(width, row_id):
    words = random_words(100_000, seed=0)
    buckets = _hashing.buckets(words, torch.tensor([row_id]), width).flatten()
    assert excess(torch.bincount(buckets, minlength=width), 100_000 / width) < 4


@pytest.mark.parametrize("width", [2, 5, 64])
def test_an_id_is_uniform_over_the_buckets_of_seeded_words(width):
    words = many_seeded_words()
    for row_id in (0, 1, 77_777, LARGEST_ID):
        buckets = _hashing.buckets(words, torch.tensor([row_id]), width).flatten()
        assert excess(torch.bincount(buckets, minlength=width), words.shape[0] / width) < 4


@pytest.mark.parametrize("width", [3, 64, 1000, 33061])
def test_random_ids_are_uniform_over_the_buckets(width):
    ids = torch.randint(LARGEST_ID, (100_000,), generator=torch.Generator().manual_seed(6))
    buckets = _hashing.buckets(_hashing.seeded(0, 0, 3), ids, width)
    for row in buckets:
        assert excess(torch.bincount(row, minlength=width), ids.numel() / width) < 4


@pytest.mark.parametrize("width", [2, 3, 16])
@pytest.mark.parametrize("pair", PAIRS)
def test_two_ids_fall_into_independent_buckets(pair, width):
    words = random_words(100_000, seed=1)
    first, second = _hashing.buckets(words, torch.tensor(pair), width).T
    assert excess(joint_counts(first, second, width), 100_000 / width**2) < 4


@pytest.mark.parametrize("pair", PAIRS)
def test_two_ids_have_independent_signs(pair):
    signs = _hashing.signs(random_words(100_000, seed=2), torch.tensor(pair))
    first, second = (signs.T < 0).long()
    assert excess(joint_counts(first, second, 2), 100_000 / 4) < 4


@pytest.mark.parametrize("pair", [(5, 5), *PAIRS])
def test_a_sign_is_independent_of_a_bucket(pair):
    words, width = random_words(100_000, seed=3), 8
    buckets = _hashing.buckets(words, torch.tensor(pair[:1]), width).flatten()
    negative = (_hashing.signs(words, torch.tensor(pair[1:])) < 0).long().flatten()
    counts = torch.bincount(buckets * 2 + negative, minlength=2 * width)
    assert excess(counts, 100_000 / (2 * width)) < 4


@pytest.mark.parametrize("source", ["random", "seeded"])
@pytest.mark.parametrize("width", [1, 2, 3, 10, 64, 1000])
def test_two_ids_collide_as_often_as_independent_draws(source, width):
    words = random_words(100_000, seed=4) if source == "random" else many_seeded_words()
    for pair in PAIRS:
        first, second = _hashing.buckets(words, torch.tensor(pair), width).T
        collisions = (first == second).sum().item()
        expected = words.shape[0] / width
        assert abs(collisions - expected) <= 4 * math.sqrt(expected * (1 - 1 / width))


def test_two_hash_rows_of_a_sketch_are_independent():
    width = 16
    words = torch.stack([_hashing.seeded(seed, 0, 2) for seed in range(20_000)])
    for row_id in (0, 1, 4242):
        first, second = (
            _hashing.buckets(words[:, row], torch.tensor([row_id]), width) for row in range(2)
        )
        assert excess(joint_counts(first, second, width), 20_000 / width**2) < 4


@pytest.mark.parametrize(
    ("broken", "pair"), [(0, (1, 2)), (1, (0, 1))], ids=["no multiplier", "nothing added"]
)
def test_the_independence_test_rejects_a_hash_that_lacks_a_word(broken, pair):
    words = random_words(100_000, seed=5).clone()
    words[:, broken] = 0
    first, second = _hashing.buckets(words, torch.tensor(pair), 16).T
    assert excess(joint_counts(first, second, 16), 100_000 / 256) > 100


@given(st.data(), st.integers(1, _hashing.MAX_WIDTH))
def test_every_bucket_gets_its_share_of_the_values_of_u(data, width):
    bucket = data.draw(st.integers(0, width - 1))
    first = -(-bucket * 2**32 // width)  # so shares differ by one value of 2^32 at most
    for u, expected in ((first, bucket), (first - 1, bucket - 1)):
        if expected >= 0:
            word = (u << 32) - (2**64 if u >= 2**31 else 0)
            words = torch.tensor([[0, word, 0, 0]])
            assert _hashing.buckets(words, torch.tensor([0]), width).item() == expected
