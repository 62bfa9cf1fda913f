"""Exact moments kept next to compressed ones while training: the error of each storage by step."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import moments
from .._rows import Rows, of_gradient, row_chunks
from .._sketch import SMALLEST_SCALE
from .._validation import check_positive_int
from ..moments import Average, Moment, Move, Name, Table, drive_
from ..optim._binding import live_moments
from ..optim._names import key_of, named_parameters
from ..optim.base import Group, Optimizer
from ..storage import Exact, RankOne, Sketched, Storage, TopSingular

KEPT = "kept"


@dataclass(frozen=True)
class ShadowRecord:
    """The error of one method to keep one moment after one step; all norms are l2."""

    step: int
    parameter: str
    moment: Name
    method: str
    """"kept" for the optimizer's own storage, else the name of a rival."""
    floats: int
    """How many numbers the method keeps."""
    columns: int
    """Of an estimate: 1 where one number stands for a row; it is compared with the row's mean."""
    touched_error: float
    """The norm of (estimate - exact) over the rows of the step's gradient."""
    touched_norm: float
    """The norm of the exact moment over those rows."""
    all_error: float
    """The norm of (estimate - exact) over all rows."""
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
    """The errors of compressed moments, measured against exact ones while training.

    The shadow follows every step of the optimizer for the chosen parameters, with the exact moment
    and with rivals: other storages that get the same gradients. Training does not change. An
    estimate is compared with the exact moment that decays in the same way: in every step for linear
    decay and `RankOne`, and when a row is touched for `Exact`, `TopSingular` and the paper's forms.

    The default rivals keep about as many numbers as the factors of a rank-one approximation,
    n + dim: `RankOne` (second moments), `TopSingular`, and "sketch", a sketch of the kind that the
    optimizer keeps (else of the paper's kind), as wide as that many numbers allow.
    `ShadowRecord.floats` has the number of each.

    The cost: at most two copies of the moment, and a pass over all rows every `every` steps.
    Attach it before the first step.

    Args:
        optimizer: One of ours, whose parameters have no coupled weight decay.
        parameters: Those to follow.
        every: Steps between two records.
        rivals: Storages by name, instead of the default ones.

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
        check_positive_int("every", every)
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
            rule = optimizer.rule(
                followed.group,
                followed.step - state.get("began_after", 0),
                memory=optimizer.memory_in_force(parameter, followed.group),
                is_sparse=parameter.grad.is_sparse,
            )
            rows = of_gradient(parameter.grad)
            for kept in live_moments(optimizer, parameter, followed.group):
                average = None if kept is None else getattr(rule, kept.name)
                if kept is None or average is None:
                    continue
                shadow = followed.moments.get(kept.name)
                if shadow is None:
                    shadow = self._start(kept, optimizer, parameter, followed.group)
                    followed.moments[kept.name] = shadow
                shadow.step_(rows, average, maximize=rule.maximize, number=followed.step)
                if followed.step % self.every == 0:
                    self._record(parameter, followed, kept, rows)

    def _start(
        self, kept: Moment, optimizer: Optimizer, parameter: Tensor, group: Group
    ) -> "_ShadowMoment":
        key = key_of(parameter, optimizer)
        table = Table(parameter.shape, torch.float32, parameter.device, key)
        rivals = default_rivals(kept, table) if self._rivals is None else self._rivals
        return _ShadowMoment(kept, rivals, table, optimizer.fill(group))

    def _record(self, parameter: Tensor, followed: "_Followed", kept: Moment, rows: Rows) -> None:
        shadow = followed.moments[kept.name]
        touched = [chunk.ids for chunk in rows.chunks()]
        methods = shadow.rivals if kept.is_exact else {KEPT: kept, **shadow.rivals}
        for method, moment in methods.items():
            exact = shadow.exact_for(moment)
            _, *touched_norms = _norms(moment, exact, touched)  # an empty gradient has no columns
            columns, *all_norms = _norms(moment, exact, (ids for _, ids in row_chunks(parameter)))
            self.records.append(
                ShadowRecord(
                    followed.step,
                    followed.name,
                    kept.name,
                    method,
                    _number_count(moment, shadow.table),
                    columns,
                    *touched_norms,
                    *all_norms,
                )
            )


class _Followed:
    """A parameter, with the shadows of its moments."""

    def __init__(self, name: str, group: Group) -> None:
        self.name, self.group = name, group
        self.step = 0
        self.moments: dict[Name, _ShadowMoment] = {}


class _ShadowMoment:
    """The rivals of one moment, and the exact moments to compare them and the kept one with."""

    def __init__(
        self, kept: Moment, rivals: Mapping[str, Storage], table: Table, fill: float
    ) -> None:
        self.table = table
        self.rivals = {
            method: _fresh_moment(storage, kept.name, table, fill)
            for method, storage in rivals.items()
        }
        self._exact: dict[bool, Moment] = {}
        for moment in (kept, *self.rivals.values()):
            if moment.decays_whole not in self._exact:
                self._exact[moment.decays_whole] = (
                    _WholeDecay(kept.name, table, fill)
                    if moment.decays_whole
                    else _fresh_moment(Exact(), kept.name, table, fill)
                )

    def exact_for(self, moment: Moment) -> Moment:
        """The exact moment that decays as the given one does."""
        return self._exact[moment.decays_whole]

    def step_(self, rows: Rows, average: Average, *, maximize: bool, number: int) -> None:
        """Repeats a step of the optimizer on the exact moments and on the rivals."""
        everything = [*self._exact.values(), *self.rivals.values()]

        def values(gradient: Tensor) -> Tensor:
            if everything[0].name == "second":
                return gradient.square()
            return -gradient if maximize else gradient

        drive_([Move(moment, average, values) for moment in everything], rows)
        for moment in everything:
            moment.maintain_(number)


class _WholeDecay(Moment):
    """An exact moment whose rows all decay in every step: ``values * scale``, in float32.

    The scale decays instead of the values, so that a step reads and writes touched rows alone.
    """

    gathers = True
    decays_whole = True

    def __init__(self, name: Name, table: Table, fill: float) -> None:
        super().__init__(Exact(), name, {})
        self._values = torch.full((table.rows, table.dim), fill, device=table.device)
        self._scale = 1.0

    def begin_(self, average: Average, touched: int) -> None:
        super().begin_(average, touched)
        self._scale *= average.decay
        if self._scale < SMALLEST_SCALE:  # values over it would overflow
            self._values.mul_(self._scale)
            self._scale = 1.0

    def gather_(self, ids: Tensor, values: Tensor) -> None:
        added = values * (self.average.weight / self._scale)
        self._values.index_add_(0, ids, added.to(self._values.dtype))

    def update_(self, ids: Tensor, values: Tensor) -> Tensor:
        return self.estimate(ids)

    def estimate(self, ids: Tensor) -> Tensor:
        return self._values.index_select(0, ids) * self._scale


def default_rivals(kept: Moment, table: Table) -> dict[str, Storage]:
    """Storages with about as many numbers as the factors of a rank-one approximation have."""
    # The storage of a sketched moment has the options of a sketch.
    like: Any = (
        Sketched(granularity="element", decay="paper") if kept.sketch is None else kept.storage
    )
    columns = table.dim if like.granularity == "element" else 1
    sketch = dataclasses.replace(
        like,
        ratio=None,
        width=max(1, (table.rows + table.dim) // (like.depth * columns)),
        clean_every=None,
        clean_by=None,
        fold_at=(),
        fold_when=None,
    )
    rivals: dict[str, Storage] = {"sketch": sketch}
    if kept.name == "second":
        rivals["rank-one"] = RankOne()
    return {**rivals, "top-singular": TopSingular()}


def _fresh_moment(storage: Storage, name: Name, table: Table, fill: float) -> Moment:
    return moments.open_moment(storage, name, moments.create(storage, name, table, fill))


def _number_count(moment: Moment, table: Table) -> int:
    """How many numbers a moment keeps, without hash words, scales and counts."""
    parts = moments.declare(moment.storage, moment.name, table)
    return sum(moment.tensors[part.name].numel() for part in parts if not part.is_bookkeeping)


def _norms(moment: Moment, exact: Moment, ids: Iterable[Tensor]) -> tuple[int, float, float]:
    """The columns of an estimate, and the norms of the error and of the exact moment."""
    columns, error, norm = 0, 0.0, 0.0
    for chunk in ids:
        estimate, truth = moment.estimate(chunk).double(), exact.estimate(chunk).double()
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
            f"weight_decay of {name} must be 0, got {group['weight_decay']}: it joins the "
            "gradient after the shadow has seen it; use AdamW, where it does not"
        )


def _quotient(error: float, norm: float) -> float:
    if error == 0.0:
        return 0.0
    return error / norm if norm else math.inf
