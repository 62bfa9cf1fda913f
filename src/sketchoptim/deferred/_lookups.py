"""The gradient of a table that was looked up: ids, and the gradient of what was looked up."""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from .._bag_ids import BagIds, TableIds
from .._rows import arithmetic_dtype
from .._torch_private import version_of
from ._parts import Part, Reader, restored


class Lookups(Part):
    """The gradient of a table whose rows were looked up, alone or in bags.

    Row i is the sum over all lookups of i of the output gradient, times the weight of the lookup.

    Args:
        weight: The table ``[n, dim]``.
        ids: Rows that were looked up, int64 or int32 of shape ``[k]``, in the order of the lookups.
        output_gradient: ``[bags, dim]``, or ``[k, dim]`` without bags. It may be a slice of columns
            of a wider matrix, and is not copied.
        offsets: Where each bag begins in `ids`, ``[bags]``; None if each lookup has an output.
        lookup_weights: A factor of each lookup, ``[k]``.
        mode: Whether a bag is the sum or the mean of its rows.
        padding_idx: Lookups of this row have no gradient, and do not count in a mean.
        is_sparse: Whether the plain gradient would be sparse.
    """

    owned = ("ids", "output_gradient", "offsets", "lookup_weights")

    def __init__(
        self,
        weight: Tensor,
        ids: Tensor,
        output_gradient: Tensor,
        *,
        offsets: Tensor | None = None,
        lookup_weights: Tensor | None = None,
        mode: Literal["sum", "mean"] = "sum",
        padding_idx: int | None = None,
        is_sparse: bool = True,
    ) -> None:
        self.ids, self.output_gradient = ids, output_gradient
        self.offsets, self.lookup_weights = offsets, lookup_weights
        self.mode, self.padding_idx = mode, padding_idx
        super().__init__(weight, is_sparse=is_sparse)

    @property
    def output_dtype(self) -> torch.dtype:
        """The dtype of the gradient of the outputs."""
        return self.output_gradient.dtype

    @property
    def touched(self) -> Tensor:
        """The ids that were looked up, ascending and distinct."""
        ids = self.ids if self.padding_idx is None else self.ids[self.ids != self.padding_idx]
        distinct: Tensor = ids.unique()
        return distinct.long()

    def reader(self) -> Reader:
        return _LookupReader(self)

    def entries(self) -> tuple[Tensor, Tensor]:
        if self.offsets is None and self.padding_idx is None and self.lookup_weights is None:
            return self.ids.long(), self.output_gradient.reshape(-1, *self.shape[1:])
        ids, bags, factors = self.kept()
        values = self.output_gradient[bags]
        if factors is not None:
            values = (values * factors[:, None]).to(self.dtype)
        return ids, values.reshape(-1, *self.shape[1:])

    def kept(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids, numbers of outputs and factors of the lookups that have a gradient, each ``[k]``."""
        ids, bags, factors = self.ids.long(), self.bags, self.factors()
        if self.padding_idx is None:
            return ids, bags, factors
        is_kept = ids != self.padding_idx
        return ids[is_kept], bags[is_kept], None if factors is None else factors[is_kept]

    def check_ids(self) -> None:
        """Raises unless all ids are rows of the table."""
        if not self.ids.numel():
            return
        low, high = torch.stack(torch.aminmax(self.ids)).tolist()
        if low < 0 or high >= self.shape[0]:
            raise ValueError(
                f"the gradient of the parameter of shape {list(self.shape)} must have row ids "
                f"between 0 and {self.shape[0] - 1}, got {low} to {high}"
            )

    def bound(self) -> Tensor:
        """The largest sum over a column of magnitudes, if all lookups were of one row."""
        if not self.ids.numel():
            return torch.zeros((), device=self.device)
        gradient = self.output_gradient.float().abs()
        if self.offsets is not None:
            counts = torch.bincount(self.bags, minlength=len(gradient))
            gradient = gradient * counts[:, None]
        bound = gradient.sum(0).amax()
        if self.lookup_weights is not None:
            bound = bound * self.lookup_weights.float().abs().amax()
        return bound

    @property
    def bags(self) -> Tensor:
        """The number of the output of each lookup, int64 ``[k]``."""
        lookups = torch.arange(self.ids.numel(), device=self.device)
        if self.offsets is None:
            return lookups
        return torch.searchsorted(self.offsets, lookups.to(self.offsets.dtype), right=True) - 1

    def factors(self) -> Tensor | None:
        """The factor of each lookup, ``[k]`` in float32 at least; None if all are one."""
        dtype = arithmetic_dtype(self.dtype)
        factors = None if self.lookup_weights is None else self.lookup_weights.to(dtype)
        is_kept = None if self.padding_idx is None else (self.ids != self.padding_idx).to(dtype)
        if self.mode == "mean" and self.offsets is not None:
            counted = self.ids.new_ones(self.ids.shape, dtype=dtype) if is_kept is None else is_kept
            bags = self.bags
            sizes = counted.new_zeros(self.offsets.shape).index_add_(0, bags, counted)
            means = sizes.clamp(min=1).reciprocal()[bags]
            factors = means if factors is None else factors * means
        if is_kept is None:
            return factors
        return is_kept if factors is None else factors * is_kept


class SharedLookups:
    """Lookups of several tables in one call, of whose outputs each table has some columns.

    Args:
        weights: The tables.
        lookups: What was looked up.
        output_gradient: ``[bags, columns of all tables]``, of which nothing is copied.
        mode: Whether a bag is the sum or the mean of its rows.
    """

    __slots__ = ("call", "columns", "lookups", "mode", "output_gradient", "tensors", "versions")

    call: Any
    """What the kernels have made of it: the same for all tables."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        lookups: TableIds,
        output_gradient: Tensor,
        mode: Literal["sum", "mean"],
    ) -> None:
        self.lookups, self.output_gradient, self.mode = lookups, output_gradient, mode
        self.columns = list(accumulate((it.shape[1] for it in weights), initial=0))
        named = {
            "ids": lookups.ids,
            "output_gradient": output_gradient,
            "offsets": lookups.offsets,
            "lookup_weights": lookups.factors,
        }
        self.tensors = {name: it for name, it in named.items() if it is not None}
        self.versions = self.current_versions()
        self.call = None

    def current_versions(self) -> list[int]:
        """The versions of the tensors."""
        return [version_of(it) for it in self.tensors.values()]


