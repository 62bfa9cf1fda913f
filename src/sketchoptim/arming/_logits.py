"""Logits that are not computed: cross entropy turns them into the fused loss of the head."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .._torch_private import version_of, without_torch_function, wrapper_tensor
from .._warning import warn
from ..nn import linear_cross_entropy
from ._layers import refuse_second_derivative


@dataclass(frozen=True)
class Source:
    """What logits are computed from: ``outer * tanh(factor * linear)``, or ``factor * linear``."""

    hidden: Tensor
    """``[..., dim]``; the logits are ``[..., classes]``."""
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    """The dtype of the logits."""
    autocast_dtype: torch.dtype | None
    """The dtype of the products if autocast was on, else None."""
    factor: float = 1.0
    has_tanh: bool = False
    outer: float = 1.0
    is_transposed: bool = False
    """Whether the last two dimensions are exchanged."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits."""
        *leading, last = *self.hidden.shape[:-1], self.weight.shape[0]
        if self.is_transposed:
            leading[-1], last = last, leading[-1]
        return torch.Size([*leading, last])

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The tensors that a gradient may flow to."""
        return self.hidden, self.weight, self.bias

    def with_tensors(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> "Source":
        """The same computation from other tensors."""
        return dataclasses.replace(self, hidden=hidden, weight=weight, bias=bias)

    def autocast(self) -> torch.autocast:
        """Autocast as it was for the head."""
        device = self.hidden.device.type
        if self.autocast_dtype is None:
            return torch.autocast(device, enabled=False)
        return torch.autocast(device, dtype=self.autocast_dtype)

    def values(self) -> Tensor:
        """The logits, by torch's operations."""
        with self.autocast():
            logits = F.linear(*self.tensors)
        if self.factor != 1:
            logits = logits * self.factor
        if self.has_tanh:
            logits = logits.tanh() * self.outer
        logits = logits.to(self.dtype)
        return logits.transpose(-1, -2) if self.is_transposed else logits

    def loss(self, target: Tensor, **options: Any) -> Tensor:
        """The cross entropy of all tokens, without their logits."""
        hidden, weight, bias = self.tensors
        softcap = None
        factor = self.factor
        if self.has_tanh:
            softcap, factor = self.outer, factor * self.outer
        if abs(factor - 1) > 1e-6:
            hidden, bias = hidden * factor, None if bias is None else bias * factor
        with self.autocast():
            return linear_cross_entropy(
                hidden, weight, target, bias=bias, softcap=softcap, **options
            )


class DeferredLogits(Tensor):
    """Logits of a head that computes them only if something else than a cross entropy reads them.

    Casts, views, slices of leading dimensions and soft caps are deferred too. Every other operation
    gets the plain logits, which are then computed, with one warning that names the operation and
    the bytes. Operations in place raise.
    """

    _source: Source
    _watched: tuple[tuple[Tensor, int], ...]
    """What must stay unchanged, with its version."""
    _computed_values: Tensor | None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None and isinstance(args[0], DeferredLogits):
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        with without_torch_function():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return _wrapped(args[0]._source, args[0])
        if func._schema.is_mutable:
            raise _in_place_error(func)

        def read(logits: DeferredLogits) -> Tensor:
            return logits._computed(func)

        assert any(isinstance(it, DeferredLogits) for it in tree_leaves((args, kwargs)))
        return func(
            *tree_map_only(DeferredLogits, read, args),
            **tree_map_only(DeferredLogits, read, kwargs),
        )

    def _computed(self, func: Any) -> Tensor:
        """The plain logits, for an operation that reads them."""
        if self._computed_values is None:
            self._check_current()
            with torch.no_grad():
                self._computed_values = self._source.values()
            warn(
                f"{func} reads deferred logits of shape {list(self.shape)}, so all of them were "
                f"computed and take {self._computed_values.nbytes:,} bytes; call "
                "so.materialize_gradients(model) if every step needs them"
            )
        return self._computed_values

    def _check_current(self) -> None:
        """Raises if the logits, or what they are computed from, were modified since."""
        if version_of(self):
            raise _in_place_error("an operation on a view")
        if any(version_of(tensor) != version for tensor, version in self._watched):
            raise RuntimeError(
                f"the weight and the hidden states behind deferred logits of shape "
                f"{list(self.shape)} must stay unchanged until the logits are used, but one of "
                "them was modified in place; use the logits before optimizer.step(), or call "
                "so.materialize_gradients(model)"
            )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredLogits({list(self.shape)}, {self.dtype})"


