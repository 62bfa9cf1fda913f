"""Proved bounds: sketch sizes from errors, and errors from sketch sizes.

`docs/theory.md` has the proofs. `CountMinSketch.for_error` and `CountSketch.for_error` build the
sizes.
"""

import math
from typing import NamedTuple

from ._validation import check_positive, check_positive_int

# A hash row of a count-sketch exceeds its error with at most this probability.
_MISS = 1 / 8
# Relative errors between which a sketch is "fine".
_WIDE, _NARROW = 0.05, 1.0


class SketchSize(NamedTuple):
    """The number of hash rows, and of buckets in each."""

    depth: int
    width: int


class Guarantee(NamedTuple):
    """With probability `1 - delta`, every error is at most `epsilon` times the norm."""

    epsilon: float
    delta: float


def count_min_size(*, epsilon: float, delta: float, items: int = 1, dim: int = 1) -> SketchSize:
    """The smallest count-min sketch that overestimates by at most ``epsilon * l1 norm``.

    In one hash row, the expected contribution of other items to an item's bucket is
    ``l1 norm / width``. It exceeds ``e`` times that with probability at most ``1 / e`` (Markov),
    and in all `depth` independent rows with probability at most ``e ** -depth``. For all
    ``items * dim`` numbers at once::

        width >= e / epsilon,    depth >= ln(items * dim / delta)

    >>> count_min_size(epsilon=0.001, delta=0.01, items=1_000_000)
    SketchSize(depth=19, width=2719)
    """
    _check_error(epsilon, delta, items, dim)
    depth = max(1, math.ceil(math.log(items * dim / delta)))
    return SketchSize(depth, math.ceil(math.e / epsilon))


def count_sketch_size(*, epsilon: float, delta: float, items: int = 1, dim: int = 1) -> SketchSize:
    """The smallest count-sketch whose estimates are within ``epsilon * l2 norm``; depth is odd.

    The error of a hash row is larger with probability at most ``1 / (width epsilon^2) = 1/8``
    (Chebyshev). The error of the median is larger only if that of half of the `depth` rows is, with
    probability at most ``(4 * 1/8 * 7/8) ^ (depth / 2)`` (Chernoff)::

        width >= 8 / epsilon^2,    depth >= 2.42 ln(items * dim / delta)

    >>> count_sketch_size(epsilon=0.1, delta=0.01, items=1_000_000)
    SketchSize(depth=45, width=800)
    """
    _check_error(epsilon, delta, items, dim)
    rate = -math.log(4 * _MISS * (1 - _MISS)) / 2
    depth = math.ceil(math.log(items * dim / delta) / rate)
    return SketchSize(depth + 1 - depth % 2, math.ceil(1 / (_MISS * epsilon**2)))


def count_min_guarantee(*, depth: int, width: int, items: int = 1, dim: int = 1) -> Guarantee:
    """The bound of `count_min_size` for a given size; delta is 1 where it guarantees nothing.

    >>> count_min_guarantee(depth=3, width=1386)
    Guarantee(epsilon=0.0019612423004755014, delta=0.049787068367863944)
    """
    for name, count in (("depth", depth), ("width", width), ("items", items), ("dim", dim)):
        check_positive_int(name, count)
    return Guarantee(math.e / width, min(1.0, items * dim * math.exp(-depth)))


def error_verdict(relative_error: float) -> str:
    """Whether a sketched moment with this relative error is "fine", "wide" or "too narrow".

    The relative error is ``e = |estimate - v| / |v|`` in l2 over the rows. For a second moment
    whose estimates are never below the truth, as lean's, steps shrink by ``sqrt(v / estimate)``.
    The mean of that over the rows, weighted by ``v^2``, is at least ``1 / sqrt(1 + e)``
    (`tests/test_theory.py::test_the_mean_step_is_at_least_what_the_verdict_promises`).

    - Above 1 it is too narrow: the bound is below 0.71, and for a first moment the estimates are
      further from the truth than zeros are.
    - Below 0.05 it is wide: the bound is above 0.97, so fewer counters would do.
    - Otherwise it is fine.

    The error of rare rows hardly counts: their share of ``v^2`` is small.

    >>> error_verdict(0.3)
    'fine'
    """
    if not relative_error >= 0.0:
        raise ValueError(f"relative_error must be at least 0, got {relative_error}")
    if relative_error > _NARROW:
        return f"too narrow: error above {_NARROW:g}"
    return "wide" if relative_error < _WIDE else "fine"


def _check_error(epsilon: float, delta: float, items: int, dim: int) -> None:
    check_positive("epsilon", epsilon, below=1.0)
    check_positive("delta", delta, below=1.0)
    check_positive_int("items", items)
    check_positive_int("dim", dim)
