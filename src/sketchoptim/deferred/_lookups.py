"""The gradient of a table that was looked up: ids, and the gradient of what was looked up."""

from typing import Literal

import torch
from torch import Tensor

from .._rows import arithmetic_dtype
from ._parts import Part, Reader


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
