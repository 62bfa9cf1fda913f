"""The step on a GPU in Triton: a few kernels that sum duplicates, check, and move the rows.

Nothing of a step waits for the device. `begin` computes the step's numbers from the device's own
count of steps, `inspect` raises a flag for ids and values that must not get in, the kernels that
move something return at once where the flag is up, and `finish` counts the step or the refusal.
The host learns of refusals later: from a report in its own memory, or when it settles.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, assert_never

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .. import _hashing
from .._torch_private import entries
from .._validation import PLAIN_TENSORS
from .._warning import warn
from ..deferred import DeferredGradient
from ..moments import ArrayView, CodesView, Moment, Moments, SketchView
from ._dispatch import PreparedStep, Settled
from ._gpu_launches import MOST_COLUMNS, Call, Shape, launches
from ._gpu_moment import Blank, GpuMoment
from ._gpu_together import groups_of, launches_together
from ._rule import AnyRule, FusedRule
from ._triton import slots

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MAX_DEPTH = 32
_PAIRS_OF_A_PAGE = 256
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
        self.parameter, self.first_row = parameter, first_row
        self.rows, self.dim = parameter.shape[:1].numel(), parameter.shape[1:].numel()
        self.ledger = torch.zeros(slots.SIZE.value, dtype=torch.float64, device=parameter.device)
        self.flag = torch.zeros(1, dtype=torch.int32, device=parameter.device)
        self.report = _reports.take(parameter.is_cuda)
        self.refused = (0, 0)
        blank = Blank.over(self.ledger)
        self.first, self.second = (GpuMoment(moment, blank) for moment in moments)
        self.expected: tuple[float, ...] = ()
        self.launched: GpuStep | None = None
        """The step that has been launched together with those of other tables."""
        self.shape = Shape.of(self.dim, self.first, self.second)
        self.is_in_order = self.first.is_in_order or self.second.is_in_order
        self.has_warned = False

    def unsupported_reason(self, gradient: Tensor, rule: AnyRule) -> str:
        """Why `prepare` gave None, and the remedy."""
        if type(rule) is not FusedRule:
            return "its rule is no FusedRule, so only the reference knows it"
        if isinstance(gradient, DeferredGradient):
            return f"there is no kernel for its {gradient!r}"
        if type(gradient) not in PLAIN_TENSORS:
            return f"its gradient is a {type(gradient).__name__}; use a plain tensor"
        return f"its gradient has the strides {gradient.stride()}; use contiguous()"

    def prepare(
        self,
        gradient: Tensor,
        rule: AnyRule,
        *,
        is_checked: bool,
        rounding_key: int | None,
    ) -> "GpuStep | None":
        """The step along a gradient; the device checks it when it runs."""
        is_readable = gradient.is_sparse or (gradient.is_contiguous() and not gradient.is_neg())
        if type(rule) is not FusedRule or type(gradient) not in PLAIN_TENSORS or not is_readable:
            return None
        ids = None
        values = gradient
        if gradient.is_sparse:
            indices, values = entries(gradient)
            ids, values = indices[0].contiguous(), values.contiguous()
            if values.numel() != ids.numel() * self.dim or values.dtype != self.parameter.dtype:
                raise ValueError(
                    f"the gradient must have {ids.numel()} rows of {self.dim} numbers of "
                    f"{self.parameter.dtype}, got {list(values.shape)} of {values.dtype}"
                )
        step = GpuStep(self, rule, ids, values, is_checked, rounding_key)
        if is_capturing(self.parameter.device) and self._held(rule) != self.expected:
            raise RuntimeError(
                f"a step of the parameter of shape {list(self.parameter.shape)} can be captured in "
                "a CUDA graph only after a step that was not: the graph would set the GPU's count "
                "of steps back in each replay. Take a step before the capture"
            )
        positions = self.rows if ids is None else ids.numel()
        if self.is_in_order and positions > MOST_IN_ORDER and not self.has_warned:
            self.has_warned = True
            warn(
                f"the parameter of shape {list(self.parameter.shape)} has {positions} entries or "
                "rows in a step. One warp of the GPU goes through them one after the other, "
                'because decay="paper" and decay="bucket" depend on their order, which is slow. '
                'Use memory="lean" for training'
            )
        return step

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
        for moment, average in ((self.first, rule.first), (self.second, rule.second)):
            if average is not None:
                moment.predict_(average)
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


@dataclass(frozen=True)
class GpuStep:
    """A prepared step. It has not been checked: the device does, when it runs."""

    kernels: GpuKernels
    rule: FusedRule
    ids: Tensor | None
    values: Tensor
    is_checked: bool
    rounding_key: int | None

    @property
    def is_finite(self) -> bool:
        """True: the device looks, and refuses the step if it is not."""
        return True

    @property
    def touched(self) -> int:
        """How many rows it moves at most: which ids repeat, only the device knows."""
        rows = self.kernels.rows
        return rows if self.ids is None else min(self.ids.numel(), rows)

    @torch.no_grad()
    def run_(self) -> None:
        """Launches the kernels; nothing here waits for the device."""
        kernels = self.kernels
        if kernels.launched is self:
            kernels.launched = None
            return
        self.begin_()
        with _current(kernels.parameter.device):
            for launch in launches(self.call()):
                launch.run_()
        self.end_()

    def begin_(self) -> None:
        """Gives the device what it needs to count this step."""
        self.kernels.push_(self.rule)

    def end_(self) -> None:
        """Follows on the host what the device will have done."""
        kernels = self.kernels
        kernels.predict_(self.rule)
        # Autograd sees writes by torch only, and must refuse graphs of the weights as they were.
        increment_version(kernels.parameter)

    def call(self) -> Call:
        """What its launches need to know."""
        kernels = self.kernels
        return Call(
            parameter=kernels.parameter,
            first_row=kernels.first_row,
            ledger=kernels.ledger,
            flag=kernels.flag,
            report=kernels.report,
            first=kernels.first,
            second=kernels.second,
            shape=kernels.shape,
            rule=self.rule,
            ids=self.ids,
            values=self.values,
            is_checked=self.is_checked,
            rounding_key=self.rounding_key,
        )


@torch.no_grad()
def launch_together_(steps: Sequence[GpuStep]) -> None:
    """Launches steps of tables that the same kernels take, all tables in one sequence.

    Their `run_` does nothing more; the steps that are left launch by themselves. So do all steps in
    a CUDA graph: it would copy the words of the arguments again in each replay, from host memory
    that no longer holds them.
    """
    if not steps or is_capturing(steps[0].kernels.parameter.device):
        return
    for group in groups_of([step.call() for step in steps]):
        together = [steps[number] for number in group]
        for step in together:
            step.begin_()
        with _current(together[0].kernels.parameter.device):
            for launch in launches_together([step.call() for step in together]):
                launch.run_()
        for step in together:
            step.end_()
            step.kernels.launched = step


def is_capturing(device: torch.device) -> bool:
    """Whether launches on a device are recorded in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one, on which Triton launches whatever it is given."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
