"""Where negatives come from: laws over class ids, and what one draw from them is worth."""

import math
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy.typing as npt
import torch
from torch import Tensor

from ._checks import check_positive

Repeats = Literal["merged", "kept", "redrawn"]

# The most ids that are drawn at once: what is needed to find many distinct ones is not known.
_MOST_AT_ONCE = 1 << 20


class Sampler(Protocol):
    """A law over class ids: draws from it and knows how likely each id is."""

    classes: int

    def draw(
        self, count: int, *, generator: torch.Generator | None, device: torch.device
    ) -> Tensor:
        """Independent ids, int64 [count], with their repeats."""
        ...

    def probability(self, ids: Tensor) -> Tensor:
        """p(id) of a single draw, float64, of the shape of `ids`, above zero."""
        ...


class LogUniformSampler:
    """Zipf's law: p(id) = log((id + 2) / (id + 1)) / log(classes + 1).

    Fits ids that are sorted by falling count. Draws invert the distribution function exactly:
    id = floor((classes + 1)^u) - 1 for uniform u in [0, 1) falls on `id` just when
    log(id + 1) <= u log(classes + 1) < log(id + 2), an interval of length p(id), id 0 included.
    Its ends are off by at most 2^-51, which is four steps of u.
    Test: `tests/nn/test_samplers.py::test_every_id_owns_the_interval_it_is_corrected_with`.

    Example:
        >>> sampler = LogUniformSampler(1000)
        >>> sampler.probability(torch.arange(1000)).sum().round(decimals=12)
        tensor(1., dtype=torch.float64)
    """

    def __init__(self, classes: int) -> None:
        check_positive(classes=classes)
        self.classes = classes
        self._log_range = math.log(classes + 1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.classes})"

    def draw(
        self, count: int, *, generator: torch.Generator | None, device: torch.device
    ) -> Tensor:
        """Independent ids, int64 [count], with their repeats."""
        return self.from_uniform(_uniform(count, generator, device))

    def from_uniform(self, uniform: Tensor) -> Tensor:
        """The ids that float64 numbers in [0, 1) fall on."""
        ids = (uniform * self._log_range).exp().floor().long() - 1
        # exp() may round up to classes + 1 for a number within an ulp of 1
        return ids.clamp_(0, self.classes - 1)

    def probability(self, ids: Tensor) -> Tensor:
        """p(id) of a single draw, float64, of the shape of `ids`."""
        # log1p(1 / (id + 1)) keeps the digits that log((id + 2) / (id + 1)) loses for large ids
        return torch.log1p(1.0 / (ids.double() + 1.0)) / self._log_range


class UnigramSampler:
    """Any law: p(id) = counts[id] / counts.sum(), drawn in constant time by the alias method.

    Each of `classes` equally likely columns belongs to one id below its threshold and to another
    one, its alias, above. The table is built in whole numbers, so draws follow `probability` to
    the last bit, and |probability - share| <= 2 classes / 2^62 for all shares of the counts but
    the largest, which takes up what rounding left.
    Tests: `tests/nn/test_samplers.py::test_the_alias_table_gives_every_class_its_share`,
    `tests/nn/test_samplers.py::test_the_alias_table_is_drawn_from_as_it_is_corrected_with`.

    Args:
        counts: [classes], a tensor, an array or a list, finite and above zero; counts ** 0.75 is a
            usual choice for words.

    Example:
        >>> sampler = UnigramSampler(torch.tensor([1, 2, 5]))
        >>> sampler.probability(torch.arange(3))
        tensor([0.1250, 0.2500, 0.6250], dtype=torch.float64)

    References: Walker 1977, An efficient method for generating discrete random variables with
    general distributions; Vose 1991, A linear algorithm for generating random numbers with a
    given distribution.
    """

    def __init__(self, counts: Tensor | npt.ArrayLike) -> None:
        weights = torch.as_tensor(counts, dtype=torch.float64, device="cpu").detach()
        if weights.dim() != 1 or weights.numel() < 1:
            raise ValueError(f"counts must have shape (classes,), got {tuple(weights.shape)}")
        if not (weights.isfinite().all() and (weights > 0).all()):
            raise ValueError(
                f"counts must be finite and > 0, got values from {weights.min().item()} to "
                f"{weights.max().item()}; give unseen classes a small count: counts.clamp(min=1)"
            )
        self.classes = weights.numel()
        tables = _alias_tables(weights / weights.sum())
        self._tables = {torch.device("cpu"): tables}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(<{self.classes} counts>)"

    def draw(
        self, count: int, *, generator: torch.Generator | None, device: torch.device
    ) -> Tensor:
        """Independent ids, int64 [count], with their repeats."""
        return self.from_uniform(
            _uniform(count, generator, device), _uniform(count, generator, device)
        )

    def from_uniform(self, column: Tensor, height: Tensor) -> Tensor:
        """The ids that two float64 numbers in [0, 1) fall on, along and up the table."""
        threshold, alias, _ = self._on(column.device)
        # not randint(), whose remainders favour small numbers by up to classes / 2^32
        at = (column * self.classes).long().clamp_(max=self.classes - 1)
        return torch.where(height < threshold[at], at, alias[at])

    def probability(self, ids: Tensor) -> Tensor:
        """p(id) of a single draw, float64, of the shape of `ids`."""
        return self._on(ids.device)[2][ids]

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Threshold, alias and probability of every class, copied to a device once."""
        if device not in self._tables:
            threshold, alias, probability = self._tables[torch.device("cpu")]
            self._tables[device] = threshold.to(device), alias.to(device), probability.to(device)
        return self._tables[device]


def _alias_tables(share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Threshold [classes], alias [classes] and the probability [classes] that both amount to.

    Vose's loop, without the loop. It fills the columns of the light classes, one after another,
    from the first heavy class that has something left; one that is left with less than its own
    column is filled from the next. So when light classes lack D_1 < D_2 < ... and heavy ones
    have E_1 <= E_2 <= ... to spare, summed up in that order, then light k is filled by the first
    heavy j with E_j >= D_(k-1), and heavy j keeps 1 + E_j - D_k for the first k with D_k > E_j.
    """
    classes = share.numel()
    # whole numbers, so that these sums are exact: a column holds `unit`, and all fit into int64
    unit = 1 << (62 - classes.bit_length())
    owned = (share * classes * unit).round().long().clamp_(min=1)
    owned[owned.argmax()] += classes * unit - owned.sum()
    kept, alias = owned.clamp(max=unit), torch.arange(classes, device=share.device)
    light, heavy = (owned < unit).nonzero()[:, 0], (owned >= unit).nonzero()[:, 0]
    lacking, spare = (unit - owned[light]).cumsum(0), (owned[heavy] - unit).cumsum(0)
    before = torch.cat([lacking.new_zeros(1), lacking])[:-1]
    alias[light] = heavy[torch.searchsorted(spare, before)]
    emptied_at = torch.searchsorted(lacking, spare, right=True)
    emptied = (emptied_at < light.numel()).nonzero()[:, 0]
    kept[heavy[emptied]] = unit + spare[emptied] - lacking[emptied_at[emptied]]
    alias[heavy[emptied]] = heavy[emptied + 1]
    return kept.double() / unit, alias, owned.double() / (classes * unit)


