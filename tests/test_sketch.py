"""The laws of both sketches, and their errors against the published bounds.

Values are small whole numbers and factors powers of two where float32 has to be exact.
"""

import copy
import math

import naive_sketches
import numpy as np
import pytest
import torch
from collision_free import collision_free_ids
from hypothesis import given
from hypothesis import strategies as st
from sketch_cases import (
    COUNT_MIN_KINDS,
    Size,
    Stream,
    build,
    count_min_kind,
    even_sizes,
    every_kind,
    histories,
    linear_kind,
    readings,
    replay,
    sized_streams,
    streams,
    true_totals,
)
from torch import Tensor

import sketchoptim as so
from sketchoptim import _sketch_base


def build_naive(kind: str, size: Size, seed: int = 0) -> naive_sketches.CountSketch:
    forms = {
        "count-sketch": naive_sketches.CountSketch,
        "count-min": naive_sketches.CountMin,
        "conservative": naive_sketches.ConservativeCountMin,
    }
    return forms[kind](naive_sketches.Hash(seed, 0, size.depth), size.width, size.dim)


# -- against the naive form ----------------------------------------------------------------------


@every_kind
@given(st.data())
def test_a_sketch_equals_its_naive_form(kind, data):
    factors = (0.0, 0.25, 0.5, 2.0) + ((-1.0,) if kind == "count-sketch" else ())
    size, seed, operations = data.draw(histories(kind, st.sampled_from(factors)))
    found = replay(build(kind, size, seed), operations)
    expected = build_naive(kind, size, seed)
    seen = {3}
    for operation in operations:
        if isinstance(operation, Stream):
            expected.add(zip(operation.ids.tolist(), operation.values.numpy(), strict=True))
            seen |= set(operation.ids.tolist())
        elif operation == "fold":
            expected.fold()
        else:
            expected.scale(operation)
    ids = sorted(seen)
    naive = np.array([expected.query(row_id) for row_id in ids])
    assert np.array_equal(found.query(torch.tensor(ids)).numpy(), naive)


@every_kind
def test_a_sketch_without_collisions_holds_every_vector_exactly(kind):
    generator = torch.Generator().manual_seed(0)
    ids, values = collision_free_ids(50, 100, 4), torch.rand(50, 3, generator=generator)
    found = build(kind, Size(4, 100, 3)).add_(ids, values)
    assert torch.equal(found.query(ids), values)


# -- linearity, merging, folding -----------------------------------------------------------------


@linear_kind
@given(st.data(), st.integers(0, 5), st.integers(0, 5))
def test_a_sketch_is_linear(kind, data, a, b):
    size, seed, (one, other) = data.draw(sized_streams(kind, 2))
    combined = build(kind, size, seed).add_(*(one.times(a) + other.times(b)))
    apart = [build(kind, size, seed).add_(*stream) for stream in (one, other)]
    assert torch.equal(combined.counters, a * apart[0].counters + b * apart[1].counters)


@linear_kind
@given(st.data(), st.sampled_from([0.25, 1.0, 4.0]), st.sampled_from([0.125, 1.0, 2.0]))
def test_merging_equals_one_sketch_of_both_scaled_streams(kind, data, mine, yours):
    size, seed, (one, other) = data.draw(sized_streams(kind, 2))
    merged = build(kind, size, seed).add_(*one).scale_(mine)
    merged.merge_(build(kind, size, seed).add_(*other).scale_(yours))
    together = build(kind, size, seed).add_(*(one.times(mine) + other.times(yours)))
    assert torch.equal(readings(merged), readings(together))


@every_kind
def test_merging_leaves_the_other_sketch_alone(kind):
    one, other = (build(kind, Size(3, 8, 2)) for _ in range(2))
    other.add_(torch.arange(5), torch.ones(5, 2)).scale_(0.5)
    before = copy.deepcopy(other)
    one.merge_(other)
    assert torch.equal(other.counters, before.counters)
    assert other.scale == before.scale


@linear_kind
@given(st.data(), st.integers(0, 5), st.integers(1, 3))
def test_folding_down_step_by_step_equals_a_narrow_sketch(kind, data, folds, width):
    size = Size(3, width * 2**folds, 2)
    stream = data.draw(streams(2, is_signed=kind == "count-sketch"))
    folded = build(kind, size).add_(*stream)
    for _ in range(folds):
        folded.fold_()
    assert torch.equal(
        folded.counters, build(kind, size._replace(width=width)).add_(*stream).counters
    )


