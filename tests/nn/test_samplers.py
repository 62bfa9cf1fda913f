"""Distributions over class ids: probabilities, draws, and draws of negatives."""

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seeds import generator

from sketchoptim.nn import LogUniformSampler, Negatives, UnigramSampler

CPU = torch.device("cpu")
SIZES = [1, 2, 10, 33_278, 793_471]


def zipf_counts(classes: int) -> torch.Tensor:
    return (1e9 / torch.arange(1, classes + 1, dtype=torch.float64)).long().clamp_(min=1)


def sampler_of(name: str, classes: int):
    if name == "log-uniform":
        return LogUniformSampler(classes)
    return UnigramSampler(zipf_counts(classes)[torch.randperm(classes, generator=generator(0))])


SAMPLERS = ["log-uniform", "unigram"]


# Distributions


@pytest.mark.parametrize("classes", SIZES)
def test_every_id_has_an_interval_as_long_as_its_probability(classes):
    sampler = LogUniformSampler(classes)
    ids = torch.arange(classes)
    ends = torch.log(ids.double() + 2) / math.log(classes + 1)
    starts = torch.log(ids.double() + 1) / math.log(classes + 1)
    steps = 4 * 2.0**-53
    assert torch.equal(sampler.from_uniform(starts + steps), ids)
    assert torch.equal(sampler.from_uniform(ends - steps), ids)
    torch.testing.assert_close(sampler.probability(ids), ends - starts, rtol=0, atol=4 * 2.0**-53)


@pytest.mark.parametrize("name", SAMPLERS)
def test_draws_pass_a_chi_square_over_the_whole_range(name):
    classes, draws = 2_000, 4_000_000
    sampler = sampler_of(name, classes)
    drawn = sampler.draw(draws, generator=generator(0), device=CPU)
    observed = drawn.bincount(minlength=classes).double()
    expected = sampler.probability(torch.arange(classes)) * draws
    assert expected.min() > 50
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    freedom = classes - 1
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)
    assert abs(observed[0] - expected[0]) < 4 * expected[0].sqrt()


counts = st.lists(
    st.one_of(st.integers(1, 20), st.integers(1, 10**9), st.floats(1e-6, 1e6)),
    min_size=1,
    max_size=40,
)


def assert_shares_are_followed(given_counts: torch.Tensor) -> None:
    classes = given_counts.numel()
    share = given_counts.double() / given_counts.sum(dtype=torch.float64)
    error = (UnigramSampler(given_counts).probability(torch.arange(classes)) - share).abs()
    largest = share.argmax()
    assert error[largest] <= classes**2 / 2**62 + classes * 2.0**-53
    error[largest] = 0
    assert (error <= 2 * classes / 2**62 + share * 2.0**-52).all()


@given(counts)
def test_the_alias_method_gives_every_class_its_share(given_counts):
    assert_shares_are_followed(torch.tensor(given_counts, dtype=torch.float64))


@pytest.mark.parametrize("classes", [33_278, 793_471])
def test_the_alias_method_gives_every_class_of_many_its_share(classes):
    assert_shares_are_followed(zipf_counts(classes))


@given(counts)
def test_alias_draws_follow_the_probabilities_exactly(given_counts):
    classes = len(given_counts)
    sampler = UnigramSampler(torch.tensor(given_counts, dtype=torch.float64))
    # in every column, the height where one id ends and the other begins, found by bisection
    column = (torch.arange(classes, dtype=torch.float64) + 0.5) / classes
    low, high = torch.zeros_like(column), torch.ones_like(column)
    for _ in range(60):
        middle = (low + high) / 2
        is_own = sampler.from_uniform(column, middle) == torch.arange(classes)
        low, high = torch.where(is_own, middle, low), torch.where(is_own, high, middle)
    other = sampler.from_uniform(column, torch.full_like(column, 1 - 2.0**-53))
    owned = torch.zeros(classes, dtype=torch.float64)
    owned.index_add_(0, torch.arange(classes), high).index_add_(0, other, 1 - high)
    torch.testing.assert_close(
        owned / classes, sampler.probability(torch.arange(classes)), rtol=1e-14, atol=1e-16
    )


@pytest.mark.parametrize(
    "counts",
    [
        torch.tensor([1, 2, 5]),
        torch.tensor([1.0, 2.0, 5.0]),
        [1, 2, 5],
        (0.1, 0.2, 0.5),
        np.array([1, 2, 5]),
    ],
    ids=str,
)
def test_counts_may_be_tensors_lists_and_arrays(counts):
    found = UnigramSampler(counts).probability(torch.arange(3))
    assert found.tolist() == pytest.approx([0.125, 0.25, 0.625])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_copy_draws_the_same(name, copied):
    sampler = sampler_of(name, 100)
    expected = sampler.draw(50, generator=generator(0), device=CPU)
    assert torch.equal(copied(sampler).draw(50, generator=generator(0), device=CPU), expected)


# Draws of negatives


