"""The best of very many classes: kernel against reference, reference against argsort."""

from unittest import mock

import numpy as np
import pytest
import torch
from backends import LEVELS, bits, library, needs_native
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sketchoptim import _hashing
from sketchoptim.ops import _top_classes as module
from sketchoptim.ops._top_classes import TopClasses, reference, top_classes

COMBINATIONS = ["sum", "least", "median"]


def random_tables(members: int, queries: int, buckets: int, *, seed: int = 0) -> Tensor:
    """Scores of few distinct values where the seed is odd, so that equal sums are met."""
    generator = torch.Generator().manual_seed(seed)
    tables = torch.randn(members, queries, buckets, generator=generator)
    return tables.round() if seed % 2 else tables


def by_level(level: str, threads: int, *arguments) -> TopClasses:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with mock.patch.object(module._native, "library", return_value=library(level)):
            return top_classes(*arguments)
    finally:
        torch.set_num_threads(before)


def assert_same(found: TopClasses, expected: TopClasses) -> None:
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(bits(found.scores + 0.0), bits(expected.scores + 0.0))  # -0 is 0


@needs_native
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("level", LEVELS)
@given(
    members=st.integers(1, 32),
    queries=st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 70]),
    buckets=st.sampled_from([2, 3, 50]),
    count=st.sampled_from([1, 2, 3, 4, 5, 7, 30, 301]),
    threads=st.integers(1, 4),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_the_kernel_finds_what_the_reference_finds(
    level, combination, members, queries, buckets, count, threads, seed, data
):
    tables, words = (
        random_tables(members, queries, buckets, seed=seed),
        _hashing.seeded(seed, 1, members),
    )
    classes: int | Tensor = count
    if data.draw(st.booleans()):
        some = st.integers(0, 2**32 - 1)
        chosen = data.draw(st.lists(some, min_size=count, max_size=count, unique=True))
        classes = torch.tensor(sorted(chosen))
    k = data.draw(st.integers(1, count))
    found = by_level(level, threads, tables, words, classes, k, combination)
    assert_same(found, reference(tables, words, classes, k, combination))


def by_argsort(tables: Tensor, words: Tensor, count: int, k: int, combination: str) -> TopClasses:
    """All scores, sorted."""
    buckets = _hashing.buckets(words, torch.arange(count), tables.shape[2]).numpy()
    readings = np.stack([table[:, row] for table, row in zip(tables.numpy(), buckets, strict=True)])
    combine = {"sum": np.sum, "least": np.min, "median": np.median}[combination]
    scores = combine(readings, axis=0)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return TopClasses(
        torch.from_numpy(np.take_along_axis(scores, order, 1)), torch.from_numpy(order)
    )


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("k", [1, 7, 2_000])
def test_the_reference_finds_what_argsort_finds(combination, seed, k):
    tables, words = random_tables(4, 5, 60, seed=seed), _hashing.seeded(seed, 0, 4)
    with mock.patch.object(module, "_CHUNK", 777):
        found = reference(tables, words, 2_000, k, combination)
    expected = by_argsort(tables, words, 2_000, k, combination)
    assert torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.scores, expected.scores)


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_a_million_classes_are_ranked_as_argsort_ranks_them(combination):
    tables, words = random_tables(4, 2, 20_000), _hashing.seeded(0, 0, 4)
    found = top_classes(tables, words, 1_000_000, 10, combination)
    assert torch.equal(found.ids, by_argsort(tables, words, 1_000_000, 10, combination).ids)


def test_among_equal_scores_the_lower_class_is_first():
    found = top_classes(torch.zeros(2, 3, 5), _hashing.seeded(0, 0, 2), 1_000, 20, "sum")
    assert torch.equal(found.ids, torch.arange(20).expand(3, -1))


def test_no_query_finds_nothing():
    found = top_classes(torch.zeros(2, 0, 5), _hashing.seeded(0, 0, 2), 10, 4, "sum")
    assert found.ids.shape == found.scores.shape == (0, 4)


def test_more_members_than_the_kernel_takes_are_left_to_the_reference():
    tables, words = random_tables(40, 3, 20), _hashing.seeded(0, 0, 40)
    found = top_classes(tables, words, 500, 9, "median")
    assert_same(found, reference(tables, words, 500, 9, "median"))


@needs_native
def test_without_a_library_the_reference_answers():
    tables, words = random_tables(3, 2, 20), _hashing.seeded(0, 0, 3)
    with mock.patch.object(module._native, "library", return_value=None):
        found = top_classes(tables, words, 100, 5, "sum")
    assert_same(found, by_level(LEVELS[-1], 1, tables, words, 100, 5, "sum"))
