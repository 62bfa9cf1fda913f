"""What torch's operations do with a deferred gradient if they need no rows of it."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch_private import entries
from ._gradient import HANDLERS, Content, DeferredGradient, Handler, Term, wrapped
from ._lookups import Lookups
from ._parts import PlainRows, Scale

_aten = torch.ops.aten


def _handles(*operations: Any) -> Callable[[Handler], Handler]:
    """Registers a function for operations; it returns NotImplemented for arguments it refuses."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(operations, handler))
        return handler

    return register


@_handles(_aten.alias.default)
def _alias(gradient: DeferredGradient) -> DeferredGradient:
    return wrapped(gradient, gradient._content)


# Autograd detaches each gradient that it keeps, and none of them has a history.
@_handles(_aten.detach.default, _aten.detach_.default)
def _detach(gradient: DeferredGradient) -> DeferredGradient:
    return gradient


@_handles(_aten.clone.default)
def _clone(gradient: DeferredGradient, memory_format: Any = None) -> DeferredGradient:
    return wrapped(gradient, gradient._content.copied())


@_handles(_aten.new_empty_strided.default)
def _new_empty_strided(
    gradient: DeferredGradient, size: Any, stride: Any, **options: Any
) -> Tensor:
    """What autograd copies a gradient into, if it may not keep that gradient itself."""
    like = torch.empty_strided(size, stride, dtype=gradient.dtype, device="meta")
    device = options.get("device") or gradient.device
    dtype = options.get("dtype") or gradient.dtype
    if (like.shape, like.stride()) == (gradient.shape, gradient.stride()) and (dtype, device) == (
        gradient.dtype,
        gradient.device,
    ):
        return wrapped(gradient, Content((), 1.0, is_sparse=gradient._content.is_sparse))
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


@_handles(_aten.copy_.default)
def _copy_(gradient: Any, source: Any, non_blocking: bool = False) -> Any:
    if not (isinstance(gradient, DeferredGradient) and isinstance(source, DeferredGradient)):
        return NotImplemented
    own, copied = gradient._content, source._content.copied()
    own.terms, own.scale, own.is_sparse = copied.terms, copied.scale, copied.is_sparse
    return gradient


@_handles(_aten.zero_.default)
def _zero_(gradient: DeferredGradient) -> DeferredGradient:
    gradient._content.terms, gradient._content.scale = (), 1.0
    return gradient


@_handles(_aten.add_.Tensor)
def _add_(gradient: Any, other: Any, alpha: float = 1) -> Any:
    if not _can_add(gradient, other):
        return NotImplemented
    if not isinstance(gradient, DeferredGradient):
        _add_rows_(gradient, other, alpha)
        return gradient
    if not isinstance(other, DeferredGradient) and other.is_sparse:
        ids, values = entries(other)
        other = DeferredGradient(gradient, [Lookups(gradient, ids[0], values)])
    if isinstance(other, DeferredGradient) and not (gradient.exists or other.exists):
        _concatenate_(gradient._content, other._content, alpha)
        if not any(part.is_collective for part, _ in gradient.terms):
            gradient.collapse_if_larger_()
        return gradient
    touched = None
    if isinstance(other, DeferredGradient) and gradient.is_row_sparse and other.is_row_sparse:
        touched = torch.cat([gradient.touched, other.touched]).unique()  # type: ignore[list-item]
    values = (gradient._content.plain or gradient._collapse_()).values
    _add_rows_(values, other, alpha)
    gradient._content.terms = (Term(PlainRows(gradient, values, touched)),)
    gradient._content.is_sparse = touched is not None
    return gradient


@_handles(_aten.add.Tensor)
def _add(one: Any, other: Any, alpha: float = 1) -> Any:
    if not isinstance(one, DeferredGradient):
        if alpha != 1:
            return NotImplemented
        one, other = other, one
    return _add_(_clone(one), other, alpha) if _can_add(one, other) else NotImplemented


def _can_add(gradient: Tensor, other: Any) -> bool:
    """Whether both are gradients of one parameter."""
    return (
        isinstance(other, Tensor)
        and gradient.shape == other.shape
        and gradient.dtype == other.dtype
        and gradient.device == other.device
        and gradient.layout == torch.strided
        and (other.layout == torch.strided or (other.is_sparse and other.sparse_dim() == 1))
    )


