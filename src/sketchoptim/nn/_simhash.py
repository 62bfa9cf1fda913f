"""Signed random projections: which vectors are at a small angle to a query, without looking at all.

A plane through the origin parts two vectors at angle a with probability a / pi. A bucket of a
table holds the vectors that lie on the same side of all of its `bits` planes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MAX_BITS = 24

# Meetings of queries and ids that are looked at together, at most.
_PAIRS_AT_ONCE = 1 << 24


class Found(NamedTuple):
    """Pairs of a query and an id, ascending, and how many ids each query met."""

    query: Tensor
    """int64 [pairs]."""
    ids: Tensor
    """int64 [pairs], distinct for a query."""
    met: Tensor
    """int64 [queries]; more than the pairs of a query where the budget was too small."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SimHashIndex:
    """`tables` hash tables over vectors: ids sorted by bucket, and where each bucket starts.

    Bytes: 4 tables vectors + 8 tables 2^bits, 55 MB for 800,000 vectors at 15 bits and 16 tables.

    Example:
        >>> vectors = torch.randn(100, 8)
        >>> index = SimHashIndex.build([vectors], SimHashIndex.planes(8, bits=4, tables=6, seed=0))
        >>> found = index.find(vectors[:2], budget=5)
        >>> found.query, found.ids[0]  # a vector is nearest to itself
        (tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1]), tensor(0))
    """

    normals: Tensor
    """Of the planes, float32 [dim, tables, bits]."""
    members: Tensor
    """Ids, int32 [tables * vectors]: by table, then by bucket, then ascending."""
    starts: Tensor
    """Where each bucket starts in `members`, int64 [tables * 2^bits + 1]."""

    @property
    def tables(self) -> int:
        return self.normals.shape[1]

    @property
    def vectors(self) -> int:
        return self.members.numel() // self.tables

    @staticmethod
    def planes(dim: int, *, bits: int, tables: int, seed: int) -> Tensor:
        """Normals of independent planes, float32 [dim, tables, bits], a function of the seed."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(dim, tables, bits, generator=generator, device="cpu")

    @classmethod
    def build(cls, chunks: Iterable[Tensor], normals: Tensor) -> "SimHashIndex":
        """The index of vectors that come in chunks [k, dim], in the order of their ids."""
        buckets = torch.cat([_buckets(chunk, normals).int() for chunk in chunks])
        tables, bits = normals.shape[1:]
        # each table's buckets follow those of the table before, so one sort serves all of them
        by_table = buckets.T.flatten()
        starts = torch.zeros(tables * 2**bits + 1, dtype=torch.int64, device=normals.device)
        torch.cumsum(by_table.bincount(minlength=tables * 2**bits), 0, out=starts[1:])
        members = (by_table.sort(stable=True).indices % buckets.shape[0]).int()
        return cls(normals=normals, members=members, starts=starts)

    def find(
        self,
        queries: Tensor,
        *,
        budget: int,
        by_chance: bool = False,
        generator: torch.Generator | None = None,
    ) -> Found:
        """The ids that share a bucket with each query, at most `budget` of them.

        Where there are more, those are taken that are met in most tables, or, `by_chance`, any. A
        bucket of more than `budget` ids gives a window of that length, at a random place.
        """
        size = max(1, _PAIRS_AT_ONCE // (self.tables * budget))
        parts = []
        for start in range(0, max(1, queries.shape[0]), size):
            some = queries[start : start + size]
            query, ids = self._meetings(some, budget, generator)
            keys, meetings = (query * self.vectors + ids).unique(return_counts=True)
            chosen = keys // self.vectors
            met = torch.bincount(chosen, minlength=some.shape[0])
            if keys.numel() and met.max() > budget:
                rank = torch.rand(keys.shape, generator=generator, device=keys.device)
                keys = _largest(keys, rank if by_chance else rank + meetings, chosen, met, budget)
            parts.append(Found(keys // self.vectors + start, keys % self.vectors, met))
        return Found(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _meetings(
        self, queries: Tensor, limit: int, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Which query [pairs] meets which id [pairs], once for every table that they meet in."""
        buckets = _buckets(queries, self.normals)
        starts = self.starts[buckets].flatten()
        sizes = self.starts[buckets + 1].flatten() - starts
        taken = sizes.clamp(max=limit)
        place = torch.rand(sizes.shape, generator=generator, device=sizes.device)
        shift = torch.where(sizes > limit, (place * sizes).long(), 0)
        visit = torch.arange(sizes.numel(), device=sizes.device).repeat_interleave(taken)
        within = torch.arange(visit.numel(), device=sizes.device) - (taken.cumsum(0) - taken)[visit]
        at = starts[visit] + (within + shift[visit]) % sizes[visit]
        return visit // self.tables, self.members[at].long()


def _largest(keys: Tensor, score: Tensor, group: Tensor, sizes: Tensor, count: int) -> Tensor:
    """The keys with the `count` largest scores of each group, ascending; groups ascend in keys."""
    # one sort by both, of whole numbers
    order = ((group << 32) - (score * 2**20).long()).argsort()
    starts = sizes.cumsum(0) - sizes
    place = torch.arange(keys.numel(), device=keys.device) - starts[group]
    return keys[order[place < count].sort().values]


def _buckets(vectors: Tensor, normals: Tensor) -> Tensor:
    """The bucket of every vector in every table, int64 [k, tables], numbered through all tables.

    A vector on a plane, such as one of zeros or of NaN, counts as below it.
    """
    dim, tables, bits = normals.shape
    is_above = vectors.to(normals.dtype) @ normals.reshape(dim, -1) > 0
    # whole numbers below 2^24, which float32 holds exactly and multiplies fastest
    powers = 2.0 ** torch.arange(bits, dtype=torch.float32, device=vectors.device)
    codes = (is_above.reshape(-1, bits).float() @ powers).long().reshape(-1, tables)
    return codes + (1 << bits) * torch.arange(tables, device=vectors.device)


def meeting_probability(cosine: Tensor, *, bits: int, tables: int) -> Tensor:
    """1 - (1 - (1 - angle / pi)^bits)^tables: that two vectors share a bucket of some table.

    Test: `tests/nn/test_simhash.py::test_vectors_meet_as_often_as_their_angle_says`.
    """
    together = (1 - cosine.clamp(-1, 1).acos() / math.pi) ** bits
    # of tiny probabilities too, which 1 - (1 - p)^tables would round away
    return -torch.expm1(tables * torch.log1p(-together))
