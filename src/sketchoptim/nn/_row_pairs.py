"""Inner products of selected pairs of rows, with gradients that hold no row for each pair."""

from typing import Any

import torch
from torch import Tensor

from .._rows import arithmetic_dtype
from ._segments import refuse_second_derivative, weighted_sums

# Elements of the rows that are multiplied at once: two blocks of this size stay in the cache.
_CHUNK_ELEMENTS = 1 << 19


def pair_logits(hidden: Tensor, rows: Tensor, token: Tensor, at: Tensor) -> Tensor:
    """<hidden[token[i]], rows[at[i]]> for every pair i, [pairs], in float32 or float64.

    `token` must be in ascending order.

    Example:
        >>> hidden, rows = torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> pair_logits(hidden, rows, torch.tensor([0, 0, 1]), torch.tensor([2, 0, 1]))
        tensor([5., 1., 4.])
    """
    with torch.autocast(hidden.device.type, enabled=False):
        logits: Tensor = _PairLogits.apply(hidden, rows, token, at)  # type: ignore[no-untyped-call]
    return logits


class _PairLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rows: Tensor, token: Tensor, at: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, rows, token, at)
        dtype = arithmetic_dtype(torch.promote_types(hidden.dtype, rows.dtype))
        logits = torch.empty_like(token, dtype=dtype)
        size = max(1, _CHUNK_ELEMENTS // hidden.shape[1])
        for start in range(0, token.numel(), size):
            part = slice(start, start + size)
            left, right = hidden.index_select(0, token[part]), rows.index_select(0, at[part])
            logits[part] = torch.linalg.vecdot(left.to(dtype), right.to(dtype))
        return logits

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("LSHSoftmax")
        hidden, rows, token, at = ctx.saved_tensors
        by_hidden = by_rows = None
        if ctx.needs_input_grad[0]:
            by_hidden = weighted_sums(
                rows, at, upstream, segment=token, segments=hidden.shape[0]
            ).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            by_rows = weighted_sums(hidden, token, upstream, segment=at, segments=rows.shape[0]).to(
                rows.dtype
            )
        return by_hidden, by_rows, None, None
