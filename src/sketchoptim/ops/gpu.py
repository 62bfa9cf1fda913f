"""The step on a GPU in Triton: a few kernels that sum duplicates, check, and move the rows.

Nothing of a step waits for the device. `begin` computes the step's numbers from the device's own
count of steps, `inspect` raises a flag for ids and values that must not get in, the kernels that
move something return at once where the flag is up, and `finish` counts the step or the refusal.
The host learns of refusals later: from a report in its own memory, or when it settles.
"""

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, assert_never

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .. import _hashing
from .._torch_private import stored_ids, stored_values
from .._validation import PLAIN_TENSORS, check_storage
from .._warning import warn
from ..deferred import DeferredGradient
from ..moments import ArrayView, CodesView, ColumnsView, Moment, Moments, SketchView
from ._dispatch import PreparedStep, Settled
from ._gpu_launches import MOST_COLUMNS, Bound, Kind, Shape
from ._gpu_moment import Blank, GpuMoment
from ._gpu_plan import PIECE, Plan, RuleNumbers
from ._gpu_together import Family, Part, family_of
from ._rule import AnyRule, FusedRule
from ._triton import slots

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MAX_DEPTH = 32
_PAIRS_OF_A_PAGE = 256
_ALIGNMENT = 16
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
        self.shape, self.dtype, self.device = parameter.shape, parameter.dtype, parameter.device
        self.rows, self.dim = parameter.shape[:1].numel(), parameter.shape[1:].numel()
        self.ledger = torch.zeros(slots.SIZE.value, dtype=torch.float64, device=parameter.device)
        flag = torch.zeros(1, dtype=torch.int32, device=parameter.device)
        self.report = _reports.take(parameter.is_cuda)
        self.reported = (ctypes.c_double * 2).from_address(self.report.data_ptr())
        """The memory of the report: torch takes longer to get at it."""
        self.refused = [0.0, 0.0]
        blank = Blank.over(self.ledger)
        self.first, self.second = (GpuMoment(moment, blank) for moment in moments)
        shape = Shape.of(self.dim, self.first, self.second)
        self.bound = Bound(
            parameter, first_row, self.ledger, flag, self.report, self.first, self.second, shape
        )
        self.plans: dict[tuple[object, ...], Plan] = {}
        """By the fields of `Kind`."""
        self.constants: object = None
        """What of the rule these plans are for."""
        self.lasting = [it for it in (self.first, self.second) if it.sketch is not None]
        """The moments that keep numbers from step to step."""
        self.expected: float | None = None
        """The steps that the device will have counted; None if it was told of none."""
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
        if (
            type(rule) is not FusedRule
            or type(gradient) not in PLAIN_TENSORS
            or gradient.dtype is not self.dtype
            or gradient.shape != self.shape
            or gradient.device != self.device
        ):
            return None
        ids, is_sorted, has_pieces = None, False, False
        if gradient.is_sparse:
            ids, values = stored_ids(gradient), stored_values(gradient)
            if not (ids.is_contiguous() and values.is_contiguous()):
                ids, values = ids.contiguous(), values.contiguous()
            ids_at, values_at, count = ids.data_ptr(), values.data_ptr(), ids.numel()
            if not (ids_at and values_at) or values.numel() != count * self.dim:
                self._check_entries(ids, values)
            is_sorted = gradient.is_coalesced()
            has_pieces = count > PIECE and not is_sorted
        else:
            values = gradient.contiguous().resolve_neg()
            ids_at, values_at, count = 0, values.data_ptr(), self.rows
        if is_capturing(self.device) and not self._is_expected(rule):
            raise RuntimeError(
                f"a step of the parameter of shape {list(self.parameter.shape)} can be captured in "
                "a CUDA graph only after a step that was not: the graph would set the GPU's count "
                "of steps back in each replay. Take a step before the capture"
            )
        if self.is_in_order:
            self._warn_of_order(count)
        numbers = RuleNumbers.of(rule)
        if numbers.constants is not self.constants:
            if numbers.constants != self.constants:
                self.plans = {}
            self.constants = numbers.constants
        kind = (
            ids is None,
            is_sorted,
            count == 0,
            has_pieces,
            _parts(count) if self.is_added_to else 1,
            is_checked,
            rounding_key is not None,
            (ids_at | values_at) % _ALIGNMENT == 0,
        )
        plan = self.plans.get(kind)
        if plan is None:
            plan = self.plans[kind] = Plan(self.bound, rule, Kind(*kind))
            plan.family = family_of(plan)
        step, size, shrink = numbers.words
        given = step, rounding_key or 0, size, shrink
        return GpuStep(self, plan, rule, ids, values, given, (ids_at, values_at, count))

    def _check_entries(self, ids: Tensor, values: Tensor) -> None:
        """Raises what is wrong with a sparse gradient; nothing is if it is empty."""
        check_storage("the ids of a gradient", ids)
        check_storage("the values of a gradient", values)
        if values.numel() != ids.numel() * self.dim:
            raise ValueError(
                f"the gradient must have {ids.numel()} rows of {self.dim} numbers, "
                f"got {list(values.shape)}"
            )

    def _warn_of_order(self, positions: int) -> None:
        if positions > MOST_IN_ORDER and not self.has_warned:
            self.has_warned = True
            warn(
                f"the parameter of shape {list(self.parameter.shape)} has {positions} entries or "
                "rows in a step. One warp of the GPU goes through them one after the other, "
                'because decay="paper" and decay="bucket" depend on their order, which is slow. '
                'Use memory="lean" for training'
            )

    def _is_expected(self, rule: FusedRule) -> bool:
        """Whether the host has what the device will have: steps, scales and writes."""
        if self.expected != self._count(rule):
            return False
        return all(moment.lasting() == moment.expected for moment in self.lasting)

    def _count(self, rule: FusedRule) -> float:
        """The steps before this one, as the host counts them."""
        schedule = rule.schedule
        return self.expected or 0.0 if schedule is None else schedule.step - 1

    def push_(self, rule: FusedRule) -> None:
        """Gives the device what the host has, where that is not what the device will have."""
        if self._is_expected(rule):
            return
        self.expected = self._count(rule)
        for moment in self.lasting:
            moment.expected = moment.lasting()
        held = (self.expected, *self.first.lasting(), *self.second.lasting())
        lasting = torch.tensor(held, dtype=torch.float64, device="cpu")
        if self.parameter.is_cuda:
            lasting = lasting.pin_memory()
        self.ledger[slots.STEP.value : slots.LASTING.value].copy_(lasting, non_blocking=True)

    def predict_(self, rule: FusedRule) -> None:
        """What the device will hold after the step, unless it refuses it."""
        assert self.expected is not None  # push_
        self.expected += 1
        for moment in self.lasting:
            average = rule.first if moment is self.first else rule.second
            if average is not None:
                moment.predict_(average)

    def has_refused(self) -> bool:
        """Whether the device has reported refusals that `settle_` did not return yet; no wait."""
        return self.reported[:] != self.refused

    def launch_together_(self, steps: Sequence[PreparedStep]) -> None:
        """Starts steps of several tables at once, where the same kernels take them."""
        launch_together_([step for step in steps if isinstance(step, GpuStep)])

    def settle_(self) -> Settled:
        """Waits for the device, and gives the host what the device has counted."""
        if self.expected is None:
            return Settled(0, 0, 0)
        values, ids, step, *lasting = self.ledger[: slots.LASTING.value].tolist()
        self.first.set_lasting_(lasting[0], int(lasting[1]))
        self.second.set_lasting_(lasting[2], int(lasting[3]))
        before, self.refused = self.refused, [values, ids]
        extra = int(step - self.expected)
        self.expected = step
        return Settled(extra, int(values - before[0]), int(ids - before[1]))


