"""The step of one parameter in C++: what the kernels take, and where they find it."""

import ctypes
import struct
from typing import ClassVar, assert_never, final

import torch
from torch import Tensor

from .. import _hashing
from .._rows import CHUNK_ELEMENTS
from .._torch_private import entries, stored_ids, stored_values
from .._validation import PLAIN_TENSORS, check_storage
from ..deferred import (
    DeferredGradient,
    Lookups,
    Scale,
    SharedLookups,
    TableLookups,
    joined_lookups,
)
from ..moments import ArrayView, CodesView, ColumnsView, KernelView, Moment, Moments, SketchView
from . import _native
from ._blocks import BlockStep
from ._lookups import LookupCall
from ._rule import AnyRule, FusedRule
from .reference import LARGEST_GRADIENT, Reference, ids_error

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_EXACT, _ROW_WISE, _SKETCH = 1, 2, 3
_FORMS = {"linear": 0, "paper": 1, "bucket": 2, "conservative": 3}
_MAX_DEPTH = 32
_IS_OUTSIDE, _IS_NOT_FINITE = 2, 3
_STRIDED = torch.strided


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
    if isinstance(view, ColumnsView):
        view = view.rows
        if isinstance(view, SketchView) and view.form != "conservative":
            return "there is no kernel for factors of columns next to its sketch"
    match view:
        case None | CodesView() | ColumnsView():
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


def rounding_word(key: int | None) -> int:
    """The key of a step's rounding as a 64-bit word; -1 stands for None, to nearest."""
    return 2**64 - 1 if key is None else key


