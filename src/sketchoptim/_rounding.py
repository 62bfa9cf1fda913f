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
rounded number is unbiased (`tests/test_rounding.py::test_rounding_is_unbiased`). Golden vectors are
in `tests/support/rounding_specification.py`; csrc/rounding.h is the same in C++.
"""

import torch
from torch import Tensor

_LOW_32_BITS = 2**32 - 1
_LOW_16_BITS = 2**16 - 1
_GOLDEN = 0x9E3779B1


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


def _finalise(words: Tensor) -> Tensor:
    """MurmurHash3's finaliser of 32-bit words, which are held in int64 tensors."""
    words = ((words ^ (words >> 16)) * 0x85EBCA6B) & _LOW_32_BITS
    words = ((words ^ (words >> 13)) * 0xC2B2AE35) & _LOW_32_BITS
    return words ^ (words >> 16)
