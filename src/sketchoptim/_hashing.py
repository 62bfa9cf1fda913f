"""Row id -> bucket and sign: the one hash specification that every backend implements.

A hash row is four 64-bit words ``(a, b, a_sign, b_sign)``. For a row id below 2^32::

    u      = ((a * id + b) mod 2^64) >> 32        strongly universal multiply-add-shift
    bucket = (u * width) >> 32                    any width, no modulo
    sign   = +1 if ((a_sign * id + b_sign) mod 2^64) < 2^63 else -1

Two ids share a bucket with probability at most ``1 / width + 2^-32`` over the choice of the
words (`tests/test_hashing.py::test_two_ids_collide_as_often_as_independent_draws`). Because a
bucket is the leading part of ``u``, halving an even width maps bucket ``b`` to ``b // 2``,
which is what lets a sketch fold.

Words are held as int64 tensors of shape ``[depth, 4]``; int64 products wrap as mod 2^64 does.
"""

import torch
from torch import Tensor

MAX_ID = 2**32 - 1
MAX_WIDTH = 2**31

_WORD = 2**64
_LOW_32_BITS = 2**32 - 1


def mixed(word: int) -> int:
    """The splitmix64 finaliser: a bijection of 64-bit words that spreads every bit."""
    word = (word + 0x9E3779B97F4A7C15) % _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % _WORD
    return word ^ (word >> 31)


def _as_words(rows: list[list[int]]) -> Tensor:
    signed = [[word - _WORD if word >= _WORD // 2 else word for word in row] for row in rows]
    return torch.tensor(signed, dtype=torch.int64, device="cpu")


def seeded(seed: int, parameter: int, depth: int) -> Tensor:
    """The hash words ``[depth, 4]`` of one parameter, a function of the three numbers alone.

    Hash row ``j`` depends on ``(seed, parameter, j)`` only, so that two sketches of one parameter
    share their buckets even when their depths differ.
    """
    rows = []
    for row in range(depth):
        key = mixed(mixed(mixed(seed % _WORD) ^ parameter) ^ row)
        rows.append([mixed(key ^ word) for word in range(1, 5)])
    return _as_words(rows)


def injective(width: int, depth: int) -> Tensor:
    """Hash words under which ids below `width` are their own buckets and all signs are +1.

    The identity is a member of the hash family, so every backend can be tested free of collisions
    without knowing about it: ``a = 2^64 / width``, rounded up, and a ``b`` that rounds ``u`` up
    too, so that no id falls short of its bucket, at any width up to `MAX_WIDTH`.
    """
    step = -(-_WORD // max(width, 1))
    return _as_words([[step % _WORD, 2**32 - 1, 0, 0]] * depth)


def buckets(words: Tensor, ids: Tensor, width: int) -> Tensor:
    """The bucket of every id in every hash row, int64 of shape ``[depth, k]`` below `width`."""
    u = ((words[:, 0:1] * ids + words[:, 1:2]) >> 32) & _LOW_32_BITS
    return (u * width) >> 32


def signs(words: Tensor, ids: Tensor) -> Tensor:
    """The sign of every id in every hash row, +1 or -1, float32 of shape ``[depth, k]``."""
    negative = (words[:, 2:3] * ids + words[:, 3:4]) < 0
    return 1 - 2 * negative.float()
