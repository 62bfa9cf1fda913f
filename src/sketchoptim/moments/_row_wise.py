"""One number for each row: the moment's mean over the row."""

import torch
from torch import Tensor

from ._moment import Moment, Parts, Table, row_sums


class RowWiseMoment(Moment):
    """A float32 vector with an entry for each row; only touched rows move."""

    @staticmethod
    def create(table: Table, fill: float) -> Parts:
        rows = torch.full((table.rows,), fill, dtype=torch.float32, device=table.device)
        return {"rows": rows}

    def update_(self, ids: Tensor, values: Tensor) -> Tensor:
        stored = self.tensors["rows"]
        mean = row_sums(values).squeeze(1) / values.shape[1]
        new = self.average.moved(stored.index_select(0, ids).to(mean.dtype), mean)
        stored.index_copy_(0, ids, new.to(stored.dtype))
        return new.unsqueeze(1)

    def estimate(self, ids: Tensor) -> Tensor:
        return self.tensors["rows"].index_select(0, ids).unsqueeze(1)
