"""How far a sketched second moment will be off, told before training from row frequencies alone.

A sketch in small is run over made-up gradients: as many buckets as tell the answer, and of every
class of rows as many as fall into them. What it needs to know of gradients is a law that holds on
real models (`benchmarks/prediction.py`): over a training run, a row's squared gradients are nearly
in proportion to how often it occurs. A row that occurs ``c`` times in a step, ``r`` times in the
mean, has

    g ~ normal(0, u(r) * (s_1 + ... + s_c)) in each column,   s lognormal with mean 1,

where ``s``, how much there was to learn, differs by orders of magnitude from one occurrence to the
next, and ``u(r)`` departs from proportion by small powers: rarer rows are less well learned, and
the gradients that a frequent row gets in one step are alike, so that they add up.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..storage import Sketched
from ._frequencies import RowFrequencies

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Chosen on WikiText-2, seeds 0 to 2: the spread of the logarithm of s, and the powers of the rate
# by which u(r) grows towards rare rows, and towards those that occur more than once a step.
_SPREAD, _RARER, _ALIKE = 2.0, 0.05, 0.07
# What a simulation is made of: steps it is cut into, of which the last are looked at, and touches
# of a row in all of them together, about.
_STEPS, _LOOKED_AT = 512, 64
_TOUCHES = 1 << 16
_FEWEST_BUCKETS = 8
# Where nothing is forgotten, relative errors hardly change any more after so many steps.
_LONGEST = 16 * _STEPS
# Rows that occur about once a step or more are drawn one by one, all others as events.
_HOT = 0.5


@dataclass(frozen=True)
class PredictedError:
    """How far estimates of the second moment are off, over the rows that a step touches."""

    relative: float
    """``l2 norm of (estimate - truth) / l2 norm of the truth``; frequent rows weigh most."""
    median: float
    """The middle of ``(estimate - truth) / truth`` over rows; rare rows weigh most."""


NO_ERROR = PredictedError(0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What training does to a table.

    Args:
        frequencies: Of the table's rows.
        ids_per_step: Ids that a step looks up, repeated ones included.
        decay: beta2 of Adam; 1 where nothing is forgotten, as in Adagrad.
        steps: Of training; those before the last ``2 / (1 - decay)`` are forgotten.
    """

    frequencies: RowFrequencies
    ids_per_step: int
    decay: float
    steps: int

    def __post_init__(self) -> None:
        for name in ("ids_per_step", "steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay, which is beta2, must be in [0, 1], got {self.decay}")


class _System(NamedTuple):
    """The sketch in small: classes of rows, and the buckets that they share."""

    rows: Ints
    occurrences: Floats
    """Of one row of the class in a step."""
    energies: Floats
    """That one occurrence brings, in the mean."""
    weights: Floats
    """Rows that the class stands for, of those that one step of the whole table touches."""
    squares: Floats
    """The same where squares of the truth are summed, since a class may stand for unequal rows."""
    buckets: int


