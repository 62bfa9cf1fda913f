"""One number for each row: the moment's mean over the row."""

from torch import Tensor

from ..storage import RowWise
from ._columns import ColumnsMoment
from ._moment import ArrayView, Moment, Name, Part, Table, row_sums


class RowWiseMoment(Moment, storage=RowWise):
    """A float32 vector with an entry for each row; only touched rows move."""

    granularity = "row"

    @classmethod
    def form_of(cls, storage: RowWise) -> type[Moment]:
        return ColumnsMoment if storage.columns else cls

    @classmethod
    def declare(cls, storage: RowWise, name: Name, table: Table, fill: float) -> tuple[Part, ...]:
        return (Part("rows", (table.rows,), by="row", initial=fill, least=0.0),)

    @property
    def rows(self) -> Tensor:
        return self.tensors["rows"]

    def kernel_view(self) -> ArrayView:
        return ArrayView(self.rows, is_by_row=True)

    def update_(self, ids: Tensor, values: Tensor) -> Tensor:
        mean = row_sums(values).squeeze(1) / max(1, values.shape[1])
        new = self.average.after(self.rows.index_select(0, ids).to(mean.dtype), mean)
        self.rows.index_copy_(0, ids, new.to(self.rows.dtype))
        return new.unsqueeze(1)

    def estimate(self, ids: Tensor) -> Tensor:
        return self.rows.index_select(0, ids).unsqueeze(1)
