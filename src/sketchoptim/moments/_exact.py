"""One number for each weight, as torch.optim keeps it."""

from torch import Tensor

from .._rows import Rows
from ..storage import Exact
from ._moment import ArrayView, Moment, Name, Part, Table


class ExactMoment(Moment, storage=Exact):
    """Rows of a tensor of the parameter's shape and dtype; only touched rows move."""

    @classmethod
    def declare(cls, storage: Exact, name: Name, table: Table, fill: float) -> tuple[Part, ...]:
        shape = tuple(table.shape)
        return (Part("values", shape, dtype=None, by="row", initial=fill, may_overflow=True),)

    def exact_values(self) -> Tensor:
        return self.tensors["values"]

    def kernel_view(self) -> ArrayView:
        return ArrayView(self.exact_values(), is_by_row=False)

    def update_(self, ids: Tensor, values: Tensor) -> Tensor:
        stored = self.exact_values()
        old = stored.index_select(0, ids).view_as(values).to(values.dtype)
        new = self.average.after(old, values)
        stored.index_copy_(0, ids, new.to(stored.dtype).view(-1, *stored.shape[1:]))
        return new

    def load_(self, rows: Rows, *, start: float) -> None:
        stored = self.exact_values()
        if rows.ids is None:
            stored.copy_(rows.values.view_as(stored))
        else:
            stored.index_copy_(0, rows.ids, rows.values.to(stored.dtype))

    def estimate(self, ids: Tensor) -> Tensor:
        stored = self.exact_values()
        return stored.index_select(0, ids).reshape(ids.numel(), stored.shape[1:].numel())
