"""The cross entropy of a linear layer over many classes, without its logits and its gradient."""

import math
from collections.abc import Iterator
from typing import Any, get_args

import torch
from torch import Tensor, nn

from .._rows import arithmetic_dtype
from .._torch_private import disable_dynamo, multiplies_fast
from .._validation import (
    PLAIN_TENSORS,
    check_choice,
    check_int,
    check_number,
    check_positive,
    check_positive_int,
    check_tensor,
)
from ..deferred import DeferredGradient
from ..ops import SoftmaxLoss
from ._class_ids import IGNORE_INDEX, check_int64, id_range
from ._loss_sweep import product_dtype
from ._output_table import Reduction, largest_logits
from ._segments import refuse_second_derivative
from ._softmax_head import SoftmaxHead, losses_of


@disable_dynamo
def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """The loss ``F.cross_entropy(F.linear(input, weight, bias), target, ...)``.

    Neither the logits of all classes nor the gradient of the weight exist. The loss and the
    gradient of the input are computed together, from blocks of logits that stay in the cache.
    ``weight.grad`` becomes a `DeferredGradient` that holds the input and a few numbers a token; the
    optimizers of this package compute its rows when they move them, and any other reader gets the
    plain gradient, with one warning. The weight must not be modified before it is read.

    Sums and the loss are in float32 at least. Products have the dtype of autocast if it is on, else
    the wider one of input and weight; float32 on a CPU without instructions for it. The bias gets
    a plain gradient, for one more product. Differentiating twice is refused. On a CPU, tokens that
    are ignored cost nothing.

    Args:
        input: Hidden states ``[..., dim]``.
        weight: ``[classes, dim]``.
        target: Class ids, int64 ``[...]``.
        bias: ``[classes]``.
        ignore_index: A target that losses and their mean leave out.
        reduction: "mean", "sum", or "none" for the losses ``[...]``.
        label_smoothing: The share of the target that is spread over all classes, from 0 to 1.
        softcap: Caps logits at ``softcap * tanh(logits / softcap)``, as Gemma 2 does.

    >>> weight = nn.Parameter(torch.randn(1000, 16))
    >>> hidden, target = torch.randn(8, 16, requires_grad=True), torch.arange(8)
    >>> linear_cross_entropy(hidden, weight, target).backward()
    >>> weight.grad
    DeferredGradient([1000, 16], torch.float32, parts=[SoftmaxHead])

    References: Wijmans et al. 2024, Cut your losses in large-vocabulary language models.
    """
    _check_tensors(input, weight, target, bias)
    check_choice("reduction", reduction, get_args(Reduction))
    check_int("ignore_index", ignore_index)
    if check_number("label_smoothing", label_smoothing) > 1:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if softcap is not None:
        check_positive("softcap", softcap)
    hidden, target = input.reshape(-1, weight.shape[1]), target.reshape(-1)
    is_kept = target != ignore_index
    if hidden.is_cpu:
        kept = None if is_kept.all() else is_kept.nonzero()[:, 0]
        chosen = target if kept is None else target[kept]
        _check_range(chosen, weight.shape[0])
        losses = _losses(
            hidden if kept is None else hidden[kept], weight, chosen, bias, label_smoothing, softcap
        )
        if reduction == "none" and kept is not None:
            losses = losses.new_zeros(target.shape).index_copy(0, kept, losses)
    else:  # without waiting for the device
        losses = _losses(hidden, weight, target.where(is_kept, 0), bias, label_smoothing, softcap)
        losses = losses.where(is_kept, 0.0)
    if reduction == "none":
        return losses.reshape(input.shape[:-1])
    return losses.sum() / is_kept.sum() if reduction == "mean" else losses.sum()


def _losses(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    label_smoothing: float,
    softcap: float | None,
) -> Tensor:
    """The losses ``[tokens]`` of targets that are all valid."""
    dtype = product_dtype(hidden, weight)
    if hidden.is_cpu and dtype.itemsize == 2 and not multiplies_fast(dtype):
        dtype = torch.float32  # each block of rows is converted
    # A copy: the model's bias may be stepped before the gradient of the weight is read.
    own_bias = None
    if bias is not None:
        own_bias = bias.detach().to(arithmetic_dtype(dtype), copy=True).contiguous()
    softmax = SoftmaxLoss(weight.shape[0], own_bias, softcap, label_smoothing)
    is_trained = torch.is_grad_enabled() and hidden.requires_grad
    losses: Tensor = _Losses.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, target.contiguous(), softmax, dtype, is_trained
    )
    return losses


