"""Seeds and ids without collisions: under them a sketch is exact storage."""

from functools import cache

import torch
from torch import Tensor

from sketchoptim import _hashing


@cache
def collision_free_seed(
    rows: int, width: int, depth: int = 3, *, parameter: int | str = 0, tries: int = 10_000
) -> int:
    """The least seed under which the ids below `rows` have a bucket of their own in every hash row.

    About one seed in ``exp(depth * rows^2 / (2 * width))`` is one, so the width must be large.
    """
    ids = torch.arange(rows)
    for seed in range(tries):
        buckets = _hashing.buckets(_hashing.seeded(seed, parameter, depth), ids, width)
        if all(row.unique().numel() == rows for row in buckets):
            return seed
    raise ValueError(f"no seed below {tries} keeps {rows} rows apart at width {width}; widen it")


@cache
def collision_free_ids(
    count: int, width: int, depth: int = 3, *, seed: int = 0, parameter: int | str = 0
) -> Tensor:
    """`count` ids in ascending order of which no two share a bucket in any hash row.

    Greedily the least ids, so about ``width * ((1 - count / width)^-depth)`` of them are tried.
    """
    assert count <= 0.8 * width, "ids that share no bucket become rare; use a larger width"
    words = _hashing.seeded(seed, parameter, depth)
    used: list[set[int]] = [set() for _ in range(depth)]
    found: list[int] = []
    for start in range(0, _hashing.MAX_ID, 1 << 16):
        ids = range(start, start + (1 << 16))
        buckets = _hashing.buckets(words, torch.tensor(ids), width).T.tolist()
        for row_id, places in zip(ids, buckets, strict=True):
            if any(place in taken for place, taken in zip(places, used, strict=True)):
                continue
            for place, taken in zip(places, used, strict=True):
                taken.add(place)
            found.append(row_id)
            if len(found) == count:
                return torch.tensor(found)
    raise AssertionError("unreachable: there are 2^32 ids")
