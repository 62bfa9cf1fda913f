"""The loss of a sampled softmax and its gradients, in one pass over the tokens.

Most of the time goes into three products of [tokens, dim] with [drawn, dim]; the rest is memory
traffic. So tokens are processed in chunks that stay in the cache: the logits of a chunk become
softmax probabilities in place, and those become gradients, before the next chunk. No
[tokens, drawn] matrix exists.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._rows import arithmetic_dtype
from ._segments import refuse_second_derivative, weighted_sums

# Elements of one chunk of tokens, logits and about four rows for each token: a few megabytes, with
# enough tokens for fast products.
_CHUNK_ELEMENTS = 1 << 21


class Candidates(NamedTuple):
    """The distinct classes of a batch, and the positions of labels and negatives among them."""

    ids: Tensor
    """Labels and negatives, int64 [k], distinct and in ascending order."""
    label_at: Tensor
    """Position of each token's label in `ids`, int64 [tokens]."""
    drawn_at: Tensor
    """Position of each negative in `ids`, int64 [drawn], distinct."""
    label_offset: Tensor
    """Added to each label's logit, [tokens]."""
    drawn_offset: Tensor
    """Added to each negative's logit, [drawn]."""


class Gradients(NamedTuple):
    """Gradients of the loss: of hidden [tokens, dim], and of the k rows of weight and bias."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor


def sampled_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    candidates: Candidates,
    *,
    factor: float | None,
) -> Tensor:
    """`factor` times the sum of the losses of all tokens; without a factor, the losses [tokens].

    The loss of a token is log(exp o'(y) + sum_s exp o'(s)) - o'(y) with o' the logits plus offsets,
    y the label and s the negatives other than y. Gradients of weight and bias are sparse, with
    distinct rows in ascending order.
    """
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    dtype = product_dtype(hidden, weight)
    with torch.autocast(hidden.device.type, enabled=False):
        loss: Tensor = _SampledLoss.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, candidates, factor, is_trained, dtype
        )
    return loss


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of the products: autocast's where it is on."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(hidden.dtype, weight.dtype)


class _SampledLoss(torch.autograd.Function):
    """Computes the gradients together with the loss when the loss is one number.

    The backward pass then only scales them. Where they are gone (a second backward pass) or could
    not be computed (each token's loss has its own upstream gradient), the pass is repeated.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        candidates: Candidates,
        factor: float | None,
        is_trained: bool,
        product_dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.candidates, ctx.factor, ctx.product_dtype = candidates, factor, product_dtype
        ctx.gradients = None
        sweep = _Sweep(hidden, weight, bias, candidates, product_dtype)
        if factor is None:
            return sweep.losses()
        if not is_trained:
            return sweep.losses().sum() * factor
        losses, ctx.gradients = sweep.losses_and_gradients(sweep.ones(), factor)
        return losses.sum() * factor

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("SampledSoftmax")
        hidden, weight, bias = ctx.saved_tensors
        # Removed from ctx, so that autograd owns them and need not copy them into parameter.grad.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            sweep = _Sweep(hidden, weight, bias, ctx.candidates, ctx.product_dtype)
            token_weights = sweep.ones() * upstream
            factor = 1.0 if ctx.factor is None else ctx.factor
            _, gradients = sweep.losses_and_gradients(token_weights, factor)
        elif upstream != 1:
            for gradient in gradients:
                gradient.mul_(upstream)
        ids = ctx.candidates.ids
        return (
            gradients.hidden.to(hidden.dtype),
            sparse_rows(ids, gradients.weight, like=weight),
            None if bias is None else sparse_rows(ids, gradients.bias[:, None], like=bias),
            *(None, None, None, None),
        )


class _Chunk(NamedTuple):
    """Some tokens; softmax probabilities are exponentials / total and label / total."""

    at: slice
    hidden: Tensor
    label_rows: Tensor
    losses: Tensor
    exponentials: Tensor
    """The exponentials of the negatives, [tokens, drawn]; the next chunk overwrites them."""
    label: Tensor
    total: Tensor


class _Sweep:
    """One pass over the tokens, chunk by chunk."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        candidates: Candidates,
        product_dtype: torch.dtype,
    ) -> None:
        self.candidates, self.dtype = candidates, arithmetic_dtype(product_dtype)
        ids, label_at, drawn_at, label_offset, drawn_offset = candidates
        self.hidden = hidden.to(product_dtype)
        self.rows = weight.index_select(0, ids).to(product_dtype)
        self.drawn_rows = self.rows.index_select(0, drawn_at)
        self.label_offset = label_offset.to(self.dtype)
        self.drawn_offset = drawn_offset.to(self.dtype)
        if bias is not None:
            row_bias = bias.index_select(0, ids)[:, 0].to(self.dtype)
            self.label_offset = self.label_offset + row_bias[label_at]
            self.drawn_offset = self.drawn_offset + row_bias[drawn_at]
        columns = torch.full_like(ids, -1)
        columns[drawn_at] = torch.arange(drawn_at.numel(), device=ids.device)
        self.hit_column = columns[label_at]

    def ones(self) -> Tensor:
        """A weight of one for each token."""
        return torch.ones_like(self.label_offset)

    def losses(self) -> Tensor:
        """The losses [tokens]."""
        losses = torch.empty_like(self.label_offset)
        for chunk in self._chunks():
            losses[chunk.at] = chunk.losses
        return losses

    def losses_and_gradients(
        self, token_weights: Tensor, factor: float
    ) -> tuple[Tensor, Gradients]:
        """The losses [tokens], and the gradients of factor * (token_weights @ losses).

        The factor is applied after the products, where half precision could underflow. Without
        tokens the gradients are zero, as those of torch's loss functions: under
        DistributedDataParallel a batch of padding alone must not spoil those of the others.
        """
        if not token_weights.numel():
            factor = 0.0  # it is NaN for the mean of no losses
        losses, by_label = torch.empty_like(token_weights), torch.empty_like(token_weights)
        by_hidden = torch.empty_like(self.hidden)
        by_drawn = torch.zeros_like(self.drawn_rows, dtype=self.dtype)
        by_drawn_bias = torch.zeros_like(self.drawn_offset)
        for chunk in self._chunks():
            losses[chunk.at] = chunk.losses
            scale = token_weights[chunk.at] / chunk.total
            by_label[chunk.at] = factor * (scale * chunk.label - token_weights[chunk.at])
            probabilities = chunk.exponentials.mul_(scale[:, None])
            by_drawn_bias += probabilities.sum(0)
            probabilities = probabilities.to(self.hidden.dtype)
            by_hidden_chunk = by_hidden[chunk.at]
            torch.mul(chunk.label_rows, by_label[chunk.at, None], out=by_hidden_chunk)
            by_hidden_chunk.addmm_(probabilities, self.drawn_rows, alpha=factor)
            _add_product_(by_drawn, probabilities.T, chunk.hidden)
        ids, label_at, drawn_at, *_ = self.candidates
        tokens = torch.arange(label_at.numel(), device=ids.device)
        weight = weighted_sums(
            self.hidden, tokens, by_label, segment=label_at, segments=ids.numel()
        )
        weight.index_add_(0, drawn_at, by_drawn, alpha=factor)
        bias = torch.zeros_like(ids, dtype=self.dtype).index_add_(0, label_at, by_label)
        bias.index_add_(0, drawn_at, by_drawn_bias, alpha=factor)
        return losses, Gradients(by_hidden, weight, bias)

    def _chunks(self) -> Iterator[_Chunk]:
        tokens, drawn = self.hidden.shape[0], self.drawn_rows.shape[0]
        size = max(1, _CHUNK_ELEMENTS // (drawn + 4 * self.hidden.shape[1]))
        buffer = self.hidden.new_empty(min(size, tokens), drawn)
        for start in range(0, tokens, size):
            at = slice(start, start + size)
            hidden, hit_column = self.hidden[at], self.hit_column[at]
            logits = torch.mm(hidden, self.drawn_rows.T, out=buffer[: hidden.shape[0]])
            logits = logits.to(self.dtype).add_(self.drawn_offset)
            hit = (hit_column >= 0).nonzero()[:, 0]
            logits[hit, hit_column[hit]] = -math.inf
            label_rows = self.rows.index_select(0, self.candidates.label_at[at])
            label_logits = torch.linalg.vecdot(hidden, label_rows).to(self.dtype)
            label_logits += self.label_offset[at]
            highest = torch.maximum(logits.amax(-1), label_logits)
            exponentials = logits.sub_(highest[:, None]).exp_()
            label = (label_logits - highest).exp_()
            total = exponentials.sum(-1).add_(label)
            losses = highest + total.log() - label_logits
            yield _Chunk(at, hidden, label_rows, losses, exponentials, label, total)


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right, whose dtype may be narrower."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def sparse_rows(ids: Tensor, values: Tensor, *, like: Tensor) -> Tensor:
    """The sparse gradient of a table; ids are distinct and in ascending order."""
    return torch.sparse_coo_tensor(
        ids[None], values.to(like.dtype), like.shape, is_coalesced=True, check_invariants=False
    )
