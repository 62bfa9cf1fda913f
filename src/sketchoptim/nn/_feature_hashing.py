"""Text as bags of hashed features, ready for `torch.nn.EmbeddingBag`.

A text is the bytes of its UTF-8 encoding. Its units, three consecutive bytes or whole words, become
ids below 2^32, and the library's hash (`sketchoptim._hashing`) maps these to a fixed number of
features. So there is no vocabulary to build or to ship, and the features of a text are the same in
every process and on every machine.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _hashing
from .._validation import check_choice, check_flag, check_int, check_positive_int, check_tensor
from ._table_layer import TableLayer

Unit = Literal["trigrams", "words"]
Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

# Separates this hash from other uses of the same seed.
_PARAMETER = 0x66656174
# Base of the polynomial whose coefficients are the bytes of a word: odd, with well spread bits.
_WORD_BASE = np.uint64(0x9E3779B97F4A7C15)
# Bytes of words: ASCII letters and digits, and every byte of a character beyond ASCII.
_IS_WORD_BYTE = np.array([byte > 127 or chr(byte).isalnum() for byte in range(256)])
# Texts that are hashed at once: their intermediate arrays stay in the cache.
_CHUNK = 4096


class Bags(NamedTuple):
    """A ragged batch in the form that `nn.EmbeddingBag` takes: ``table(*bags)``.

    Attributes:
        ids: the features of all texts, concatenated, int64 or int32 [total].
        offsets: the position in `ids` where each text begins, same dtype, [texts].
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
        """The bags of some texts, in the order of `rows`, int64 [n]: a batch of a larger set.

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
    def concatenate(cls, parts: Sequence["Bags"]) -> "Bags":
        """The texts of several batches as one batch."""
        starts = accumulate((part.ids.numel() for part in parts), initial=0)
        offsets = [part.offsets + start for part, start in zip(parts, starts, strict=False)]
        weights = [part.weights for part in parts if part.weights is not None]
        return cls(
            torch.cat([part.ids for part in parts]),
            torch.cat(offsets),
            torch.cat(weights) if weights else None,
        )

    def as_int32(self) -> "Bags":
        """The same bags with int32 ids and offsets, which `nn.EmbeddingBag` takes too."""
        return Bags(self.ids.int(), self.offsets.int(), self.weights)


@dataclass(frozen=True, kw_only=True)
class FeatureHashing:
    """Texts -> `Bags` of feature ids below `features`.

    "trigrams" are all sequences of three consecutive bytes of the text with a zero byte before and
    after it: a text of n bytes has n trigrams, an empty text none. "words" are the longest
    sequences of ASCII letters, ASCII digits and bytes of characters beyond ASCII; other bytes
    separate words. Case counts; pass ``text.lower()`` where it should not. A unit that occurs twice
    gives its feature twice. A text without units is an empty bag, for which an `EmbeddingBag` gives
    zeros.

    Two units share a feature with probability at most 1 / features + 2^-32, except for about one
    pair in 2^32 (see `sketchoptim._hashing`). With signs, the inner product of two hashed texts is
    unbiased
    (`tests/nn/test_feature_hashing.py::test_inner_products_of_signed_features_are_unbiased`).

    Args:
        features: number of features, the rows of the table; the paper uses 80,000.
        unit: "trigrams" or "words".
        signed: gives each unit a sign, in `Bags.weights`.
        seed: seed of the hash.

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
        check_int("features", self.features, least=1, most=_hashing.MAX_WIDTH)
        check_choice("unit", self.unit, get_args(Unit))
        check_flag("signed", self.signed)
        check_int("seed", self.seed)
        words = _hashing.seeded(self.seed, _PARAMETER, 1)[0].numpy().view(np.uint64)
        object.__setattr__(self, "_words", words)

    def __call__(self, texts: Iterable[str]) -> Bags:
        """The features of each text, in the order of its units; ids and offsets are int64."""
        if isinstance(texts, str | bytes):
            raise TypeError("texts must be a list of str, got a single text; write [text]")
        encoded = [_encode(text, number) for number, text in enumerate(texts)]
        ids, counts = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        signs = [np.zeros(0, dtype=np.float32)]
        for start in range(0, len(encoded), _CHUNK):
            units, units_of_each = self._units(encoded[start : start + _CHUNK])
            mixed = _mix_(units)
            ids.append(self._features(mixed))
            counts.append(units_of_each)
            if self.signed:
                signs.append(self._signs(mixed))
        lengths = np.concatenate(counts)
        return Bags(
            torch.from_numpy(np.concatenate(ids)),
            torch.from_numpy(np.cumsum(lengths) - lengths),
            torch.from_numpy(np.concatenate(signs)) if self.signed else None,
        )

    def _units(self, texts: Sequence[bytes]) -> tuple[npt.NDArray[np.uint64], Numbers]:
        """Every unit as a number below 2^32, text by text, and how many units each text has."""
        data = np.frombuffer(b"\0" + b"\0".join(texts) + b"\0", dtype=np.uint8)
        lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        ends = np.cumsum(lengths + 1)  # the zero byte after each text
        if self.unit == "words":
            return _words(data, ends)
        wide = data.astype(np.uint64)
        units = (wide[:-2] << np.uint64(16)) | (wide[1:-1] << np.uint64(8)) | wide[2:]
        is_within = np.ones(units.size, dtype=bool)
        is_within[ends[:-1] - 1] = False  # centred on the zero byte between two texts
        return units[is_within], lengths

    # `_hashing.buckets` and `_hashing.signs` in NumPy, in place and five times as fast; the tests
    # compare them.

    def _features(self, mixed: npt.NDArray[np.uint64]) -> Numbers:
        hashed = mixed * self._words[0]
        hashed += self._words[1]
        hashed >>= np.uint64(32)
        hashed *= np.uint64(self.features)
        hashed >>= np.uint64(32)
        features: Numbers = hashed.view(np.int64)
        return features

    def _signs(self, mixed: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
        hashed = mixed * self._words[2] + self._words[3]
        return np.where(hashed >> np.uint64(63), np.float32(-1), np.float32(1))


class BagEncoder(TableLayer):
    """Bags of features -> hidden vectors: relu(sum of the features' rows + bias), [texts, dim].

    The first layer of the paper's Amazon model. Its table gets sparse gradients. The weights are
    drawn from a uniform distribution of variance 1 / `expected`, so that the sum over a bag of
    `expected` features has variance 1.

    Args:
        features: rows of the table, as many as the features of the `FeatureHashing` before it.
        dim: size of a hidden vector.
        expected: number of features in a typical bag.

    Example:
        >>> encoder = BagEncoder(1000, 16)
        >>> encoder(*FeatureHashing(features=1000)(["usr/bin/env"])).shape
        torch.Size([1, 16])
    """

    renamed_keys: ClassVar = {"weight": "table.weight", "bias": "activation.bias"}

    def __init__(self, features: int, dim: int, *, expected: int = 50) -> None:
        super().__init__()
        features = check_positive_int("features", features)
        dim = check_positive_int("dim", dim)
        bound = (3 / check_positive_int("expected", expected)) ** 0.5
        weight = torch.empty(features, dim).uniform_(-bound, bound)
        self.table = self.as_table(nn.Parameter(weight))
        self.activation = _BiasedReLU(dim)

    @property
    def weight(self) -> nn.Parameter:
        """The rows of all features, [features, dim]."""
        return self.table.weight

    @weight.setter
    def weight(self, weight: nn.Parameter) -> None:
        self.table.weight = weight

    @property
    def bias(self) -> nn.Parameter:
        """Added to every hidden vector, [dim]."""
        return self.activation.bias

    @bias.setter
    def bias(self, bias: nn.Parameter) -> None:
        self.activation.bias = bias

    def table_parameters(self) -> list[nn.Parameter]:
        """The parameter with a row for each feature, which `so.find_tables` looks for."""
        return [self.weight]

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        """The hidden vectors of the bags; weights must be finite."""
        for name, part in (("ids", ids), ("offsets", offsets)):
            check_tensor(name, part)
            if part.dtype not in (torch.int64, torch.int32) or part.dim() != 1:
                raise TypeError(
                    f"{name} must be int64 or int32 of one dimension, got {part.dtype} of shape "
                    f"{list(part.shape)}; pass the Bags of a FeatureHashing"
                )
        if weights is not None and not weights.isfinite().all():
            raise ValueError("weights must be finite, got NaN or inf; leave such features out")
        # Each row is looked up once: texts of a batch share most of their features, and a gradient
        # of distinct rows is a fraction of one with a row for each id.
        distinct, places = ids.unique(return_inverse=True)
        if distinct.numel() and not 0 <= distinct[0] <= distinct[-1] < len(self.weight):
            raise ValueError(
                f"ids must be in [0, {len(self.weight) - 1}], got values from {distinct[0]} to "
                f"{distinct[-1]}; give the FeatureHashing at most the features of the BagEncoder"
            )
        rows = F.embedding(distinct, self.table.read(), sparse=True)
        if weights is not None:
            weights = weights.to(rows.dtype)
        bags = F.embedding_bag(places, rows, offsets.long(), mode="sum", per_sample_weights=weights)
        hidden: Tensor = self.activation(bags)
        return hidden


class _BiasedReLU(nn.Module):
    """relu(x + bias). A module after the table, so that parameters are in the order of old runs."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(inputs + self.bias)


def _encode(text: str, number: int) -> bytes:
    if not isinstance(text, str):
        raise TypeError(
            f"texts must be str, got {type(text).__name__} at {number}; decode it first"
        )
    # A lone surrogate, as in file names that are not UTF-8, is encoded too.
    return text.encode("utf-8", "surrogatepass")


def _mix_(units: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The units, overwritten by `_hashing.mix` of them: NumPy's products wrap modulo 2^64 too."""
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        units ^= units >> np.uint64(shift)
        units *= np.uint64(multiplier)
    units ^= units >> np.uint64(31)
    return units


def _words(data: Bytes, ends: Numbers) -> tuple[npt.NDArray[np.uint64], Numbers]:
    """A number below 2^32 for each word: the upper half of sum byte_k base^(k + 1) mod 2^64."""
    is_part = _IS_WORD_BYTE[data]
    # Data begins and ends with a zero byte, so every word has a start and an end.
    edges = np.flatnonzero(is_part[1:] != is_part[:-1]) + 1
    starts, stops = edges[0::2], edges[1::2]
    lengths = stops - starts
    if not lengths.size:
        return np.zeros(0, dtype=np.uint64), np.zeros(ends.size, dtype=np.int64)
    powers = np.cumprod(np.full(int(lengths.max()), _WORD_BASE))
    firsts = np.cumsum(lengths) - lengths  # the first byte of each word among the bytes of words
    places = np.arange(int(lengths.sum())) - np.repeat(firsts, lengths)
    terms = data[is_part].astype(np.uint64) * powers[places]
    counts = np.searchsorted(starts, ends)
    return np.add.reduceat(terms, firsts) >> np.uint64(32), np.diff(counts, prepend=0)
