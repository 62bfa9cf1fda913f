"""Softmax over many classes, trained on a few drawn ones, with sparse gradients.

A batch shares one set of negatives. A drawn class also represents classes that were not drawn, so
its term in the denominator is divided by its expected count in the draw.
"""

import torch
from torch import Tensor, nn

from ._class_ids import IGNORE_INDEX
from ._loss_sweep import Candidates, sampled_loss
from ._output_table import OutputTable, Reduction, reduction_factor
from ._samplers import LogUniformSampler, Negatives, Repeats, Sampler, check_repeats


class SampledSoftmax(OutputTable):
    """Cross entropy over `classes` classes that reads only the rows of labels and negatives.

    With logits o(c) = `<hidden, weight[c]>` + bias[c], label y and negatives s, where class c was
    drawn m(c) times and q(c) is its expected count, the loss of one token is

        o'(c) = o(c) + log m(c) - log q(c),
        loss = log(exp o'(y) + sum_{s != y} exp o'(s)) - o'(y).

    Accidental hits, s = y, are left out; where repeats are kept, m(y) counts them, plus one for the
    label itself. exp(-loss) is the probability that y is the label, given the set of label and
    negatives. So the expected gradient of the true model is zero for any number of samples
    (approximately where repeats are not kept: q then treats the draws as independent). With more
    samples, loss and gradient approach those of the full softmax.
    Tests: `tests/nn/test_sampled_loss.py::test_the_true_model_has_an_expected_gradient_of_zero`,
    `tests/nn/test_sampled_loss.py::test_sampled_gradient_approaches_the_full_gradient`.

    Gradients of the tables are sparse, with distinct rows. They are computed together with the
    loss. `reduction="none"`, whose upstream gradients are not known at that time, therefore costs a
    third more, and differentiating twice is refused. Under autocast, products have its dtype;
    exp() and sums are in float32 or float64. NaN in `hidden` gives a NaN loss, as in torch's loss
    functions.

    Args:
        dim: size of a hidden vector.
        classes: number of classes; ids sorted by descending count suit the default sampler.
        samples: negatives drawn for a batch.
        bias: adds a learned bias for each class, a [classes, 1] table with sparse gradients.
        weight: a [classes, dim] parameter to share, such as the input embedding's.
        sampler: the distribution of negatives; `LogUniformSampler(classes)` when None.
        repeats: what happens to an id that is drawn again: it is "merged" into the first one,
            "kept" as a count, or "redrawn" until `samples` ids are distinct, which TensorFlow calls
            unique. Merged, the default, gives a frequent class a weight without noise, as redrawn
            does and kept does not, and takes one draw for any distribution, as redrawn does not.
        ignore_index: a label that losses and their mean leave out, as in `F.cross_entropy`.

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
        ignore_index: int = IGNORE_INDEX,
    ) -> None:
        super().__init__(dim, classes, bias=bias, weight=weight, ignore_index=ignore_index)
        if sampler is not None and sampler.classes != classes:
            raise ValueError(
                f"sampler must draw from {classes} classes, got one of {sampler.classes}; "
                "construct it for the classes of the layer"
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
        """The sampled loss, for training; `generator` fixes the negatives."""
        tokens = self._tokens(hidden, labels)
        factor = reduction_factor(reduction, tokens.labels.numel())
        negatives = Negatives.draw(
            self.sampler,
            self.samples,
            repeats=self.repeats,
            generator=generator,
            device=hidden.device,
        )
        candidates = self._candidates(tokens.labels, negatives)
        bias = None if self.bias_table is None else self.bias_table.read()
        loss = sampled_loss(tokens.hidden, self.table.read(), bias, candidates, factor=factor)
        return tokens.scatter(loss) if factor is None else loss

    def _candidates(self, labels: Tensor, negatives: Negatives) -> Candidates:
        """Labels and negatives as distinct ids, so that no row is looked up twice."""
        ids, at = torch.cat([labels, negatives.ids]).unique(return_inverse=True)
        label_at, drawn_at = at.split([labels.numel(), negatives.ids.numel()])
        offset = -negatives.log_expected_count(self.sampler.probability(ids))
        label_offset = offset[label_at]
        if self.repeats == "kept":
            hits = torch.zeros_like(ids).index_copy_(0, drawn_at, negatives.counts)
            label_offset = label_offset + (hits[label_at] + 1).double().log()
        drawn_offset = offset[drawn_at] + negatives.counts.double().log()
        return Candidates(ids, label_at, drawn_at, label_offset, drawn_offset)