class TableLookups(Lookups):
    """The lookups of one of several tables. What is its own is found when it is read."""

    def __init__(self, weight: Tensor, shared: SharedLookups, table: int) -> None:
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self.is_sparse, self.mode, self.padding_idx = True, shared.mode, None
        self.shared, self.table = shared, table

    @cached_property
    def _own(self) -> BagIds:
        return self.shared.lookups.of(self.table)

    @property
    def ids(self) -> Tensor:  # type: ignore[override]
        return self._own.ids

    @property
    def offsets(self) -> Tensor | None:  # type: ignore[override]
        is_single = self.shared.lookups.offsets is None
        return None if is_single else self._own.starts

    @property
    def lookup_weights(self) -> Tensor | None:  # type: ignore[override]
        return self._own.factors

    @property
    def output_gradient(self) -> Tensor:  # type: ignore[override]
        begin = self.shared.columns[self.table]
        return self.shared.output_gradient[:, begin : begin + self.dim]

    @property
    def output_dtype(self) -> torch.dtype:
        return self.shared.output_gradient.dtype

    @property
    def is_current(self) -> bool:
        return self.shared.versions == self.shared.current_versions()

    def check_current(self) -> None:
        if not self.is_current:
            super().check_current()

    @property
    def _versions(self) -> dict[str, int]:  # type: ignore[override]
        return dict(zip(self.shared.tensors, self.shared.versions, strict=True))

    def _current_versions(self) -> dict[str, int]:
        return dict(zip(self.shared.tensors, self.shared.current_versions(), strict=True))

    def alone(self) -> Lookups:
        """The same without the other tables, to be copied or pickled."""
        self.check_current()
        names = ["shape", "dtype", "device", "is_sparse", "mode", "padding_idx"]
        return restored(Lookups, {name: getattr(self, name) for name in (*names, *self.owned)})

    def __deepcopy__(self, memo: dict[int, Any]) -> Lookups:  # type: ignore[override]
        return self.alone().__deepcopy__(memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.alone().__reduce__()


class _LookupReader:
    """Lookups in the order of their ids; those of one row stay in their order."""

    def __init__(self, part: Lookups) -> None:
        self.gradient = part.output_gradient
        self.ids, order = part.ids.long().sort(stable=True)
        self.outputs = part.bags[order]
        factors = part.factors()
        self.factors = None if factors is None else factors[order]

    def add_(self, out: Tensor, at: slice | Tensor) -> None:
        if not self.ids.numel() or not out.numel():
            return
        if isinstance(at, slice):
            limits = torch.tensor([at.start, at.stop], device=self.ids.device)
            begin, end = torch.searchsorted(self.ids, limits).tolist()
            rows, found = self.ids[begin:end] - at.start, slice(begin, end)
        else:
            begin, end = torch.searchsorted(self.ids, torch.stack([at[0], at[-1] + 1])).tolist()
            place = torch.searchsorted(at, self.ids[begin:end])
            is_wanted = at[place] == self.ids[begin:end]
            found = begin + is_wanted.nonzero()[:, 0]
            rows = place[is_wanted]
        values = self.gradient[self.outputs[found]].reshape(-1, out.shape[1]).to(out.dtype)
        if self.factors is not None:
            values = values * self.factors[found, None]
        out.index_add_(0, rows, values)
