"""The best rank-one approximation in l2 after every update: a baseline."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..storage import TopSingular
from ._moment import Average, Moment, Name, Part, Table


@contextmanager
def _one_thread() -> Iterator[None]:
    """Without it the bits of sums and matrix products would depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class TopSingularMoment(Moment, storage=TopSingular):
    """``rows * columns^T`` with columns of unit norm; only touched rows move before the fit.

    The fit needs no ``[n, dim]`` matrix: untouched rows are multiples of the old columns, so the
    Gram matrix of all rows is that of the touched ones plus the rest's energy times
    ``columns columns^T``.
    """

    gathers = True

    @classmethod
    def declare(
        cls, storage: TopSingular, name: Name, table: Table, fill: float
    ) -> tuple[Part, ...]:
        norm = max(1, table.dim) ** 0.5
        return (
            Part("rows", (table.rows,), by="row", initial=fill * norm),
            Part("columns", (table.dim,), initial=1 / norm, combine="refused"),
        )

    @property
    def rows(self) -> Tensor:
        return self.tensors["rows"]

    @property
    def columns(self) -> Tensor:
        return self.tensors["columns"]

    @_one_thread()
    def begin_(self, average: Average, touched: int, step: int = 1) -> None:
        super().begin_(average, touched, step)
        columns = self.columns.double()
        self._gram = torch.outer(columns, columns) * self.rows.double().square().sum()
        self._fitted: Tensor | None = None
        self._moved: list[tuple[Tensor, Tensor]] = []

    def _exact(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        old = torch.outer(self.rows[ids], self.columns).double()
        return old, self.average.after(old, values.double())

    @_one_thread()
    def gather_(self, ids: Tensor, values: Tensor) -> None:
        old, new = self._exact(ids, values)
        self._gram += new.t() @ new - old.t() @ old

    @_one_thread()
    def update_(self, ids: Tensor, values: Tensor) -> Tensor:
        if self._fitted is None:
            top = torch.linalg.eigh(self._gram).eigenvectors[:, -1]
            self._fitted = -top if top @ self.columns.double() < 0 else top
        rows = self._exact(ids, values)[1] @ self._fitted
        self._moved.append((ids, rows))
        return self._clamp(torch.outer(rows, self._fitted).to(values.dtype))

    def estimate(self, ids: Tensor) -> Tensor:
        return self._clamp(torch.outer(self.rows.index_select(0, ids), self.columns))

    def _clamp(self, estimates: Tensor) -> Tensor:
        """A non-negative matrix has non-negative factors, but for rounding."""
        return estimates if self.name == "first" else estimates.clamp_min_(0)

    @_one_thread()
    def end_(self) -> None:
        if self._fitted is not None:  # some row was touched
            self.rows.mul_(self.columns.double() @ self._fitted)
            for ids, rows in self._moved:
                self.rows[ids] = rows.to(self.rows.dtype)
            self.columns.copy_(self._fitted)
        del self._gram, self._fitted, self._moved  # of no use between steps
