"""The error of a sketched second moment, predicted before training from row frequencies alone.

A small sketch is simulated on synthetic gradients: it has a share of the buckets, and the same
share of the rows of every class. The gradients follow a distribution that fits real models
(`experiments/studies/prediction.py`): over a training run, a row's squared gradients are nearly
proportional to how often it occurs. A row that occurs ``c`` times in a step, with expectation
``r``, has

    g ~ normal(0, u(r) * (s_1 + ... + s_c)) in each column,   s lognormal with mean 1,

where ``s``, the squared gradient of one occurrence, varies by orders of magnitude, and ``u(r)``
corrects the proportion by small powers: rare rows are less well learned, and the gradients that a
frequent row gets in one step are correlated, so that they add up.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._validation import check_positive_int
from ..storage import Sketched
from ._frequencies import RowFrequencies

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Fitted on WikiText-2, seeds 0 to 2: the standard deviation of log(s), and the powers of r by which
# u(r) grows towards rare rows, and towards those that occur more than once per step.
_SPREAD, _RARER, _CORRELATED = 2.0, 0.05, 0.07
# Steps of a simulation, of which the last ones are measured, and about how many touches of a row
# all of them have together.
_STEPS, _MEASURED_STEPS = 512, 64
_TOUCHES = 1 << 16
_FEWEST_BUCKETS = 8
# Without decay, relative errors hardly change after this many steps.
_LONGEST = 16 * _STEPS
# Rows that occur at least this often per step are drawn one by one, all others as events.
_HOT = 0.5


@dataclass(frozen=True)
class PredictedError:
    """The error of the second moment's estimates, over the rows that a step touches."""

    relative: float
    """``l2 norm of (estimate - truth) / l2 norm of the truth``; frequent rows weigh most."""
    median: float
    """The median of ``(estimate - truth) / truth`` over rows; rare rows weigh most."""


