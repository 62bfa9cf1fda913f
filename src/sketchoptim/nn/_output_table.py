"""The table of an output layer over very many classes: its rows, and exact answers in chunks."""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from .._rows import arithmetic_dtype
from ._checks import IGNORED, check_int64, check_positive, check_span, span

Reduction = Literal["mean", "sum", "none"]


class OutputTable(nn.Module):
    """Logits <hidden, weight[c]> + bias[c] of `classes` classes, never all of them at once.

    Base of the layers that train on some classes only; these give `forward(hidden, labels)`.

    Args:
        dim: length of a hidden vector.
        classes: number of classes.
        bias: adds a learned bias for each class, a [classes, 1] table with sparse gradients.
        weight: a [classes, dim] parameter to share, such as the input embedding's.
        ignore_index: a label that is left out of losses and their mean, such as padding.
    """

    sparse = True
    """Whether its parameters get sparse gradients: as `nn.Embedding` says it, for `so.plan`."""

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        bias: bool = False,
        weight: nn.Parameter | None = None,
        ignore_index: int = IGNORED,
    ) -> None:
        super().__init__()
        check_positive(dim=dim, classes=classes)
        if weight is not None and not isinstance(weight, nn.Parameter):
            raise TypeError(
                f"weight must be an nn.Parameter, got {type(weight).__name__}, which would not be "
                "trained; pass embedding.weight itself, or nn.Parameter(weight)"
            )
        if weight is not None and tuple(weight.shape) != (classes, dim):
            raise ValueError(
                f"weight must have shape ({classes}, {dim}), got {tuple(weight.shape)}; "
                "tie only tables whose rows are the classes"
            )
        self.dim, self.classes, self.ignore_index = dim, classes, ignore_index
        if weight is None:
            # in place: a second copy, if only for a moment, would be the peak of a lean training
            drawn = torch.empty(classes, dim).uniform_(-1.0, 1.0).div_(math.sqrt(dim))
            weight = nn.Parameter(drawn)
        self.weight = weight
        # a column, so that it gets a sparse gradient of rows as the weight does
        self.bias = nn.Parameter(torch.zeros(classes, 1)) if bias else None

    @torch.no_grad()
    def full_loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        *,
        reduction: Reduction = "mean",
        chunk: int = 4096,
    ) -> Tensor:
        """The exact softmax loss, for evaluation: no matrix above [tokens, chunk] is ever made."""
        tokens = self._tokens(hidden, labels)
        factor = token_factor(reduction, tokens.labels.numel())
        label_logits = widened((tokens.hidden * self.weight[tokens.labels]).sum(-1))
        if self.bias is not None:
            label_logits += self.bias[tokens.labels, 0]
        denominator = torch.full_like(label_logits, -math.inf)
        for _, logits in self._logits(tokens.hidden, chunk):
            denominator = torch.logaddexp(denominator, logits.logsumexp(-1))
        losses = denominator - label_logits
        return tokens.in_place(losses) if factor is None else losses.sum() * factor

    @torch.no_grad()
    def top_k(self, hidden: Tensor, k: int, *, chunk: int = 4096) -> Tensor:
        """The ids of the k largest logits, int64 [..., k], largest first, over all classes.

        No matrix above [tokens, chunk + k] is ever made. Equal logits come in any order.
        """
        if not 1 <= k <= self.classes:
            raise ValueError(f"k must lie in [1, classes = {self.classes}], got {k}")
        hidden_2d = self._checked_hidden(hidden)
        if hidden_2d.isnan().any():
            raise ValueError("hidden must not be NaN, which has no largest logits")
        best: Tensor | None = None
        ids = torch.empty(0, dtype=torch.int64, device=hidden.device)
        for start, logits in self._logits(hidden_2d, chunk):
            values, at = logits.topk(min(k, logits.shape[1]))
            if best is None:
                best, ids = values, at
                continue
            merged = torch.cat([best, values], 1)
            best, chosen = merged.topk(min(k, merged.shape[1]))
            ids = torch.cat([ids, at + start], 1).gather(1, chosen)
        return ids.reshape(*hidden.shape[:-1], k)

    def _logits(self, hidden: Tensor, chunk: int) -> Iterator[tuple[int, Tensor]]:
        """The exact logits [tokens, <= chunk] of consecutive classes, with the first one's id."""
        check_positive(chunk=chunk)
        dtype = torch.promote_types(hidden.dtype, self.weight.dtype)
        hidden = hidden.to(dtype)
        for start in range(0, self.classes, chunk):
            logits = widened(hidden @ self.weight[start : start + chunk].T.to(dtype))
            if self.bias is not None:
                logits += self.bias[start : start + chunk, 0]
            yield start, logits

    def _tokens(self, hidden: Tensor, labels: Tensor) -> "Tokens":
        """The tokens that have a loss, after checking all."""
        if hidden.shape != (*labels.shape, self.dim):
            raise ValueError(
                f"hidden must have the shape of labels plus ({self.dim},), got "
                f"{tuple(hidden.shape)} for labels of shape {tuple(labels.shape)}"
            )
        check_int64("labels", labels)
        hidden_2d, labels_1d = self._checked_hidden(hidden), labels.reshape(-1)
        lowest, highest = span(labels_1d)
        kept = None
        if lowest <= self.ignore_index <= highest:  # else there is nothing to look for
            kept = (labels_1d != self.ignore_index).nonzero()[:, 0]
            hidden_2d, labels_1d = hidden_2d[kept], labels_1d[kept]
            lowest, highest = span(labels_1d)
        check_span("labels", (lowest, highest), self.classes, layer=type(self).__name__)
        return Tokens(hidden_2d, labels_1d, labels.shape, kept)

    def _checked_hidden(self, hidden: Tensor) -> Tensor:
        """Hidden vectors as [tokens, dim], after checking them."""
        if hidden.shape[-1:] != (self.dim,):
            raise ValueError(f"hidden must have shape (..., {self.dim}), got {tuple(hidden.shape)}")
        if not hidden.is_floating_point():
            raise TypeError(f"hidden must be floating point, got {hidden.dtype}")
        if hidden.device != self.weight.device:
            raise ValueError(
                f"hidden must be on {self.weight.device} as the weight is, got {hidden.device}"
            )
        return hidden.reshape(-1, self.dim)


class Tokens(NamedTuple):
    """Those with a label that is not ignored."""

    hidden: Tensor
    """[tokens, dim]."""
    labels: Tensor
    """int64 [tokens]."""
    shape: torch.Size
    """Of all labels."""
    kept: Tensor | None
    """Where they are among all labels, int64 [tokens]; None where they are all of them."""

    def in_place(self, losses: Tensor) -> Tensor:
        """Their losses [tokens] where all labels are, with zeros where they are ignored."""
        if self.kept is not None:
            losses = losses.new_zeros(self.shape.numel()).index_copy(0, self.kept, losses)
        return losses.reshape(self.shape)


def widened(logits: Tensor) -> Tensor:
    """The logits, in float32 when they came in half precision: sums of exp() need the digits."""
    return logits.to(arithmetic_dtype(logits.dtype))


def token_factor(reduction: Reduction, tokens: int) -> float | None:
    """What to multiply the sum of the losses by, or None to leave them apart, as torch does."""
    if reduction == "mean":
        return 1.0 / tokens if tokens else math.nan
    if reduction == "sum":
        return 1.0
    if reduction == "none":
        return None
    raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
