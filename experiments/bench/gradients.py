"""Sparse gradients like those of training on text: ids by word frequency, coalesced or raw."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..corpora import load_array

TYPICAL_GRADIENT = 0.01


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The gradient of one step.

    `ids` int64 ``[entries]`` and `values` ``[entries, dim]`` are coalesced (distinct, ascending)
    or raw: one entry for each token, as in the backward pass of ``nn.Embedding(sparse=True)``.
    """

    rows: int
    ids: Tensor
    values: Tensor
    is_coalesced: bool

    @property
    def entries(self) -> int:
        return self.ids.numel()

    @cached_property
    def touched(self) -> int:
        """Distinct rows."""
        return self.entries if self.is_coalesced else self.ids.unique().numel()

    @cached_property
    def gradient(self) -> Tensor:
        """The tensor for ``parameter.grad``."""
        return torch.sparse_coo_tensor(
            self.ids.unsqueeze(0),
            self.values,
            (self.rows, self.values.shape[1]),
            is_coalesced=self.is_coalesced,
            check_invariants=False,
        )

    @cached_property
    def distinct(self) -> Tensor:
        """A coalesced gradient for the same rows."""
        if self.is_coalesced:
            return self.gradient
        ids = self.ids.unique()
        values = self.values[: ids.numel()]
        return Batch(rows=self.rows, ids=ids, values=values, is_coalesced=True).gradient


class WordFrequencies:
    """How often each word occurs, most frequent first; its id is its rank.

    Args:
        counts: of all words, in descending order.
        source: where they come from, for reports.
    """

    def __init__(self, counts: npt.NDArray[np.float64], *, source: str) -> None:
        self.counts, self.source = counts, source

    @classmethod
    def from_file(cls, path: Path, *, rows: int) -> "WordFrequencies":
        """The frequencies in a NumPy file of at least `rows` counts, in any order."""
        counts = load_array(path).astype(np.float64)
        if counts.ndim != 1 or counts.size < rows or not (counts > 0).all():
            raise ValueError(
                f"{path} must hold at least {rows} positive counts in one dimension, "
                f"got shape {counts.shape}; take smaller tables or another file"
            )
        # The log-uniform sampler needs ids sorted by count, which the file may not be.
        return cls(np.sort(counts)[::-1], source=path.name)

    @classmethod
    def zipf(cls, *, rows: int) -> "WordFrequencies":
        """Zipf's law, count = 1 / rank, where there is no file of counts."""
        return cls(1.0 / np.arange(1, rows + 1), source="Zipf's law, NOT the counts of LM1B")

    def distinct(self, rows: int, touched: int, generator: np.random.Generator) -> Tensor:
        """The first `touched` distinct words of a random text over `rows` words, ascending.

        The time until word i is first seen is exponential with rate counts[i], so these are the
        words with the shortest times.
        """
        waits = generator.exponential(size=rows) / self.counts[:rows]
        first = np.argpartition(waits, touched - 1)[:touched]
        return torch.from_numpy(np.sort(first).astype(np.int64))

    def tokens(self, rows: int, count: int, generator: np.random.Generator) -> Tensor:
        """Random words out of `rows`, with repeats, int64 ``[count]``."""
        cumulative = np.cumsum(self.counts[:rows])
        words = np.searchsorted(cumulative, generator.random(count) * cumulative[-1], side="right")
        return torch.from_numpy(np.minimum(words, rows - 1).astype(np.int64))

    def coalesced(self, rows: int, dim: int, touched: int, *, seed: int) -> Batch:
        """A gradient of distinct rows."""
        ids = self.distinct(rows, touched, np.random.default_rng(seed))
        return Batch(rows=rows, ids=ids, values=_values(touched, dim, seed), is_coalesced=True)

    def raw(self, rows: int, dim: int, tokens: int, *, seed: int) -> Batch:
        """A gradient with one entry for each token."""
        ids = self.tokens(rows, tokens, np.random.default_rng(seed))
        return Batch(rows=rows, ids=ids, values=_values(tokens, dim, seed), is_coalesced=False)


def _values(entries: int, dim: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(entries, dim, generator=generator) * TYPICAL_GRADIENT