NO_ERROR = PredictedError(0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How training touches a table.

    Args:
        frequencies: Of the table's rows.
        ids_per_step: Ids that a step looks up, repeated ones included.
        decay: beta2 of Adam; 1 for a sum without decay, as in Adagrad.
        steps: Training steps; only the last ``2 / (1 - decay)`` of them matter.
    """

    frequencies: RowFrequencies
    ids_per_step: int
    decay: float
    steps: int

    def __post_init__(self) -> None:
        check_positive_int("ids_per_step", self.ids_per_step)
        check_positive_int("steps", self.steps)
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay, which is beta2, must be in [0, 1], got {self.decay}")

    def distinct_rows(self) -> float:
        """How many rows a step is expected to touch."""
        rows, shares = np.array(self.frequencies.rows), np.array(self.frequencies.shares)
        return float(rows @ -np.expm1(self.ids_per_step * np.log1p(-np.minimum(shares, 1 - 1e-15))))


class _System(NamedTuple):
    """The small sketch: classes of rows, and the buckets that they share."""

    rows: Ints
    occurrences: Floats
    """Expected occurrences of one row of the class per step."""
    energies: Floats
    """The expected squared gradient of one occurrence."""
    weights: Floats
    """Rows that the class represents, of those that one step touches in the whole table."""
    squares: Floats
    """The weights for sums of squared truths: a class may represent rows of unequal frequency."""
    buckets: int


@functools.lru_cache(maxsize=1024)
def predicted_error(
    storage: Sketched, workload: Workload, *, dim: int, seed: int = 0
) -> PredictedError:
    """The error that collisions cause in a sketched second moment at the end of training.

    The truth is the same moment in the same granularity without collisions. A prediction takes tens
    of milliseconds for a table of any size. It is within a factor of 2 of the error measured in
    training on WikiText-2 (`experiments/studies/prediction.py`), and of that of sketches on the
    gradients it assumes
    (`tests/planning/test_prediction.py::test_a_prediction_is_within_a_factor_of_2_of_a_run`).

    Args:
        storage: Where the second moment lives; ``decay="linear"``.
        workload: How training touches the table.
        dim: Columns of the table.
        seed: Of the synthetic gradients.

    >>> text = RowFrequencies.zipf(33_278)
    >>> workload = Workload(frequencies=text, ids_per_step=1120, decay=0.999, steps=1000)
    >>> error = predicted_error(Sketched(ratio=1 / 8, conservative=True), workload, dim=256)
    >>> 0.005 < error.relative < 0.05 < error.median < 5
    True
    """
    if storage.decay != "linear":
        raise ValueError(f'storage must have decay="linear" to be predicted, got {storage.decay!r}')
    depth, width, columns = storage.counters_shape(workload.frequencies.total_rows, dim)
    decay = float(workload.decay)
    remembered = min(workload.steps, _LONGEST if decay == 1 else math.ceil(2 / (1 - decay)))
    merged = max(1, math.ceil(remembered / _STEPS))
    system = _small_system(workload, width, merged, dim)
    random = np.random.default_rng(seed)
    step, row, energy = _touches(system, -(-remembered // merged), merged, random)
    elements = dim // columns  # the elements that one counter averages
    energy *= random.chisquare(elements, energy.size) / elements
    growth = decay ** (-merged * step)
    return _simulate(storage, system, depth, step, row, energy * growth, random)


def occurrence_energy(occurrences: Floats, *, dim: int) -> Floats:
    """``u(r)``: the expected squared gradient of one of the ``r`` occurrences of a row per step.

    The gradients of single numbers, such as biases, do not add up as those of vectors do: those of
    a frequent row cancel.
    """
    power = _CORRELATED if dim > 1 else -_RARER
    return np.where(occurrences > 1, occurrences**power, occurrences**-_RARER)


def _small_system(workload: Workload, width: int, merged: int, dim: int) -> _System:
    """Fewer buckets with the same load; classes with less than one row left are merged."""
    occurrences = np.array(workload.frequencies.shares) * workload.ids_per_step
    rows = np.array(workload.frequencies.rows, dtype=np.float64)[occurrences > 0]
    occurrences = occurrences[occurrences > 0]
    energies = occurrence_energy(occurrences, dim=dim)
    touched = rows * -np.expm1(-occurrences)
    share = _TOUCHES / (_STEPS * (rows * -np.expm1(-occurrences * merged)).sum())
    share = min(1.0, max(share, _FEWEST_BUCKETS / width))
    kept: list[tuple[int, float, float, float, float]] = []
    # Sums over classes: rows, their occurrences, energy of these, touched rows, squared truths.
    pending = np.zeros(5)
    columns = (rows * share, occurrences, occurrences * energies, touched)
    for size, rate, truth, weight in zip(*columns, strict=True):
        pending += size, size * rate, size * truth, weight, weight * truth**2
        whole = math.floor(pending[0])
        if whole:
            rate, truth = pending[1:3] / pending[0]
            kept.append((whole, rate, truth / rate, pending[3], pending[4] / truth**2))
            pending[:3] *= 1 - whole / pending[0]
            pending[3:] = 0
    sizes, rates, means, weights, squares = (np.array(part) for part in zip(*kept, strict=True))
    return _System(sizes, rates, means, weights, squares, max(1, round(share * width)))


def _touches(
    system: _System, steps: int, merged: int, random: np.random.Generator
) -> tuple[Ints, Ints, Floats]:
    """Every touch of a row, ordered by step: its step, its row, its gradient's mean square."""
    rates = system.occurrences * merged
    first = np.cumsum(system.rows) - system.rows
    hot = rates >= _HOT
    hot_rows = np.repeat(first[hot], system.rows[hot]) + _counting(system.rows[hot])
    hot_counts = random.poisson(np.repeat(rates[hot], system.rows[hot]), (steps, hot_rows.size))
    hot_steps, at = np.nonzero(hot_counts)
    mass = np.cumsum(np.where(hot, 0.0, rates * system.rows))
    events = random.poisson(mass[-1] * steps)
    kind = np.searchsorted(mass, random.random(events) * mass[-1], side="right")
    kind = np.minimum(kind, rates.size - 1)
    cold_rows = first[kind] + (random.random(events) * system.rows[kind]).astype(np.int64)
    total = int(system.rows.sum())
    keys, cold_counts = np.unique(
        random.integers(0, steps, events) * total + cold_rows, return_counts=True
    )
    step = np.concatenate([hot_steps, keys // total])
    row = np.concatenate([hot_rows[at], keys % total])
    count = np.concatenate([hot_counts[hot_steps, at], cold_counts]).astype(np.float64)
    # A sum of lognormals is nearly lognormal; its relative variance is that of one over the count.
    variance = np.log1p(math.expm1(_SPREAD**2) / count)
    energy = count * random.lognormal(-variance / 2, np.sqrt(variance))
    energy *= np.repeat(system.energies, system.rows)[row]
    order = np.argsort(step, kind="stable")
    return step[order], row[order], energy[order]


def _simulate(
    storage: Sketched,
    system: _System,
    depth: int,
    step: Ints,
    row: Ints,
    energy: Floats,
    random: np.random.Generator,
) -> PredictedError:
    """The error of a sketch that took the touches; energies grow instead of counters that decay."""
    touched, position = np.unique(row, return_inverse=True)
    kinds = np.searchsorted(np.cumsum(system.rows), touched, side="right")
    at = random.integers(0, system.buckets, (depth, touched.size))
    at += np.arange(depth)[:, None] * system.buckets
    counters, truth = np.zeros(depth * system.buckets), np.zeros(touched.size)
    steps = int(step[-1]) + 1 if step.size else 0
    ends = np.searchsorted(step, np.arange(steps), side="right")
    seen: list[tuple[Ints, Floats, Floats]] = []
    for number, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        rows, added = position[start:end], energy[start:end]
        buckets = at[:, rows]
        if storage.conservative:
            targets = counters[buckets].min(0) + added
            np.maximum.at(counters, buckets.ravel(), np.tile(targets, depth))
        else:
            np.add.at(counters, buckets.ravel(), np.tile(added, depth))
        truth[rows] += added
        if number >= steps - _MEASURED_STEPS:
            seen.append((kinds[rows], counters[buckets].min(0), truth[rows]))
    if not seen:
        return NO_ERROR
    kind, estimate, exact = (np.concatenate(parts) for parts in zip(*seen, strict=True))
    # Merged steps of a small system touch more of the rare rows than a real step, so rows have
    # weights.
    found = np.bincount(kind, minlength=system.rows.size)
    weight, square = (
        (weights / np.maximum(found, 1))[kind] for weights in (system.weights, system.squares)
    )
    relative = math.sqrt((weight @ (estimate - exact) ** 2) / (square @ exact**2))
    return PredictedError(relative, _weighted_median(estimate / exact - 1, weight))


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    mass = np.cumsum(weights[order])
    return max(0.0, float(values[order][np.searchsorted(mass, mass[-1] / 2)]))


def _counting(sizes: Ints) -> Ints:
    """0, 1, ... up to each size, one after the other."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
