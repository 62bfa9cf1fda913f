"""Bags of ids: which rows of a table each example looks up."""

from typing import NamedTuple

import torch
from torch import Tensor


class BagIds(NamedTuple):
    """The bags of one table, one bag after the other.

    Attributes:
        ids: int64 ``[count]``, contiguous.
        bags: how many there are.
        offsets: where each bag begins in `ids`, int64 ``[bags]``, contiguous and ascending. None
            if all bags have the same number of ids.
        first_offset: what is subtracted from the offsets, which may be those of several tables.
        factors: float32 ``[count]``, contiguous: what the row of each id is multiplied by. None for
            ones.
    """

    ids: Tensor
    bags: int
    offsets: Tensor | None = None
    first_offset: int = 0
    factors: Tensor | None = None

    @property
    def ids_a_bag(self) -> int:
        """The number of ids in each bag, if there are no offsets."""
        return self.ids.numel() // self.bags if self.bags else 0

    def starts(self) -> Tensor:
        """Where each bag begins in `ids`, int64 ``[bags]``."""
        if self.offsets is not None:
            return self.offsets - self.first_offset
        return torch.arange(self.bags, device=self.ids.device) * self.ids_a_bag

    def sizes(self) -> Tensor:
        """How many ids each bag has, int64 ``[bags]``."""
        starts = self.starts()
        return torch.diff(starts, append=starts.new_tensor([self.ids.numel()]))

    def factor_of_each(self, *, is_mean: bool) -> Tensor | None:
        """What the row of each id is multiplied by, float32 ``[count]``; None for ones."""
        if not is_mean:
            return self.factors
        sizes = self.sizes()
        return (1 / sizes.to(torch.float32)).repeat_interleave(sizes)

    def bag_of_each(self) -> Tensor:
        """The bag of each id, int64 ``[count]``."""
        return torch.arange(self.bags, device=self.ids.device).repeat_interleave(self.sizes())
