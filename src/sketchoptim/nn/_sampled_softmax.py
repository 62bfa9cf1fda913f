"""Softmax over very many classes, trained on a few of them, with sparse gradients.

A batch shares one set of drawn negatives. A drawn class stands for the classes like it that were
not drawn, so its weight in the denominator is divided by how often it was to be expected there.
"""

import torch
from torch import Tensor, nn

from ._checks import IGNORED, check_positive
from ._output_table import OutputTable, Reduction, token_factor
from ._sampled_loss import Candidates, sampled_loss
from ._samplers import LogUniformSampler, Negatives, Repeats, Sampler, check_repeats


class SampledSoftmax(OutputTable):
    """Cross entropy over `classes` classes that touches only the labels' and the drawn rows.

    With logits o(c) = `<hidden, weight[c]>` + bias[c], labels y and drawn negatives s, each drawn
    m(s) times where q(s) times were expected, the loss of one token is

        o'(c) = o(c) + log m(c) - log q(c),
        loss = log(exp o'(y) + sum_{s != y} exp o'(s)) - o'(y).

    Accidental hits, s = y, are thus left out; where repeats are kept, m(y) counts them, and the
    label itself as one more. That is how likely y is the label and the others are the drawn
    ones, given all of them together, so the true model has no gradient in the mean, whatever the
    number of samples (nearly so when repeats are not kept: there q takes draws as independent).
    As samples grow, loss and gradient approach those of the full softmax.
    Tests: `tests/nn/test_sampled_loss.py::test_the_true_model_has_no_gradient_in_the_mean`,
    `tests/nn/test_sampled_loss.py::test_sampled_gradient_approaches_the_full_gradient`.

    Gradients of the tables are sparse, with distinct rows. They are made along with the loss, so
    `reduction="none"`, whose upstream gradients are not known then, costs a third more, and
    differentiating twice is refused. Under autocast products are made in its dtype; exp() and
    sums are float32 at least. NaN in `hidden` gives a NaN loss, as in torch's loss functions.

    Args:
        dim: length of a hidden vector.
        classes: number of classes; ids sorted by falling count suit the default sampler.
        samples: negatives drawn for a batch.
        bias: adds a learned bias for each class, a [classes, 1] table with sparse gradients.
        weight: a [classes, dim] parameter to share, such as the input embedding's.
        sampler: where negatives come from; `LogUniformSampler(classes)` when None.
        repeats: what becomes of an id that is drawn again: "merged" into the first one, "kept"
            as a count, or "redrawn" until `samples` ids are distinct, which TensorFlow calls
            unique. Merged is the default: like redrawn, and unlike kept, it gives a frequent
            class a weight without noise, and unlike redrawn it takes one draw, whatever the law.
            `benchmarks/softmax_layers.py` has the bias and spread of all three.
        ignore_index: a label that is left out of losses and their mean, as in `F.cross_entropy`.

    Shapes: hidden [..., dim], labels [...] int64; the loss is a scalar unless reduction="none".

    Example:
        >>> head = SampledSoftmax(16, 1000, samples=64)
        >>> hidden, labels = torch.randn(8, 16), torch.arange(8)
        >>> head(hidden, labels).backward()
        >>> head.weight.grad.is_sparse
        True
        >>> head.full_loss(hidden, labels).shape
        torch.Size([])
        >>> head.top_k(hidden, 5).shape
        torch.Size([8, 5])

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
        repeats: Repeats = "merged",
        ignore_index: int = IGNORED,
    ) -> None:
        super().__init__(dim, classes, bias=bias, weight=weight, ignore_index=ignore_index)
        check_positive(samples=samples)
        if sampler is not None and sampler.classes != classes:
            raise ValueError(
                f"sampler must draw from {classes} classes, got one for {sampler.classes}"
            )
        self.sampler: Sampler = LogUniformSampler(classes) if sampler is None else sampler
        check_repeats(repeats, samples, self.sampler)
        self.samples = samples
        self.repeats: Repeats = repeats

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return (
            f"{self.dim}, {self.classes}, samples={self.samples}, bias={self.bias is not None}, "
            f"sampler={self.sampler!r}, repeats={self.repeats!r}"
        )

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        *,
        reduction: Reduction = "mean",
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The sampled loss, for training; `generator` fixes which negatives are drawn."""
        tokens = self._tokens(hidden, labels)
        factor = token_factor(reduction, tokens.labels.numel())
        negatives = Negatives.draw(
            self.sampler,
            self.samples,
            repeats=self.repeats,
            generator=generator,
            device=hidden.device,
        )
        candidates = self._candidates(tokens.labels, negatives)
        loss = sampled_loss(tokens.hidden, self.weight, self.bias, candidates, factor=factor)
        return tokens.in_place(loss) if factor is None else loss

    def _candidates(self, labels: Tensor, negatives: Negatives) -> Candidates:
        """Labels and negatives as distinct ids, so that no row is looked up or corrected twice."""
        ids, at = torch.cat([labels, negatives.ids]).unique(return_inverse=True)
        label_at, drawn_at = at.split([labels.numel(), negatives.ids.numel()])
        offset = -negatives.log_expected_count(self.sampler.probability(ids))
        label_offset = offset[label_at]
        if self.repeats == "kept":
            hits = torch.zeros_like(ids).index_copy_(0, drawn_at, negatives.counts)
            label_offset = label_offset + (hits[label_at] + 1).double().log()
        drawn_offset = offset[drawn_at] + negatives.counts.double().log()
        return Candidates(ids, label_at, drawn_at, label_offset, drawn_offset)