@linear_kind
@given(st.data())
def test_a_folded_sketch_goes_on_like_a_narrow_one(kind, data):
    size, seed, (before, after) = data.draw(sized_streams(kind, 2, even_sizes))
    folded = build(kind, size, seed).add_(*before).fold_().add_(*after)
    narrow = build(kind, size._replace(width=size.width // 2), seed).add_(*(before + after))
    assert torch.equal(folded.counters, narrow.counters)


# -- count-min -----------------------------------------------------------------------------------


@count_min_kind
@given(st.data())
def test_count_min_never_underestimates(kind, data):
    factors = st.sampled_from([0.0, 0.5, 1.0, 2.0])
    size, seed, operations = data.draw(histories(kind, factors))
    found = replay(build(kind, size, seed), operations)
    for row_id, true in true_totals(operations).items():
        assert (found.query(torch.tensor([row_id]))[0] >= true).all()


@count_min_kind
@given(st.data())
def test_merged_count_mins_never_underestimate(kind, data):
    size, seed, (one, other) = data.draw(sized_streams(kind, 2))
    merged = build(kind, size, seed).add_(*one).merge_(build(kind, size, seed).add_(*other))
    for row_id, true in (one + other).totals().items():
        assert (merged.query(torch.tensor([row_id]))[0] >= true).all()


@given(st.data())
def test_a_conservative_count_min_is_never_above_the_plain_one(data):
    factors = st.sampled_from([0.0, 0.5, 1.0, 2.0])
    size, seed, operations = data.draw(histories("count-min", factors))
    plain, conservative = (
        replay(build(kind, size, seed), operations) for kind in ("count-min", "conservative")
    )
    assert (readings(conservative) <= readings(plain)).all()


def test_a_conservative_count_min_is_closer_on_a_skewed_stream():
    truth = 1000 / torch.arange(1.0, 2001.0).unsqueeze(1)
    ids = torch.arange(2000)
    errors = {
        kind: (build(kind, Size(3, 200, 1)).add_(ids, truth).query(ids) - truth).mean().item()
        for kind in COUNT_MIN_KINDS
    }
    assert errors["conservative"] < 0.5 * errors["count-min"]


def test_the_order_of_ids_does_not_matter_to_a_conservative_count_min():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(40_000, generator=generator)
    values = torch.rand(40_000, 2, generator=generator)
    order = torch.randperm(40_000, generator=generator)
    size = Size(3, 500, 2)
    assert ids.numel() > 2 * _sketch_base._IDS_AT_ONCE
    there = build("conservative", size).add_(ids, values)
    back = build("conservative", size).add_(ids[order], values[order])
    assert torch.equal(there.counters, back.counters)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(st.data(), st.integers(1, 5))
def test_how_many_ids_are_handled_at_once_does_not_matter(kind, dtype, data, at_once):
    size, seed, (stream, more) = data.draw(sized_streams(kind, 2))
    stream = stream.times(1001)  # too long for bfloat16, so that it is rounded
    whole = build(kind, size, seed, dtype=dtype).add_(*stream).add_(*more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sketch_base, "_IDS_AT_ONCE", at_once)
        parts = build(kind, size, seed, dtype=dtype).add_(*stream).add_(*more)
        assert torch.equal(parts.query(stream.ids), whole.query(stream.ids))
    assert torch.equal(parts.counters, whole.counters)


@every_kind
@given(st.data())
def test_values_of_an_id_that_repeats_in_one_call_are_summed(kind, data):
    size, seed, (stream,) = data.draw(sized_streams(kind, 1))
    totals = stream.totals()
    ids = torch.tensor(sorted(totals), dtype=torch.int64)
    summed = [totals[row_id].float() for row_id in ids.tolist()]
    values = torch.stack(summed) if summed else torch.zeros(0, size.dim)
    repeated, once = build(kind, size, seed), build(kind, size, seed)
    assert torch.equal(repeated.add_(*stream).counters, once.add_(ids, values).counters)


# -- published bounds ----------------------------------------------------------------------------

ITEMS, DIM = 400, 2


def stream_of(shape: str, seed: int, *, is_signed: bool) -> tuple[Tensor, Tensor]:
    """The ids and true vectors of a stream whose magnitudes are Zipf-distributed or uniform."""
    generator = torch.Generator().manual_seed(seed)
    if shape == "zipf":
        order = torch.randperm(ITEMS, generator=generator)
        values = (100 / torch.arange(1.0, ITEMS + 1))[order].unsqueeze(1).repeat(1, DIM)
    else:
        values = torch.rand(ITEMS, DIM, generator=generator)
    if is_signed:
        values = values * (torch.randint(2, (ITEMS, DIM), generator=generator) * 2 - 1)
    return torch.randint(2**32, (ITEMS,), generator=generator).unique(), values


def errors_of(kind: str, shape: str, trial: int, size: Size) -> tuple[Tensor, Tensor]:
    """Estimate less truth ``[items, dim]``, and the norm of the bound ``[dim]``."""
    is_signed = kind == "count-sketch"
    ids, values = stream_of(shape, trial, is_signed=is_signed)
    error = build(kind, size, seed=trial).add_(ids, values).query(ids) - values
    return error, values.norm(2 if is_signed else 1, dim=0)


every_shape = pytest.mark.parametrize("shape", ["zipf", "uniform"])


@every_shape
@count_min_kind
@pytest.mark.parametrize("epsilon", [0.02, 0.2])
def test_count_min_error_stays_within_its_published_bound(kind, shape, epsilon):
    delta, trials = 0.2, 60
    sized = so.CountMinSketch.for_error(epsilon, delta, ITEMS, DIM)
    size = Size(sized.depth, sized.width, sized.dim)
    failures = 0
    for trial in range(trials):
        error, norm = errors_of(kind, shape, trial, size)
        assert (error >= -1e-3).all()  # of norms in the hundreds: rounding alone
        failures += bool((error > epsilon * norm).any())
    assert failures <= delta * trials


@every_shape
@pytest.mark.parametrize("epsilon", [0.2, 0.5])
def test_count_sketch_error_stays_within_its_published_bound(shape, epsilon):
    delta, trials = 0.2, 60
    sized = so.CountSketch.for_error(epsilon, delta, ITEMS, DIM)
    size = Size(sized.depth, sized.width, sized.dim)
    failures = 0
    for trial in range(trials):
        error, norm = errors_of("count-sketch", shape, trial, size)
        failures += bool((error.abs() > epsilon * norm).any())
    assert failures <= delta * trials


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_a_count_sketch_is_unbiased(depth):
    size, trials = Size(depth, 16, 1), 1000
    ids, truth = torch.arange(40), torch.linspace(-3, 9, 40).unsqueeze(1)
    estimates = torch.stack(
        [build("count-sketch", size, seed).add_(ids, truth).query(ids) for seed in range(trials)]
    )
    deviation = (estimates.mean(0) - truth) / (estimates.std(0) / math.sqrt(trials))
    assert deviation.abs().max() < 4
