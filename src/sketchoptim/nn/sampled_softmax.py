"""Softmax over very many classes, trained on a few of them, with sparse gradients.

A batch shares one set of drawn negatives. A drawn class stands for the classes like it that were
not drawn, so its weight in the denominator is divided by how often it was to be expected there.
"""

import math
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Reduction = Literal["mean", "sum", "none"]


class Sampler(Protocol):
    """Where negatives come from: draws distinct class ids and knows how likely each was."""

    classes: int

    def draw(
        self, samples: int, *, generator: torch.Generator | None, device: torch.device
    ) -> Tensor:
        """Distinct class ids, int64 [drawn], with drawn <= samples."""
        ...

    def log_expected_count(self, ids: Tensor, samples: int) -> Tensor:
        """Logarithm of how often each id is expected in one draw of `samples`, float64."""
        ...


class LogUniformSampler:
    """Zipf's law: p(id) = log((id + 2) / (id + 1)) / log(classes + 1), drawn with replacement.

    Fits ids that are sorted by falling count. Draws invert the distribution function exactly:
    id = floor((classes + 1)^u) - 1 for uniform u in [0, 1) falls on `id` just when
    log(id + 1) <= u log(classes + 1) < log(id + 2), an interval of length p(id), id 0 included.
    Test: `test_every_id_owns_exactly_the_interval_it_is_corrected_with`.

    Repeats are merged, so the expected count of an id is 1 - (1 - p(id))^samples. Left in, they
    would make the count of a frequent label exceed one and its removal as a hit bias the loss.

    Example:
        >>> sampler = LogUniformSampler(1000)
        >>> sampler.probability(torch.arange(1000)).sum().round(decimals=12)
        tensor(1., dtype=torch.float64)
    """

    def __init__(self, classes: int) -> None:
        if classes < 1:
            raise ValueError(f"classes must be >= 1, got {classes}")
        self.classes = classes
        self._log_range = math.log(classes + 1)

    def draw(
        self, samples: int, *, generator: torch.Generator | None, device: torch.device
    ) -> Tensor:
        """Distinct class ids, int64 [drawn], ascending: `samples` draws with repeats merged."""
        uniform = torch.rand(samples, dtype=torch.float64, generator=generator, device=device)
        drawn: Tensor = self.from_uniform(uniform).unique()
        return drawn

    def from_uniform(self, uniform: Tensor) -> Tensor:
        """The ids that float64 numbers in [0, 1) fall on."""
        ids = (uniform * self._log_range).exp().floor().long() - 1
        # exp() may round up to classes + 1 for a number within an ulp of 1
        return ids.clamp_(0, self.classes - 1)

    def probability(self, ids: Tensor) -> Tensor:
        """p(id) of a single draw, float64, of the shape of `ids`."""
        # log1p(1 / (id + 1)) keeps the digits that log((id + 2) / (id + 1)) loses for large ids
        return torch.log1p(1.0 / (ids.double() + 1.0)) / self._log_range

    def log_expected_count(self, ids: Tensor, samples: int) -> Tensor:
        """log(1 - (1 - p(id))^samples), float64, of the shape of `ids`."""
        return (-torch.expm1(samples * torch.log1p(-self.probability(ids)))).log()