def _in_place_error(operation: object) -> NotImplementedError:
    return NotImplementedError(
        f"{operation} is not possible in place on deferred logits; use logits.clone() before, or "
        "call so.materialize_gradients(model)"
    )


def deferred_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What a head returns: ``F.linear(hidden, weight, bias)``, not computed."""
    device = hidden.device.type
    autocast_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return _of(Source(hidden, weight, bias, autocast_dtype or weight.dtype, autocast_dtype))


def _of(source: Source) -> Tensor:
    """Logits that autograd follows."""
    logits: DeferredLogits = _Logits.apply(  # type: ignore[no-untyped-call]
        *source.tensors, source
    )
    logits._source = source
    return logits


def _wrapped(source: Source, earlier: DeferredLogits | None = None) -> DeferredLogits:
    """Logits of tensors that autograd does not follow."""
    like = torch.empty(source.shape, dtype=source.dtype, device="meta")
    logits = wrapper_tensor(DeferredLogits, like, source.hidden.device)
    logits._source = source.with_tensors(
        *(None if it is None else it.detach() for it in source.tensors)  # type: ignore[arg-type]
    )
    if earlier is None:
        watched = (it for it in source.tensors if it is not None)
        logits._watched = tuple((it, version_of(it)) for it in watched)
        logits._computed_values = None
    else:  # torch's dispatcher gives what is detached here a version of its own
        logits._watched, logits._computed_values = earlier._watched, earlier._computed_values
    return logits


class _Logits(torch.autograd.Function):
    """The logits for operations that read them; a cross entropy goes to the head by itself."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, source: Source
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.source = source
        return _wrapped(source)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(ctx.source.weight)
        tensors = [None if it is None else it.detach() for it in ctx.saved_tensors]
        wanted = []
        for tensor, is_needed in zip(tensors, ctx.needs_input_grad, strict=False):
            if tensor is not None and is_needed:
                wanted.append(tensor.requires_grad_())
        with torch.enable_grad():
            values = ctx.source.with_tensors(*tensors).values()
        found = iter(torch.autograd.grad(values, wanted, upstream))
        return (
            *(next(found) if it is not None and it.requires_grad else None for it in tensors),
            None,
        )


# -- operations that need no logits ----------------------------------------------------------------

_Handler = Callable[..., Any]
_HANDLERS: dict[Any, _Handler] = {}


def _handles(*functions: Any) -> Callable[[_Handler], _Handler]:
    """Registers a function for operations; it returns NotImplemented for arguments it refuses."""

    def register(handler: _Handler) -> _Handler:
        _HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register


def _changed(logits: DeferredLogits, **changes: Any) -> Tensor:
    """Other logits of the same head."""
    logits._check_current()
    return _of(dataclasses.replace(logits._source, **changes))


