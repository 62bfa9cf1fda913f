"""The step in C++: one call that sums duplicates, moves the moments and the parameter's rows."""

import ctypes
from types import NoneType

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .. import _hashing
from .._rows import CHUNK_ELEMENTS
from .._sketch import Sketch, is_lazy
from ..moments import Average, ExactMoment, Moment, Moments, RowWiseMoment, SketchedMoment
from . import _native
from ._rule import Rule
from .reference import LARGEST_GRADIENT, ids_error

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_EXACT, _ROW_WISE, _SKETCH = 1, 2, 3
_FORMS = {"linear": 0, "paper": 1, "bucket": 2}
_CONSERVATIVE = 3
_MAX_DEPTH = 32
# Waking a thread takes as long as one of them needs for about so many.
_ELEMENTS_FOR_THREADS = 1 << 15
# With cold caches torch takes as long to allocate as the kernel for a hundred rows; 64 KiB.
_ROWS_KEPT = 1 << 14
_PLAIN = (Tensor, torch.nn.Parameter)
# The part of a rule that hardly ever changes from step to step.
_CONSTANTS_FROM = Rule._fields.index("eps")


def has_kernels(parameter: Tensor, moments: Moments) -> bool:
    """Whether there are kernels, and they can be called, on this device for storages as these."""
    kinds = (ExactMoment, RowWiseMoment, SketchedMoment, NoneType)
    return (
        parameter.device.type == "cpu"
        and all(isinstance(moment, kinds) for moment in moments)
        and _native.library() is not None
    )


def obstacle(parameter: Tensor, gradient: Tensor, moments: Moments) -> str | None:
    """What keeps the kernels from a parameter, and the remedy, where there are any; else None."""
    if parameter.dtype not in _DTYPES:
        known = ", ".join(str(dtype) for dtype in _DTYPES)
        return f"there is no kernel for {parameter.dtype}; use one of {known}"
    if parameter.shape[:1].numel() > _hashing.MAX_ID + 1:
        return f"it has more than {_hashing.MAX_ID + 1} rows; use several tables"
    for moment in moments:
        if isinstance(moment, SketchedMoment):
            storage = moment.storage
            if storage.depth > _MAX_DEPTH:
                return f"its sketch has a depth of {storage.depth}; use at most {_MAX_DEPTH}"
            if storage.conservative and storage.granularity == "element":
                return 'its sketch is conservative by element; use granularity="row"'
    return _obstacle_in(parameter, "it") or _obstacle_in(gradient, "its gradient")


def _obstacle_in(tensor: Tensor, name: str) -> str | None:
    """Why the numbers of a tensor are not those that a kernel would find in memory."""
    if type(tensor) not in _PLAIN:
        return f"{name} is a {type(tensor).__name__}; use a plain tensor"
    if tensor.is_sparse:
        return None
    if tensor.is_neg():
        return f"{name} is negated lazily; use resolve_neg()"
    if not tensor.is_contiguous():
        return f"{name} has the strides {tensor.stride()}; use contiguous()"
    return None


