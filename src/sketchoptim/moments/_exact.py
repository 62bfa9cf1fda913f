"""One number for each weight, as torch.optim keeps it."""

import torch
from torch import Tensor

from .._rows import Rows
from ._moment import Moment, Parts, Table


class ExactMoment(Moment):
    """Rows of a tensor of the parameter's shape and dtype; only touched rows move."""

    @staticmethod
    def create(table: Table, fill: float) -> Parts:
        values = torch.full(table.shape, fill, dtype=table.dtype, device=table.device)
        return {"values": values}

    def update_(self, ids: Tensor, values: Tensor) -> Tensor:
        stored = self.tensors["values"]
        old = stored.index_select(0, ids).view_as(values).to(values.dtype)
        new = self.average.moved(old, values)
        stored.index_copy_(0, ids, new.to(stored.dtype).view(-1, *stored.shape[1:]))
        return new

    def load_(self, rows: Rows, *, start: float) -> None:
        stored = self.tensors["values"]
        if rows.ids is None:
            stored.copy_(rows.values.view_as(stored))
        else:
            stored.index_copy_(0, rows.ids, rows.values.to(stored.dtype))

    def estimate(self, ids: Tensor) -> Tensor:
        stored = self.tensors["values"]
        return stored.index_select(0, ids).reshape(ids.numel(), stored.shape[1:].numel())
