"""The language model of the experiments: two large tables around a small dense body."""

from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Generator, Tensor, nn

from sketchoptim.nn import SampledSoftmax
from sketchoptim.nn._output_table import OutputTable

from .full_softmax import FullSoftmax, Products

State = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Sizes of a `LanguageModel`.

    Args:
        dim: columns of the input table.
        hidden: units of the LSTM.
        layers: of the LSTM.
        projection: columns of the output table, after a linear layer; with 0 there is no such
            layer, and the output table has `hidden` columns.
        samples: negatives a step of the sampled softmax; 0 takes the full softmax, whose table
            gets dense gradients and belongs to the body.
        dropout: share of inputs and outputs of the LSTM that training sets to zero.
        products: dtype of the full softmax's matrix products, as under autocast.
    """

    dim: int = 256
    hidden: int = 256
    layers: int = 1
    projection: int = 0
    samples: int = 1024
    dropout: float = 0.0
    products: Products = "float32"

    def __post_init__(self) -> None:
        for name, least in (
            ("dim", 1), ("hidden", 1), ("layers", 1), ("projection", 0), ("samples", 0),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if self.products not in get_args(Products):
            raise ValueError(f"products must be in {get_args(Products)}, got {self.products!r}")


class Model(nn.Module):
    """The interface of a model for the training loop."""

    def loss(
        self, inputs: Any, labels: Tensor, state: Any, *, generator: Generator | None
    ) -> tuple[Tensor, Any]:
        """The training loss, and the state for the next batch."""
        raise NotImplementedError

    def named_tables(self) -> dict[str, nn.Parameter]:
        """The parameters that a method trains in its own way, by name."""
        raise NotImplementedError

    def named_body(self) -> dict[str, nn.Parameter]:
        """All other parameters, by name; their gradients are dense."""
        tables = self.named_tables()
        return {name: weight for name, weight in self.named_parameters() if name not in tables}

    def named_matrices(self) -> dict[str, nn.Parameter]:
        """The parameters of the body that Muon is made for, by name."""
        return {name: weight for name, weight in self.named_body().items() if weight.ndim == 2}


class LanguageModel(Model):
    """The next word from the ones before: embedding -> LSTM -> projection -> softmax.

    The input table gets sparse gradients; so do the output table and bias when sampled.

    Example:
        >>> model = LanguageModel(1000, ModelSettings(dim=16, hidden=16, samples=64))
        >>> import torch
        >>> words = torch.randint(1000, (4, 10))
        >>> hidden, state = model(words)
        >>> hidden.shape
        torch.Size([4, 10, 16])
    """

    def __init__(self, classes: int, settings: ModelSettings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, settings.dim, sparse=True)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        between = settings.dropout if settings.layers > 1 else 0.0
        self.lstm = nn.LSTM(
            settings.dim, settings.hidden, settings.layers, batch_first=True, dropout=between
        )
        self.dropout = nn.Dropout(settings.dropout)
        width = settings.projection or settings.hidden
        self.projection: nn.Module = nn.Identity()
        if settings.projection:
            self.projection = nn.Linear(settings.hidden, width)
        self.softmax: OutputTable
        if settings.samples:
            self.softmax = SampledSoftmax(width, classes, samples=settings.samples, bias=True)
        else:
            self.softmax = FullSoftmax(width, classes, bias=True)
            self.softmax.products = getattr(torch, settings.products)

    def forward(self, words: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Hidden vectors [batch, length, width] for words [batch, length], and the last state."""
        rows = self.embedding(words).float()  # tables may be narrower than the layers
        hidden, last = self.lstm(self.dropout(rows), state)
        return self.projection(self.dropout(hidden)), last

    def loss(
        self, inputs: Tensor, labels: Tensor, state: State | None, *, generator: Generator | None
    ) -> tuple[Tensor, State]:
        """The loss of the words `labels` after the words `inputs`, and the LSTM's state."""
        hidden, last = self(inputs, state)
        return self.softmax(hidden, labels, generator=generator), detach_state(last)

    def named_tables(self) -> dict[str, nn.Parameter]:
        """The parameters that get sparse gradients, by name."""
        is_full = isinstance(self.softmax, FullSoftmax)
        sparse = ("embedding.",) if is_full else ("embedding.", "softmax.")
        return {name: table for name, table in self.named_parameters() if name.startswith(sparse)}


def detach_state(state: State) -> State:
    """The same state without its graph."""
    return state[0].detach(), state[1].detach()
