"""Bags of ids: which rows of each table each example looks up."""

from typing import NamedTuple

import torch
from torch import Tensor


class BagIds(NamedTuple):
    """The bags of one table, one bag after the other.

    Attributes:
        ids: int64 ``[count]``, contiguous.
        starts: where each bag begins in `ids`, int64 ``[bags]``, ascending from 0.
        factors: float32 ``[count]``: what the row of each id is multiplied by. None for ones.
    """

    ids: Tensor
    starts: Tensor
    factors: Tensor | None = None

    def sizes(self) -> Tensor:
        """How many ids each bag has, int64 ``[bags]``."""
        return torch.diff(self.starts, append=self.starts.new_tensor([self.ids.numel()]))

    def factor_of_each(self, *, is_mean: bool) -> Tensor | None:
        """What the row of each id is multiplied by, float32 ``[count]``; None for ones."""
        if not is_mean:
            return self.factors
        sizes = self.sizes()
        return (1 / sizes.to(torch.float32)).repeat_interleave(sizes)

    def bag_of_each(self) -> Tensor:
        """The bag of each id, int64 ``[count]``."""
        bags = torch.arange(self.starts.numel(), device=self.ids.device)
        return bags.repeat_interleave(self.sizes())


class TableIds:
    """The bags of several tables, one table after the other; all have the same number of bags.

    Args:
        ids: int64 ``[count]``, contiguous.
        offsets: where each bag begins in `ids`, int64 ``[tables * bags]`` or one more, contiguous
            and ascending from 0. None if each bag has one id.
        tables: how many there are.
        bags: of each table.
        factors: float32 ``[count]``, contiguous: what the row of each id is multiplied by. None for
            ones.
    """

    __slots__ = ("bags", "factors", "ids", "offsets", "tables")

    def __init__(
        self, ids: Tensor, offsets: Tensor | None, factors: Tensor | None, tables: int, bags: int
    ) -> None:
        self.ids, self.offsets, self.factors = ids, offsets, factors
        self.tables, self.bags = tables, bags

    def starts_of(self, table: int) -> Tensor:
        """Where each bag of a table begins in `ids`, int64 ``[bags]``."""
        begin, end = table * self.bags, (table + 1) * self.bags
        if self.offsets is None:
            return torch.arange(begin, end, device=self.ids.device)
        return self.offsets[begin:end]

    def begins(self) -> list[int]:
        """Where each table begins in `ids`."""
        if not self.bags:
            return [0] * self.tables
        if self.offsets is None:
            return [table * self.bags for table in range(self.tables)]
        found: list[int] = self.offsets[: self.tables * self.bags : self.bags].tolist()
        return found

    def of_each(self) -> list[BagIds]:
        """The bags of each table."""
        return [self.of(table) for table in range(self.tables)]

    def of(self, table: int) -> BagIds:
        """The bags of one table."""
        begin, end = [*self.begins(), self.ids.numel()][table : table + 2]
        factors = None if self.factors is None else self.factors[begin:end]
        return BagIds(self.ids[begin:end], self.starts_of(table) - begin, factors)
