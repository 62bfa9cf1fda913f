"""A Transformer language model whose tables get dense gradients from a full softmax."""

from dataclasses import dataclass
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from .full_softmax import FullSoftmax, Products
from .models import Model


@dataclass(frozen=True, kw_only=True)
class TransformerSettings:
    """Sizes of a `Transformer`.

    Args:
        dim: columns of the tables and of all layers.
        layers: blocks of attention and feed-forward layers.
        heads: of the attention.
        is_tied: whether input and output share one table.
        longest: most words of a segment.
        dropout: share of each block's output that training sets to zero.
        products: dtype of the matrix products in training, "bfloat16" as under autocast. Weights,
            gradients and quality are in float32.
    """

    dim: int = 128
    layers: int = 2
    heads: int = 4
    is_tied: bool = True
    longest: int = 128
    dropout: float = 0.0
    products: Products = "float32"

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "longest"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.dim % self.heads:
            raise ValueError(f"dim must be a multiple of heads = {self.heads}, got {self.dim}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if self.products not in get_args(Products):
            raise ValueError(f"products must be in {get_args(Products)}, got {self.products!r}")


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each added to its normalised input."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        dim = settings.dim
        self.heads = settings.heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.queries_keys_values = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_output = nn.Linear(dim, dim, bias=False)
        self.feed_input = nn.Linear(dim, 4 * dim, bias=False)
        self.feed_output = nn.Linear(4 * dim, dim, bias=False)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden vectors [batch, length, dim] of the next layer."""
        queries, keys, values = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.queries_keys_values(self.attention_norm(hidden)).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.dropout(self.attention_output(seen.transpose(1, 2).flatten(2)))
        fed = self.feed_output(F.gelu(self.feed_input(self.feed_norm(hidden))))
        out: Tensor = hidden + self.dropout(fed)
        return out


class Transformer(Model):
    """The next word from those before it in the same segment, by a full softmax.

    Example:
        >>> model = Transformer(1000, TransformerSettings(dim=16, layers=1))
        >>> loss, _ = model.loss(
        ...     torch.zeros(2, 5).long(), torch.ones(2, 5).long(), None, generator=None
        ... )
        >>> loss.backward()
        >>> [(name, table.grad.is_sparse) for name, table in model.named_tables().items()]
        [('embedding.weight', False)]
    """

    def __init__(self, classes: int, settings: TransformerSettings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, settings.dim)
        self.positions = nn.Parameter(torch.empty(settings.longest, settings.dim))
        table = self.embedding.weight
        assert isinstance(table, nn.Parameter)
        for weight in (table, self.positions):
            nn.init.normal_(weight, std=0.02)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.dim)
        self.dropout = nn.Dropout(settings.dropout)
        self.softmax = FullSoftmax(
            settings.dim, classes, weight=table if settings.is_tied else None
        )
        self.softmax.products = getattr(torch, settings.products)

    def forward(self, words: Tensor, state: None = None) -> tuple[Tensor, None]:
        """Hidden vectors [batch, length, dim] for words [batch, length]; there is no state."""
        rows = self.embedding(words).float()  # tables may be narrower than the layers
        hidden = self.dropout(rows + self.positions[: words.shape[1]])
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden), None

    def loss(
        self, inputs: Tensor, labels: Tensor, state: None, *, generator: Generator | None
    ) -> tuple[Tensor, None]:
        """The loss of the words `labels` after the words `inputs`."""
        products = self.softmax.products
        with torch.autocast(
            inputs.device.type, dtype=products, enabled=products is not torch.float32
        ):
            hidden, _ = self(inputs)
        return self.softmax(hidden, labels), None

    def named_tables(self) -> dict[str, nn.Parameter]:
        """The table of words, or both where input and output have their own."""
        return {
            name: weight
            for name, weight in self.named_parameters()
            if name.startswith(("embedding.", "softmax."))
        }

    def named_matrices(self) -> dict[str, nn.Parameter]:
        """The matrices of the blocks, by name."""
        return {
            name: weight
            for name, weight in self.named_body().items()
            if name.startswith("blocks.") and weight.ndim == 2
        }
