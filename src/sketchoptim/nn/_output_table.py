"""The weight table of an output layer over many classes, and exact evaluation in chunks."""

import math
from collections.abc import Iterator
from typing import ClassVar, Literal, NamedTuple, assert_never, get_args

import torch
from torch import Tensor, nn

from .._rows import arithmetic_dtype
from .._validation import check_choice, check_int, check_positive_int, check_tensor
from ._class_ids import IGNORE_INDEX, check_int64, check_range, id_range
from ._table_layer import Table, TableLayer

Reduction = Literal["mean", "sum", "none"]


class OutputTable(TableLayer):
    """Logits <hidden, weight[c]> + bias[c] of `classes` classes, computed a chunk at a time.

    Base class of layers that train on a few classes only; they define `forward(hidden, labels)`.

    Args:
        dim: size of a hidden vector.
        classes: number of classes.
        bias: adds a learned bias for each class, a [classes, 1] table with sparse gradients.
        weight: a [classes, dim] parameter to share, such as the input embedding's.
        ignore_index: a label that losses and their mean leave out, such as padding.
    """

    bias_table: Table | None
    renamed_keys: ClassVar = {"weight": "table.weight", "bias": "bias_table.weight"}

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        bias: bool = False,
        weight: nn.Parameter | None = None,
        ignore_index: int = IGNORE_INDEX,
    ) -> None:
        super().__init__()
        self.dim = dim = check_positive_int("dim", dim)
        self.classes = classes = check_positive_int("classes", classes)
        self.ignore_index = check_int("ignore_index", ignore_index)
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
        if weight is None:
            # In place: a second copy, even a temporary one, would be the peak of a lean training.
            drawn = torch.empty(classes, dim).uniform_(-1.0, 1.0).div_(math.sqrt(dim))
            weight = nn.Parameter(drawn)
        self.table = self.as_table(weight)
        # A column, so that it gets a sparse gradient of rows, as the weight does.
        self.bias = nn.Parameter(torch.zeros(classes, 1)) if bias else None

    @property
    def weight(self) -> nn.Parameter:
        """The rows of all classes, [classes, dim]."""
        return self.table.weight

    @weight.setter
    def weight(self, weight: nn.Parameter) -> None:
        self.table.weight = weight

    @property
    def bias(self) -> nn.Parameter | None:
        """The biases of all classes, [classes, 1], or None."""
        return None if self.bias_table is None else self.bias_table.weight

    @bias.setter
    def bias(self, bias: nn.Parameter | None) -> None:
        self.bias_table = None if bias is None else self.as_table(bias)

    def table_parameters(self) -> list[nn.Parameter]:
        """The parameters with a row for each class, which `so.find_tables` looks for."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @torch.no_grad()
    def full_loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        *,
        reduction: Reduction = "mean",
        chunk: int = 4096,
    ) -> Tensor:
        """The exact softmax loss, for evaluation; no matrix is larger than [tokens, chunk]."""
        tokens = self._tokens(hidden, labels)
        factor = reduction_factor(reduction, tokens.labels.numel())
        label_logits = to_arithmetic((tokens.hidden * self.weight[tokens.labels]).sum(-1))
        if self.bias is not None:
            label_logits += self.bias[tokens.labels, 0]
        denominator = torch.full_like(label_logits, -math.inf)
        for _, logits in self._logits(tokens.hidden, chunk):
            denominator = torch.logaddexp(denominator, logits.logsumexp(-1))
        losses = denominator - label_logits
        return tokens.scatter(losses) if factor is None else losses.sum() * factor

    @torch.no_grad()
    def top_k(self, hidden: Tensor, k: int, *, chunk: int = 4096) -> Tensor:
        """The ids of the k largest logits of all classes, int64 [..., k], largest first.

        No matrix is larger than [tokens, chunk + k]. Equal logits are in any order.
        """
        k = check_int("k", k, least=1, most=self.classes)
        hidden_2d = self._checked_hidden(hidden)
        if hidden_2d.isnan().any():
            raise ValueError(
                "hidden must not be NaN, which has no largest logits; look for its source"
            )
        ids = largest_logits(self._logits(hidden_2d, chunk), k)
        return ids.reshape(*hidden.shape[:-1], k)

    def _logits(self, hidden: Tensor, chunk: int) -> Iterator[tuple[int, Tensor]]:
        """The id of the first class and the exact logits [tokens, <= chunk] of each chunk."""
        check_positive_int("chunk", chunk)
        dtype = torch.promote_types(hidden.dtype, self.weight.dtype)
        hidden = hidden.to(dtype)
        for start in range(0, self.classes, chunk):
            logits = to_arithmetic(hidden @ self.weight[start : start + chunk].T.to(dtype))
            if self.bias is not None:
                logits += self.bias[start : start + chunk, 0]
            yield start, logits

    def _tokens(self, hidden: Tensor, labels: Tensor) -> "Tokens":
        """The tokens that have a loss; all tokens are checked."""
        check_tensor("hidden", hidden)
        check_int64("labels", labels)
        if hidden.shape != (*labels.shape, self.dim):
            raise ValueError(
                f"hidden must have the shape of labels plus ({self.dim},), got "
                f"{tuple(hidden.shape)} for labels of shape {tuple(labels.shape)}; pass one hidden "
                "vector for each label"
            )
        hidden_2d, labels_1d = self._checked_hidden(hidden), labels.reshape(-1)
        lowest, highest = id_range(labels_1d)
        kept = None
        if lowest <= self.ignore_index <= highest:  # else no label is ignored
            kept = (labels_1d != self.ignore_index).nonzero()[:, 0]
            hidden_2d, labels_1d = hidden_2d[kept], labels_1d[kept]
            lowest, highest = id_range(labels_1d)
        check_range("labels", (lowest, highest), self.classes, layer=type(self).__name__)
        return Tokens(hidden_2d, labels_1d, labels.shape, kept)

    def _checked_hidden(self, hidden: Tensor) -> Tensor:
        """The hidden vectors as [tokens, dim]."""
        check_tensor("hidden", hidden)
        if hidden.shape[-1:] != (self.dim,):
            raise ValueError(
                f"hidden must have shape (..., {self.dim}), got {tuple(hidden.shape)}; construct "
                f"{type(self).__name__} with dim of the hidden vectors"
            )
        if not hidden.is_floating_point():
            raise TypeError(
                f"hidden must be floating point, got {hidden.dtype}; call hidden.float()"
            )
        if hidden.device != self.weight.device:
            raise ValueError(
                f"hidden must be on {self.weight.device} as the weight is, got {hidden.device}; "
                "move one of them"
            )
        return hidden.reshape(-1, self.dim)


class Tokens(NamedTuple):
    """The tokens whose label is not ignored."""

    hidden: Tensor
    """[tokens, dim]."""
    labels: Tensor
    """int64 [tokens]."""
    shape: torch.Size
    """The shape of all labels."""
    kept: Tensor | None
    """Positions of the tokens among all labels, int64 [tokens]; None where none is ignored."""

    def scatter(self, losses: Tensor) -> Tensor:
        """The losses [tokens] in the shape of all labels, with zeros for ignored ones."""
        if self.kept is not None:
            losses = losses.new_zeros(self.shape.numel()).index_copy(0, self.kept, losses)
        return losses.reshape(self.shape)


def largest_logits(chunks: Iterator[tuple[int, Tensor]], k: int) -> Tensor:
    """The ids of the k largest logits of all classes, int64 [tokens, k], largest first.

    Args:
        chunks: the id of the first class and the logits [tokens, classes] of each chunk.
        k: at most the number of classes.
    """
    best: Tensor | None = None
    ids: Tensor | None = None
    for start, logits in chunks:
        values, at = logits.topk(min(k, logits.shape[1]))
        if best is None or ids is None:
            best, ids = values, at + start
            continue
        merged = torch.cat([best, values], 1)
        best, chosen = merged.topk(min(k, merged.shape[1]))
        ids = torch.cat([ids, at + start], 1).gather(1, chosen)
    assert ids is not None  # there is one class at least
    return ids


def to_arithmetic(logits: Tensor) -> Tensor:
    """The logits, in float32 where they are in half precision: sums of exp() need the digits."""
    return logits.to(arithmetic_dtype(logits.dtype))


def reduction_factor(reduction: Reduction, tokens: int) -> float | None:
    """The factor of the sum of all losses, or None for "none", as in torch's loss functions."""
    check_choice("reduction", reduction, get_args(Reduction))
    match reduction:
        case "mean":
            return 1.0 / tokens if tokens else math.nan
        case "sum":
            return 1.0
        case "none":
            return None
        case _:
            assert_never(reduction)
