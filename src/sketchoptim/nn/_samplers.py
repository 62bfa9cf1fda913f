"""Distributions over class ids that negatives are drawn from, and the draws."""

import math
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy.typing as npt
import torch
from torch import Tensor

from .._validation import check_choice, check_positive_int

Repeats = Literal["merged", "kept", "redrawn"]

# At most this many ids are drawn at once: how many draws many distinct ids take is not known.
_LARGEST_DRAW = 1 << 20


class Sampler(Protocol):
    """A distribution over class ids: draws ids, and returns the probability of each."""

    classes: int

    def draw(
        self, count: int, *, generator: torch.Generator | None, device: torch.device
    ) -> Tensor:
        """Independent draws, int64 [count]; ids may repeat."""
        ...

    def probability(self, ids: Tensor) -> Tensor:
        """p(id) of a single draw, float64 and positive, with the shape of `ids`."""
        ...


class LogUniformSampler:
    """The log-uniform (Zipfian) distribution: p(id) = log((id + 2) / (id + 1)) / log(classes + 1).

    It suits ids that are sorted by descending count. Draws invert the distribution function:
    floor((classes + 1)^u) - 1 for uniform u in [0, 1) is `id` exactly when
    log(id + 1) <= u log(classes + 1) < log(id + 2), an interval of length p(id), id 0 included.
    The ends of an interval are off by at most 2^-51, four steps of u.
    Test: `tests/nn/test_samplers.py::test_every_id_has_an_interval_as_long_as_its_probability`.

    Example:
        >>> sampler = LogUniformSampler(1000)
        >>> sampler.probability(torch.arange(1000)).sum().round(decimals=12)
        tensor(1., dtype=torch.float64)
    """

    def __init__(self, classes: int) -> None:
        self.classes = check_positive_int("classes", classes)
        self._log_range = math.log(classes + 1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.classes})"

    def draw(
        self, count: int, *, generator: torch.Generator | None, device: torch.device
    ) -> Tensor:
        """Independent draws, int64 [count]; ids may repeat."""
        return self.from_uniform(_uniform(count, generator, device))

    def from_uniform(self, uniform: Tensor) -> Tensor:
        """The ids that float64 numbers in [0, 1) select."""
        ids = (uniform * self._log_range).exp().floor().long() - 1
        # For a number within an ulp of 1, exp() may round up to classes + 1.
        return ids.clamp_(0, self.classes - 1)

    def probability(self, ids: Tensor) -> Tensor:
        """p(id) of a single draw, float64, with the shape of `ids`."""
        # For large ids, log1p(1 / (id + 1)) keeps digits that log((id + 2) / (id + 1)) loses.
        return torch.log1p(1.0 / (ids.double() + 1.0)) / self._log_range


class UnigramSampler:
    """Any distribution: p(id) = counts[id] / counts.sum(), drawn in constant time.

    The alias method: each of `classes` equally probable columns belongs to one id below its
    threshold and to another id, its alias, above. The columns are computed in integers, so draws
    follow `probability` exactly. It differs from the share of the counts by at most
    2 classes / 2^62 for every class but the most frequent, which absorbs the rounding.
    Tests: `tests/nn/test_samplers.py::test_the_alias_method_gives_every_class_its_share`,
    `tests/nn/test_samplers.py::test_alias_draws_follow_the_probabilities_exactly`.

    Args:
        counts: [classes], a tensor, an array or a list, finite and > 0; counts ** 0.75 is a
            common choice for words.

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
        """Independent draws, int64 [count]; ids may repeat."""
        return self.from_uniform(
            _uniform(count, generator, device), _uniform(count, generator, device)
        )

    def from_uniform(self, column: Tensor, height: Tensor) -> Tensor:
        """The ids that pairs of float64 numbers in [0, 1) select: a column, and a height in it."""
        threshold, alias, _ = self._on(column.device)
        # Not randint(): its modulo favours small numbers by up to classes / 2^32.
        at = (column * self.classes).long().clamp_(max=self.classes - 1)
        return torch.where(height < threshold[at], at, alias[at])

    def probability(self, ids: Tensor) -> Tensor:
        """p(id) of a single draw, float64, with the shape of `ids`."""
        return self._on(ids.device)[2][ids]

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Threshold, alias and probability of every class; each device gets one copy."""
        if device not in self._tables:
            threshold, alias, probability = self._tables[torch.device("cpu")]
            self._tables[device] = threshold.to(device), alias.to(device), probability.to(device)
        return self._tables[device]


def _alias_tables(share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Threshold [classes], alias [classes] and the probability [classes] that they imply.

    Vose's algorithm without its loop. The loop fills the columns of light classes, one after
    another, from the first heavy class that has something left. A heavy class that is left with
    less than its own column is filled from the next heavy class. Let D_1 < D_2 < ... be the running
    sums of what light classes lack, and E_1 <= E_2 <= ... those of what heavy classes can spare.
    Then light class k is filled by the first heavy class j with E_j >= D_(k-1), and heavy class j
    keeps 1 + E_j - D_k for the first k with D_k > E_j.
    """
    classes = share.numel()
    # Integers make these sums exact. A column holds `unit`; the sum of all columns fits into int64.
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
    """The distinct ids of one draw of negatives.

    `ids` int64 [drawn] are in ascending order; `counts` int64 [drawn] are ones unless repeats were
    kept; `tries` is the number of single draws.
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
        """`samples` draws, with repeats "merged" into one, "kept" as counts, or "redrawn".

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
        """The logarithm of the expected count of an id with this probability.

        The expected count is tries * p when repeats are kept, else the probability
        1 - (1 - p)^tries that the id was drawn. TensorFlow's samplers document the latter for
        unique=True, which is "redrawn" here.
        """
        if self.repeats == "kept":
            return (self.tries * probability).log()
        return (-torch.expm1(self.tries * torch.log1p(-probability))).log()


def check_repeats(repeats: Repeats, samples: int, sampler: Sampler) -> None:
    """Raises where the sampler cannot make such a draw."""
    check_choice("repeats", repeats, get_args(Repeats))
    check_positive_int("samples", samples)
    if repeats == "redrawn" and samples > sampler.classes:
        raise ValueError(
            f"samples must be <= classes = {sampler.classes} when repeats are redrawn, got "
            f"{samples}; there are no more distinct ids"
        )


def _first_distinct(
    sampler: Sampler, samples: int, generator: torch.Generator | None, device: torch.device
) -> tuple[Tensor, int]:
    """The first `samples` distinct ids of repeated draws, and the number of draws they took."""
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
        tries, size = tries + size, min(2 * size, _LARGEST_DRAW)
