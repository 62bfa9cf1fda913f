"""Row id -> bucket and sign: the one hash specification that every backend implements.

A hash row is four 64-bit words ``(a, b, a_sign, b_sign)``. All arithmetic is modulo 2^64. A row id
below 2^32 is first mixed by a fixed bijection, the finaliser of splitmix64::

    mix(x): x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9
            x ^= x >> 27;  x *= 0x94D049BB133111EB
            x ^= x >> 31

and the mixed id is then hashed by multiply-add-shift::

    u      = (a * mix(id) + b) >> 32
    bucket = (u * width) >> 32                    any width, no modulo
    sign   = +1 if a_sign * mix(id) + b_sign < 2^63 else -1

Without the mixing, consecutive ids are an arithmetic progression in ``u``, and an unlucky ``a``
leaves most buckets empty
(`tests/test_hashing.py::test_consecutive_ids_leave_as_many_buckets_empty_as_random_ones`).

Two ids share a bucket with probability at most ``1 / width + 2^-32`` over the choice of the words
(`tests/test_hashing.py::test_two_ids_fall_into_independent_buckets`), unless their mixed
ids agree in the low 32 bits, as one pair in 2^32 does. Because a bucket is the leading part of
``u``, halving an even width maps bucket ``b`` to ``b // 2``, which lets a sketch fold.

Words are held as int64 tensors of shape ``[depth, 4]``; int64 products wrap modulo 2^64.
"""

import torch
from torch import Tensor

MAX_ID = 2**32 - 1
MAX_WIDTH = 2**31

_WORD = 2**64
_LOW_32_BITS = 2**32 - 1
_GAMMA = 0x9E3779B97F4A7C15
# (shift, multiplier) of the finaliser's first two rounds, and the shift of its last.
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
# Separates the keys of named parameters from those of numbered ones: "by name." in ASCII.
_NAME_TAG = int.from_bytes(b"by name.", "little")


def splitmix64(state: int) -> int:
    """The first output of the splitmix64 generator that starts from `state`."""
    word = (state + _GAMMA) % _WORD
    for shift, multiplier in _ROUNDS:
        word = ((word ^ (word >> shift)) * multiplier) % _WORD
    return word ^ (word >> _LAST_SHIFT)


def seeded(seed: int, parameter: int | str, depth: int) -> Tensor:
    """The hash words ``[depth, 4]`` of one parameter, given by its name or its number.

    Word ``i`` (1 to 4) of hash row ``j`` is ``s(s(key ^ j) ^ i)`` with ``s`` for `splitmix64` and::

        key = s(s(seed) ^ number)                 of a number
        key = s(s(s(seed) ^ tag) ^ fold(name))    of a name; see `fold_name`

    A hash row depends on its own index only, so two sketches of one parameter share their buckets
    even when their depths differ.
    """
    key = parameter_key(seed, parameter)
    rows = []
    for row in range(depth):
        row_key = splitmix64(key ^ row)
        rows.append([splitmix64(row_key ^ word) for word in range(1, 5)])
    return _as_words(rows)


def parameter_key(seed: int, parameter: int | str) -> int:
    """The 64-bit key of a parameter, given by its name or its number; see `seeded`."""
    key = splitmix64(seed % _WORD)
    if isinstance(parameter, str):
        return splitmix64(splitmix64(key ^ _NAME_TAG) ^ fold_name(parameter))
    return splitmix64(key ^ parameter)


def fold_name(name: str) -> int:
    """64 bits of a name: `splitmix64` chained over its length and its UTF-8 bytes.

    The bytes are read as little-endian 64-bit words; the last one is padded with zero bytes.
    """
    data = name.encode("utf-8", "surrogatepass")
    key = splitmix64(len(data))
    for start in range(0, len(data), 8):
        key = splitmix64(key ^ int.from_bytes(data[start : start + 8], "little"))
    return key


def mix(ids: Tensor) -> Tensor:
    """The ids after the fixed bijection of 64-bit words, int64 of the same shape."""
    mixed = ids
    for shift, multiplier in _ROUNDS:
        mixed = _shifted_right(mixed, shift).bitwise_xor_(mixed).mul_(_signed(multiplier))
    return _shifted_right(mixed, _LAST_SHIFT).bitwise_xor_(mixed)


def buckets(words: Tensor, ids: Tensor, width: int) -> Tensor:
    """The bucket of every id in every hash row, int64 of shape ``[depth, k]`` below `width`."""
    u = ((words[:, 0:1] * mix(ids) + words[:, 1:2]) >> 32) & _LOW_32_BITS
    return (u * width) >> 32


def signs(words: Tensor, ids: Tensor) -> Tensor:
    """The sign of every id in every hash row, +1 or -1, float32 of shape ``[depth, k]``."""
    negative = (words[:, 2:3] * mix(ids) + words[:, 3:4]) < 0
    return 1 - 2 * negative.float()


def _shifted_right(words: Tensor, shift: int) -> Tensor:
    """A logical shift: torch's shift of int64 repeats the sign bit."""
    return (words >> shift).bitwise_and_(2 ** (64 - shift) - 1)


def _signed(word: int) -> int:
    """The int64 with the same 64 bits."""
    return word - _WORD if word >= _WORD // 2 else word


def _as_words(rows: list[list[int]]) -> Tensor:
    signed = [[_signed(word) for word in row] for row in rows]
    return torch.tensor(signed, dtype=torch.int64, device="cpu")