@pytest.mark.parametrize("repeats", ["merged", "kept", "redrawn"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_ids_are_drawn_as_often_as_their_expected_count_says(name, repeats):
    classes, samples, rounds = 50, 20, 2_000
    sampler = sampler_of(name, classes)
    source = generator(1)
    probability = sampler.probability(torch.arange(classes))
    seen, seen_squared, expected = torch.zeros(3, classes, dtype=torch.float64)
    for _ in range(rounds):
        drawn = Negatives.draw(sampler, samples, repeats=repeats, generator=source)
        # how many tries a draw takes depends on what it finds, so it is compared by itself
        surplus = -drawn.log_expected_count(probability).exp()
        expected -= surplus
        surplus[drawn.ids] += drawn.counts
        seen += surplus
        seen_squared += surplus**2
    sd = (seen_squared / rounds).sqrt() / math.sqrt(rounds)
    if repeats == "redrawn":
        # TensorFlow's count takes the tries as if they had been chosen beforehand; almost so
        assert (seen.abs() < 0.02 * expected + 4.5 * sd * rounds).all()
    else:
        assert (seen.abs() < 4.5 * sd * rounds).all()


@pytest.mark.parametrize("repeats", ["merged", "kept", "redrawn"])
def test_drawn_ids_are_distinct_and_ascend(repeats):
    drawn = Negatives.draw(LogUniformSampler(50), 40, repeats=repeats, generator=generator(0))
    assert drawn.ids.tolist() == sorted(set(drawn.ids.tolist()))
    assert drawn.counts.shape == drawn.ids.shape


def test_kept_repeats_are_counted_and_merged_ones_are_not():
    sampler = LogUniformSampler(10)
    ids = sampler.draw(1000, generator=generator(0), device=CPU)
    kept = Negatives.draw(sampler, 1000, repeats="kept", generator=generator(0))
    assert kept.counts.tolist() == ids.bincount(minlength=10).tolist()
    merged = Negatives.draw(sampler, 1000, repeats="merged", generator=generator(0))
    assert merged.ids.tolist() == list(range(10))
    assert merged.counts.tolist() == [1] * 10


class Scripted:
    """A sampler that draws the given ids, one list a call."""

    def __init__(self, classes: int, *calls: list[int]) -> None:
        self.classes, self.endless = classes, itertools.cycle(itertools.chain(*calls))

    def draw(self, count, *, generator, device):
        return torch.tensor(list(itertools.islice(self.endless, count)))

    def probability(self, ids):
        return torch.full_like(ids, 1 / self.classes, dtype=torch.float64)


def test_redrawing_ends_with_the_draw_that_finds_the_last_distinct_id():
    drawn = Negatives.draw(Scripted(9, [7, 7, 3, 7, 3, 5, 1]), 3, repeats="redrawn")
    assert drawn.ids.tolist() == [3, 5, 7]
    assert drawn.tries == 6


def test_redrawing_goes_on_when_one_batch_of_draws_is_not_enough():
    drawn = Negatives.draw(Scripted(9, [4] * 10, [2, 4, 4, 8]), 3, repeats="redrawn")
    assert drawn.ids.tolist() == [2, 4, 8]
    assert drawn.tries == 14


def test_redrawing_can_find_every_class():
    drawn = Negatives.draw(LogUniformSampler(300), 300, repeats="redrawn", generator=generator(0))
    assert drawn.ids.tolist() == list(range(300))


@pytest.mark.parametrize("samples", [1, 5, 100])
def test_log_expected_counts_are_the_documented_ones(samples):
    sampler = LogUniformSampler(40)
    p = sampler.probability(torch.arange(40))
    draws = {
        name: Negatives.draw(sampler, min(samples, 40), repeats=name, generator=generator(0))
        for name in ("merged", "kept", "redrawn")
    }
    for name, drawn in draws.items():
        expected = drawn.tries * p if name == "kept" else 1 - (1 - p) ** drawn.tries
        torch.testing.assert_close(drawn.log_expected_count(p).exp(), expected)


# Bad input


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([[1, 2]], r"counts must have shape \(classes,\), got \(1, 2\)"),
        ([], r"counts must have shape \(classes,\), got \(0,\)"),
        ([1, 0, 2], r"finite and > 0, got values from 0.0 to 2.0; .*clamp\(min=1\)"),
        ([1.0, math.inf], "finite and > 0, got values from 1.0 to inf"),
        ([1.0, math.nan], "finite and > 0, got values from nan to nan"),
    ],
)
def test_bad_counts_get_a_clear_error(bad, message):
    with pytest.raises(ValueError, match=message):
        UnigramSampler(torch.tensor(bad))


@pytest.mark.parametrize(("classes", "error"), [(0, ValueError), (4.0, TypeError)])
def test_a_number_of_classes_that_cannot_be_gets_a_clear_error(classes, error):
    with pytest.raises(error, match=f"classes must be .*, got {classes}"):
        LogUniformSampler(classes)


@pytest.mark.parametrize(
    ("samples", "repeats", "message"),
    [
        (5, "unique", r"repeats must be one of \['merged', 'kept', 'redrawn'\], got 'unique'"),
        (0, "kept", "samples must be >= 1, got 0"),
        (11, "redrawn", "samples must be <= classes = 10 when repeats are redrawn, got 11"),
    ],
)
def test_a_draw_that_cannot_be_gets_a_clear_error(samples, repeats, message):
    with pytest.raises(ValueError, match=message):
        Negatives.draw(LogUniformSampler(10), samples, repeats=repeats)
