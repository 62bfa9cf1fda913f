"""Stochastic rounding: pseudo-random bits that are a function of a key, a row id and a column.

A counter-based generator of 32-bit words, so the same run gives the same bits, in any order, on
any number of threads. All arithmetic is modulo 2^32, and ``f`` is the finaliser of MurmurHash3::

    f(x): x ^= x >> 16;  x *= 0x85EBCA6B
          x ^= x >> 13;  x *= 0xC2B2AE35
          x ^= x >> 16

    row_key             = f(f(id) + key)                        once for a row
    noise(key, id, col) = f(col * 0x9E3779B1 + row_key) mod 2^16

A float32 becomes a bfloat16 by adding the noise to its bits and dropping the low 16: it goes to the
neighbour away from zero with a probability equal to its distance from the other one, so the
rounded number is unbiased (`tests/test_rounding.py::test_rounding_is_unbiased`). It becomes a
float16 by adding the upper 13 bits of the noise and dropping the low 13. Below 2^-14, where the
numbers of float16 are 2^-24 apart, ``(trunc(|x| * 2^40) + noise) >> 16`` of those distances are
taken, which is unbiased up to 2^-40.

Weights that are above the largest finite number of their dtype, or NaN, are rounded to nearest: by
chance alone, no finite number becomes infinite. Golden vectors are in
`tests/support/rounding_specification.py`; csrc/rounding.h is the same in C++.
"""

import torch
from torch import Tensor

from . import _hashing

# Keeps keys of rounding apart from hash words, whose seeds are small: "rounding" in ASCII.
_SEED = int.from_bytes(b"rounding", "little")
_LOW_32_BITS = 2**32 - 1
_LOW_16_BITS = 2**16 - 1
_GOLDEN = 0x9E3779B1
# The bits of the largest finite number, by the dtypes that weights are rounded to.
_LARGEST = {torch.bfloat16: 0x7F7F0000, torch.float16: 0x477FE000}
ROUNDED_DTYPES = tuple(_LARGEST)


def weights_seed(parameter: int | str) -> int:
    """What the keys of a parameter's steps come from; it is given by its name or its number."""
    return _hashing.parameter_key(_SEED, parameter)


def weights_key(seed: int, step: int) -> int:
    """The key, 32 bits, by which the weights of a parameter are rounded in step number `step`."""
    return _hashing.splitmix64(seed ^ step) & _LOW_32_BITS


def noise(key: int, ids: Tensor, dim: int) -> Tensor:
    """16 random bits for each of `dim` columns of the rows ``ids[k]``, int32 ``[k, dim]``."""
    row_keys = _finalise((_finalise(ids) + key) & _LOW_32_BITS)
    columns = torch.arange(dim, device=ids.device) * _GOLDEN
    words = _finalise((columns + row_keys.unsqueeze(-1)) & _LOW_32_BITS)
    return words.bitwise_and_(_LOW_16_BITS).int()


def to_bfloat16(x: Tensor, noise: Tensor) -> Tensor:
    """`x`, a float32 tensor, rounded up or down to bfloat16; the noise broadcasts to its shape."""
    bits = x.contiguous().view(torch.int32) + noise
    # The low half of the sum is zero, so this conversion is exact.
    return bits.bitwise_and_(~_LOW_16_BITS).view(torch.float32).to(torch.bfloat16)


def to_half(x: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
    """Weights `x`, a float32 tensor, rounded up or down to one of `ROUNDED_DTYPES`."""
    magnitude = x.contiguous().view(torch.int32) & 0x7FFFFFFF
    rounded = to_bfloat16(x, noise) if dtype == torch.bfloat16 else _to_float16(x, noise)
    return torch.where(magnitude > _LARGEST[dtype], x.to(dtype), rounded)


def _to_float16(x: Tensor, noise: Tensor) -> Tensor:
    """`x` rounded up or down to float16 where it lies in the range of that."""
    bits = x.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude - 0x38000000 + (noise >> 3)) >> 13
    small = ((x.abs().clamp_max(2.0**-14) * 2.0**40).int() + noise) >> 16
    half = torch.where(magnitude < 0x38800000, small, normal) | ((bits >> 16) & 0x8000)
    return half.to(torch.int16).view(torch.float16)


def _finalise(words: Tensor) -> Tensor:
    """MurmurHash3's finaliser of 32-bit words, which are held in int64 tensors."""
    words = ((words ^ (words >> 16)) * 0x85EBCA6B) & _LOW_32_BITS
    words = ((words ^ (words >> 13)) * 0xC2B2AE35) & _LOW_32_BITS
    return words ^ (words >> 16)