class _Losses(torch.autograd.Function):
    """The losses; the gradient of the hidden states, each by its own loss, is found with them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        softmax: SoftmaxLoss,
        product_dtype: torch.dtype,
        is_trained: bool,
    ) -> Tensor:
        ctx.softmax, ctx.dtype = softmax, hidden.dtype
        hidden = hidden.to(product_dtype)
        found = losses_of(hidden, weight, target, softmax, is_trained=is_trained)
        ctx.save_for_backward(hidden, weight, target, found.logsumexp, found.by_hidden)
        return found.losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative("linear_cross_entropy")
        hidden, weight, target, logsumexp, by_hidden = ctx.saved_tensors
        gradients: list[Tensor | None] = [None, None, None]
        if ctx.needs_input_grad[0]:
            gradients[0] = (by_hidden * upstream[:, None]).to(ctx.dtype)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            part = SoftmaxHead(
                weight, hidden.clone(), target.clone(), logsumexp, upstream.clone(), ctx.softmax
            )
            if ctx.needs_input_grad[1]:
                gradients[1] = DeferredGradient(weight, [part])
            if ctx.needs_input_grad[2]:
                gradients[2] = part.bias_gradient()
        return (*gradients, None, None, None, None)


def _check_tensors(input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    """Raises unless shapes, dtypes and devices belong together."""
    for name, tensor in (("input", input), ("weight", weight)):
        if not check_tensor(name, tensor).is_floating_point():
            raise TypeError(f"{name} must be floating point, got {tensor.dtype}")
    if type(weight) not in PLAIN_TENSORS:
        raise TypeError(
            f"weight must be a plain parameter, got a {type(weight).__name__}; use "
            "F.cross_entropy(F.linear(...)) for it"
        )
    if weight.dim() != 2 or not weight.shape[0]:
        raise ValueError(f"weight must have shape [classes, dim], got {list(weight.shape)}")
    classes, dim = weight.shape
    if input.shape[-1:] != (dim,):
        raise ValueError(f"input must have shape [..., {dim}], got {list(input.shape)}")
    if check_int64("target", target).shape != input.shape[:-1]:
        raise ValueError(
            f"target must have the shape of input without its last dimension, "
            f"{list(input.shape[:-1])}, got {list(target.shape)}; probabilities are not supported"
        )
    if bias is not None and check_tensor("bias", bias).shape != (classes,):
        raise ValueError(f"bias must have shape [{classes}], got {list(bias.shape)}")
    for name, other in (("input", input), ("target", target), ("bias", bias)):
        if other is not None and other.device != weight.device:
            raise ValueError(f"{name} must be on {weight.device} as weight is, got {other.device}")


def _check_range(target: Tensor, classes: int) -> None:
    lowest, highest = id_range(target)
    if lowest < 0 or highest >= classes:
        raise ValueError(
            f"target must lie in [0, {classes - 1}], got values from {lowest} to {highest}; map "
            "them, or pass ignore_index if one of them is padding"
        )


class LinearCrossEntropy(nn.Module):
    """A linear layer over many classes with its cross entropy: `linear_cross_entropy` as a module.

    Its parameters have the names and shapes of those of `nn.Linear`, so checkpoints of a linear
    output layer load. Assign ``head.weight = embedding.weight`` to tie it.

    Args:
        in_features: Size of a hidden state.
        num_classes: Number of classes.
        bias: Adds a learned bias for each class.
        ignore_index: A target that losses and their mean leave out.
        reduction: "mean", "sum" or "none".
        label_smoothing: The share of the target that is spread over all classes, from 0 to 1.
        softcap: Caps logits at ``softcap * tanh(logits / softcap)``.
        device: Of the parameters.
        dtype: Of the parameters.

    >>> head = LinearCrossEntropy(16, 1000)
    >>> hidden, target = torch.randn(2, 4, 16), torch.randint(1000, (2, 4))
    >>> head(hidden, target).backward()
    >>> type(head.weight.grad).__name__, head.logits(hidden).shape, head.top_k(hidden, 5).shape
    ('DeferredGradient', torch.Size([2, 4, 1000]), torch.Size([2, 4, 5]))
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        ignore_index: int = IGNORE_INDEX,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = check_positive_int("in_features", in_features)
        self.num_classes = check_positive_int("num_classes", num_classes)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.softcap = label_smoothing, softcap
        shape = (num_classes, in_features)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws new weights as `nn.Linear` does: uniform within ``in_features ** -0.5``."""
        bound = 1 / math.sqrt(self.in_features)
        for parameter in self.parameters():
            parameter.uniform_(-bound, bound)

    def table_parameters(self) -> list[nn.Parameter]:
        """The parameters with a row for each class, which `so.find_tables` looks for."""
        return [self.weight]

    def read(self) -> Tensor:
        """The weight, for a computation that autograd follows."""
        return self.weight

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of hidden states ``[..., in_features]`` and targets ``[...]``."""
        return linear_cross_entropy(
            input,
            self.read(),
            target,
            bias=self.bias,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
        )

    def logits(self, input: Tensor) -> Tensor:
        """The logits of all classes, ``[..., num_classes]``, differentiable as usual."""
        return self._capped(nn.functional.linear(input, self.weight, self.bias))

    @torch.no_grad()
    def top_k(self, input: Tensor, k: int, *, chunk: int = 4096) -> Tensor:
        """The ids of the k largest logits, int64 ``[..., k]``, largest first.

        No matrix is larger than ``[tokens, chunk + k]``. Equal logits are in any order.
        """
        check_int("k", k, least=1, most=self.num_classes)
        check_positive_int("chunk", chunk)
        if input.isnan().any():
            raise ValueError("input must not be NaN, which has no largest logits")
        hidden = input.reshape(-1, self.in_features)
        return largest_logits(self._chunks(hidden, chunk), k).reshape(*input.shape[:-1], k)

    def _chunks(self, hidden: Tensor, chunk: int) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, self.num_classes, chunk):
            at = slice(start, start + chunk)
            bias = None if self.bias is None else self.bias[at]
            yield start, self._capped(nn.functional.linear(hidden, self.weight[at], bias))

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, num_classes={self.num_classes}, "
            f"bias={self.bias is not None}"
        )