class GpuStep:
    """A prepared step. It has not been checked: the device does, when it runs."""

    __slots__ = ("ids", "kernels", "numbers", "places", "plan", "rule", "values")

    def __init__(
        self,
        kernels: GpuKernels,
        plan: Plan,
        rule: FusedRule,
        ids: Tensor | None,
        values: Tensor,
        numbers: tuple[int, ...],
        places: tuple[int, int, int],
    ) -> None:
        self.kernels, self.plan, self.rule = kernels, plan, rule
        self.ids, self.values = ids, values
        self.numbers = numbers
        """What kernels are given in each step: `NUMBERS`."""
        self.places = places
        """Where ids and values are, and how many rows or entries there are."""

    @property
    def is_finite(self) -> bool:
        """True: the device looks, and refuses the step if it is not."""
        return True

    @property
    def touched(self) -> int:
        """The most rows that it moves: the count of repeated ids is on the device."""
        return min(self.places[2], self.kernels.rows)

    def run_(self) -> None:
        """Launches the kernels; nothing here waits for the device."""
        kernels = self.kernels
        if kernels.launched is self:
            kernels.launched = None
            return
        kernels.push_(self.rule)
        with _current(kernels.device):
            self.plan.run_(self.ids, self.values, self.places[2], self.numbers)
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
        with family.lock:  # tables of other optimizers, in other threads, have the same launches
            for part, it in family.parts(group):
                if len(it) > 1:
                    _launch_part_(family, part, it)


def _launch_part_(family: Family, part: Part, steps: Sequence[GpuStep]) -> None:
    for step in steps:
        step.kernels.push_(step.rule)
    with _current(family.device):
        part.run_(steps)
    for step in steps:
        kernels = step.kernels
        kernels.predict_(step.rule)
        kernels.launched = step
    increment_version([step.kernels.parameter for step in steps])


def groups_of(steps: Sequence[GpuStep]) -> list[tuple[Family, list[GpuStep]]]:
    """Steps that can be launched together, with the launches that take them."""
    groups: defaultdict[Family | None, list[GpuStep]] = defaultdict(list)
    for step in steps:
        groups[step.plan.family].append(step)
    return [(family, group) for family, group in groups.items() if family is not None]


def is_capturing(device: torch.device) -> bool:
    """Whether launches on a device are recorded in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one, on which Triton launches whatever it is given."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