@_handles(F.cross_entropy)
def _cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    source: Source = input._source
    is_by_class = target.dtype == torch.int64 and target.dim() == input.dim() - 1
    # The classes are the second dimension.
    is_second = input.dim() == (3 if source.is_transposed else 2)
    has_others = weight is not None or size_average is not None or reduce is not None
    if has_others or not is_by_class or not is_second:
        return NotImplemented
    input._check_current()
    loss = source.loss(
        target,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    is_cast = torch.is_autocast_enabled(input.device.type)
    return loss.to(torch.float32 if is_cast else input.dtype)


@_handles(Tensor.contiguous)
def _contiguous(logits: DeferredLogits, **_: Any) -> Any:
    return logits


@_handles(Tensor.float)
def _float(logits: DeferredLogits, **_: Any) -> Any:
    return _cast(logits, torch.float32)


@_handles(Tensor.to)
def _to(logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    like = torch.empty(0, dtype=logits.dtype, device="meta")
    if kwargs.get("copy") or len(args) > 2:
        return NotImplemented
    dtype = like.dtype
    for given in (*args, *kwargs.values()):
        if isinstance(given, torch.dtype):
            dtype = given
        elif isinstance(given, str | torch.device):
            if torch.device(given) != logits.device:
                return NotImplemented
        elif not isinstance(given, bool):
            return NotImplemented
    return _cast(logits, dtype)


def _cast(logits: DeferredLogits, dtype: torch.dtype) -> Any:
    if dtype == logits.dtype:
        return logits
    is_wider = torch.promote_types(dtype, logits.dtype) == dtype
    return _changed(logits, dtype=dtype) if is_wider else NotImplemented


@_handles(Tensor.view, Tensor.reshape, torch.reshape)
def _reshape(logits: DeferredLogits, *shape: Any, **_: Any) -> Any:
    if not shape or isinstance(shape[0], torch.dtype) or logits._source.is_transposed:
        return NotImplemented
    return _viewed(logits, torch.empty(logits.shape, device="meta").reshape(*shape).shape)


@_handles(Tensor.flatten, torch.flatten)
def _flatten(logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    if logits._source.is_transposed:
        return NotImplemented
    like = torch.empty(logits.shape, device="meta")
    return _viewed(logits, torch.flatten(like, *args, **kwargs).shape)


def _viewed(logits: DeferredLogits, shape: torch.Size) -> Any:
    hidden = logits._source.hidden
    if not shape or shape[-1] != logits.shape[-1] or not logits.numel():
        return NotImplemented
    return _changed(logits, hidden=hidden.reshape(*shape[:-1], hidden.shape[-1]))


@_handles(Tensor.transpose, torch.transpose)
def _transpose(logits: DeferredLogits, dim0: Any, dim1: Any) -> Any:
    dims = logits.dim()
    if dims < 2 or {dim0 % dims, dim1 % dims} != {dims - 1, dims - 2}:
        return NotImplemented
    return _changed(logits, is_transposed=not logits._source.is_transposed)


@_handles(Tensor.__getitem__)
def _getitem(logits: DeferredLogits, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    if logits._source.is_transposed or not all(type(it) in _INDICES for it in parts):
        return NotImplemented
    # An index of all classes, or fewer indices than dimensions.
    is_of_rows = isinstance(parts[-1], slice) and parts[-1] == slice(None)
    if not is_of_rows:
        taken = (it.dim() if _is_mask(it) else 1 for it in parts)
        is_of_rows = type(Ellipsis) not in map(type, parts) and sum(taken) < logits.dim()
    if not is_of_rows:
        return NotImplemented
    return _changed(logits, hidden=logits._source.hidden[index])


@_handles(Tensor.__setitem__)
def _setitem(logits: DeferredLogits, index: Any, value: Any) -> None:
    raise _in_place_error("logits[...] = value")


_INDICES = (int, slice, type(Ellipsis), Tensor)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


@_handles(Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul)
def _mul(logits: DeferredLogits, factor: Any) -> Any:
    if not isinstance(factor, int | float) or not factor > 0:
        return NotImplemented
    source = logits._source
    if source.has_tanh:
        return _changed(logits, outer=source.outer * factor)
    return _changed(logits, factor=source.factor * factor)


@_handles(Tensor.div, Tensor.__truediv__, torch.div, Tensor.true_divide, torch.true_divide)
def _div(logits: DeferredLogits, divisor: Any, **options: Any) -> Any:
    if options or not isinstance(divisor, int | float) or not divisor > 0:
        return NotImplemented
    return _mul(logits, 1 / divisor)


@_handles(Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add)
def _add(logits: DeferredLogits, other: Any, **options: Any) -> Any:
    """Adds a bias that is not trained, such as BART's."""
    source = logits._source
    is_bias = (
        isinstance(other, Tensor)
        and other.shape[-1:] == source.weight.shape[:1]
        and other.numel() == source.weight.shape[0]
        and not other.requires_grad
    )
    if not is_bias or options or source.has_tanh or source.is_transposed or source.factor != 1:
        return NotImplemented
    added = other.reshape(-1).to(source.weight.dtype)
    return _changed(logits, bias=added if source.bias is None else source.bias + added)


@_handles(Tensor.tanh, torch.tanh)
def _tanh(logits: DeferredLogits) -> Any:
    return NotImplemented if logits._source.has_tanh else _changed(logits, has_tanh=True)