def _uniform(count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    return torch.rand(count, dtype=torch.float64, generator=generator, device=device)


@dataclass(frozen=True, kw_only=True)
class Negatives:
    """The distinct ids of one draw, and how often each id was to be expected in it.

    `ids` int64 [drawn] ascend; `counts` int64 [drawn] are ones unless repeats were kept; `tries`
    is how many single draws were made.
    """

    ids: Tensor
    counts: Tensor
    tries: int
    repeats: Repeats

    @classmethod
    def draw(
        cls,
        sampler: Sampler,
        samples: int,
        *,
        repeats: Repeats,
        generator: torch.Generator | None = None,
        device: torch.device | None = None,
    ) -> "Negatives":
        """What `samples` draws give, repeats "merged" into one, "kept" as counts or "redrawn".

        Example:
            >>> sampler = LogUniformSampler(1000)
            >>> Negatives.draw(sampler, 5, repeats="redrawn").ids.numel()
            5
        """
        check_repeats(repeats, samples, sampler)
        device = device or torch.device("cpu")
        if repeats == "redrawn":
            ids, tries = _first_distinct(sampler, samples, generator, device)
            return cls(ids=ids, counts=torch.ones_like(ids), tries=tries, repeats=repeats)
        drawn = sampler.draw(samples, generator=generator, device=device)
        ids, counts = drawn.unique(return_counts=True)
        if repeats == "merged":
            counts = torch.ones_like(ids)
        return cls(ids=ids, counts=counts, tries=samples, repeats=repeats)

    def log_expected_count(self, probability: Tensor) -> Tensor:
        """log of what `counts` is for an id of this probability in the mean over draws.

        tries * p when repeats are kept, else the probability 1 - (1 - p)^tries that it is there.
        The latter is also what TensorFlow's samplers document for unique=True, our "redrawn".
        """
        if self.repeats == "kept":
            return (self.tries * probability).log()
        return (-torch.expm1(self.tries * torch.log1p(-probability))).log()


def check_repeats(repeats: Repeats, samples: int, sampler: Sampler) -> None:
    """Raises where a draw cannot be what it is asked to be."""
    if repeats not in get_args(Repeats):
        raise ValueError(f"repeats must be 'merged', 'kept' or 'redrawn', got {repeats!r}")
    if repeats == "redrawn" and samples > sampler.classes:
        raise ValueError(
            f"samples must be <= classes = {sampler.classes} when repeats are redrawn, got "
            f"{samples}; there are no more distinct ones"
        )


def _first_distinct(
    sampler: Sampler, samples: int, generator: torch.Generator | None, device: torch.device
) -> tuple[Tensor, int]:
    """The first `samples` distinct ids of an endless draw, and how many draws that took."""
    found = torch.empty(0, dtype=torch.int64, device=device)
    tries, size = 0, 2 * samples
    while True:
        drawn = torch.cat([found, sampler.draw(size, generator=generator, device=device)])
        ids, at = drawn.unique(return_inverse=True)
        place = torch.arange(drawn.numel(), device=device)
        first = torch.full_like(ids, drawn.numel()).scatter_reduce_(0, at, place, "amin")
        if ids.numel() >= samples:
            last = int(first.kthvalue(samples).values)
            return ids[first <= last], tries + last + 1 - found.numel()
        found = ids[first.argsort()]
        tries, size = tries + size, min(2 * size, _MOST_AT_ONCE)
