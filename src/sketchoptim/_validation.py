"""Checks of arguments, one family for the whole library.

A check returns the value as a plain Python one, or raises an error that names the argument, says
what is allowed and what was received, and ends with the remedy where there is one::

    NAME must be ALLOWED, got VALUE; REMEDY

A value of the wrong type is a `TypeError`, a value out of range a `ValueError`. NumPy's numbers
count as numbers; True and False do not.
"""

import math
import sys
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Tensors whose numbers are in memory by their shape and strides.
PLAIN_TENSORS = (Tensor, Parameter)
# An error quotes at most this many characters of a value.
_LONGEST_QUOTE = 120


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor only wraps others that hold its numbers, as a DTensor does."""
    return hasattr(type(tensor), "__tensor_flatten__")


def is_dtensor(tensor: Any) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor; without an import of torch.distributed.tensor, which takes long."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_number(
    name: str,
    value: Any,
    *,
    least: float = 0.0,
    below: float = math.inf,
    allow_tensor: bool = False,
    remedy: str = "",
) -> float:
    """The value as a float, where ``least <= value < below``; `least` is finite.

    With `allow_tensor`, a tensor of one element counts as its number.

    >>> check_number("momentum", 0.9, below=1.0)
    0.9
    >>> check_number("momentum", 1, below=1.0)
    Traceback (most recent call last):
    ...
    ValueError: momentum must be in [0, 1), got 1
    """
    if type(value) is float and least <= value < below:
        return value  # the usual case: a step checks about ten options
    number = _finite_float(name, value, allow_tensor=allow_tensor, remedy=remedy)
    if number is None or not least <= number < below:
        raise _error(ValueError, name, _interval(least, below), value, remedy)
    return number


def check_positive(name: str, value: Any, *, below: float = math.inf, remedy: str = "") -> float:
    """The value as a float, where ``0 < value < below``.

    >>> check_positive("ratio", 0.0)
    Traceback (most recent call last):
    ...
    ValueError: ratio must be finite and > 0, got 0.0
    """
    number = _finite_float(name, value, allow_tensor=False, remedy=remedy)
    if number is None or not 0.0 < number < below:
        allowed = "finite and > 0" if below == math.inf else f"between 0 and {below:g}"
        raise _error(ValueError, name, allowed, value, remedy)
    return number


def check_int(
    name: str, value: Any, *, least: int | None = None, most: int | None = None, remedy: str = ""
) -> int:
    """The value as an int, where ``least <= value <= most``.

    >>> check_int("seed", -3)
    -3
    >>> check_int("bits", 25, least=1, most=24)
    Traceback (most recent call last):
    ...
    ValueError: bits must be in [1, 24], got 25
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _error(TypeError, name, "an int", value, remedy)
    number = int(value)
    if (least is not None and number < least) or (most is not None and number > most):
        if most is None:
            allowed = f">= {least}"
        else:
            allowed = f"<= {most}" if least is None else f"in [{least}, {most}]"
        raise _error(ValueError, name, allowed, value, remedy)
    return number


def check_positive_int(name: str, value: Any, *, remedy: str = "") -> int:
    """The value as an int, where it is at least one: a size or a count."""
    return check_int(name, value, least=1, remedy=remedy)


def check_count(name: str, value: Any, *, remedy: str = "") -> int:
    """The value as an int, where it is a whole number >= 0: an int, a float or a tensor of one.

    >>> check_count("step", 3.0)
    3
    >>> check_count("step", 2.5)
    Traceback (most recent call last):
    ...
    ValueError: step must be a whole number, got 2.5
    """
    number = check_number(name, value, allow_tensor=True, remedy=remedy)
    if not number.is_integer():
        raise _error(ValueError, name, "a whole number", value, remedy)
    return int(value)


def check_flag(name: str, value: Any, *, remedy: str = "") -> bool:
    """The value, where it is True or False."""
    if not isinstance(value, bool):
        raise _error(TypeError, name, "True or False", value, remedy)
    return value


def check_choice(name: str, value: Any, allowed: Collection[Any], *, remedy: str = "") -> None:
    """Raises unless the value is one of the allowed ones.

    >>> check_choice("form", "sum", ("moments", "ratio"))
    Traceback (most recent call last):
    ...
    ValueError: form must be one of ['moments', 'ratio'], got 'sum'
    """
    # compared one by one, since a value that cannot be hashed is no member of a set or a dict
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise _error(ValueError, name, f"one of {list(allowed)}", value, remedy)


def check_tensor(name: str, value: Any, *, remedy: str = "use torch.as_tensor()") -> Tensor:
    """The value, where it is a tensor."""
    if not isinstance(value, Tensor):
        raise _error(TypeError, name, "a tensor", value, remedy)
    return value


def check_storage(name: str, tensor: Tensor) -> None:
    """Raises where the memory behind a tensor has been freed, which reading it would not notice."""
    if type(tensor) not in PLAIN_TENSORS or tensor.is_meta or not tensor.numel():
        return
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.itemsize
    found = tensor.untyped_storage().nbytes()
    if found < needed:
        raise ValueError(
            f"{name} must have its memory, {needed} bytes, but its storage has {found}; "
            "do not free or shrink it before step()"
        )


def check_keys(
    name: str,
    value: Any,
    *,
    required: Collection[Any] = (),
    optional: Collection[Any] | None = (),
    remedy: str = "",
) -> Mapping[Any, Any]:
    """The value, where it is a dict with all required keys and no others but the optional ones.

    With ``optional=None`` it may have any others.

    >>> check_keys("plan", {"optimizer": "Adam"}, required=("optimizer", "budget_bytes"))
    Traceback (most recent call last):
    ...
    ValueError: plan must have the key 'budget_bytes', got ['optimizer']
    """
    if not isinstance(value, Mapping):
        raise _error(TypeError, name, "a dict", value, remedy)
    for key in required:
        if key not in value:
            raise _error(ValueError, name, f"the key {key!r}", list(value), remedy, verb="have")
    if optional is None:
        return value
    known = {*required, *optional}
    unknown = [key for key in value if key not in known]
    if unknown:
        raise _error(ValueError, name, f"no keys but {sorted(known)}", unknown, remedy, verb="have")
    return value


def _finite_float(name: str, value: Any, *, allow_tensor: bool, remedy: str) -> float | None:
    """The value as a float, or None where no finite float is near it."""
    if allow_tensor and isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{name} must be one number, got a tensor of shape {list(value.shape)}"
                + _ending(remedy)
            )
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _error(TypeError, name, "a number", value, remedy)
    try:
        number = float(value)
    except OverflowError:  # an int above about 1.8e308
        return None
    return number if math.isfinite(number) else None


def _interval(least: float, below: float) -> str:
    return f"in [{least:g}, {below:g})" if below < math.inf else f"finite and >= {least:g}"


def _error(
    kind: type[Exception], name: str, allowed: str, value: Any, remedy: str, *, verb: str = "be"
) -> Exception:
    return kind(f"{name} must {verb} {allowed}, got {_quote(value)}{_ending(remedy)}")


def _ending(remedy: str) -> str:
    return f"; {remedy}" if remedy else ""


def _quote(value: Any) -> str:
    try:
        text = str(value) if isinstance(value, Real | Tensor) else repr(value)
    except ValueError:  # Python refuses to write ints of more than 4,300 digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= _LONGEST_QUOTE else f"{text[: _LONGEST_QUOTE - 3]}..."