class SampledSoftmax(nn.Module):
    """Cross entropy over `classes` classes that touches only the labels' and the drawn rows.

    With logits o(c) = <hidden, weight[c]> + bias[c], expected counts q(c), labels y and drawn
    negatives s, accidental hits s = y left out, the loss of one token is

        o'(c) = o(c) - log q(c),    loss = log(exp o'(y) + sum_{s != y} exp o'(s)) - o'(y).

    That is how likely y is the label and the others are the drawn ones, given the set of both.
    Loss and gradient approach those of the full softmax as `samples` grows.
    Test: `test_sampled_gradient_approaches_the_full_gradient`.

    Args:
        dim: length of a hidden vector.
        classes: number of classes; ids sorted by falling count suit the default sampler.
        samples: negatives drawn for a batch.
        bias: adds a learned bias for each class, a [classes, 1] table with sparse gradients.
        weight: a [classes, dim] parameter to share, such as the input embedding's.
        sampler: where negatives come from; `LogUniformSampler(classes)` when None.

    Shapes: hidden [..., dim], labels [...] int64; the loss is a scalar unless reduction="none".

    Example:
        >>> head = SampledSoftmax(16, 1000, samples=64)
        >>> hidden, labels = torch.randn(8, 16), torch.arange(8)
        >>> head(hidden, labels).backward()
        >>> head.weight.grad.is_sparse
        True
        >>> head.full_loss(hidden, labels).shape
        torch.Size([])

    References: Jean et al. 2015, On using very large target vocabulary for neural machine
    translation; Bengio and Senecal 2008, Adaptive importance sampling.
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        samples: int,
        bias: bool = False,
        weight: nn.Parameter | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("classes", classes), ("samples", samples)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if weight is not None and tuple(weight.shape) != (classes, dim):
            raise ValueError(
                f"weight must have shape ({classes}, {dim}), got {tuple(weight.shape)}; "
                "tie only tables whose rows are the classes"
            )
        if sampler is not None and sampler.classes != classes:
            raise ValueError(
                f"sampler must draw from {classes} classes, got one for {sampler.classes}"
            )
        self.dim = dim
        self.classes = classes
        self.samples = samples
        self.sampler: Sampler = LogUniformSampler(classes) if sampler is None else sampler
        if weight is None:
            weight = nn.Parameter(torch.empty(classes, dim).uniform_(-1.0, 1.0) / math.sqrt(dim))
        self.weight = weight
        # 2-D because sparse gradients of rows are made by the embedding lookup
        self.bias = nn.Parameter(torch.zeros(classes, 1)) if bias else None

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return f"{self.dim}, {self.classes}, samples={self.samples}, bias={self.bias is not None}"

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        *,
        reduction: Reduction = "mean",
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The sampled loss, for training; `generator` fixes which negatives are drawn."""
        hidden_2d, labels_1d = self._checked(hidden, labels)
        drawn = self.sampler.draw(self.samples, generator=generator, device=hidden.device)
        tokens = labels_1d.numel()
        # one lookup for labels and negatives gives the table one sparse gradient, not two to add
        ids = torch.cat([labels_1d, drawn])
        rows = F.embedding(ids, self.weight, sparse=True)
        label_rows, drawn_rows = rows.split([tokens, drawn.numel()])
        label_logits = _widened((hidden_2d * label_rows).sum(-1))
        drawn_logits = _widened(hidden_2d @ drawn_rows.T)
        offsets = -self.sampler.log_expected_count(ids, self.samples).to(label_logits.dtype)
        if self.bias is not None:
            offsets = offsets + F.embedding(ids, self.bias, sparse=True).squeeze(-1)
        label_logits = label_logits + offsets[:tokens]
        drawn_logits = drawn_logits + offsets[tokens:]
        is_hit = labels_1d[:, None] == drawn[None, :]
        drawn_logits = drawn_logits.masked_fill(is_hit, -math.inf)
        denominator = torch.logaddexp(label_logits, drawn_logits.logsumexp(-1))
        return _reduced(denominator - label_logits, labels.shape, reduction)

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
        if chunk < 1:
            raise ValueError(f"chunk must be >= 1, got {chunk}")
        hidden_2d, labels_1d = self._checked(hidden, labels)
        label_logits = _widened((hidden_2d * self.weight[labels_1d]).sum(-1))
        if self.bias is not None:
            label_logits += self.bias[labels_1d, 0]
        denominator = torch.full_like(label_logits, -math.inf)
        for start in range(0, self.classes, chunk):
            logits = _widened(hidden_2d @ self.weight[start : start + chunk].T)
            if self.bias is not None:
                logits += self.bias[start : start + chunk, 0]
            denominator = torch.logaddexp(denominator, logits.logsumexp(-1))
        return _reduced(denominator - label_logits, labels.shape, reduction)

    def _checked(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden vectors as [tokens, dim] and labels as [tokens], after checking both."""
        if hidden.shape != (*labels.shape, self.dim):
            raise ValueError(
                f"hidden must have the shape of labels plus ({self.dim},), got "
                f"{tuple(hidden.shape)} for labels of shape {tuple(labels.shape)}"
            )
        if labels.dtype != torch.int64:
            raise TypeError(f"labels must be int64, got {labels.dtype}; call labels.long()")
        if labels.numel():
            lowest, highest = (int(bound) for bound in labels.aminmax())
            if lowest < 0 or highest >= self.classes:
                raise ValueError(
                    f"labels must lie in [0, {self.classes - 1}], got values from {lowest} to "
                    f"{highest}; construct SampledSoftmax with classes > {highest} or map them"
                )
        return hidden.reshape(-1, self.dim), labels.reshape(-1)


def _widened(logits: Tensor) -> Tensor:
    """The logits, in float32 when they came in half precision: sums of exp() need the digits."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _reduced(losses: Tensor, shape: torch.Size, reduction: Reduction) -> Tensor:
    """The losses summarised as torch's loss functions do."""
    if reduction == "mean":
        return losses.mean()
    if reduction == "sum":
        return losses.sum()
    if reduction == "none":
        return losses.reshape(shape)
    raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