@final
class CpuKernels:
    """The kernels bound to one parameter, and the step of it that is under way.

    Python that runs once a step is most of the cost of a small step, and with cold caches ten to
    thirty times its cost in a loop. So everything known in advance is computed here, `prepare` only
    notes where a gradient is, and `Calls` takes the steps of all parameters together.
    """

    counts_steps: ClassVar[bool] = False

    def __init__(
        self,
        parameter: Tensor,
        moments: Moments,
        *,
        first_row: int = 0,
        step_count: Tensor | None = None,
    ) -> None:
        library = _native.library()
        assert library is not None  # find_kernels() has looked
        if step_count is None:
            step_count = torch.zeros((), dtype=torch.float64, device="cpu")
        self.library, self.parameter = library, parameter
        self.shape, self.dtype = parameter.shape, parameter.dtype
        self.rows, self.dim = parameter.shape[:1].numel(), parameter.shape[1:].numel()
        self.call = _native.Step(
            parameter=parameter.data_ptr(),
            n=self.rows,
            step_count=step_count.data_ptr(),
            dim=self.dim,
            dtype=_DTYPES[parameter.dtype],
            largest_gradient=LARGEST_GRADIENT,
            first_row=first_row,
            piece_rows=max(1, CHUNK_ELEMENTS // max(1, self.dim)),
            most_row_values=CHUNK_ELEMENTS,
        )
        self.address = ctypes.addressof(self.call)
        for moment, call in zip(moments, (self.call.first, self.call.second), strict=True):
            if moment is not None:
                view = moment.kernel_view()
                if isinstance(view, ColumnsView):
                    self._describe_columns(view, is_divided=moment.held is not None)
                    view = view.rows
                _describe(view, parameter, call)
        self.takes_blocks = bool(library.sketchoptim_takes_rows(self.call))
        self.reference = Reference(parameter, moments, first_row=first_row)
        self.step_count = step_count
        self.rule = FusedRule(0.0)
        self.words: tuple[int, ...] = ()
        """The step as the 64-bit words of a `Call` in csrc/abi.h, but for its rule."""
        self.copies: tuple[Tensor, ...] = ()
        """What the step points to instead of the gradient; `Calls` takes it over."""

    def _describe_columns(self, view: ColumnsView, *, is_divided: bool) -> None:
        call = self.call
        _check_array(view.columns, torch.float32, self.dim)
        _check_array(view.shares, torch.int64, self.dim)
        self.column_roots = torch.empty(2, self.dim, dtype=torch.float32, device="cpu")
        call.columns, call.column_shares = view.columns.data_ptr(), view.shares.data_ptr()
        call.column_roots, call.column_inverses = (it.data_ptr() for it in self.column_roots)
        call.leaves_shares = is_divided

    def unsupported_reason(self, gradient: Tensor, rule: AnyRule) -> str:
        """Why `prepare` gave None for a gradient of this parameter, and the remedy."""
        if isinstance(gradient, DeferredGradient):
            return (
                f"there is no kernel for its {gradient!r} with these moments and this rule; use "
                "so.materialize_gradients(model)"
            )
        reason = _unsupported_layout(gradient, "its gradient")
        return reason or "the CPU kernels support only FusedRule"

    def prepare(
        self, gradient: Tensor, rule: AnyRule, *, is_checked: bool, rounding_key: int | None
    ) -> "CpuKernels | BlockStep | None":
        """The next step, for `Calls` to check and to run: itself, unless it goes block by block."""
        key = rounding_word(rounding_key)
        if type(gradient) is DeferredGradient and type(rule) is FusedRule:
            if gradient.is_row_sparse:
                return self._prepare_lookups(gradient, rule, is_checked, key)
            if not self.takes_blocks:
                return None
            checked = self.reference.prepare(
                gradient, rule, is_checked=is_checked, rounding_key=rounding_key
            )
            return BlockStep(self, gradient, rule, key, is_finite=checked.is_finite)
        if (
            type(rule) is not FusedRule
            or type(gradient) not in PLAIN_TENSORS
            or gradient.dtype is not self.dtype
            or gradient.shape != self.shape
            or not gradient.is_cpu
        ):
            return None
        ids: Tensor | None = None
        ids_at, values, count = 0, gradient, self.rows
        if gradient.is_sparse:
            ids, values = stored_ids(gradient), stored_values(gradient)
            if not (ids.is_contiguous() and values.is_contiguous()):  # a gradient set by hand
                ids, values = self.copies = ids.contiguous(), values.contiguous()
            count, ids_at = ids.numel(), ids.data_ptr()
            if values.numel() != count * self.dim or values.dtype is not self.dtype or not count:
                if gradient.sparse_dim() != 1:
                    return None
                _check_array(values, self.dtype, count * self.dim)
        elif gradient.layout is not _STRIDED or not gradient.is_contiguous() or gradient.is_neg():
            return None
        values_at = values.data_ptr()
        if not (values_at and (ids_at or ids is None)):  # empty, or freed
            for tensor in (values, ids):
                if tensor is not None:
                    check_storage("a gradient", tensor)
            if ids is not None and not ids_at:  # sparse without an entry
                ids_at = self.address
        self.words = (self.address, 0, values_at, ids_at, count, 0, 0, 0, is_checked, key)
        self.rule = rule
        return self

    def _prepare_lookups(
        self, gradient: DeferredGradient, rule: FusedRule, is_checked: bool, key: int
    ) -> "CpuKernels | None":
        """The step along the gradient of lookups, whose rows are summed when they move."""
        part = _single_lookups(self.parameter, gradient)
        if part is None or part.output_dtype is not self.dtype:
            return None
        if isinstance(part, TableLookups):
            shared, table = part.shared, part.table
            call, column = call_of_shared(shared), shared.columns[table]
        else:
            call, table, column = _call_of(part, self.dim), 0, 0
        self.copies = call.kept
        self.lookups = call
        self.words = (
            self.address,
            0,
            call.values_at + column * self.dtype.itemsize,
            0,
            0,
            call.address,
            table,
            scale_word(gradient.scale),
            is_checked,
            key,
        )
        self.rule = rule
        return self

    @property
    def touched(self) -> int:
        """How many rows the step moves, once it is checked."""
        rows: int = self.call.gradient.rows
        return rows

    @property
    def is_finite(self) -> bool:
        """Whether every gradient that would reach the moments is finite, and its square is too."""
        return bool(self.call.finding != _IS_NOT_FINITE)

    def skip_(self) -> None:
        """Leaves the step out when `Calls` runs."""
        self.call.finding = _IS_NOT_FINITE

    @property
    def has_ids_outside(self) -> bool:
        """Whether a row id is outside the parameter."""
        return bool(self.call.finding == _IS_OUTSIDE)

    def ids_error(self, gradient: Tensor) -> ValueError:
        """What is wrong with the ids of a sparse gradient, or with the bags of lookups."""
        if isinstance(gradient, DeferredGradient):
            gradient.check_ids()
            return ValueError(
                f"the offsets behind the gradient of the parameter of shape {list(self.shape)} "
                "must ascend from 0 to the number of ids"
            )
        ids, _ = entries(gradient)
        return ids_error(self.parameter, int(ids.min()), int(ids.max()))


def _single_lookups(parameter: Tensor, gradient: DeferredGradient) -> Lookups | None:
    """The one part of a gradient of lookups, made of several if need be; None for other parts."""
    terms = gradient.terms
    if len(terms) == 1:
        part, scale = terms[0]
        if isinstance(part, Lookups) and scale == 1.0 and part.padding_idx is None:
            return part
    if not terms or not all(isinstance(part, Lookups) for part, _ in terms):
        return None
    return joined_lookups(parameter, terms)


def _call_of(part: Lookups, dim: int) -> LookupCall:
    """The lookups of one table."""
    values, offsets, factors = part.output_gradient, part.offsets, part.lookup_weights
    if values.dim() != 2:
        values = values.reshape(-1, dim)
    return LookupCall(
        part.ids.long().contiguous(),
        None if offsets is None else offsets.long().contiguous(),
        None if factors is None else factors.float().contiguous(),
        values if values.stride(1) == 1 else values.contiguous(),
        tables=1,
        bags=values.shape[0],
        is_mean=part.mode == "mean" and offsets is not None,
    )


def call_of_shared(shared: SharedLookups) -> LookupCall:
    """The lookups of several tables: one object for all of them."""
    if shared.call is None:
        shared.call = _new_call_of_shared(shared)
    call: LookupCall = shared.call
    return call


def _new_call_of_shared(shared: SharedLookups) -> LookupCall:
    lookups, values = shared.lookups, shared.output_gradient
    return LookupCall(
        lookups.ids,
        lookups.offsets,
        lookups.factors,
        values if values.stride(1) == 1 else values.contiguous(),
        tables=lookups.tables,
        bags=lookups.bags,
        is_mean=shared.mode == "mean",
    )


def scale_word(scale: Scale) -> int:
    """The factor of a gradient, as a word of a `Call` in csrc/abi.h."""
    return _ONE if scale == 1.0 else _word(float(scale))


def _word(number: float) -> int:
    return int(struct.unpack("=Q", struct.pack("=d", number))[0])


_ONE = _word(1.0)


def _describe(view: KernelView | None, parameter: Tensor, call: _native.Moment) -> None:
    """Fills in a moment's part of the call, but for the numbers of a step."""
    match view:
        case ArrayView(values, is_by_row=True):
            _check_array(values, torch.float32, parameter.shape[:1].numel())
            call.kind, call.is_by_row, call.data = _ROW_WISE, True, values.data_ptr()
        case ArrayView(values):
            _check_array(values, parameter.dtype, parameter.numel())
            call.kind, call.dtype, call.data = _EXACT, _DTYPES[values.dtype], values.data_ptr()
        case SketchView():
            _describe_sketch(view, parameter.shape[1:].numel(), call)
        case None | CodesView() | ColumnsView():
            raise AssertionError("unsupported_reason() has looked")
        case _:
            assert_never(view)


def _describe_sketch(view: SketchView, dim: int, call: _native.Moment) -> None:
    sketch = view.sketch
    size = sketch.depth * sketch.width * (1 if view.is_by_row else dim)
    _check_array(sketch.counters, sketch.counters.dtype, size)
    _check_array(sketch.words, torch.int64, 4 * sketch.depth)
    _check_array(sketch.scale, torch.float32, 1)
    call.kind, call.form, call.dtype = _SKETCH, _FORMS[view.form], _DTYPES[sketch.counters.dtype]
    call.is_signed, call.is_by_row = sketch.is_signed, view.is_by_row
    call.depth, call.width = sketch.depth, sketch.width
    call.data, call.words = sketch.counters.data_ptr(), sketch.words.data_ptr()
    tensors = sketch.tensors()
    call.stored_scale = sketch.scale.data_ptr()
    if "start" in tensors:
        _check_array(tensors["start"], torch.float32, 1)
        call.stored_start = tensors["start"].data_ptr()
    if sketch.writes is not None:
        _check_array(sketch.writes, torch.int64, 1)
        call.writes = sketch.writes.data_ptr()


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
