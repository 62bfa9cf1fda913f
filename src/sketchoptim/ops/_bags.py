"""Sums and means of rows over bags of ids, for several tables in one call."""

from array import array
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .._bag_ids import TableIds
from . import _native
from ._lookups import LookupCall

Mode = Literal["sum", "mean"]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def pool_bags(
    weights: Sequence[Tensor], lookups: TableIds, mode: Mode, names: Sequence[str]
) -> Tensor:
    """The sum or mean of the rows of each bag, ``[bags, columns of all tables]``.

    Rows are added in float32, in the order of their ids; an empty bag gives zeros. Offsets and ids
    are validated before anything is written.

    Args:
        weights: of the tables, ``[rows, dim]``, of one dtype and device; at least one.
        lookups: of the tables.
        mode: "sum" or "mean".
        names: of the tables, for errors.
    """
    if _is_native(weights, lookups):
        return _by_kernel(weights, lookups, mode, names)
    return reference(weights, lookups, mode, names)


def reference(
    weights: Sequence[Tensor], lookups: TableIds, mode: Mode, names: Sequence[str]
) -> Tensor:
    """The sums of bags in torch's operations, table by table."""
    if weights[0].device.type == "cpu":  # other devices would wait, and check by themselves
        check(weights, lookups, names)
    pooled = []
    for weight, bags in zip(weights, lookups.of_each(), strict=True):
        factors = None if bags.factors is None else bags.factors.to(weight.dtype)
        pooled.append(
            F.embedding_bag(bags.ids, weight, bags.starts, mode=mode, per_sample_weights=factors)
        )
    return torch.cat(pooled, 1)


def _is_native(weights: Sequence[Tensor], lookups: TableIds) -> bool:
    dtype = weights[0].dtype
    return (
        dtype in _DTYPES
        and lookups.ids.is_cpu
        and all(it.is_cpu and it.dtype is dtype and it.is_contiguous() for it in weights)
        and _native.library() is not None
    )


def _by_kernel(
    weights: Sequence[Tensor], lookups: TableIds, mode: Mode, names: Sequence[str]
) -> Tensor:
    library = _native.library()
    assert library is not None  # the caller has looked
    words: list[int] = []  # of a `BagTable` in csrc/abi.h each
    columns = 0
    for weight in weights:
        rows, dim = weight.shape
        words += (weight.data_ptr(), rows, dim, columns)
        columns += dim
    tables = array(_native.WORD, words)
    output = torch.empty(lookups.bags, columns, dtype=weights[0].dtype)
    call = LookupCall(
        lookups.ids,
        lookups.offsets,
        lookups.factors,
        output,
        tables=lookups.tables,
        bags=lookups.bags,
        is_mean=mode == "mean",
    )
    threads = torch.get_num_threads() if output.numel() >= _native.ELEMENTS_FOR_THREADS else 1
    bags = _native.Bags(
        tables.buffer_info()[0], call.address, call.values_at, _DTYPES[output.dtype], threads
    )
    if library.sketchoptim_pool_bags(bags):
        check(weights, lookups, names)
    return output


def check(weights: Sequence[Tensor], lookups: TableIds, names: Sequence[str]) -> None:
    """Raises unless offsets and ids are valid."""
    ends = [*lookups.begins()[1:], lookups.ids.numel()]
    for table, (weight, end, name) in enumerate(zip(weights, ends, names, strict=True)):
        begin = lookups.begins()[table]
        starts = lookups.starts_of(table)
        is_divided = begin == (ends[table - 1] if table else 0) and begin <= end
        if starts.numel():
            is_divided &= int(starts[-1]) <= end and bool((starts.diff() >= 0).all())
        if not is_divided:
            shown = (starts - begin)[:8].tolist()
            raise ValueError(
                f"offsets of {name!r} must ascend from 0 to at most {end - begin}, its number of "
                f"ids, got {shown}{'...' if starts.numel() > 8 else ''}"
            )
        if begin < end:
            low, high = (int(bound) for bound in lookups.ids[begin:end].aminmax())
            if low < 0 or high >= weight.shape[0]:
                raise ValueError(
                    f"ids of {name!r} must lie in [0, {weight.shape[0] - 1}], got values from "
                    f"{low} to {high}"
                )