class NativeStepper:
    """What the steps of one parameter share: the call, filled in but for gradient and numbers.

    Python that runs once a step is most of what a small step costs, and with cold caches ten to
    thirty times what it costs in a loop; hence what can be known in advance is.
    """

    def __init__(self, parameter: Tensor, moments: Moments) -> None:
        library = _native.library()
        assert library is not None  # has_kernels() has looked
        self.library, self.parameter = library, parameter
        self.rows, self.dim = parameter.shape[:1].numel(), parameter.shape[1:].numel()
        self.call = _native.Step(
            parameter=parameter.data_ptr(),
            dim=self.dim,
            dtype=_DTYPES[parameter.dtype],
            largest_gradient=LARGEST_GRADIENT,
            piece_rows=max(1, CHUNK_ELEMENTS // max(1, self.dim)),
        )
        self.gradient = self.call.gradient
        self.moments = [
            None if moment is None else NativeMoment(moment, parameter, call)
            for moment, call in zip(moments, (self.call.first, self.call.second), strict=True)
        ]
        self.is_by_row = bool(self.call.second.is_by_row)
        self.kept = torch.empty(0, dtype=torch.float32, device="cpu")
        self.constants: tuple[object, ...] = ()

    def takes(self, gradient: Tensor) -> bool:
        """Whether the gradient's numbers are in memory as the kernel reads them."""
        return _obstacle_in(gradient, "its gradient") is None

    def prepare(self, gradient: Tensor, rule: Rule) -> "NativeStep":
        """The step along a gradient, its equal ids found, once its rows are known to exist."""
        call = self.call
        call.step_size, call.second_root = rule.step_size, rule.second_root
        constants = rule[_CONSTANTS_FROM:]
        if constants != self.constants:
            self.constants = constants
            call.eps, call.weight_decay, call.shrink = rule.eps, rule.weight_decay, rule.shrink
            call.is_maximizing, call.is_ratio = rule.maximize, rule.is_ratio
            call.has_nesterov, call.nesterov = rule.nesterov is not None, rule.nesterov or 0.0
            call.has_clip, call.clip = rule.clip is not None, rule.clip or 0.0
        return NativeStep(self, gradient, rule)

    def row_values(self, rows: int) -> Tensor:
        """Room for a number a row, kept from step to step where it is little."""
        if self.kept.numel() >= rows:
            return self.kept
        room = torch.empty(rows, dtype=torch.float32, device="cpu")
        if rows <= _ROWS_KEPT:
            self.kept = room
        return room


class NativeStep:
    """A step of one parameter: first looked at, then done. Temporaries are a few numbers a row."""

    def __init__(self, stepper: NativeStepper, gradient: Tensor, rule: Rule) -> None:
        self.stepper, self.rule = stepper, rule
        self.sums: Tensor | None = None
        self.row_values: Tensor | None = None
        call = stepper.gradient
        call.starts = call.sums = None
        self.shared = 0
        if gradient.is_sparse:
            values, ids = gradient._values(), gradient._indices()
            if values.is_neg():  # lazily, by a flag that is not in memory
                values = values.resolve_neg()
            # A copy where values are expanded, as in a gradient that was set by hand.
            self.values = values if values.is_contiguous() else values.contiguous()
            _check(self.values, stepper.parameter.dtype, ids.numel() * stepper.dim)
            self._group(ids)
        else:
            self.values = gradient
            call.ids, call.rows = None, stepper.rows
            stepper.call.row_values = None
        call.values = self.values.data_ptr()
        self.touched = int(call.rows)
        # Mean squares by row, found while a gradient is looked at, become second moments. Those of
        # a dense one, if the table has many rows, are found again by the step, a few at a time.
        is_little = gradient.is_sparse or self.touched <= CHUNK_ELEMENTS
        self.keeps_squares = stepper.is_by_row and is_little
        is_worth_it = self.touched * stepper.dim >= _ELEMENTS_FOR_THREADS
        stepper.call.threads = torch.get_num_threads() if is_worth_it else 1
        self.is_inspected = False

    def _group(self, ids: Tensor) -> None:
        """Finds equal ids; ids that ascend strictly, as coalesced ones do, stay as they are."""
        library, call, rows = self.stepper.library, self.stepper.gradient, self.stepper.rows
        self.ids = ids = ids if ids.is_contiguous() else ids.contiguous()
        count = ids.numel()
        ascends = library.sketchoptim_ascend(ids.data_ptr(), count, rows)
        if ascends < 0:
            raise ids_error(self.stepper.parameter, int(ids.min()), int(ids.max()))
        if ascends:
            call.rows, call.ids = count, ids.data_ptr()
            return
        self.ids = torch.empty(3 * count + 1, dtype=torch.int64, device="cpu")
        self.shared = library.sketchoptim_group(ids.data_ptr(), count, self.ids.data_ptr(), call)

    def is_finite(self) -> bool:
        call, stepper = self.stepper.gradient, self.stepper
        # What has been summed once is kept for the step itself, unless that is more than one copy
        # of the touched rows: sums are float32 where rows may be half as wide.
        if 0 < self.shared * 4 <= self.touched * stepper.parameter.element_size():
            self.sums = torch.empty(self.shared * stepper.dim, dtype=torch.float32, device="cpu")
            call.sums = self.sums.data_ptr()
        if self.keeps_squares:
            self.row_values = stepper.row_values(self.touched)
            stepper.call.row_values = self.row_values.data_ptr()
        self.is_inspected = True
        return bool(stepper.library.sketchoptim_inspect(stepper.call))

    def run_(self) -> None:
        stepper = self.stepper
        if self.keeps_squares and not self.is_inspected:
            self.is_finite()
        for moment, average in zip(
            stepper.moments, (self.rule.first, self.rule.second), strict=True
        ):
            if moment is not None and average is not None:
                moment.begin_(average)
        stepper.library.sketchoptim_step(stepper.call)
        # Autograd sees writes by torch only, and must refuse graphs of the weights as they were.
        increment_version(stepper.parameter)


class NativeMoment:
    """A moment's part of the call: what it is, once, and how it moves, before each step."""

    def __init__(self, moment: Moment, parameter: Tensor, call: _native.Moment) -> None:
        self.call = call
        self.sketch: Sketch | None = None
        if isinstance(moment, SketchedMoment):
            self._describe_sketch(moment, parameter.shape[1:].numel())
        elif isinstance(moment, RowWiseMoment):
            rows = moment.tensors["rows"]
            _check(rows, torch.float32, parameter.shape[:1].numel())
            call.kind, call.is_by_row, call.data = _ROW_WISE, True, rows.data_ptr()
        else:
            values = moment.tensors["values"]
            _check(values, parameter.dtype, parameter.numel())
            call.kind, call.dtype, call.data = _EXACT, _DTYPES[values.dtype], values.data_ptr()

    def _describe_sketch(self, moment: SketchedMoment, dim: int) -> None:
        call, storage, sketch = self.call, moment.storage, moment.sketch
        is_by_row = storage.granularity == "row"
        size = sketch.depth * sketch.width * (1 if is_by_row else dim)
        _check(sketch.table, storage.dtype, size)
        _check(sketch.words, torch.int64, 4 * sketch.depth)
        _check(sketch.scale, torch.float32, 1)
        self.sketch = sketch
        self.decays = storage.decay == "linear"
        # The memory of a tensor that the sketch keeps, without a call of torch to get at it.
        self.scale = ctypes.c_float.from_address(sketch.scale.data_ptr())
        call.kind, call.form = _SKETCH, _FORMS[storage.decay]
        if storage.conservative:
            call.form = _CONSERVATIVE
        call.dtype, call.is_signed, call.is_by_row = (
            _DTYPES[sketch.table.dtype],
            sketch.is_signed,
            is_by_row,
        )
        call.depth, call.width = sketch.depth, sketch.width
        call.data, call.words = sketch.table.data_ptr(), sketch.words.data_ptr()

    def begin_(self, average: Average) -> None:
        """Describes the next step; decays what decays as a whole."""
        call, sketch = self.call, self.sketch
        call.weight, call.decay_less_one = average.weight, average.decay - 1
        call.is_average = average.weight == 1 - average.decay
        if sketch is None:
            return
        if self.decays:
            scale = self.scale.value * average.decay
            if is_lazy(scale):
                self.scale.value = scale
            else:
                sketch.scale_(average.decay)
        call.scale = scale = self.scale.value
        call.inverse_scale = 1.0 / scale
        if sketch.rounds is not None:
            call.rounding_key = sketch.rounding_key()


def _check(tensor: Tensor, dtype: torch.dtype, count: int) -> None:
    """Raises unless `count` numbers of a dtype lie in a row behind the tensor's pointer."""
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
