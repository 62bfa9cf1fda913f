"""The step in C++: one call that sums duplicates, moves the moments and the parameter's rows."""

import ctypes
from typing import ClassVar, NamedTuple, assert_never

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .. import _hashing
from .._rows import CHUNK_ELEMENTS
from .._sketch import LARGEST_SCALE, SMALLEST_SCALE, Sketch
from .._torch_private import entries
from .._validation import PLAIN_TENSORS
from ..deferred import DeferredGradient
from ..moments import ArrayView, Average, CodesView, KernelView, Moment, Moments, SketchView
from . import _native
from ._rule import AnyRule, FusedRule
from .reference import LARGEST_GRADIENT, ids_error

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_EXACT, _ROW_WISE, _SKETCH = 1, 2, 3
_FORMS = {"linear": 0, "paper": 1, "bucket": 2, "conservative": 3}
_MAX_DEPTH = 32
# Below this many elements, threads cost more than they save.
_ELEMENTS_FOR_THREADS = 1 << 15
# A buffer of up to this many row values is kept between steps: 64 KiB. With cold caches torch takes
# as long to allocate one as the kernel takes for a hundred rows.
_ROWS_KEPT = 1 << 14
# The workspace of a step with one thread, 16 bytes a column, is kept for up to this many: 64 KiB.
_COLUMNS_KEPT = 1 << 12
# The fields of a rule from here on hardly ever change from step to step.
_CONSTANTS_FROM = FusedRule._fields.index("eps")


def unsupported_reason(parameter: Tensor, moments: Moments, first_row: int = 0) -> str | None:
    """Why there are no kernels for a parameter with these moments, and the remedy, or None."""
    if parameter.dtype not in _DTYPES:
        known = ", ".join(str(dtype) for dtype in _DTYPES)
        return f"there is no kernel for {parameter.dtype}; use one of {known}"
    if first_row + parameter.shape[:1].numel() > _hashing.MAX_ID + 1:
        return f"its table has more than {_hashing.MAX_ID + 1} rows; use several tables"
    for moment in moments:
        if moment is not None:
            reason = _unsupported_storage(moment)
            if reason is not None:
                return reason
    return _unsupported_layout(parameter, "it")


def _unsupported_storage(moment: Moment) -> str | None:
    if moment.gathers and moment.held is not None:
        return "processes exchange its rows in the middle of a step, where no kernel stops"
    view = moment.kernel_view()
    match view:
        case None | CodesView():
            return f"there is no kernel for {type(moment.storage).__name__} storage"
        case ArrayView():
            return None
        case SketchView():
            if view.sketch.depth > _MAX_DEPTH:
                return f"its sketch has a depth of {view.sketch.depth}; use at most {_MAX_DEPTH}"
            if view.form == "conservative" and not view.is_by_row:
                return 'its sketch is conservative by element; use granularity="row"'
            return None
        case _:
            assert_never(view)


def _unsupported_layout(tensor: Tensor, name: str) -> str | None:
    """Why the numbers of a tensor are not in memory as a kernel reads them, or None."""
    if type(tensor) not in PLAIN_TENSORS:
        return f"{name} is a {type(tensor).__name__}; use a plain tensor"
    if tensor.is_sparse:
        return None
    if tensor.is_neg():
        return f"{name} is negated lazily; use resolve_neg()"
    if not tensor.is_contiguous():
        return f"{name} has the strides {tensor.stride()}; use contiguous()"
    return None


