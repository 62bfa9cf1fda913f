"""What a sketch refuses, with which message, and that it stays as it was, bit for bit."""

import re

import pytest
import torch

import sketchoptim as so

ANY = (3, 8, 2)

BAD_SKETCHES = [
    (lambda: so.CountSketch(0, 8, 2), ValueError, "depth must be >= 1, got 0"),
    (lambda: so.CountSketch(3, 0, 2), ValueError, "width must be >= 1, got 0"),
    (lambda: so.CountSketch(3, 8, -1), ValueError, "dim must be >= 1, got -1"),
    (lambda: so.CountSketch(3.0, 8, 2), TypeError, "depth must be an int, got 3.0"),
    (lambda: so.CountSketch(3, "8", 2), TypeError, "width must be an int, got '8'"),
    (lambda: so.CountSketch(3, 8, True), TypeError, "dim must be an int, got True"),
    (lambda: so.CountSketch(3, 2**31 + 1, 2), ValueError, "width must be <= 2147483648"),
    (
        lambda: so.CountSketch(*ANY, dtype=torch.float16),
        ValueError,
        "dtype must be torch.float32 or torch.bfloat16, got torch.float16",
    ),
    (lambda: so.CountMinSketch(3, 0, 2), ValueError, "width must be >= 1, got 0"),
    (
        lambda: so.CountMinSketch(*ANY, dtype=torch.int64),
        ValueError,
        "dtype must be torch.float32 or torch.bfloat16, got torch.int64",
    ),
    (lambda: so.CountSketch(*ANY, seed=1.5), TypeError, "seed must be an int, got 1.5"),
    (lambda: so.CountMinSketch(*ANY, seed=None), TypeError, "seed must be an int, got None"),
    (
        lambda: so.CountMinSketch(*ANY, conservative="no"),
        TypeError,
        "conservative must be True or False, got 'no'",
    ),
]

BAD_ERRORS = [
    ({"epsilon": 0.0}, "epsilon must be between 0 and 1, got 0.0"),
    ({"epsilon": 1.0}, "epsilon must be between 0 and 1, got 1.0"),
    ({"epsilon": float("nan")}, "epsilon must be between 0 and 1, got nan"),
    ({"delta": 0.0}, "delta must be between 0 and 1, got 0.0"),
    ({"delta": 2.0}, "delta must be between 0 and 1, got 2.0"),
    ({"items": 0}, "items must be >= 1, got 0"),
    ({"dim": 0}, "dim must be >= 1, got 0"),
]

IDS, VALUES = torch.arange(3), torch.ones(3, 2)


def values_with(bad, dtype=torch.float32):
    values = torch.ones(3, 2, dtype=dtype)
    values[1, 1] = bad
    return values


# For every kind of sketch: a call on a sketch of ANY size, the error, and its message.
BAD_CALLS = [
    ("add_", (IDS.float(), VALUES), TypeError, "ids must be int64 of shape [k], got torch.float32"),
    ("add_", (IDS.view(3, 1), VALUES), TypeError, "ids must be int64 of shape [k]"),
    ("add_", (IDS.bool(), VALUES), TypeError, "ids must be int64 of shape [k], got torch.bool"),
    ("add_", (IDS - 1, VALUES), ValueError, "ids must be between 0 and 2**32 - 1, got -1 to 1"),
    (
        "add_",
        (IDS + 2**32 - 2, VALUES),
        ValueError,
        "ids must be between 0 and 2**32 - 1, got 4294967294 to 4294967296",
    ),
    ("add_", (IDS.to("meta"), VALUES), ValueError, "ids must be on cpu, got meta"),
    ("add_", ([1], [[1.0, 2.0]]), TypeError, "ids must be a tensor, got [1]; use torch.tensor()"),
    ("add_", (IDS, [[1.0, 2.0]]), TypeError, "values must be a tensor, got [[1.0, 2.0]]; use"),
    ("query", ([1],), TypeError, "ids must be a tensor, got [1]; use torch.tensor()"),
    ("add_", (IDS, VALUES[:2]), ValueError, "values must have shape [3, 2], got [2, 2]"),
    ("add_", (IDS, VALUES[:, :1]), ValueError, "values must have shape [3, 2], got [3, 1]"),
    ("add_", (IDS, VALUES[:, 0]), ValueError, "values must have shape [3, 2], got [3]"),
    ("add_", (IDS, VALUES.to("meta")), ValueError, "values must be on cpu, got meta"),
    ("add_", (IDS, VALUES + 1j), TypeError, "values must be real, got torch.complex64"),
    ("add_", (IDS, values_with(float("nan"))), ValueError, "values must be finite"),
    ("add_", (IDS, values_with(float("inf"))), ValueError, "values must be finite"),
    ("add_", (IDS, values_with(-float("inf"))), ValueError, "values must be finite"),
    ("add_", (IDS, values_with(float("inf"), torch.float16)), ValueError, "values must be finite"),
    ("add_", (IDS, values_with(1e300, torch.float64)), ValueError, "within 2**80"),
    ("add_", (IDS, values_with(1.25e24)), ValueError, "within 2**80"),
    ("query", (IDS.double(),), TypeError, "ids must be int64 of shape [k], got torch.float64"),
    ("query", (IDS - 5,), ValueError, "ids must be between 0 and 2**32 - 1, got -5 to -3"),
    ("query", (IDS.to("meta"),), ValueError, "ids must be on cpu, got meta"),
    ("scale_", (float("nan"),), ValueError, "factor must be finite"),
    ("scale_", (float("inf"),), ValueError, "factor must be finite"),
    ("scale_", (1e39,), ValueError, "factor must leave every estimate finite, got 1e+39"),
    ("scale_", (1e300,), ValueError, "factor must leave every estimate finite, got 1e+300"),
    ("merge_", (so.CountSketch(3, 4, 2),), ValueError, "other must be like"),
    ("merge_", (so.CountMinSketch(3, 4, 2),), ValueError, "other must be"),
    ("merge_", (so.CountSketch(2, 8, 2),), ValueError, "other must be like"),
    ("merge_", (None,), ValueError, "other must be like"),
]

