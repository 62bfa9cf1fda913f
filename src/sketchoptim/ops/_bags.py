"""Sums and means of rows over bags of ids, for several tables in one call."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .._bag_ids import BagIds
from . import _native

Mode = Literal["sum", "mean"]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Below this many elements of the output, threads cost more than they save.
_ELEMENTS_FOR_THREADS = 1 << 15


def pool_bags(
    weights: Sequence[Tensor], lookups: Sequence[BagIds], mode: Mode, names: Sequence[str]
) -> Tensor:
    """The sum or mean of the rows of each bag, ``[bags, columns of all tables]``.

    Rows are added in float32, in the order of their ids; an empty bag gives zeros. Offsets and ids
    are validated before anything is written.

    Args:
        weights: of the tables, ``[rows, dim]``, of one dtype and device; at least one.
        lookups: of each table, all with the same number of bags.
        mode: "sum" or "mean".
        names: of the tables, for errors.
    """
    if _is_native(weights, lookups):
        return _by_kernel(weights, lookups, mode, names)
    return reference(weights, lookups, mode, names)


def reference(
    weights: Sequence[Tensor], lookups: Sequence[BagIds], mode: Mode, names: Sequence[str]
) -> Tensor:
    """The sums of bags in torch's operations, table by table."""
    for weight, bags, name in zip(weights, lookups, names, strict=True):
        if weight.device.type == "cpu":  # other devices would wait, and check by themselves
            _check(weight, bags, name)
    pooled = []
    for weight, bags in zip(weights, lookups, strict=True):
        factors = None if bags.factors is None else bags.factors.to(weight.dtype)
        pooled.append(
            F.embedding_bag(bags.ids, weight, bags.starts(), mode=mode, per_sample_weights=factors)
        )
    return torch.cat(pooled, 1)


def _is_native(weights: Sequence[Tensor], lookups: Sequence[BagIds]) -> bool:
    dtype = weights[0].dtype
    return (
        dtype in _DTYPES
        and all(it.is_cpu and it.dtype == dtype and it.is_contiguous() for it in weights)
        and all(it.ids.is_cpu for it in lookups)
        and _native.library() is not None
    )


def _by_kernel(
    weights: Sequence[Tensor], lookups: Sequence[BagIds], mode: Mode, names: Sequence[str]
) -> Tensor:
    library = _native.library()
    assert library is not None  # the caller has looked
    ends = list(accumulate(weight.shape[1] for weight in weights))
    columns = [0, *ends[:-1]]
    bags = lookups[0].bags
    tables = (_native.BagTable * len(weights))(
        *(
            _native.BagTable(
                weight.data_ptr(),
                it.ids.data_ptr(),
                None if it.offsets is None else it.offsets.data_ptr(),
                None if it.factors is None else it.factors.data_ptr(),
                *weight.shape,
                column,
                it.ids.numel(),
                it.first_offset,
                0 if it.offsets is not None else it.ids_a_bag,
            )
            for weight, it, column in zip(weights, lookups, columns, strict=True)
        )
    )
    output = torch.empty(bags, ends[-1], dtype=weights[0].dtype)
    call = _native.Bags(
        table=tables,
        tables=len(weights),
        bags=bags,
        columns=ends[-1],
        output=output.data_ptr(),
        dtype=_DTYPES[output.dtype],
        is_mean=mode == "mean",
        threads=torch.get_num_threads() if output.numel() >= _ELEMENTS_FOR_THREADS else 1,
    )
    wrong = library.sketchoptim_pool_bags(call)
    if wrong:
        at = abs(wrong) - 1
        _check(weights[at], lookups[at], names[at])
    return output


def _check(weight: Tensor, bags: BagIds, name: str) -> None:
    """Raises unless offsets and ids are valid."""
    count, rows = bags.ids.numel(), weight.shape[0]
    starts, sizes = bags.starts(), bags.sizes()
    is_divided = starts.numel() > 0 and int(starts[0]) == 0 and int(sizes.min()) >= 0
    if count and not is_divided:
        raise ValueError(
            f"offsets of {name!r} must ascend from 0 to at most {count}, its number of ids, got "
            f"{starts.tolist()[:8]}{'...' if starts.numel() > 8 else ''}"
        )
    if count:
        low, high = (int(bound) for bound in bags.ids.aminmax())
        if low < 0 or high >= rows:
            raise ValueError(
                f"ids of {name!r} must lie in [0, {rows - 1}], got values from {low} to {high}"
            )
