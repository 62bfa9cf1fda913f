"""The softmax over all classes with dense gradients, in time and memory that two cores have.

Most of the time goes into three products with the whole table. Tokens are processed in chunks whose
logits stay in the cache, and gradients are computed along with the loss, so that the one
[tokens, classes] matrix is that of the logits' gradients. The products can be in bfloat16, as under
autocast; the table and its gradient stay in float32.
"""

from typing import Any, Literal

import torch
from torch import Generator, Tensor

from sketchoptim.nn._output_table import OutputTable

Products = Literal["float32", "bfloat16"]
_CHUNK_ELEMENTS = 1 << 21  # logits of a chunk: 8 MB in float32


class FullSoftmax(OutputTable):
    """The softmax over all classes, with dense gradients.

    Example:
        >>> layer = FullSoftmax(8, 100)
        >>> loss = layer(torch.randn(5, 8), torch.arange(5))
        >>> loss.backward()
        >>> layer.weight.grad.is_sparse
        False
    """

    sparse = False
    products: torch.dtype = torch.float32
    """Of the matrix products."""

    def forward(
        self, hidden: Tensor, labels: Tensor, *, generator: Generator | None = None
    ) -> Tensor:
        """The mean loss over all classes; `generator` is not used."""
        loss: Tensor = _FullLoss.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, -2), self.weight, self.bias, labels.flatten(), self.products
        )
        return loss


class _FullLoss(torch.autograd.Function):
    """The mean loss; its gradients are computed along with it, and scaled in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        products: torch.dtype,
    ) -> Tensor:
        tokens, classes = hidden.shape[0], weight.shape[0]
        rows, vectors = weight.to(products), hidden.to(products)
        by_logits = torch.empty((tokens, classes), dtype=products, device=hidden.device)
        by_vectors = torch.empty(hidden.shape, device=hidden.device)
        by_bias = torch.zeros(classes, device=weight.device)
        total = torch.zeros((), device=hidden.device)
        size = max(1, _CHUNK_ELEMENTS // classes)
        for start in range(0, tokens, size):
            here = slice(start, start + size)
            logits = (vectors[here] @ rows.T).float()
            if bias is not None:
                logits += bias[:, 0]
            at = torch.arange(logits.shape[0], device=labels.device), labels[here]
            label_logits = logits[at]
            highest = logits.amax(1, keepdim=True)
            gradient = logits.sub_(highest).exp_()
            sums = gradient.sum(1, keepdim=True)
            total += (highest + sums.log()).sum() - label_logits.sum()
            gradient.div_(sums)[at] -= 1
            if bias is not None:
                by_bias += gradient.sum(0)
            by_logits[here] = gradient
            by_vectors[here] = by_logits[here] @ rows
        by_rows = (by_logits.T @ vectors).float()
        ctx.gradients = [gradient.div_(tokens) for gradient in (by_vectors, by_rows, by_bias)]
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total / tokens

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        by_vectors, by_rows, by_bias = (gradient.mul_(upstream) for gradient in ctx.gradients)
        ctx.gradients = None  # so that autograd need not copy them into parameter.grad
        hidden, weight, bias = ctx.dtypes
        column = None if bias is None else by_bias[:, None].to(bias)
        return by_vectors.to(hidden), by_rows.to(weight), column, None, None
