"""The step on a GPU in Triton: a few kernels that sum duplicates, check, and move the rows.

Nothing of a step waits for the device. `begin` computes the step's numbers from the device's own
count of steps, `inspect` raises a flag for ids and values that must not get in, the kernels that
move something return at once where the flag is up, and `finish` counts the step or the refusal.
The host learns of refusals later: from a report in its own memory, or when it settles.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, ClassVar, assert_never

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .. import _hashing
from .._torch_private import entries
from .._validation import PLAIN_TENSORS
from .._warning import warn
from ..deferred import DeferredGradient
from ..moments import ArrayView, CodesView, ColumnsView, Moment, Moments, SketchView
from ._dispatch import PreparedStep, Settled
from ._gpu_launches import MOST_COLUMNS, Bound, Kind, Shape, bits_of
from ._gpu_moment import Blank, GpuMoment
from ._gpu_plan import PIECE, Plan
from ._gpu_together import Family, family_of
from ._rule import AnyRule, FusedRule
from ._triton import slots

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MAX_DEPTH = 32
_PAIRS_OF_A_PAGE = 256
_ALIGNMENT = 16
# What of a rule stays the same in the steps that a plan is for, beside its schedule.
_CHANGING = ("step_size", "shrink", "schedule")
_constants_of = attrgetter(*(it for it in FusedRule._fields if it not in _CHANGING))
# Parts that the buckets of a hash row are divided among, where rows are added in order.
_MOST_PARTS = 64
_ROWS_OF_A_PART = 64
# Entries or rows beyond which a step that goes through them one by one is worth a warning.
MOST_IN_ORDER = 4096


def unsupported_reason(parameter: Tensor, moments: Moments, first_row: int = 0) -> str | None:
    """Why there are no kernels for a parameter with these moments, and the remedy, or None."""
    if parameter.dtype not in _FLOATS:
        known = ", ".join(str(dtype) for dtype in _FLOATS)
        return f"there is no kernel for {parameter.dtype}; use one of {known}"
    if type(parameter) not in PLAIN_TENSORS:
        return f"it is a {type(parameter).__name__}; use a plain tensor"
    if not parameter.is_contiguous():
        return f"it has the strides {parameter.stride()}; use contiguous()"
    if parameter.numel() == 0:
        return "it has no elements"
    if first_row + parameter.shape[:1].numel() > _hashing.MAX_ID + 1:
        return f"its table has more than {_hashing.MAX_ID + 1} rows; use several tables"
    for moment in moments:
        reason = None if moment is None else _unsupported_storage(moment)
        if reason is not None:
            return reason
    return _unsupported_blocks(parameter, moments)


def _unsupported_storage(moment: Moment) -> str | None:
    if moment.gathers and moment.held is not None:
        return "processes exchange its rows in the middle of a step, where no kernel stops"
    view = moment.kernel_view()
    if isinstance(view, ColumnsView):
        if moment.name == "first":
            return "its first moment has factors for columns; use them for the second"
        if moment.held is not None:
            return "processes divide its rows and sum the shares of columns after a step"
        view = view.rows
    match view:
        case None:
            return f"there is no kernel for {type(moment.storage).__name__} storage"
        case SketchView():
            if view.sketch.depth > _MAX_DEPTH:
                return f"its sketch has a depth of {view.sketch.depth}; use at most {_MAX_DEPTH}"
            if view.form == "conservative" and not view.is_by_row:
                return 'its sketch is conservative by element; use granularity="row"'
            return None
        case ArrayView() | CodesView():
            return None
        case _:
            assert_never(view)


def _unsupported_blocks(parameter: Tensor, moments: Moments) -> str | None:
    """Rows that share blocks of codes move together, which other storages do not."""
    views = [moment.kernel_view() for moment in moments if moment is not None]
    views = [view.rows if isinstance(view, ColumnsView) else view for view in views]
    codes = {(view.block, view.rows) for view in views if isinstance(view, CodesView)}
    if any(block > MOST_COLUMNS for block, _ in codes):
        return f"its blocks have more than {MOST_COLUMNS} numbers; use a smaller block="
    if len(codes) > 1:
        return "its moments have blocks of different sizes; use one block= for both"
    if any(rows > 1 for _, rows in codes):
        for view in views:
            if isinstance(view, SketchView) or (isinstance(view, ArrayView) and view.is_by_row):
                return "its rows share blocks of codes with one moment alone; use one storage"
    return None


class _Reports:
    """Pairs of float64 in the memory of the host, which the device writes without a copy or a wait.

    A pair is given out once, and its memory is never freed: a launch may write to it after the
    kernels that own it are gone, and torch records no stream for pinned memory.
    """

    def __init__(self) -> None:
        self.pages: list[Tensor] = []
        self.free: dict[bool, list[Tensor]] = {True: [], False: []}  # by whether they are pinned

    def take(self, is_pinned: bool) -> Tensor:
        """A pair of zeros."""
        free = self.free[is_pinned]
        if not free:
            page = torch.zeros(_PAIRS_OF_A_PAGE, 2, dtype=torch.float64, device="cpu")
            self.pages.append(page.pin_memory() if is_pinned else page)
            free += self.pages[-1]
        return free.pop()


_reports = _Reports()


class GpuKernels:
    """The kernels bound to one parameter, with the device's own count of its steps."""

    counts_steps: ClassVar[bool] = True

    def __init__(self, parameter: Tensor, moments: Moments, first_row: int = 0) -> None:
        self.parameter = parameter
        self.layout = parameter.shape, parameter.dtype, parameter.device
        self.rows, self.dim = parameter.shape[:1].numel(), parameter.shape[1:].numel()
        self.ledger = torch.zeros(slots.SIZE.value, dtype=torch.float64, device=parameter.device)
        flag = torch.zeros(1, dtype=torch.int32, device=parameter.device)
        self.report = _reports.take(parameter.is_cuda)
        self.refused = (0, 0)
        blank = Blank.over(self.ledger)
        self.first, self.second = (GpuMoment(moment, blank) for moment in moments)
        shape = Shape.of(self.dim, self.first, self.second)
        self.bound = Bound(
            parameter, first_row, self.ledger, flag, self.report, self.first, self.second, shape
        )
        self.plans: dict[Kind, Plan] = {}
        self.constants: object = None
        """What of the rule these plans are for."""
        self.expected: tuple[float, ...] = ()
        self.launched: GpuStep | None = None
        """The step that has been launched together with those of other tables."""
        self.is_in_order = self.first.is_in_order or self.second.is_in_order
        self.is_added_to = self.first.is_added_to or self.second.is_added_to
        self.has_warned = False

    def unsupported_reason(self, gradient: Tensor, rule: AnyRule) -> str:
        """Why `prepare` gave None, and the remedy."""
        if type(rule) is not FusedRule:
            return "the GPU kernels support only FusedRule"
        if isinstance(gradient, DeferredGradient):
            return f"there is no kernel for its {gradient!r}"
        return f"its gradient is a {type(gradient).__name__}; use a plain tensor"

    def prepare(
        self,
        gradient: Tensor,
        rule: AnyRule,
        *,
        is_checked: bool,
        rounding_key: int | None,
    ) -> "GpuStep | None":
        """The step along a gradient; the device checks it when it runs."""
        if type(rule) is not FusedRule or type(gradient) not in PLAIN_TENSORS:
            return None
        if (gradient.shape, gradient.dtype, gradient.device) != self.layout:
            return None
        ids = None
        is_sorted = False
        if gradient.is_sparse:
            is_sorted = gradient.is_coalesced()
            ids, values = entries(gradient)
            if not (ids.is_contiguous() and values.is_contiguous()):
                ids, values = ids.contiguous(), values.contiguous()
            if values.numel() != ids.numel() * self.dim or values.dtype != self.parameter.dtype:
                raise ValueError(
                    f"the gradient must have {ids.numel()} rows of {self.dim} numbers of "
                    f"{self.parameter.dtype}, got {list(values.shape)} of {values.dtype}"
                )
        else:
            values = gradient.contiguous().resolve_neg()
        if is_capturing(self.parameter.device) and self._held(rule) != self.expected:
            raise RuntimeError(
                f"a step of the parameter of shape {list(self.parameter.shape)} can be captured in "
                "a CUDA graph only after a step that was not: the graph would set the GPU's count "
                "of steps back in each replay. Take a step before the capture"
            )
        if self.is_in_order:
            self._warn_of_order(self.rows if ids is None else ids.numel())
        plan = self._plan(rule, ids, values, is_sorted, is_checked, rounding_key is not None)
        return GpuStep(self, plan, rule, ids, values, rounding_key)

    def _plan(
        self,
        rule: FusedRule,
        ids: Tensor | None,
        values: Tensor,
        is_sorted: bool,
        is_checked: bool,
        is_stochastic: bool,
    ) -> Plan:
        """The launches of a step, which are built once for each kind of step."""
        schedule = rule.schedule
        constants = _constants_of(rule), None if schedule is None else schedule[1:]
        if constants != self.constants:
            self.plans, self.constants = {}, constants
        count = self.rows if ids is None else ids.numel()
        address = values.data_ptr() if ids is None else values.data_ptr() | ids.data_ptr()
        kind = Kind(
            ids is None,
            is_sorted,
            count == 0,
            ids is not None and not is_sorted and count > PIECE,
            _parts(count) if self.is_added_to else 1,
            is_checked,
            is_stochastic,
            address % _ALIGNMENT == 0,
        )
        plan = self.plans.get(kind)
        if plan is None:
            plan = self.plans[kind] = Plan(self.bound, rule, kind)
            plan.family = family_of(plan)
        return plan

    def _warn_of_order(self, positions: int) -> None:
        if positions > MOST_IN_ORDER and not self.has_warned:
            self.has_warned = True
            warn(
                f"the parameter of shape {list(self.parameter.shape)} has {positions} entries or "
                "rows in a step. One warp of the GPU goes through them one after the other, "
                'because decay="paper" and decay="bucket" depend on their order, which is slow. '
                'Use memory="lean" for training'
            )

    def _held(self, rule: FusedRule) -> tuple[float, ...]:
        """What the host has before a step: its count of steps, scales and writes."""
        step = self.expected[0] if self.expected else 0.0
        if rule.schedule is not None:
            step = float(rule.schedule.step - 1)
        return (step, *self.first.lasting(), *self.second.lasting())

    def push_(self, rule: FusedRule) -> None:
        """Gives the device what the host has, where that is not what the device will have."""
        held = self._held(rule)
        if held != self.expected:
            first = slots.STEP.value
            lasting = torch.tensor(held, dtype=torch.float64, device="cpu")
            if self.parameter.is_cuda:
                lasting = lasting.pin_memory()
            self.ledger[first : slots.LASTING.value].copy_(lasting, non_blocking=True)
            self.expected = held

    def predict_(self, rule: FusedRule) -> None:
        """What the device will hold after the step, unless it refuses it."""
        if rule.first is not None:
            self.first.predict_(rule.first)
        if rule.second is not None:
            self.second.predict_(rule.second)
        self.expected = (self.expected[0] + 1, *self.first.lasting(), *self.second.lasting())

    def has_refused(self) -> bool:
        """Whether the device has reported refusals that `settle_` did not return yet; no wait."""
        return tuple(self.report.tolist()) != self.refused

    def launch_together_(self, steps: Sequence[PreparedStep]) -> None:
        """Starts steps of several tables at once, where the same kernels take them."""
        launch_together_([step for step in steps if isinstance(step, GpuStep)])

    def settle_(self) -> Settled:
        """Waits for the device, and gives the host what the device has counted."""
        if not self.expected:
            return Settled(0, 0, 0)
        values, ids, step, *lasting = self.ledger[: slots.LASTING.value].tolist()
        self.first.set_lasting_(lasting[0], int(lasting[1]))
        self.second.set_lasting_(lasting[2], int(lasting[3]))
        before, self.refused = self.refused, (int(values), int(ids))
        extra = int(step - self.expected[0])
        self.expected = (step, *self.first.lasting(), *self.second.lasting())
        return Settled(extra, self.refused[0] - before[0], self.refused[1] - before[1])


