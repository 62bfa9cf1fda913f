"""Row sums times column sums: the non-negative factors of rank one."""

from typing import Any

import torch
from torch import Tensor

from .. import _hashing, _pages
from .._sketch import CountMinSketch
from ._moment import Average, Moment, Parts, Table, row_sums


class RankOneMoment(Moment):
    """``rows_i * columns_j / sum(columns)`` of the whole table's decayed moment.

    Both factors are sums of the moment itself, so decaying the table decays them, whole: the row
    sums through the lazy scale of a sketch that has a bucket of its own for each row.
    """

    gathers = True

    @staticmethod
    def create(table: Table, fill: float) -> Parts:
        wide: Any = {"dtype": torch.float32, "device": table.device}
        return {
            "table": _pages.empty((1, table.rows, 1), **wide).fill_(fill * table.dim),
            "scale": torch.ones((), dtype=torch.float32, device="cpu"),
            "words": _hashing.injective(table.rows, 1).to(table.device),
            "columns": torch.full((table.dim,), fill * table.rows, **wide),
        }

    def __init__(self, tensors: Parts) -> None:
        super().__init__(tensors)
        self.columns = tensors["columns"]
        self.rows = CountMinSketch.over(
            table=tensors["table"], scale=tensors["scale"], words=tensors["words"], rounds=None
        )

    def begin_(self, average: Average, touched: int) -> None:
        super().begin_(average, touched)
        self.rows.scale_(average.decay)
        self.columns.mul_(average.decay)

    def gather_(self, ids: Tensor, values: Tensor) -> None:
        self.rows.accumulate_(ids, row_sums(values) * self.average.weight)
        self.columns.add_(values.sum(0), alpha=self.average.weight)

    def update_(self, ids: Tensor, values: Tensor) -> Tensor:
        return self.estimate(ids).to(values.dtype)

    def estimate(self, ids: Tensor) -> Tensor:
        # A table without any mass has estimates of zero, not of 0 / 0.
        total = row_sums(self.columns.unsqueeze(0)).clamp_min(torch.finfo(self.columns.dtype).tiny)
        return self.rows.estimate(ids) * (self.columns / total)