@functools.lru_cache(maxsize=1024)
def predicted_error(
    storage: Sketched, workload: Workload, *, dim: int, seed: int = 0
) -> PredictedError:
    """The error of a second moment in such a sketch at the end of training, from collisions alone.

    The truth is the same moment, in the same granularity, kept without collisions. Takes tens of
    milliseconds for a table of any size. On WikiText-2 it is within a factor of 2 of what training
    measures (`benchmarks/prediction.py`), and of sketches that are run on the gradients it assumes
    (`tests/diagnostics/test_prediction.py::test_a_prediction_is_within_a_factor_of_2_of_a_run`).

    Args:
        storage: Where the second moment lives; ``decay="linear"``.
        workload: What training does to the table.
        dim: Columns of the table.
        seed: Of the made-up gradients.

    >>> text = RowFrequencies.zipf(33_278)
    >>> workload = Workload(frequencies=text, ids_per_step=1120, decay=0.999, steps=1000)
    >>> error = predicted_error(Sketched(ratio=1 / 8, conservative=True), workload, dim=256)
    >>> 0.005 < error.relative < 0.05 < error.median < 5
    True
    """
    if storage.decay != "linear":
        raise ValueError(f'storage must have decay="linear" to be predicted, got {storage.decay!r}')
    depth, width, columns = storage.table_shape(workload.frequencies.total_rows, dim)
    decay = float(workload.decay)
    remembered = min(workload.steps, _LONGEST if decay == 1 else math.ceil(2 / (1 - decay)))
    merged = max(1, math.ceil(remembered / _STEPS))
    system = _scaled_down(workload, width, merged, dim)
    random = np.random.default_rng(seed)
    step, row, energy = _touches(system, -(-remembered // merged), merged, random)
    averaged = dim // columns  # elements a number stands for
    energy *= random.chisquare(averaged, energy.size) / averaged
    growth = decay ** (-merged * step)
    return _measured(storage, system, depth, step, row, energy * growth, random)


def occurrence_energy(occurrences: Floats, *, dim: int) -> Floats:
    """``u(r)``: the energy, in the mean, of one occurrence of a row that has ``r`` in a step.

    Numbers, such as biases, do not add up as vectors do: those of a frequent row cancel.
    """
    alike = _ALIKE if dim > 1 else -_RARER
    return np.where(occurrences > 1, occurrences**alike, occurrences**-_RARER)


def _scaled_down(workload: Workload, width: int, merged: int, dim: int) -> _System:
    """Fewer buckets, with as many rows of every kind in each; hot rows of a kind become one."""
    occurrences = np.array(workload.frequencies.shares) * workload.ids_per_step
    rows = np.array(workload.frequencies.rows, dtype=np.float64)[occurrences > 0]
    occurrences = occurrences[occurrences > 0]
    energies = occurrence_energy(occurrences, dim=dim)
    touched = rows * -np.expm1(-occurrences)
    share = _TOUCHES / (_STEPS * (rows * -np.expm1(-occurrences * merged)).sum())
    share = min(1.0, max(share, _FEWEST_BUCKETS / width))
    kept: list[tuple[int, float, float, float, float]] = []
    # rows in small, their occurrences and the energy of these, touched rows, their squared truths
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
    """Every touch of a row in order of time: its step, its row, its gradient's mean square."""
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
    # a sum of lognormals is about lognormal, with the variance of one over their number
    variance = np.log1p(math.expm1(_SPREAD**2) / count)
    energy = count * random.lognormal(-variance / 2, np.sqrt(variance))
    energy *= np.repeat(system.energies, system.rows)[row]
    order = np.argsort(step, kind="stable")
    return step[order], row[order], energy[order]


def _measured(
    storage: Sketched,
    system: _System,
    depth: int,
    step: Ints,
    row: Ints,
    energy: Floats,
    random: np.random.Generator,
) -> PredictedError:
    """Runs the sketch over the touches, whose energies grow in place of a table that decays."""
    touched, position = np.unique(row, return_inverse=True)
    kinds = np.searchsorted(np.cumsum(system.rows), touched, side="right")
    at = random.integers(0, system.buckets, (depth, touched.size))
    at += np.arange(depth)[:, None] * system.buckets
    table, truth = np.zeros(depth * system.buckets), np.zeros(touched.size)
    steps = int(step[-1]) + 1 if step.size else 0
    ends = np.searchsorted(step, np.arange(steps), side="right")
    seen: list[tuple[Ints, Floats, Floats]] = []
    for number, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        rows, added = position[start:end], energy[start:end]
        buckets = at[:, rows]
        if storage.conservative:
            np.maximum.at(table, buckets.ravel(), np.tile(table[buckets].min(0) + added, depth))
        else:
            np.add.at(table, buckets.ravel(), np.tile(added, depth))
        truth[rows] += added
        if number >= steps - _LOOKED_AT:
            seen.append((kinds[rows], table[buckets].min(0), truth[rows]))
    if not seen:
        return NO_ERROR
    kind, estimate, exact = (np.concatenate(parts) for parts in zip(*seen, strict=True))
    # A small system, and steps merged into one, touch more of the rare rows than a real step.
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