class GpuStep:
    """A prepared step. It has not been checked: the device does, when it runs."""

    __slots__ = ("count", "ids", "kernels", "plan", "rounding_key", "rule", "values")

    def __init__(
        self,
        kernels: GpuKernels,
        plan: Plan,
        rule: FusedRule,
        ids: Tensor | None,
        values: Tensor,
        rounding_key: int | None,
    ) -> None:
        self.kernels, self.plan, self.rule, self.rounding_key = kernels, plan, rule, rounding_key
        self.ids, self.values = ids, values
        self.count = kernels.rows if ids is None else ids.numel()

    @property
    def is_finite(self) -> bool:
        """True: the device looks, and refuses the step if it is not."""
        return True

    @property
    def touched(self) -> int:
        """The most rows that it moves: the count of repeated ids is on the device."""
        return min(self.count, self.kernels.rows)

    def numbers(self) -> tuple[int, ...]:
        """What kernels are given in each step: its number, a key, step size and shrinkage."""
        rule = self.rule
        step = -1 if rule.schedule is None else rule.schedule.step
        return step, self.rounding_key or 0, *bits_of(rule.step_size, rule.shrink)

    def run_(self) -> None:
        """Launches the kernels; nothing here waits for the device."""
        kernels = self.kernels
        if kernels.launched is self:
            kernels.launched = None
            return
        self.begin_()
        with _current(kernels.parameter.device):
            self.plan.run_(self.ids, self.values, self.numbers())
        self.end_()

    def begin_(self) -> None:
        """Gives the device what it needs to count this step."""
        self.kernels.push_(self.rule)

    def end_(self) -> None:
        """Follows on the host what the device will have done."""
        kernels = self.kernels
        kernels.predict_(self.rule)
        # Autograd notices writes by torch only, and must refuse graphs of the weights as they were.
        increment_version(kernels.parameter)


