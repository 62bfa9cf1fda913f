"""Row sums times column sums: the non-negative factors of rank one."""

import torch
from torch import Tensor

from .._sketch import SMALLEST_SCALE
from ..storage import RankOne
from ._moment import Average, Moment, Name, Part, Table, row_sums


class RankOneMoment(Moment, storage=RankOne):
    """``rows_i * columns_j / sum(columns)`` of the whole table's decayed moment.

    Both factors are sums of the moment itself, so decaying the table decays them. A row sum is
    ``rows_i * scale``: the n rows decay by one multiplication.
    """

    gathers = True
    decays_whole = True
    _added: Tensor | None = None  # to the columns, where rows are divided among several processes

    @classmethod
    def declare(cls, storage: RankOne, name: Name, table: Table, fill: float) -> tuple[Part, ...]:
        return (
            Part("rows", (table.rows,), by="row", initial=fill * table.dim, least=0.0),
            Part("scale", (), is_on_host=True, initial=1.0, least=SMALLEST_SCALE, most=1.0),
            Part(
                "columns", (table.dim,), combine="sum", initial=fill * table.rows, least=0.0
            ),
        )  # fmt: skip

    @property
    def rows(self) -> Tensor:
        return self.tensors["rows"]

    @property
    def scale(self) -> Tensor:
        return self.tensors["scale"]

    @property
    def columns(self) -> Tensor:
        return self.tensors["columns"]

    def start_rows_(self, added: range, fill: float) -> None:
        self.columns.add_(fill * len(added))

    def begin_(self, average: Average, touched: int, step: int = 1) -> None:
        super().begin_(average, touched, step)
        self.columns.mul_(average.decay)
        self.scale.mul_(average.decay)
        if self.scale < SMALLEST_SCALE:  # rows over it would overflow
            self.rows.mul_(self.scale.item())
            self.scale.fill_(1.0)
        if self.held is not None:
            self._added = torch.zeros_like(self.columns)

    def gather_(self, ids: Tensor, values: Tensor) -> None:
        added = row_sums(values).squeeze(1) * (self.average.weight / self.scale.item())
        self.rows.index_add_(0, ids, added.to(self.rows.dtype))
        columns = self.columns if self._added is None else self._added
        columns.add_(values.sum(0), alpha=self.average.weight)

    @property
    def gathered(self) -> Tensor | None:
        return self._added

    def take_gathered_(self) -> None:
        if self._added is not None:
            self.columns.add_(self._added)
            self._added = None

    def update_(self, ids: Tensor, values: Tensor) -> Tensor:
        return self.estimate(ids).to(values.dtype)

    def estimate(self, ids: Tensor) -> Tensor:
        # A table without any mass has estimates of zero, not of 0 / 0.
        total = row_sums(self.columns.unsqueeze(0)).clamp_min(torch.finfo(self.columns.dtype).tiny)
        rows = self.rows.index_select(0, ids).unsqueeze(1) * self.scale.item()
        return rows * (self.columns / total)
