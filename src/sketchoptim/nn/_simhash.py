"""Signed random projections: finds vectors at a small angle to a query without visiting all.

A random plane through the origin separates two vectors at angle a with probability a / pi. A bucket
of a hash table holds the vectors that lie on the same side of all `bits` planes of the table.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MAX_BITS = 24

# At most this many matches of queries and ids are held at once.
_PAIRS_AT_ONCE = 1 << 24


class Found(NamedTuple):
    """Pairs of a query and an id, in ascending order, and how many ids each query matched."""

    query: Tensor
    """int64 [pairs]."""
    ids: Tensor
    """int64 [pairs], distinct within a query."""
    matches: Tensor
    """int64 [queries]; more than the pairs of a query where the budget was too small."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SimHashIndex:
    """`tables` hash tables over vectors: ids sorted by bucket, and where each bucket starts.

    It takes 4 * tables * vectors + 8 * tables * 2^bits bytes: 55 MB for 800,000 vectors at 15 bits
    and 16 tables.

    Example:
        >>> vectors = torch.randn(100, 8)
        >>> index = SimHashIndex.build([vectors], SimHashIndex.planes(8, bits=4, tables=6, seed=0))
        >>> found = index.find(vectors[:2], budget=5)
        >>> found.query, found.ids[0]  # a vector matches itself in every table
        (tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1]), tensor(0))
    """

    normals: Tensor
    """Normals of the planes, float32 [dim, tables, bits]."""
    members: Tensor
    """Ids, int32 [tables * vectors], sorted by table, then by bucket, then by id."""
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
        """Normals of independent random planes, float32 [dim, tables, bits]."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(dim, tables, bits, generator=generator, device="cpu")

    @classmethod
    def build(cls, chunks: Iterable[Tensor], normals: Tensor) -> "SimHashIndex":
        """The index of vectors that arrive in chunks [k, dim], in the order of their ids."""
        buckets = torch.cat([_buckets(chunk, normals).int() for chunk in chunks])
        tables, bits = normals.shape[1:]
        # Bucket numbers of a table follow those of the table before, so one sort serves all.
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
        at_random: bool = False,
        generator: torch.Generator | None = None,
    ) -> Found:
        """The ids that share a bucket with each query, at most `budget` for a query.

        Where there are more, the ids that match in most tables are taken, or random ones with
        `at_random`. A bucket of more than `budget` ids gives a window of `budget` consecutive ids
        at a random position.
        """
        size = max(1, _PAIRS_AT_ONCE // (self.tables * budget))
        parts = []
        for start in range(0, max(1, queries.shape[0]), size):
            some = queries[start : start + size]
            query, ids = self._matches(some, budget, generator)
            keys, tables = (query * self.vectors + ids).unique(return_counts=True)
            group = keys // self.vectors
            matches = torch.bincount(group, minlength=some.shape[0])
            if keys.numel() and matches.max() > budget:
                noise = torch.rand(keys.shape, generator=generator, device=keys.device)
                score = noise if at_random else noise + tables  # which breaks ties at random
                keys = _largest(keys, score, group, matches, budget)
            parts.append(Found(keys // self.vectors + start, keys % self.vectors, matches))
        return Found(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _matches(
        self, queries: Tensor, limit: int, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """The query [pairs] and the id [pairs] of every match, once for each table with it."""
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
    """The keys with the `count` largest scores of each group; keys and groups ascend."""
    # One sort of integers, by group and then by score.
    order = ((group << 32) - (score * 2**20).long()).argsort()
    starts = sizes.cumsum(0) - sizes
    place = torch.arange(keys.numel(), device=keys.device) - starts[group]
    return keys[order[place < count].sort().values]


def _buckets(vectors: Tensor, normals: Tensor) -> Tensor:
    """The bucket of every vector in every table, int64 [k, tables], numbered across all tables.

    A vector on a plane counts as below it, and so does a vector with NaN.
    """
    dim, tables, bits = normals.shape
    is_above = vectors.to(normals.dtype) @ normals.reshape(dim, -1) > 0
    # Integers below 2^24, which float32 represents exactly; its products are the fastest.
    powers = 2.0 ** torch.arange(bits, dtype=torch.float32, device=vectors.device)
    codes = (is_above.reshape(-1, bits).float() @ powers).long().reshape(-1, tables)
    return codes + (1 << bits) * torch.arange(tables, device=vectors.device)


def collision_probability(cosine: Tensor, *, bits: int, tables: int) -> Tensor:
    """1 - (1 - (1 - angle / pi)^bits)^tables: that two vectors share a bucket of some table.

    Test: `tests/nn/test_simhash.py::test_vectors_collide_as_often_as_their_angle_says`.
    """
    in_one_table = (1 - cosine.clamp(-1, 1).acos() / math.pi) ** bits
    # expm1 and log1p keep tiny probabilities, which 1 - (1 - p)^tables would round to zero.
    return -torch.expm1(tables * torch.log1p(-in_one_table))
