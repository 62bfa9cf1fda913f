"""Bytes of one process among several that divide the rows of a table, as `Shard(0)` does."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from .. import moments
from ..moments import Name, Part, Table
from ..storage import Storage


class RankBytes(NamedTuple):
    """The bytes that one rank keeps of a moment, and sends for it in a step."""

    state: int
    """Bytes in memory on the rank with the most rows."""
    sent: int
    """Bytes sent in one step: 2 (ranks - 1) / ranks of what a ring all-reduce reduces."""


def rows_of_rank(rows: int, ranks: int) -> int:
    """The rows of the rank that has the most; DTensor gives the others as many or fewer."""
    return -(-rows // ranks)


def rank_bytes(
    storage: Storage, name: Name, table: Table, *, ranks: int = 1, fill: float = 0.0
) -> RankBytes:
    """The bytes of a fresh moment on one of `ranks` ranks, as its parts are declared.

    >>> import torch
    >>> from sketchoptim.storage import Exact, RowWise
    >>> table = Table(torch.Size((1000, 16)), torch.float32, torch.device("meta"))
    >>> rank_bytes(Exact(), "second", table, ranks=8), rank_bytes(RowWise(), "second", table)
    (RankBytes(state=8000, sent=0), RankBytes(state=4000, sent=0))
    """
    parts = moments.declare(storage, name, table, fill)
    refused = [part.name for part in parts if part.combine == "refused"]
    if ranks > 1 and refused:
        raise ValueError(
            f"the {name} moment must be one that ranks can divide among them, got {storage}, whose "
            f"{refused[0]} depend on the order of rows; plan for ranks=1, or choose another storage"
        )
    return _total(_part_bytes(part, table, ranks) for part in parts)


def _part_bytes(part: Part, table: Table, ranks: int) -> RankBytes:
    whole = part.nbytes(table.dtype)
    if part.sharding == "replicated":
        if part.combine == "same":
            return RankBytes(whole, 0)
        dtype = part.reduced_dtype or part.dtype or table.dtype
        reduced = math.prod(part.shape) * dtype.itemsize
        return RankBytes(whole, math.ceil(2 * (ranks - 1) * reduced / ranks))
    return RankBytes(whole // max(1, table.rows) * rows_of_rank(table.rows, ranks), 0)


def _total(several: Iterable[RankBytes]) -> RankBytes:
    state = sent = 0
    for one in several:
        state, sent = state + one.state, sent + one.sent
    return RankBytes(state, sent)