KINDS = {
    "count-sketch": lambda **options: so.CountSketch(*ANY, **options),
    "count-min": lambda **options: so.CountMinSketch(*ANY, **options),
    "conservative": lambda **options: so.CountMinSketch(*ANY, conservative=True, **options),
}


def check_refusal(found, method, arguments, error, message):
    """A filled sketch refuses the call and is the same after it, in every tensor and bit."""
    generator = torch.Generator().manual_seed(0)
    found.add_(torch.arange(20), torch.rand(20, 2, generator=generator)).scale_(0.7)
    before = {name: tensor.clone() for name, tensor in found.tensors().items()}
    with pytest.raises(error, match=re.escape(message)):
        getattr(found, method)(*arguments)
    for name, tensor in found.tensors().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(("call", "error", "message"), BAD_SKETCHES)
def test_a_sketch_that_makes_no_sense_is_refused(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


@pytest.mark.parametrize("kind", [so.CountSketch, so.CountMinSketch])
@pytest.mark.parametrize(("changed", "message"), BAD_ERRORS)
def test_an_error_that_makes_no_sense_is_refused(kind, changed, message):
    asked = {"epsilon": 0.1, "delta": 0.1, "items": 10, "dim": 2} | changed
    with pytest.raises(ValueError, match=re.escape(message)):
        kind.for_error(**asked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("method", "arguments", "error", "message"), BAD_CALLS)
def test_a_bad_call_is_refused_and_changes_nothing(kind, dtype, method, arguments, error, message):
    check_refusal(KINDS[kind](dtype=dtype), method, arguments, error, message)


@pytest.mark.parametrize("kind", ["count-min", "conservative"])
@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("add_", (IDS, values_with(-1e-30)), "values must be >= 0 in a count-min sketch"),
        ("scale_", (-0.5,), "factor must be finite and >= 0, got -0.5"),
        ("merge_", (so.CountSketch(*ANY),), "other must be like CountMinSketch"),
    ],
)
def test_a_count_min_refuses_signs(kind, method, arguments, message):
    check_refusal(KINDS[kind](), method, arguments, ValueError, message)


@pytest.mark.parametrize("kind", KINDS)
def test_merging_sketches_of_another_hash_is_refused(kind):
    other = KINDS[kind](seed=1)
    check_refusal(KINDS[kind](), "merge_", (other,), ValueError, "other must have the same hash")


@pytest.mark.parametrize("is_conservative", [False, True])
def test_merging_a_plain_with_a_conservative_count_min_is_refused(is_conservative):
    one = so.CountMinSketch(*ANY, conservative=is_conservative)
    other = so.CountMinSketch(*ANY, conservative=not is_conservative)
    check_refusal(one, "merge_", (other,), ValueError, "other must be conservative exactly if")


@pytest.mark.parametrize("kind", [so.CountSketch, so.CountMinSketch])
def test_folding_an_odd_width_is_refused(kind):
    message = "width must be even to fold, got 7; build it with an even width"
    check_refusal(kind(3, 7, 2), "fold_", (), ValueError, message)


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_values_allowed_are_held_at_the_smallest_scale(kind):
    found = KINDS[kind]().scale_(2.0**-24)
    estimates = found.add_(IDS, torch.full((3, 2), 2.0**80)).query(IDS)
    assert estimates.isfinite().all()
    assert found.counters.isfinite().all()
