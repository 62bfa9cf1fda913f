"""The checks of arguments: what each accepts, as what, and which error it raises otherwise."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from sketchoptim._validation import (
    check_choice,
    check_count,
    check_flag,
    check_int,
    check_keys,
    check_number,
    check_positive,
    check_positive_int,
    check_tensor,
)

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "value", [0.5, 0, 0.0, Fraction(1, 2), np.float64(0.5), np.float32(0.5), np.int64(0)], ids=repr
)
def test_a_number_comes_back_as_a_plain_float(value):
    found = check_number("x", value, below=1.0)
    assert type(found) is float
    assert found == value


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)], ids=repr)
def test_a_whole_number_comes_back_as_a_plain_int(value):
    found = check_positive_int("x", value)
    assert type(found) is int
    assert found == 3


@pytest.mark.parametrize("value", [3, 3.0, torch.tensor(3), torch.tensor([3.0])], ids=repr)
def test_a_count_comes_back_as_a_plain_int(value):
    found = check_count("x", value)
    assert type(found) is int
    assert found == 3


def test_a_count_above_those_of_float64_keeps_its_last_digit():
    assert check_count("x", torch.tensor(2**53 + 1)) == 2**53 + 1


def test_a_dict_may_have_any_other_keys_where_these_are_not_told():
    found = {"a": 1, 3: 2}
    assert check_keys("x", found, required="a", optional=None) is found


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_tensor_of_one_element_is_a_number_where_tensors_are_allowed(shape):
    assert check_number("x", torch.full(shape, 0.5), allow_tensor=True) == 0.5


# A check, a value and options that it refuses, the error, and a part of its message.
REFUSED = [
    (check_number, NAN, {}, ValueError, "x must be finite and >= 0, got nan"),
    (check_number, INF, {}, ValueError, "x must be finite and >= 0, got inf"),
    (check_number, -0.1, {"remedy": "do so"}, ValueError, "and >= 0, got -0.1; do so"),
    (check_number, 1.0, {"below": 1.0}, ValueError, "x must be in [0, 1), got 1.0"),
    (check_number, 10**400, {}, ValueError, ">= 0, got 1000"),
    (check_number, 10**5000, {"below": 1.0}, ValueError, "got a very large int"),
    (check_number, Fraction(10**400), {}, ValueError, "x must be finite and >= 0, got 1000"),
    (check_number, "0.1", {}, TypeError, "x must be a number, got '0.1'"),
    (check_number, True, {}, TypeError, "x must be a number, got True"),
    (check_number, np.True_, {}, TypeError, "x must be a number, got np.True_"),
    (check_number, None, {}, TypeError, "x must be a number, got None"),
    (check_number, 1j, {}, TypeError, "x must be a number, got 1j"),
    (check_number, torch.tensor(0.1), {}, TypeError, "x must be a number, got tensor(0.1"),
    (check_number, torch.ones(2), {"allow_tensor": True}, ValueError, "of shape [2]"),
    (check_number, torch.ones(0), {"allow_tensor": True}, ValueError, "of shape [0]"),
    (check_number, torch.tensor(NAN), {"allow_tensor": True}, ValueError, "got tensor(nan)"),
    (check_number, torch.tensor(True), {"allow_tensor": True}, TypeError, "a number, got"),
    (check_positive, 0.0, {}, ValueError, "x must be finite and > 0, got 0.0"),
    (check_positive, INF, {}, ValueError, "x must be finite and > 0, got inf"),
    (check_positive, NAN, {"below": 1.0}, ValueError, "x must be between 0 and 1, got nan"),
    (check_positive, True, {}, TypeError, "x must be a number, got True"),
    (check_int, 3.0, {}, TypeError, "x must be an int, got 3.0"),
    (check_int, True, {}, TypeError, "x must be an int, got True"),
    (check_int, -1, {"least": 0}, ValueError, "x must be >= 0, got -1"),
    (check_int, 9, {"most": 8}, ValueError, "x must be <= 8, got 9"),
    (check_int, 0, {"least": 1, "most": 8}, ValueError, "x must be in [1, 8], got 0"),
    (check_positive_int, 0, {"remedy": "see y"}, ValueError, "x must be >= 1, got 0; see y"),
    (check_count, 2.5, {}, ValueError, "x must be a whole number, got 2.5"),
    (check_count, torch.tensor(2.5), {}, ValueError, "a whole number, got tensor(2.5"),
    (check_count, -1, {}, ValueError, "x must be finite and >= 0, got -1"),
    (check_count, NAN, {}, ValueError, "x must be finite and >= 0, got nan"),
    (check_count, "3", {}, TypeError, "x must be a number, got '3'"),
    (check_flag, 1, {}, TypeError, "x must be True or False, got 1"),
    (check_choice, "c", {"allowed": "ab"}, ValueError, "one of ['a', 'b'], got 'c'"),
    (check_choice, [1], {"allowed": {"a": 1}}, ValueError, "one of ['a'], got [1]"),
    (check_choice, torch.ones(2), {"allowed": "a"}, ValueError, "got tensor([1., 1.])"),
    (check_tensor, [1], {}, TypeError, "x must be a tensor, got [1]; use torch.as_tensor()"),
    (check_keys, [1], {}, TypeError, "x must be a dict, got [1]"),
    (check_keys, {"b": 1}, {"required": "ab"}, ValueError, "have the key 'a', got ['b']"),
    (check_keys, {"b": 1, 3: 1}, {"optional": "b"}, ValueError, "no keys but ['b'], got [3]"),
]


@pytest.mark.parametrize(
    ("check", "value", "options", "error", "message"),
    REFUSED,
    ids=[f"{case[0].__name__}: {case[-1]}" for case in REFUSED],
)
def test_anything_else_is_refused_by_name(check, value, options, error, message):
    with pytest.raises(error, match=r"^x must ") as raised:
        check("x", value, **options)
    assert message in str(raised.value)


def test_a_long_value_is_quoted_in_part():
    with pytest.raises(TypeError, match=re.escape("...")) as raised:
        check_number("x", "0" * 1000)
    assert len(str(raised.value)) < 200
