"""The step in C++: one call that sums duplicates, moves the moments and the parameter's rows."""

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from .. import hashing
from ..moments import ExactMoment, Moment, Name, RowWiseMoment, SketchedMoment
from ..moments.moment import Average
from ..rows import CHUNK_ELEMENTS
from ..storage import Exact, RowWise, Sketched, Storage
from . import native
from .reference import LARGEST_GRADIENT, ids_error
from .rule import Rule

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_EXACT, _ROW_WISE, _SKETCH = 1, 2, 3
_FORMS = {"linear": 0, "paper": 1, "bucket": 2}
_CONSERVATIVE = 3
_MAX_DEPTH = 32


def supports(parameter: Tensor, gradient: Tensor, storages: Mapping[Name, Storage]) -> bool:
    """Whether a kernel exists for this parameter and these storages, and can be called."""
    values = gradient._values() if gradient.is_sparse else gradient
    return (
        parameter.device.type == "cpu"
        and parameter.dtype in _DTYPES
        and parameter.shape[:1].numel() <= hashing.MAX_ID + 1
        and _is_plain(parameter)
        and _is_plain(values)
        and (gradient.is_sparse or not _keeps_too_much(parameter, storages))
        and all(_has_kernel(storage) for storage in storages.values())
        and native.library() is not None
    )


def _is_plain(tensor: Tensor) -> bool:
    """Whether the numbers are those in memory: not in a subclass of Tensor, nor negated lazily."""
    is_itself = type(tensor) in (Tensor, torch.nn.Parameter)
    return is_itself and tensor.is_contiguous() and not tensor.is_neg()


def _keeps_too_much(parameter: Tensor, storages: Mapping[Name, Storage]) -> bool:
    """Whether a number for each row, which the kernel keeps, would be of the size of a table."""
    return _is_by_row(storages.get("second")) and parameter.shape[:1].numel() > CHUNK_ELEMENTS


def _has_kernel(storage: Storage) -> bool:
    if isinstance(storage, Sketched):
        is_lean = storage.granularity == "row" or not storage.conservative
        return is_lean and storage.depth <= _MAX_DEPTH
    return isinstance(storage, Exact | RowWise)


class NativeStep:
    """A step of one parameter: first looked at, then done. Temporaries are a few numbers a row."""

    def __init__(
        self, parameter: Tensor, gradient: Tensor, storages: Mapping[Name, Storage], rule: Rule
    ) -> None:
        library = native.library()
        assert library is not None  # supports() has looked
        self.library, self.parameter, self.rule = library, parameter, rule
        self.values = gradient._values() if gradient.is_sparse else gradient
        self.dim = parameter.shape[1:].numel()
        _check(self.values, parameter.dtype, self.values.shape[:1].numel() * self.dim)
        self.grouping: Tensor | None = None
        self.description = native.Gradient(values=self.values.data_ptr())
        if gradient.is_sparse:
            self._group(gradient._indices()[0])
        else:
            self.description.rows = parameter.shape[0] if parameter.dim() else 1
        self.touched = int(self.description.rows)
        # Mean squares by row, found while the gradient is looked at, become second moments.
        self.is_by_row = _is_by_row(storages.get("second"))
        size = self.touched if self.is_by_row else 0
        self.row_values = torch.empty(size, dtype=torch.float32, device="cpu")
        self.has_row_values = False
        self.step = self._described_step()

    def _group(self, ids: Tensor) -> None:
        """Finds equal ids; ids that ascend strictly, as coalesced ones do, stay as they are."""
        ids = ids.contiguous()
        count = ids.numel()
        # scratch (2 count), order, unique (count each), starts, slots (count + 1): one allocation
        work = torch.empty(6 * count + 2, dtype=torch.int64, device="cpu")
        order, unique, starts, slots = (
            work.data_ptr() + 8 * part for part in (2 * count, 3 * count, 4 * count, 5 * count + 1)
        )
        rows = self.library.sketchoptim_group(
            *(ids.data_ptr(), count, self.parameter.shape[0], work.data_ptr()),
            *(order, starts, slots, unique),
        )
        if rows < 0:
            raise ids_error(self.parameter, int(ids.min()), int(ids.max()))
        description = self.description
        if rows == 0:
            self.grouping = ids
            description.rows, description.ids = count, ids.data_ptr()
        else:
            self.grouping = work
            description.rows, description.ids = rows, unique
            description.order, description.starts, description.slots = order, starts, slots

    def is_finite(self) -> bool:
        step = self.step
        if step.gradient.slots:
            shared = ctypes.c_int64.from_address(step.gradient.slots + 8 * self.touched).value
            # What has been summed once is kept for the step itself, unless that is more than one
            # copy of the touched rows: sums are float32 where rows may be half as wide.
            if shared * 4 <= self.touched * self.parameter.element_size():
                self.sums = torch.empty(shared * self.dim, dtype=torch.float32, device="cpu")
                step.gradient.sums = self.sums.data_ptr()
        if self.is_by_row:  # tells the kernel that mean squares are wanted
            step.second = native.Moment(kind=_ROW_WISE, is_by_row=1)
        self.has_row_values = True
        return bool(self.library.sketchoptim_inspect(ctypes.byref(step)))

    def run_(self, first: Moment | None, second: Moment | None) -> None:
        if self.is_by_row and not self.has_row_values:
            self.is_finite()
        for moment in (first, second):
            _check_moment(moment, self.parameter, self.dim)
        self.step.first = _described(first, self.rule.first)
        self.step.second = _described(second, self.rule.second)
        self.library.sketchoptim_step(ctypes.byref(self.step))
        # Autograd sees writes by torch only, and must refuse graphs of the weights as they were.
        torch.autograd.graph.increment_version(self.parameter)

    def _described_step(self) -> native.Step:
        rule = self.rule
        return native.Step(
            parameter=self.parameter.data_ptr(),
            dim=self.dim,
            dtype=_DTYPES[self.parameter.dtype],
            threads=torch.get_num_threads(),
            gradient=self.description,
            row_values=self.row_values.data_ptr(),
            step_size=rule.step_size,
            second_root=rule.second_root,
            eps=rule.eps,
            weight_decay=rule.weight_decay,
            shrink=rule.shrink,
            nesterov=rule.nesterov or 0.0,
            clip=rule.clip or 0.0,
            largest_gradient=LARGEST_GRADIENT,
            is_maximizing=rule.maximize,
            has_nesterov=rule.nesterov is not None,
            has_clip=rule.clip is not None,
            is_ratio=rule.is_ratio,
        )


