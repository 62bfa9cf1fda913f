"""Text as bags of hashed features, ready for `torch.nn.EmbeddingBag`.

A text is the bytes of its UTF-8 form. Its units, three bytes in a row or whole words, become ids
below 2^32, which the project's hash (`sketchoptim._hashing`) maps to a fixed number of features. So
there is no vocabulary to build, to ship or to outgrow, and the features of a text are the same in
every process and on every machine.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _hashing
from ._checks import check_positive

Unit = Literal["trigrams", "words"]
Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

# sets feature ids apart from those of other users of one seed
_PARAMETER = 0x66656174
# of the polynomial that a word's bytes are the coefficients of: odd, with bits all over
_WORD_BASE = np.uint64(0x9E3779B97F4A7C15)
# parts of a word: ASCII letters and digits, and every byte of a character beyond ASCII
_IS_OF_WORDS = np.array([byte > 127 or chr(byte).isalnum() for byte in range(256)])
_CHUNK = 4096


class Bags(NamedTuple):
    """Ragged batches in the form that `nn.EmbeddingBag` takes: ``table(*bags)``.

    Attributes:
        ids: features of all texts, one text after the other, int64 or int32 [total].
        offsets: where each text begins in `ids`, of the same dtype, [texts].
        weights: +1 or -1 for each id, float32 [total], where features are signed; else None.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None = None

    def to(self, device: torch.device | str) -> "Bags":
        """The same bags on a device.

        Example:
            >>> Bags(torch.tensor([5, 6]), torch.tensor([0])).to("meta").ids.device
            device(type='meta')
        """
        weights = None if self.weights is None else self.weights.to(device)
        return Bags(self.ids.to(device), self.offsets.to(device), weights)

    def take(self, rows: Tensor) -> "Bags":
        """The bags of some texts, in the order of `rows`, int64 [n]: a batch out of many texts.

        Example:
            >>> bags = Bags(torch.tensor([5, 6, 7, 8]), torch.tensor([0, 1, 3]))
            >>> bags.take(torch.tensor([2, 1]))
            Bags(ids=tensor([8, 6, 7]), offsets=tensor([0, 1]), weights=None)
        """
        ends = torch.cat([self.offsets[1:], self.offsets.new_tensor([self.ids.numel()])])
        starts = self.offsets[rows].long()
        lengths = ends[rows].long() - starts
        offsets = lengths.cumsum(0) - lengths
        places = torch.arange(int(lengths.sum()), device=self.ids.device)
        places += (starts - offsets).repeat_interleave(lengths)
        weights = None if self.weights is None else self.weights[places]
        return Bags(self.ids[places], offsets.to(self.offsets.dtype), weights)

    @classmethod
    def joined(cls, parts: Sequence["Bags"]) -> "Bags":
        """All texts of several batches, one batch after the other."""
        starts = accumulate((part.ids.numel() for part in parts), initial=0)
        offsets = [part.offsets + start for part, start in zip(parts, starts, strict=False)]
        weights = [part.weights for part in parts if part.weights is not None]
        return cls(
            torch.cat([part.ids for part in parts]),
            torch.cat(offsets),
            torch.cat(weights) if weights else None,
        )

    def as_int32(self) -> "Bags":
        """The same with ids and offsets in int32, which `nn.EmbeddingBag` takes as well."""
        return Bags(self.ids.int(), self.offsets.int(), self.weights)