def _concatenate_(content: Content, added: Content, alpha: float) -> None:
    """Adds terms to terms; the common scale stays common if both have the same."""
    is_same = content.scale is added.scale or content.scale == added.scale
    if alpha == 1 and (is_same or not content.terms):
        content.scale = added.scale
        content.terms += added.terms
    else:
        content.terms = content.scaled_terms(1.0) + added.scaled_terms(alpha)
        content.scale = 1.0
    content.is_sparse = content.is_sparse and added.is_sparse


def _add_rows_(values: Tensor, other: Tensor, alpha: float) -> None:
    """Adds a gradient to one that is written down."""
    if not isinstance(other, DeferredGradient):
        values.add_(other, alpha=alpha)
        return
    for chunk in other.chunks():
        rows = values[chunk.at] + chunk.gradient.view(-1, *values.shape[1:]) * alpha
        values[chunk.at] = rows.to(values.dtype)


@_handles(_aten.mul_.Tensor, _aten.mul_.Scalar)
def _mul_(gradient: Any, factor: Any) -> Any:
    scale = _as_scale(factor, gradient)
    if scale is None:
        return NotImplemented
    gradient._content.scale_(scale)
    return gradient


@_handles(_aten.div_.Tensor, _aten.div_.Scalar)
def _div_(gradient: Any, divisor: Any) -> Any:
    scale = _as_scale(divisor, gradient)
    return NotImplemented if scale is None else _mul_(gradient, _reciprocal(scale))


@_handles(_aten.mul.Tensor, _aten.mul.Scalar)
def _mul(one: Any, other: Any) -> Any:
    gradient, factor = (one, other) if isinstance(one, DeferredGradient) else (other, one)
    if _as_scale(factor, gradient) is None:
        return NotImplemented
    return _mul_(_clone(gradient), factor)


@_handles(_aten.div.Tensor, _aten.div.Scalar)
def _div(gradient: Any, divisor: Any) -> Any:
    if _as_scale(divisor, gradient) is None:
        return NotImplemented
    return _div_(_clone(gradient), divisor)


def _as_scale(factor: Any, gradient: Any) -> Scale | None:
    """The factor of a whole gradient; None for a factor of each element."""
    if not isinstance(gradient, DeferredGradient):
        return None
    if not isinstance(factor, Tensor):
        return float(factor) if isinstance(factor, int | float) else None
    if isinstance(factor, DeferredGradient) or factor.dim() or factor.is_complex():
        return None
    return float(factor) if factor.device.type == "cpu" else factor.float()


def _reciprocal(scale: Scale) -> Scale:
    """One over a divisor, which may be zero as in a division of tensors."""
    return 1 / scale if isinstance(scale, Tensor) or scale else math.copysign(math.inf, scale)


@_handles(_aten.linalg_vector_norm.default)
def _vector_norm(
    gradient: DeferredGradient,
    ord: float = 2.0,  # the names of torch.linalg.vector_norm
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    if dim is not None or keepdim:
        return NotImplemented
    return gradient.norm_of(ord).to(dtype or gradient.dtype)


@_handles(_aten._foreach_norm.Scalar)
def _foreach_norm(gradients: Any, ord: Any = 2, dtype: torch.dtype | None = None) -> Any:
    return [torch.linalg.vector_norm(gradient, ord, dtype=dtype) for gradient in gradients]


@_handles(_aten._foreach_mul_.Tensor, _aten._foreach_mul_.Scalar)
def _foreach_mul_(gradients: Any, factor: Any) -> None:
    for gradient in gradients:
        gradient.mul_(factor)


@_handles(_aten._foreach_zero_.default)
def _foreach_zero_(gradients: Any) -> None:
    for gradient in gradients:
        gradient.zero_()


@_handles(_aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale_(gradients: Any, found_inf: Tensor, inverse_scale: Tensor) -> None:
    """What a GradScaler does: looks for values that are not finite, and divides by its scale."""
    plain = []
    for gradient in gradients:
        if isinstance(gradient, DeferredGradient):
            largest = torch.finfo(gradient.dtype).max
            found_inf.masked_fill_(~gradient.is_within(largest), 1.0)
            _mul_(gradient, inverse_scale.reshape(()))
        else:
            plain.append(gradient)
    if plain:
        torch._amp_foreach_non_finite_check_and_unscale_(plain, found_inf, inverse_scale)
