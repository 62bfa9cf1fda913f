"""The best of very many classes, each scored by one bucket of every hash row.

Class ``c`` has bucket ``h_j(c)`` in hash row ``j`` (`_hashing.buckets`), and the score of query
``q`` for it is the sum, the least or the median over ``j`` of ``tables[j, q, h_j(c)]``. Buckets are
never stored: nothing of the size of the classes is read, written or kept.

The order is total: higher scores first, and lower class ids first among equal scores. So there is
one result, whichever backend, chunk or number of threads finds it.
"""

import ctypes
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .. import _hashing
from .._sketch import median
from . import _native

Combination = Literal["sum", "least", "median"]
_COMBINATIONS: dict[Combination, int] = {"sum": 0, "least": 1, "median": 2}
_MAX_MEMBERS = 32
_LANES = 16
_QUERIES = 32
_CHUNK = 1 << 14


class TopClasses(NamedTuple):
    """The best classes of each query, best first: scores and class ids, [queries, k] each."""

    scores: Tensor
    ids: Tensor


def top_classes(
    tables: Tensor, words: Tensor, classes: int | Tensor, k: int, combination: Combination
) -> TopClasses:
    """The `k` best classes of each query, by the native kernel where there is one.

    Args:
        tables: scores of buckets, float32 ``[members, queries, buckets]``, without NaN.
        words: one hash row a member, int64 ``[members, 4]``.
        classes: how many there are, or ids to choose from, int64, ascending strictly.
        k: at most the number of classes.
        combination: of a class's bucket scores; the median of an even number is the mean of the
            middle two.
    """
    is_native = (
        tables.device.type == "cpu"
        and tables.shape[0] <= _MAX_MEMBERS
        and _native.library() is not None
    )
    search = _by_kernel if is_native else reference
    found = [
        search(tables[:, start : start + _QUERIES], words, classes, k, combination)
        for start in range(0, tables.shape[1], _QUERIES)
    ]
    if not found:
        return TopClasses(tables.new_empty(0, k), words.new_empty(0, k))
    return TopClasses(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def reference(
    tables: Tensor, words: Tensor, classes: int | Tensor, k: int, combination: Combination
) -> TopClasses:
    """The top classes in plain torch, chunk by chunk: the definition of correct."""
    count = classes if isinstance(classes, int) else classes.numel()
    best = TopClasses(tables.new_empty(tables.shape[1], 0), words.new_empty(tables.shape[1], 0))
    for start in range(0, count, _CHUNK):
        end = min(count, start + _CHUNK)
        if isinstance(classes, int):
            ids = torch.arange(start, end, device=tables.device)
        else:
            ids = classes[start:end]
        scores = torch.cat([best.scores, class_scores(tables, words, ids, combination)], dim=1)
        ids = torch.cat([best.ids, ids.expand(tables.shape[1], -1)], dim=1)
        # what was found before has the lower ids and stands first, where a stable sort leaves it
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        best = TopClasses(scores[:, :k], ids.gather(1, order[:, :k]))
    return best


def class_scores(tables: Tensor, words: Tensor, ids: Tensor, combination: Combination) -> Tensor:
    """The scores of classes [n] for each query, ``[queries, n]``: tables as in `top_classes`."""
    buckets = _hashing.buckets(words, ids, tables.shape[2])
    readings = torch.stack([table[:, row] for table, row in zip(tables, buckets, strict=True)])
    if combination == "least":
        return readings.amin(0)
    if combination == "median":
        return median(readings)
    total = readings[0]
    for row in readings[1:]:  # in this order in every backend, for the same bits
        total = total + row
    return total


def _by_kernel(
    tables: Tensor, words: Tensor, classes: int | Tensor, k: int, combination: Combination
) -> TopClasses:
    library = _native.library()
    assert library is not None  # the caller has looked
    members, queries, buckets = tables.shape
    # A class reads one row of each table, for all queries at once.
    columns = _LANES if queries <= _LANES else _QUERIES
    rows = torch.zeros(members, buckets, columns, dtype=torch.float32, device="cpu")
    rows[:, :, :queries] = tables.transpose(1, 2)
    words = words.contiguous()
    ids = None if isinstance(classes, int) else classes.contiguous()
    found = TopClasses(
        torch.empty(queries, k, dtype=torch.float32, device="cpu"),
        torch.empty(queries, k, dtype=torch.int64, device="cpu"),
    )
    search = _native.TopClasses(
        tables=rows.data_ptr(),
        words=words.data_ptr(),
        ids=None if ids is None else ids.data_ptr(),
        count=classes if isinstance(classes, int) else classes.numel(),
        buckets=buckets,
        k=k,
        members=members,
        queries=queries,
        combination=_COMBINATIONS[combination],
        threads=torch.get_num_threads(),
        scores=found.scores.data_ptr(),
        classes=found.ids.data_ptr(),
    )
    if not library.sketchoptim_top_classes(ctypes.byref(search)):
        raise MemoryError(
            f"the search for the {k} best of {search.count} classes needs a list of {k} for each "
            f"of {queries} queries and {search.threads} threads; use a smaller k, or fewer threads"
        )
    return found
