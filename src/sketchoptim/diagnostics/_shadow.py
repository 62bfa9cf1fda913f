"""The exact moment beside the compressed one: how wrong each way of keeping it is, step by step."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _hashing, moments
from .._rows import Rows, of_gradient, row_chunks
from ..moments import Average, Moment, Name, Table
from ..optim._names import named_parameters
from ..optim._opened import opened_moments
from ..optim.base import Group, Optimizer
from ..storage import Exact, RankOne, Sketched, Storage, TopSingular

KEPT = "kept"
# The parts of a moment that hold its numbers, beside hash words, scales and counts.
_NUMBERS = ("table", "values", "rows", "columns")


@dataclass(frozen=True)
class ShadowRecord:
    """The error of one way to keep one moment after one step: lengths in the sense of l2."""

    step: int
    parameter: str
    moment: Name
    method: str
    """"kept" for what the optimizer itself keeps, else the name of a rival."""
    floats: int
    """How many numbers the method keeps."""
    columns: int
    """Of an estimate: 1 where one number stands for a row, and is held against the row's mean."""
    touched_error: float
    """The length of (estimate - exact) over the rows of the step's gradient."""
    touched_norm: float
    """The length of the exact moment over those rows."""
    all_error: float
    """The length of (estimate - exact) over all rows."""
    all_norm: float

    @property
    def touched_relative(self) -> float:
        """Error over norm on the touched rows."""
        return _quotient(self.touched_error, self.touched_norm)

    @property
    def all_relative(self) -> float:
        """Error over norm on all rows."""
        return _quotient(self.all_error, self.all_norm)


class Shadow:
    """The errors of compressed moments against exact ones that are kept beside them while training.

    For the chosen parameters the shadow follows every step of the optimizer with the exact moment
    and with rivals, which see the same gradients and change nothing. An estimate is held against
    the exact moment that decays as it does: on all rows for linear decay and `RankOne`, on touched
    rows for `Exact`, `TopSingular` and the forms of the paper.

    By default the rivals are what keeps as many numbers as the factors of a rank-one
    approximation, n + dim of them: `RankOne` (second moments), `TopSingular`, and, under the name
    "sketch", a sketch of the kind that the optimizer keeps (or else of the paper's) that is as wide
    as so many numbers allow. `ShadowRecord.floats` says what each came to.

    This costs what it measures: two copies of the moment at most, and a pass over all rows every
    `every` steps. Attach it before the first step.

    Args:
        optimizer: One of ours, whose parameters have no coupled weight decay.
        parameters: Those to follow.
        every: Steps between two records.
        rivals: Storages by name, in place of the default ones.

    >>> table = torch.nn.Embedding(1000, 8, sparse=True)
    >>> optimizer = so.Adam([("table", table.weight)], memory="paper-v-only")
    >>> shadow = Shadow(optimizer, [table.weight], every=1)
    >>> table(torch.arange(500)).square().sum().backward()
    >>> optimizer.step()
    >>> {record.method: record.floats for record in shadow.records}
    {'kept': 1584, 'sketch': 1008, 'rank-one': 1008, 'top-singular': 1008}
    >>> shadow.remove()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Iterable[Tensor],
        *,
        every: int = 10,
        rivals: Mapping[str, Storage] | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            kind = type(optimizer).__name__
            raise TypeError(f"optimizer must be one of sketchoptim's, got {kind}")
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be an int >= 1, got {every!r}")
        if rivals is not None and KEPT in rivals:
            raise ValueError(f'rivals must not be named "{KEPT}", which is the optimizer\'s own')
        chosen = set(parameters)
        found = [item for item in named_parameters(optimizer) if item[1] in chosen]
        if len(found) != len(chosen):
            raise ValueError("parameters must be those of the optimizer, got others among them")
        for name, parameter, group in found:
            _check(name, optimizer.state.get(parameter), group)
        self.every = every
        self.records: list[ShadowRecord] = []
        self._rivals = rivals
        self._followed = {parameter: _Followed(name, group) for name, parameter, group in found}
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Stops following the optimizer; the records stay."""
        self._handle.remove()

    @torch.no_grad()
    def _after_step(self, optimizer: Any, *_: object) -> None:
        for parameter, followed in self._followed.items():
            state = optimizer.state.get(parameter)
            if not state or parameter.grad is None or int(state["step"]) == followed.step:
                continue  # it had no gradient, or its step was skipped
            followed.step = int(state["step"])
            group = followed.group
            memory = optimizer._memory(parameter, group)
            step_of_moments = followed.step - state.get("began_after", 0)
            rule = optimizer._rule(
                group, step_of_moments, memory=memory, is_sparse=parameter.grad.is_sparse
            )
            gradient = of_gradient(parameter.grad)
            kept = opened_moments(optimizer, parameter, group)
            averages: dict[Name, Average | None] = {"first": rule.first, "second": rule.second}
            for name, average in averages.items():
                if average is None:
                    continue
                if name not in followed.moments:
                    table, fill = optimizer._table(parameter), optimizer._fill(group)
                    followed.moments[name] = self._started(name, kept[name], memory, table, fill)
                step = _Step(gradient, average, name, rule.maximize, followed.step)
                for moment in followed.moments[name].everything():
                    step.run_(moment)
                if followed.step % self.every == 0:
                    self._record(parameter, followed, kept[name], step)

    def _started(
        self, name: Name, kept: Moment, memory: Any, table: Table, fill: float
    ) -> "_Beside":
        table = dataclasses.replace(table, dtype=torch.float32)
        rivals = self._rivals
        if rivals is None:
            rivals = default_rivals(getattr(memory, name), name, table)
        return _Beside(name, kept, rivals, table, fill)

    def _record(
        self, parameter: Tensor, followed: "_Followed", kept: Moment, step: "_Step"
    ) -> None:
        beside = followed.moments[step.name]
        touched = [chunk.ids for chunk in step.rows.chunks()]
        methods = {KEPT: kept, **beside.rivals}
        if isinstance(kept, moments.ExactMoment):
            del methods[KEPT]
        for method, moment in methods.items():
            exact = beside.exact_for(moment)
            _, *touched_lengths = _lengths(moment, exact, touched)  # of which there may be none
            all_rows = (ids for _, ids in row_chunks(parameter))
            columns, *all_lengths = _lengths(moment, exact, all_rows)
            floats = sum(
                moment.tensors[part].numel() for part in _NUMBERS if part in moment.tensors
            )
            self.records.append(
                ShadowRecord(
                    step.number, followed.name, step.name, method, floats, columns,
                    *touched_lengths, *all_lengths,
                )
            )  # fmt: skip