class CpuKernels:
    """The kernels bound to one parameter: the call, filled in but for gradient and numbers.

    Python that runs once a step is most of the cost of a small step, and with cold caches ten to
    thirty times its cost in a loop. So everything known in advance is computed here.
    """

    counts_steps: ClassVar[bool] = False

    def __init__(self, parameter: Tensor, moments: Moments, *, first_row: int = 0) -> None:
        library = _native.library()
        assert library is not None  # find_kernels() has looked
        self.library, self.parameter = library, parameter
        self.rows, self.dim = parameter.shape[:1].numel(), parameter.shape[1:].numel()
        self.call = _native.Step(
            parameter=parameter.data_ptr(),
            dim=self.dim,
            dtype=_DTYPES[parameter.dtype],
            largest_gradient=LARGEST_GRADIENT,
            first_row=first_row,
            piece_rows=max(1, CHUNK_ELEMENTS // max(1, self.dim)),
        )
        self.call_gradient = self.call.gradient
        self.first, self.second = (
            None if moment is None else _KernelMoment(moment, parameter, call)
            for moment, call in zip(moments, (self.call.first, self.call.second), strict=True)
        )
        # What steps with one thread need; those with several allocate what they need themselves.
        self.workspace: Tensor | None = None
        if self.dim <= _COLUMNS_KEPT:
            self.workspace = torch.empty(16 * self.dim + 64, dtype=torch.uint8, device="cpu")
        self.squares = torch.empty(0, dtype=torch.float32, device="cpu")
        self.constants: tuple[object, ...] = ()

    def unsupported_reason(self, gradient: Tensor, rule: AnyRule) -> str:
        """Why `prepare` gave None, and the remedy."""
        if isinstance(gradient, DeferredGradient):
            return f"there is no kernel for its {gradient!r}"
        reason = _unsupported_layout(gradient, "its gradient")
        return reason or "its rule is no FusedRule, so only the reference knows it"

    def prepare(
        self, gradient: Tensor, rule: AnyRule, *, is_checked: bool, rounding_key: int | None
    ) -> "_CpuStep | None":
        """The step along a gradient, its equal ids grouped, once its rows are known to exist."""
        is_sparse = gradient.is_sparse
        is_readable = is_sparse or (gradient.is_contiguous() and not gradient.is_neg())
        if type(rule) is not FusedRule or type(gradient) not in PLAIN_TENSORS or not is_readable:
            return None
        call, part = self.call, self.call_gradient
        call.step_size, call.second_root, clip = rule.numbers()
        call.has_clip, call.clip = clip is not None, clip or 0.0
        constants = rule[_CONSTANTS_FROM:]
        if constants != self.constants:
            self._set_constants(rule)
            self.constants = constants
        call.is_stochastic = rounding_key is not None
        call.rounding_key = rounding_key or 0
        part.starts = part.sums = call.row_values = None
        ids = sums = squares = None
        repeated = 0
        if is_sparse:
            ids, values, repeated = self._group(*entries(gradient))
        else:
            values = gradient
            part.ids, part.rows = None, self.rows
        part.values = values.data_ptr()
        touched: int = part.rows
        is_large = touched * self.dim >= _ELEMENTS_FOR_THREADS
        call.threads = torch.get_num_threads() if is_large else 1
        # Sums found by the check are kept for the step, unless they take more than one copy of the
        # touched rows: they are float32 where rows may be half as wide.
        if is_checked and 0 < repeated * 4 <= touched * self.parameter.element_size():
            sums = torch.empty(repeated * self.dim, dtype=torch.float32, device="cpu")
            part.sums = sums.data_ptr()
        # Mean squares by row, found by the check if there is one, become second moments. Those of a
        # dense gradient with many rows are found by the step, a few at a time.
        if call.second.is_by_row and (is_sparse or touched <= CHUNK_ELEMENTS):
            squares = self.squares
            if squares.numel() < touched:
                squares = torch.empty(touched, dtype=torch.float32, device="cpu")
                if touched <= _ROWS_KEPT:
                    self.squares = squares
            call.row_values = squares.data_ptr()
        workspace = self.workspace
        if is_large or workspace is None:
            size = self.library.sketchoptim_workspace(call)
            workspace = torch.empty(size, dtype=torch.uint8, device="cpu")
        call.workspace = workspace.data_ptr()
        call.is_inspected = is_checked
        is_finite = not is_checked or bool(self.library.sketchoptim_inspect(call))
        return _CpuStep(self, rule, touched, is_finite, (values, ids, sums, squares, workspace))

    def _set_constants(self, rule: FusedRule) -> None:
        call = self.call
        call.eps, call.weight_decay, call.shrink = rule.eps, rule.weight_decay, rule.shrink
        call.is_maximizing, call.is_ratio = rule.maximize, rule.is_ratio
        call.has_nesterov, call.nesterov = rule.nesterov is not None, rule.nesterov or 0.0

    def _group(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor, int]:
        """Groups equal ids; strictly ascending ones, as coalesced ids are, stay as they are.

        Returns ids and values as the call reads them, and how many rows have several entries.
        """
        if not values.is_contiguous():  # expanded, as in a gradient that was set by hand
            values = values.contiguous()
        ids = ids if ids.is_contiguous() else ids.contiguous()
        count, address = ids.numel(), ids.data_ptr()
        if values.numel() != count * self.dim or values.dtype != self.parameter.dtype:
            _check_array(values, self.parameter.dtype, count * self.dim)
        ascends = self.library.sketchoptim_ascend(address, count, self.rows)
        if ascends < 0:
            raise ids_error(self.parameter, int(ids.min()), int(ids.max()))
        if ascends:
            self.call_gradient.rows, self.call_gradient.ids = count, address
            return ids, values, 0
        room = torch.empty(3 * count + 1, dtype=torch.int64, device="cpu")
        repeated = self.library.sketchoptim_group(
            address, count, room.data_ptr(), self.call_gradient
        )
        return room, values, repeated


class _CpuStep(NamedTuple):
    """A prepared step. Temporaries are a few numbers a row."""

    kernels: CpuKernels
    rule: FusedRule
    touched: int
    is_finite: bool
    kept: tuple[Tensor | None, ...]
    """Memory that the call points to."""

    def run_(self) -> None:
        kernels, rule = self.kernels, self.rule
        if kernels.first is not None and rule.first is not None:
            kernels.first.begin_(rule.first)
        if kernels.second is not None and rule.second is not None:
            kernels.second.begin_(rule.second)
        kernels.library.sketchoptim_step(kernels.call)
        # Autograd sees writes by torch only, and must refuse graphs of the weights as they were.
        increment_version(kernels.parameter)


class _KernelMoment:
    """A moment's part of the call: what it is, once, and how it moves, before each step."""

    def __init__(self, moment: Moment, parameter: Tensor, call: _native.Moment) -> None:
        self.call = call
        self.sketch: Sketch | None = None
        view: KernelView | None = moment.kernel_view()
        match view:
            case ArrayView(values, is_by_row=True):
                _check_array(values, torch.float32, parameter.shape[:1].numel())
                call.kind, call.is_by_row, call.data = _ROW_WISE, True, values.data_ptr()
            case ArrayView(values):
                _check_array(values, parameter.dtype, parameter.numel())
                call.kind, call.dtype, call.data = _EXACT, _DTYPES[values.dtype], values.data_ptr()
            case SketchView():
                self._describe_sketch(view, parameter.shape[1:].numel())
            case None | CodesView():
                raise AssertionError("unsupported_reason() has looked")
            case _:
                assert_never(view)

    def _describe_sketch(self, view: SketchView, dim: int) -> None:
        call, sketch = self.call, view.sketch
        size = sketch.depth * sketch.width * (1 if view.is_by_row else dim)
        _check_array(sketch.counters, sketch.counters.dtype, size)
        _check_array(sketch.words, torch.int64, 4 * sketch.depth)
        _check_array(sketch.scale, torch.float32, 1)
        self.sketch = sketch
        self.decays = view.form in ("linear", "conservative")
        # The memory of a tensor that the sketch keeps, without a call of torch to get at it.
        self.scale = ctypes.c_float.from_address(sketch.scale.data_ptr())
        call.kind, call.form, call.dtype = (
            _SKETCH,
            _FORMS[view.form],
            _DTYPES[sketch.counters.dtype],
        )
        call.is_signed, call.is_by_row = sketch.is_signed, view.is_by_row
        call.depth, call.width = sketch.depth, sketch.width
        call.data, call.words = sketch.counters.data_ptr(), sketch.words.data_ptr()

    def begin_(self, average: Average) -> None:
        """Describes the next step; decays what decays as a whole."""
        call, sketch = self.call, self.sketch
        decay, weight = average
        call.weight, call.decay_less_one = weight, decay - 1
        call.is_average = weight == 1 - decay
        if sketch is None:
            return
        if self.decays:
            scale = self.scale.value * decay
            if SMALLEST_SCALE <= scale <= LARGEST_SCALE:
                self.scale.value = scale
            else:
                sketch.scale_(decay)
        call.scale = scale = self.scale.value
        call.inverse_scale = 1.0 / scale
        if sketch.writes is not None:
            call.rounding_key = sketch.next_key()


def _check_array(tensor: Tensor, dtype: torch.dtype, count: int) -> None:
    """Raises unless `count` contiguous numbers of a dtype are behind the tensor's pointer."""
    if (
        tensor.dtype != dtype
        or tensor.numel() != count
        or not tensor.is_cpu
        or not tensor.is_contiguous()
    ):
        raise ValueError(
            f"the step needs {count} contiguous elements of {dtype} on the CPU, got a tensor of "
            f"shape {list(tensor.shape)}, strides {list(tensor.stride())}, {tensor.dtype} on "
            f"{tensor.device}; make moments with sketchoptim, or load them with load_state_dict()"
        )