@dataclass(frozen=True, kw_only=True)
class FeatureHashing:
    """Texts -> `Bags` of feature ids below `features`.

    "trigrams" are all runs of three bytes of the text with a zero byte before and after it, so a
    text of n bytes has n of them and a text without bytes has none. "words" are the longest runs
    of ASCII letters, ASCII digits and bytes of characters beyond ASCII; all else separates them.
    Nothing is folded: write ``text.lower()`` where case should not count. Units that occur twice
    are there twice. A text without units is an empty bag, for which an `EmbeddingBag` gives zeros.

    Two trigrams share a feature with probability at most 1 / features + 2^-32, and so do two words
    but for those, one pair in 2^32, that share their 32-bit number. With signs, the inner product
    of two hashed texts is right in the mean, whatever collides
    (`tests/nn/test_feature_hashing.py::test_signed_features_keep_inner_products_in_the_mean`).

    Args:
        features: how many there are, the rows of the table; the paper takes 80,000.
        unit: "trigrams" or "words".
        signed: gives each unit a sign, as `Bags.weights`.
        seed: of the hash.

    Example:
        >>> hashing = FeatureHashing(features=1000)
        >>> bags = hashing(["libc", "", "naïve"])
        >>> bags.offsets
        tensor([0, 4, 4])
        >>> torch.nn.EmbeddingBag(1000, 8, mode="sum", sparse=True)(*bags).shape
        torch.Size([3, 8])

    Reference: Weinberger et al. 2009, Feature Hashing for Large Scale Multitask Learning.
    """

    features: int = 80_000
    unit: Unit = "trigrams"
    signed: bool = False
    seed: int = 0
    _words: npt.NDArray[np.uint64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.features <= _hashing.MAX_WIDTH:
            raise ValueError(f"features must be in [1, 2**31], got {self.features}")
        if self.unit not in get_args(Unit):
            raise ValueError(f"unit must be one of {list(get_args(Unit))}, got {self.unit!r}")
        words = _hashing.seeded(self.seed, _PARAMETER, 1)[0].numpy().view(np.uint64)
        object.__setattr__(self, "_words", words)

    def __call__(self, texts: Iterable[str]) -> Bags:
        """The features of each text, in its order; 64-bit ids and offsets."""
        if isinstance(texts, str | bytes):
            raise TypeError("texts must be a list of str, got one of them; write [text]")
        encoded = [_encoded(text, number) for number, text in enumerate(texts)]
        ids, counts = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        signs = [np.zeros(0, dtype=np.float32)]
        for start in range(0, len(encoded), _CHUNK):  # intermediate arrays stay in the cache
            units, units_of_each = self._units(encoded[start : start + _CHUNK])
            ids.append(self._features(units))
            counts.append(units_of_each)
            if self.signed:
                signs.append(self._signs(units))
        lengths = np.concatenate(counts)
        return Bags(
            torch.from_numpy(np.concatenate(ids)),
            torch.from_numpy(np.cumsum(lengths) - lengths),
            torch.from_numpy(np.concatenate(signs)) if self.signed else None,
        )

    def _units(self, texts: Sequence[bytes]) -> tuple[npt.NDArray[np.uint64], Numbers]:
        """Every unit as a number below 2^32, text by text, and how many each text has."""
        data = np.frombuffer(b"\0" + b"\0".join(texts) + b"\0", dtype=np.uint8)
        lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        ends = np.cumsum(lengths + 1)  # the zero byte behind each text
        if self.unit == "words":
            return _words(data, ends)
        wide = data.astype(np.uint64)
        units = (wide[:-2] << np.uint64(16)) | (wide[1:-1] << np.uint64(8)) | wide[2:]
        is_within = np.ones(units.size, dtype=bool)
        is_within[ends[:-1] - 1] = False  # around a zero byte between two texts
        return units[is_within], lengths

    def _features(self, units: npt.NDArray[np.uint64]) -> Numbers:
        # _hashing.buckets() on NumPy's unsigned numbers, whose products wrap as mod 2^64 does
        mixed = units * self._words[0]
        mixed += self._words[1]
        mixed >>= np.uint64(32)
        mixed *= np.uint64(self.features)
        mixed >>= np.uint64(32)
        features: Numbers = mixed.view(np.int64)
        return features

    def _signs(self, units: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
        mixed = units * self._words[2] + self._words[3]
        return np.where(mixed >> np.uint64(63), np.float32(-1), np.float32(1))


class BagEncoder(nn.Module):
    """Bags of features -> hidden vectors: relu(sum of the features' rows + bias), [texts, dim].

    The first layer of the paper's Amazon model. Its table gets sparse gradients; it starts from
    uniform numbers of variance 1 / `expected`, so that a bag of so many features gives hidden
    numbers near 1.

    Args:
        features: rows of the table, those of the `FeatureHashing` before it.
        dim: length of a hidden vector.
        expected: features in a usual bag.

    Example:
        >>> encoder = BagEncoder(1000, 16)
        >>> encoder(*FeatureHashing(features=1000)(["usr/bin/env"])).shape
        torch.Size([1, 16])
    """

    sparse = True
    """Whether its table gets sparse gradients: as `nn.Embedding` says it, for `so.plan`."""

    def __init__(self, features: int, dim: int, *, expected: int = 50) -> None:
        super().__init__()
        check_positive(features=features, dim=dim, expected=expected)
        bound = (3 / expected) ** 0.5
        self.weight = nn.Parameter(torch.empty(features, dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Hidden vectors of the bags; weights must be finite."""
        if weights is not None and not weights.isfinite().all():
            raise ValueError("weights must be finite, got NaN or inf; leave such features out")
        # Each row is looked up once: texts of a batch have most of their features in common, and
        # a gradient of distinct rows is a fraction of one with a row for each id.
        distinct, places = ids.unique(return_inverse=True)
        if distinct.numel() and not 0 <= distinct[0] <= distinct[-1] < len(self.weight):
            raise ValueError(
                f"ids must be in [0, {len(self.weight) - 1}], got values from {distinct[0]} to "
                f"{distinct[-1]}; features of the FeatureHashing must be <= those of the BagEncoder"
            )
        rows = F.embedding(distinct, self.weight, sparse=True)
        if weights is not None:
            weights = weights.to(rows.dtype)
        bags = F.embedding_bag(places, rows, offsets.long(), mode="sum", per_sample_weights=weights)
        return torch.relu(bags + self.bias)


def _encoded(text: str, number: int) -> bytes:
    if not isinstance(text, str):
        raise TypeError(
            f"texts must be str, got {type(text).__name__} at {number}; decode it first"
        )
    # a lone surrogate, as in names of files that are not UTF-8, has bytes of its own as well
    return text.encode("utf-8", "surrogatepass")


def _words(data: Bytes, ends: Numbers) -> tuple[npt.NDArray[np.uint64], Numbers]:
    """A number below 2^32 for each word: the upper half of sum byte_k base^(k + 1) mod 2^64."""
    is_part = _IS_OF_WORDS[data]
    edges = np.flatnonzero(is_part[1:] != is_part[:-1]) + 1  # data begins and ends outside words
    starts, stops = edges[0::2], edges[1::2]
    lengths = stops - starts
    if not lengths.size:
        return np.zeros(0, dtype=np.uint64), np.zeros(ends.size, dtype=np.int64)
    powers = np.cumprod(np.full(int(lengths.max()), _WORD_BASE))
    firsts = np.cumsum(lengths) - lengths  # of each word, where only words' bytes are kept
    places = np.arange(int(lengths.sum())) - np.repeat(firsts, lengths)
    terms = data[is_part].astype(np.uint64) * powers[places]
    counts = np.searchsorted(starts, ends)
    return np.add.reduceat(terms, firsts) >> np.uint64(32), np.diff(counts, prepend=0)
