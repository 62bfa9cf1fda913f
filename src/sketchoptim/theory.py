"""Proved bounds: sketch sizes from errors, errors from sketch sizes, and convergence of training.

`docs/theory.md` has the proofs. `CountMinSketch.for_error` and `CountSketch.for_error` build the
sizes.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from ._validation import check_choice, check_number, check_positive, check_positive_int

Form = Literal["conservative", "plain"]

# A hash row of a count-sketch exceeds its error with at most this probability.
_MISS = 1 / 8


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


@dataclass(frozen=True)
class Assumption:
    """A condition of the theorem, ``left <= right``."""

    name: str
    left: float
    right: float

    @property
    def holds(self) -> bool:
        return self.left <= self.right

    def __str__(self) -> str:
        return f"{self.name}: {self.left:.3g} {'<=' if self.holds else '>'} {self.right:.3g}"


@dataclass(frozen=True)
class ConvergenceBound:
    """A bound of the smallest ``E |gradient of f|^2`` over the steps, and its terms."""

    slowdown: float
    """The factor of all terms: twice the largest denominator of a step."""
    progress: float
    """The term of the distance to the minimum; it vanishes as the number of steps grows."""
    noise: float
    """The term of the variance of the gradients."""
    collisions: float
    """The term of rows that share a bucket in one step; 0 for a conservative sketch."""
    delta: float
    """The probability that the bound fails because some estimate has a larger error."""
    assumptions: tuple[Assumption, ...]

    @property
    def holds(self) -> bool:
        return all(assumption.holds for assumption in self.assumptions)

    @property
    def total(self) -> float:
        """The bound; infinite where an assumption fails, because then nothing is proved."""
        if not self.holds:
            return math.inf
        return self.slowdown * (self.progress + self.noise + self.collisions)

    def __str__(self) -> str:
        terms = f"{self.progress:.3g} + {self.noise:.3g} + {self.collisions:.3g}"
        bound = f"min E|grad f|^2 <= {self.slowdown:.3g} * ({terms}) = {self.total:.3g}"
        return "\n".join([bound, *map(str, self.assumptions)])


def convergence_bound(
    *,
    lr: float,
    eps: float,
    beta2: float,
    smoothness: float,
    largest_gradient: float,
    gradient_norm: float,
    variance: float,
    gap: float,
    steps: int,
    rows: int,
    touched: int,
    depth: int,
    width: int,
    form: Form = "conservative",
) -> ConvergenceBound:
    """The theorem of `docs/theory.md`, for steps ``lr * g / (sqrt(v) + eps)`` with a count-min v.

    With ``G = largest_gradient``, ``e1 = e / width``, and ``r = depth * touched / width`` for the
    plain form, 0 for the conservative one::

        min_t E|grad f(x_t)|^2  <=  2 (eps + G sqrt(beta2 (1 + e1 rows))) *
            ( gap / (lr steps)
              + (G sqrt(1 - beta2) / eps^2 * (1 + r) + smoothness lr / (2 eps^2)) variance
              + r G sqrt(1 - beta2) / eps^2 * gradient_norm^2 )

    if ``lr <= eps / (2 smoothness)`` and ``sqrt(1 - beta2) <= eps / (4 G)``. Measured runs stay
    below it (`tests/test_theory.py::test_training_stays_below_the_bound`).

    Args:
        lr, eps, beta2: Options of RMSprop, or of Adam without first moment and bias correction.
        smoothness: L, the Lipschitz constant of the gradient of f.
        largest_gradient: A bound of every element of a gradient, full or stochastic.
        gradient_norm: A bound of the l2 norm of the full gradient.
        variance: Variance of the stochastic gradient of a step, summed over all elements.
        gap: f at the start, minus its smallest value.
        steps: Number of steps.
        rows: Rows of the table; its elements, where the sketch has a number for each.
        touched: The largest number of rows, or elements, with a gradient in one step.
        depth, width: Size of the sketch.
        form: "conservative", as in lean, or "plain" with linear decay.
    """
    counts = {"steps": steps, "rows": rows, "touched": touched, "depth": depth, "width": width}
    for name, count in counts.items():
        check_positive_int(name, count)
    for name, value in {"lr": lr, "eps": eps, "smoothness": smoothness}.items():
        check_positive(name, value)
    check_positive("largest_gradient", largest_gradient)
    for name, value in {"gradient_norm": gradient_norm, "variance": variance, "gap": gap}.items():
        check_number(name, value)
    check_number("beta2", beta2, below=1.0)
    check_choice("form", form, get_args(Form))
    epsilon, delta = count_min_guarantee(depth=depth, width=width, items=rows * steps)
    shared = depth * touched / width if form == "plain" else 0.0
    fresh = largest_gradient * math.sqrt(1 - beta2) / eps**2
    largest_root = largest_gradient * math.sqrt(beta2 * (1 + epsilon * rows))
    return ConvergenceBound(
        slowdown=2 * (eps + largest_root),
        progress=gap / (lr * steps),
        noise=(fresh * (1 + shared) + smoothness * lr / (2 * eps**2)) * variance,
        collisions=shared * fresh * gradient_norm**2,
        delta=delta,
        assumptions=(
            Assumption("lr <= eps / 2L", lr, eps / (2 * smoothness)),
            Assumption(
                "sqrt(1 - beta2) <= eps / 4G", math.sqrt(1 - beta2), eps / (4 * largest_gradient)
            ),
        ),
    )


def _check_error(epsilon: float, delta: float, items: int, dim: int) -> None:
    check_positive("epsilon", epsilon, below=1.0)
    check_positive("delta", delta, below=1.0)
    check_positive_int("items", items)
    check_positive_int("dim", dim)
