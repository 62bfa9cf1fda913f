"""Rows times columns: the moment of one number a row, with an exact factor for each column."""

import dataclasses
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import _hashing
from .._rows import Chunk, Rows
from ._moment import (
    ArrayView,
    Average,
    ColumnsView,
    Moment,
    Name,
    Part,
    Parts,
    SketchView,
    Table,
    row_sums,
)

# A row is divided into so many units among its columns. Sums of integers have the same bits in any
# order: for every number of threads, processes and chunks.
SHARE_UNITS = 1 << 26
# Of so many rows one gives its shares, another one in each step. Shares are most of the work that
# columns add to a step, and a mean over rows does not need all of them.
ROWS_A_SHARE = 8
# Of a column's factor. A column of zeros divides by it.
LEAST_FACTOR = 2.0**-20


class ColumnsMoment(Moment):
    r"""``v_ij = r_i h_j``: r by the moment of a row storage, h by one number for each column.

    A step over rows i with values ``s_ij`` (squared gradients) is, with the factors h as they were
    before the step::

        r_i <- the row storage, moved by  mean_j(s_ij / h_j)
        v_ij = r_i h_j                                          what the step divides by
        a_j  = sum_i  round(2^26 s_ij / sum_j(s_ij))            over one row in eight: see below
        c_j  <- decay c_j + weight dim a_j / sum_j(a_j)         nothing changes where all a_j are 0
        h_j  <- max(c_j / mean_j(c_j), 2^-20)                   1 while all c_j are 0

    Row i is in the sum of step t if ``mix(i) + t`` is a multiple of 8, where ``mix`` is the
    bijection of `_hashing`: a choice that depends on nothing else, and takes each row once in
    8 steps. Rows without any mass add nothing.

    Every row weighs alike in a_j, whatever its size, and every step weighs alike in c_j, whatever
    its number of rows. c_j is the part that is kept. It starts at 0 and is used by its mean, so
    that no bias correction is needed: after one step h is the value of that step. Without decay, as
    under Adagrad, c_j is a sum and h the mean over all steps.

    a_j are integers, so that they have the same bits in every order. Processes that divide the rows
    sum them after the step.
    """

    def __init__(self, storage: Any, name: Name, tensors: Parts, held: range | None = None) -> None:
        super().__init__(storage, name, tensors, held)
        plain = _without_columns(storage)
        self.inner = _class_of(plain)(plain, name, tensors, held)
        self.sketch = self.inner.sketch
        self.gathers, self.decays_whole = self.inner.gathers, self.inner.decays_whole
        self._shares = torch.zeros_like(self.columns, dtype=torch.int64)

    @classmethod
    def declare(cls, storage: Any, name: Name, table: Table, fill: float) -> tuple[Part, ...]:
        plain = _without_columns(storage)
        columns = Part("columns", (table.dim,), combine="sum", reduced_dtype=torch.int64, least=0.0)
        return (*_class_of(plain).declare(plain, name, table, fill), columns)

    @classmethod
    def starts_from_zero(cls, part_names: Container[str]) -> bool:
        return "start" not in part_names  # that of a sketch by row

    def kernel_view(self) -> ColumnsView | None:
        rows = self.inner.kernel_view()
        if not isinstance(rows, ArrayView | SketchView):
            return None
        return ColumnsView(rows, self.columns, self._shares)

    @property
    def columns(self) -> Tensor:
        return self.tensors["columns"]

    def factors(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """h ``[dim]``, as the next step uses it."""
        columns = self.columns.double()
        mean = row_sums(columns.unsqueeze(0)) / max(1, columns.numel())
        # Fresh columns are all zero, and all factors are one.
        factors = torch.where(mean > 0, columns / mean.clamp_min(torch.finfo(mean.dtype).tiny), 1.0)
        return factors[0].clamp_min(LEAST_FACTOR).to(torch.float32).to(dtype)

    def start_rows_(self, added: range, fill: float) -> None:
        self.inner.start_rows_(added, fill)

    def begin_(self, average: Average, touched: int, step: int = 1) -> None:
        super().begin_(average, touched, step)
        self.inner.begin_(average, touched, step)
        self._step = step
        self._factors = self.factors()
        self._shares.zero_()

    def gather_(self, ids: Tensor, values: Tensor) -> None:
        self.inner.gather_(ids, values / self._factors.to(values.dtype))

    @property
    def gathered(self) -> Tensor | None:
        return self.inner.gathered

    def take_gathered_(self) -> None:
        self.inner.take_gathered_()

    def update_(self, ids: Tensor, values: Tensor) -> Tensor:
        first_row = 0 if self.held is None else self.held.start
        gives_shares = (_hashing.mix(ids + first_row) + self._step) % ROWS_A_SHARE == 0
        self._shares += _shares(values[gives_shares])
        factors = self._factors.to(values.dtype)
        return self.inner.update_(ids, values / factors) * factors

    def estimate(self, ids: Tensor) -> Tensor:
        rows = self.inner.estimate(ids)
        return rows * self.factors(rows.dtype)

    def end_(self) -> None:
        self.inner.end_()
        if self.held is None:
            self.take_added_(self.average)

    @property
    def added(self) -> Tensor | None:
        return None if self.held is None else self._shares

    def take_added_(self, average: Average) -> None:
        self._move_columns_(average, self._shares)

    def _move_columns_(self, average: Average, shares: Tensor) -> None:
        total = shares.sum().double()
        step = shares.double() * (shares.numel() / total)
        moved = average.after(self.columns.double(), step)
        self.columns.copy_(torch.where(total > 0, moved, self.columns))

    def load_(self, rows: Rows, *, start: float) -> None:
        # All rows of a whole moment give their shares, once.
        shares = torch.zeros_like(self.columns, dtype=torch.int64)
        for chunk in rows.chunks():
            shares += _shares(chunk.gradient)
        self._move_columns_(Average(0.0, 1.0), shares)
        self.inner.load_(_Divided(rows.ids, rows.values, self.factors()), start=start)

    @property
    def has_maintenance(self) -> bool:
        return self.inner.has_maintenance

    def maintain_(self, step: int) -> bool:
        return self.inner.maintain_(step)

    def overload(self, touched: int, decay: float) -> str | None:
        return self.inner.overload(touched, decay)


@dataclasses.dataclass(frozen=True)
class _Divided(Rows):
    """Rows whose values are divided by factors, chunk by chunk."""

    factors: Tensor

    def chunks(self) -> Iterator[Chunk]:
        for chunk in super().chunks():
            yield chunk._replace(gradient=chunk.gradient / self.factors.to(chunk.gradient.dtype))


def _shares(values: Tensor) -> Tensor:
    """The sums over rows of each column's share of its row, int64 ``[dim]``."""
    sums = row_sums(values)
    shares = values / sums.clamp_min(torch.finfo(sums.dtype).tiny) * SHARE_UNITS
    return shares.round().to(torch.int64).sum(0)


def _without_columns(storage: Any) -> Any:
    return dataclasses.replace(storage, columns=False)


def _class_of(storage: Any) -> type[Moment]:
    return Moment._by_storage[type(storage)].form_of(storage)
