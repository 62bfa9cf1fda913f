"""What is proved: sizes from error bounds, error bounds from sizes, and a bound for training.

`docs/theory.md` derives all of it. Sizes are what `CountMinSketch.for_error` and
`CountSketch.for_error` build.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

# A hash row of a count-sketch misses with at most this probability; medians do the rest.
_MISS = 1 / 8


class SketchSize(NamedTuple):
    """Hash rows, and buckets in each."""

    depth: int
    width: int


class Guarantee(NamedTuple):
    """An error of at most `epsilon` norms, for all items and columns, but with odds of `delta`."""

    epsilon: float
    delta: float


def count_min_size(*, epsilon: float, delta: float, items: int = 1, dim: int = 1) -> SketchSize:
    """The smallest count-min sketch that overestimates by at most ``epsilon * l1 norm``.

    In one hash row, the others' share in an item's bucket is ``l1 norm / width`` in the mean, so it
    exceeds ``e`` times that with probability ``1 / e`` at most (Markov), and does so in all `depth`
    independent rows with ``e ** -depth``. For all ``items * dim`` numbers at once::

        width >= e / epsilon,    depth >= ln(items * dim / delta)

    >>> count_min_size(epsilon=0.001, delta=0.01, items=1_000_000)
    SketchSize(depth=19, width=2719)
    """
    _check_error(epsilon, delta, items, dim)
    depth = max(1, math.ceil(math.log(items * dim / delta)))
    return SketchSize(depth, math.ceil(math.e / epsilon))


def count_sketch_size(*, epsilon: float, delta: float, items: int = 1, dim: int = 1) -> SketchSize:
    """The smallest count-sketch whose estimates are within ``epsilon * l2 norm``; depth is odd.

    A hash row misses by more with probability at most ``1 / (width epsilon^2) = 1/8`` (Chebyshev),
    and the median of `depth` rows only if half of them do, with at most ``(4 * 1/8 * 7/8) ^
    (depth / 2)`` (Chernoff)::

        width >= 8 / epsilon^2,    depth >= 2.42 ln(items * dim / delta)

    >>> count_sketch_size(epsilon=0.1, delta=0.01, items=1_000_000)
    SketchSize(depth=45, width=800)
    """
    _check_error(epsilon, delta, items, dim)
    rate = -math.log(4 * _MISS * (1 - _MISS)) / 2
    depth = math.ceil(math.log(items * dim / delta) / rate)
    return SketchSize(depth + 1 - depth % 2, math.ceil(1 / (_MISS * epsilon**2)))


def count_min_guarantee(*, depth: int, width: int, items: int = 1, dim: int = 1) -> Guarantee:
    """What `count_min_size` turned around says of a given size; delta is 1 where nothing is sure.

    >>> count_min_guarantee(depth=3, width=1386)
    Guarantee(epsilon=0.0019612423004755014, delta=0.049787068367863944)
    """
    _check_counts(depth=depth, width=width, items=items, dim=dim)
    return Guarantee(math.e / width, min(1.0, items * dim * math.exp(-depth)))


@dataclass(frozen=True)
class Assumption:
    """One condition of the theorem, ``left <= right``."""

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
    """A bound for the least ``E |gradient of f|^2`` over the steps, and what it consists of."""

    slowdown: float
    """What everything is multiplied by: the largest denominator of a step, twice."""
    progress: float
    """How far there is to go, over the steps: vanishes as they grow."""
    noise: float
    """From the variance of the gradients."""
    collisions: float
    """From rows that share a bucket in one step; nothing in a conservative table."""
    delta: float
    """The probability that some estimate was worse than the bound takes into account."""
    assumptions: tuple[Assumption, ...]

    @property
    def holds(self) -> bool:
        return all(assumption.holds for assumption in self.assumptions)

    @property
    def total(self) -> float:
        """The bound; infinite where an assumption fails, since then nothing is proved."""
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
    form: Literal["conservative", "plain"] = "conservative",
) -> ConvergenceBound:
    r"""The theorem of `docs/theory.md`, for steps ``lr * g / (sqrt(v) + eps)`` over a count-min v.

    With ``G = largest_gradient``, ``e1 = e / width`` and, for the plain form alone, ``r = depth *
    touched / width`` (0 for the conservative one)::

        min_t E|grad f(x_t)|^2  <=  2 (eps + G sqrt(beta2 (1 + e1 rows))) *
            ( gap / (lr steps)
              + (G sqrt(1 - beta2) / eps^2 * (1 + r) + smoothness lr / (2 eps^2)) variance
              + r G sqrt(1 - beta2) / eps^2 * gradient_norm^2 )

    provided that ``lr <= eps / (2 smoothness)`` and ``sqrt(1 - beta2) <= eps / (4 G)``. Measured
    runs stay below it (`tests/test_theory.py::test_training_stays_below_the_bound`).

    Args:
        lr, eps, beta2: Of RMSprop, or of Adam without first moment and bias correction.
        smoothness: L, the Lipschitz constant of the gradient of f.
        largest_gradient: No element of a gradient, full or stochastic, is larger.
        gradient_norm: No full gradient is longer.
        variance: Of the stochastic gradient of a step: the sum over all elements.
        gap: f at the start, minus its least value.
        steps: T.
        rows: Rows of the table; elements, where the sketch has one number for each.
        touched: Rows, or elements, with a gradient in one step, at most.
        depth, width: Of the sketch.
        form: "conservative", as in lean, or "plain" with linear decay.
    """
    _check_counts(steps=steps, rows=rows, touched=touched, depth=depth, width=width)
    for name, value in (
        ("lr", lr),
        ("eps", eps),
        ("smoothness", smoothness),
        ("largest_gradient", largest_gradient),
    ):
        _check_range(name, value, is_open=True)
    for name, value in (("gradient_norm", gradient_norm), ("variance", variance), ("gap", gap)):
        _check_range(name, value)
    _check_range("beta2", beta2, below=1.0)
    if form not in ("conservative", "plain"):
        raise ValueError(f'form must be "conservative" or "plain", got {form!r}')
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
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must be between 0 and 1, got {value}")
    _check_counts(items=items, dim=dim)


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if not count >= 1:
            raise ValueError(f"{name} must be >= 1, got {count}")


def _check_range(
    name: str, value: float, *, below: float = math.inf, is_open: bool = False
) -> None:
    if not (0 <= value < below) or (is_open and value == 0):
        least, most = (
            "> 0" if is_open else ">= 0",
            "finite" if below == math.inf else f"< {below:g}",
        )
        raise ValueError(f"{name} must be {least} and {most}, got {value}")