def _is_by_row(storage: Storage | None) -> bool:
    return isinstance(storage, RowWise) or (
        isinstance(storage, Sketched) and storage.granularity == "row"
    )


def _check_moment(moment: Moment | None, parameter: Tensor, dim: int) -> None:
    """Raises, before anything has moved, where a moment's tensors are not what kernels read."""
    if isinstance(moment, SketchedMoment):
        sketch = moment.sketch
        columns = 1 if moment.storage.granularity == "row" else dim
        _check(sketch.table, moment.storage.dtype, sketch.depth * sketch.width * columns)
        _check(sketch.words, torch.int64, 4 * sketch.depth)
    elif isinstance(moment, RowWiseMoment):
        _check(moment.tensors["rows"], torch.float32, parameter.shape[:1].numel())
    elif isinstance(moment, ExactMoment):
        _check(moment.tensors["values"], parameter.dtype, parameter.numel())


def _check(tensor: Tensor, dtype: torch.dtype, count: int) -> None:
    """Raises unless `count` numbers of a dtype lie in a row behind the tensor's pointer."""
    if (
        tensor.dtype != dtype
        or tensor.numel() != count
        or tensor.device.type != "cpu"
        or not tensor.is_contiguous()
    ):
        raise ValueError(
            f"the step needs {count} contiguous elements of {dtype} on the CPU, got a tensor of "
            f"shape {list(tensor.shape)}, strides {list(tensor.stride())}, {tensor.dtype} on "
            f"{tensor.device}; make moments with sketchoptim, or load them with load_state_dict()"
        )


def _described(moment: Moment | None, average: Average | None) -> native.Moment:
    """What the kernel needs to know of a moment; decays what decays as a whole."""
    if moment is None or average is None:
        return native.Moment()
    shared = {
        "is_average": average.weight == 1 - average.decay,
        "weight": average.weight,
        "decay_less_one": average.decay - 1,
    }
    if isinstance(moment, SketchedMoment):
        storage, sketch = moment.storage, moment.sketch
        if storage.decay == "linear":
            sketch.scale_(average.decay)
        scale = sketch.scale.item()
        key = 0
        if sketch.rounds is not None:
            key = sketch.rounding_key()
        return native.Moment(
            kind=_SKETCH,
            form=_CONSERVATIVE if storage.conservative else _FORMS[storage.decay],
            dtype=_DTYPES[sketch.table.dtype],
            is_signed=sketch.is_signed,
            is_by_row=storage.granularity == "row",
            depth=sketch.depth,
            scale=scale,
            inverse_scale=1.0 / scale,
            rounding_key=key,
            width=sketch.width,
            data=sketch.table.data_ptr(),
            words=sketch.words.data_ptr(),
            **shared,
        )
    if isinstance(moment, RowWiseMoment):
        data = moment.tensors["rows"].data_ptr()
        return native.Moment(kind=_ROW_WISE, is_by_row=1, data=data, **shared)
    assert isinstance(moment, ExactMoment)
    values = moment.tensors["values"]
    return native.Moment(kind=_EXACT, dtype=_DTYPES[values.dtype], data=values.data_ptr(), **shared)