class _Followed:
    """A parameter with what is kept beside its moments."""

    def __init__(self, name: str, group: Group) -> None:
        self.name, self.group = name, group
        self.step = 0
        self.moments: dict[Name, _Beside] = {}


class _Beside:
    """The rivals of one moment, and the exact moments to hold them and the kept one against."""

    def __init__(
        self, name: Name, kept: Moment, rivals: Mapping[str, Storage], table: Table, fill: float
    ) -> None:
        self.rivals: dict[str, Moment] = {}
        for method, storage in rivals.items():
            tensors = moments.create(storage, table, fill=fill)
            self.rivals[method] = moments.open_moment(storage, name, tensors)
        self._exact: dict[bool, Moment] = {}
        for moment in (kept, *self.rivals.values()):
            decays_whole = _decays_whole(moment)
            if decays_whole not in self._exact:
                self._exact[decays_whole] = _exact(name, table, fill, decays_whole=decays_whole)

    def exact_for(self, moment: Moment) -> Moment:
        return self._exact[_decays_whole(moment)]

    def everything(self) -> list[Moment]:
        return [*self._exact.values(), *self.rivals.values()]


class _Step:
    """A step of the optimizer, to be repeated on other moments."""

    def __init__(
        self, rows: Rows, average: Average, name: Name, maximize: bool, number: int
    ) -> None:
        self.rows, self.average, self.name = rows, average, name
        self.sign, self.number = -1.0 if maximize else 1.0, number

    def run_(self, moment: Moment) -> None:
        moment.begin_(self.average, len(self.rows))
        if moment.gathers:
            for ids, values in self._values():
                moment.gather_(ids, values)
        for ids, values in self._values():
            moment.update_(ids, values)
        moment.end_()
        moment.maintain_(self.number)

    def _values(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chunk in self.rows.chunks():
            is_first = self.name == "first"
            yield chunk.ids, chunk.gradient * self.sign if is_first else chunk.gradient.square()


def default_rivals(kept: Storage, name: Name, table: Table) -> dict[str, Storage]:
    """Ways to keep a moment in about as many numbers as rank-one factors have."""
    sketch = Sketched(granularity="element", decay="paper")
    if isinstance(kept, Sketched):
        sketch = dataclasses.replace(kept, clean_every=None, clean_by=None)
    columns = table.dim if sketch.granularity == "element" else 1
    width = max(1, (table.rows + table.dim) // (sketch.depth * columns))
    alike = dataclasses.replace(sketch, ratio=None, width=width, fold_at=(), fold_when=None)
    rivals: dict[str, Storage] = {"sketch": alike}
    if name == "second":
        rivals["rank-one"] = RankOne()
    return {**rivals, "top-singular": TopSingular()}


def _exact(name: Name, table: Table, fill: float, *, decays_whole: bool) -> Moment:
    """An exact moment; one that decays as a whole is a linear sketch with a bucket for each row."""
    if not decays_whole:
        return moments.open_moment(Exact(), name, moments.create(Exact(), table, fill=fill))
    alone = Sketched(width=table.rows, depth=1, granularity="element")
    tensors = moments.create(alone, table, fill=fill)
    tensors["words"] = _hashing.injective(table.rows, 1).to(table.device)
    return moments.open_moment(alone, name, tensors)


def _decays_whole(moment: Moment) -> bool:
    if isinstance(moment, moments.SketchedMoment):
        return moment.storage.decay == "linear"
    return isinstance(moment, moments.RankOneMoment)


def _lengths(moment: Moment, exact: Moment, ids: Iterable[Tensor]) -> tuple[int, float, float]:
    """The columns of an estimate, and the lengths of the error and of the exact moment."""
    columns, error, norm = 0, 0.0, 0.0
    for part in ids:
        estimate, truth = moment.estimate(part).double(), exact.estimate(part).double()
        columns = estimate.shape[1]
        if columns != truth.shape[1]:
            truth = truth.mean(1, keepdim=True)
        error += (estimate - truth).square().sum().item()
        norm += truth.square().sum().item()
    return columns, math.sqrt(error), math.sqrt(norm)


def _check(name: str, state: object, group: Group) -> None:
    if state:
        raise ValueError(
            f"{name} has taken steps already, whose exact moments are lost; "
            "attach the shadow before the first step"
        )
    if group["weight_decay"] and not group.get("decoupled_weight_decay"):
        raise ValueError(
            f"weight_decay of {name} must be 0, got {group['weight_decay']}: what it adds to the "
            "gradient is gone after the step; see AdamW for one that does not join the gradient"
        )


def _quotient(error: float, norm: float) -> float:
    if error == 0.0:
        return 0.0
    return error / norm if norm else math.inf