def _parts(positions: int) -> int:
    """A power of two: each number of parts is compiled."""
    parts = max(1, min(_MOST_PARTS, positions // _ROWS_OF_A_PART))
    return 1 << (parts.bit_length() - 1)


def launch_together_(steps: Sequence[GpuStep]) -> None:
    """Launches steps of tables that the same kernels take, all tables in one sequence.

    Their `run_` does nothing more; the steps that are left launch by themselves. So do all steps in
    a CUDA graph: it would copy the words of the arguments again in each replay, from host memory
    that no longer holds them.
    """
    if not steps or is_capturing(steps[0].kernels.parameter.device):
        return
    for family, group in groups_of(steps):
        for part in family.parts(group):
            if len(part) > 1:
                _launch_part_(family, part)


def _launch_part_(family: Family, steps: Sequence[GpuStep]) -> None:
    for step in steps:
        step.begin_()
    with _current(family.device):
        family.run_(steps)
    for step in steps:
        step.end_()
        step.kernels.launched = step


def groups_of(steps: Sequence[GpuStep]) -> list[tuple[Family, list[GpuStep]]]:
    """Steps that can be launched together, with the launches that take them."""
    groups: defaultdict[int, list[GpuStep]] = defaultdict(list)
    for step in steps:
        groups[id(step.plan.family)].append(step)
    families = {id(group[0].plan.family): group[0].plan.family for group in groups.values()}
    return [(family, groups[number]) for number, family in families.items() if family is not None]


def is_capturing(device: torch.device) -> bool:
    """Whether launches on a device are recorded in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one, on which Triton launches whatever it is given."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
