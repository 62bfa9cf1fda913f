"""How often the rows of a table are touched: measured, or assumed to follow Zipf's law."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from .._validation import check_number, check_positive_int

Numbers = Tensor | ArrayLike

# Ranks of a class are within 10 % of one another, so that a billion rows make 200 classes.
_GROWTH = 1.1


@dataclass(frozen=True)
class RowFrequencies:
    """Rows by decreasing frequency, in classes of about equal frequency: a histogram, not a list.

    An id is a given row of class ``k`` with probability ``shares[k]``. A billion rows take hardly
    more memory than a thousand, and equal tables compare equal.

    >>> text = RowFrequencies.zipf(793_471, exponent=1.0)
    >>> text.total_rows, round(text.exponent, 2), len(text.rows) < 200
    (793471, 1.0, True)
    """

    rows: tuple[int, ...]
    """Rows of each class, the most frequent class first; never-touched rows come last."""
    shares: tuple[float, ...]
    """The probability that an id is a given row of the class; over all rows they sum to 1."""

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.shares):
            raise ValueError(
                f"rows and shares must be equally long and not empty, "
                f"got {len(self.rows)} and {len(self.shares)}"
            )

    @property
    def total_rows(self) -> int:
        return sum(self.rows)

    @property
    def exponent(self) -> float:
        """The Zipf exponent: minus the slope of log frequency over log rank, by least squares.

        Classes have about equal widths in log rank, so head and tail have equal weight; 0 means
        uniform. Rows that were never seen do not count.
        """
        seen = [(rows, share) for rows, share in zip(self.rows, self.shares, strict=True) if share]
        counts = np.array([rows for rows, _ in seen], dtype=np.float64)
        last = np.cumsum(counts)
        ranks = np.log(last - counts / 2 + 0.5)
        slope = _slope(ranks, np.log([share for _, share in seen]))
        return max(0.0, -slope)

    @classmethod
    def zipf(cls, rows: int, *, exponent: float = 1.0) -> "RowFrequencies":
        """Frequencies proportional to ``rank ** -exponent``; 0 is uniform, text is near 1."""
        check_positive_int("rows", rows)
        check_number("exponent", exponent)
        edges = _edges(rows)
        # From rank 10 on, a sum over ranks is the integral between midpoints, within 0.1 %.
        low, high = edges[:-1] + 0.5, edges[1:] + 0.5
        if exponent == 1:
            mass = np.log(high / low)
        else:
            mass = (high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent)
        sizes = np.diff(edges)
        mass = np.where(sizes == 1, edges[1:] ** -float(exponent), mass)
        return cls._of_mass(sizes, mass)

    @classmethod
    def of_counts(cls, counts: Numbers) -> "RowFrequencies":
        """Measured frequencies: ``counts[rows]`` has the number of touches of each row."""
        numbers = _numpy(counts).astype(np.float64)
        if numbers.ndim != 1 or not numbers.size:
            raise ValueError(f"counts must have shape [rows], got {list(numbers.shape)}")
        if not (np.isfinite(numbers).all() and (numbers >= 0).all() and numbers.any()):
            raise ValueError("counts must be finite, >= 0, and not all 0")
        decreasing = np.sort(numbers)[::-1]
        seen = int(np.count_nonzero(decreasing))
        edges = _edges(seen)
        mass = np.add.reduceat(decreasing[:seen], edges[:-1])
        sizes = np.diff(edges)
        if seen < decreasing.size:
            sizes, mass = np.append(sizes, decreasing.size - seen), np.append(mass, 0.0)
        return cls._of_mass(sizes, mass)

    @classmethod
    def of_ids(cls, ids: Numbers, *, rows: int) -> "RowFrequencies":
        """Frequencies in a sample of ids, such as a corpus, of a table with `rows` rows."""
        numbers = _numpy(ids).ravel()
        if not np.issubdtype(numbers.dtype, np.integer) or not numbers.size:
            raise ValueError(f"ids must be whole numbers, at least one, got {numbers.dtype}")
        if numbers.min() < 0 or numbers.max() >= rows:
            span = f"{numbers.min()} to {numbers.max()}"
            raise ValueError(f"ids must be between 0 and {rows - 1}, got {span}")
        return cls.of_counts(np.bincount(numbers, minlength=rows))

    @classmethod
    def _of_mass(cls, sizes: NDArray[np.int64], mass: NDArray[np.float64]) -> "RowFrequencies":
        shares = mass / sizes / mass.sum()
        return cls(tuple(int(size) for size in sizes), tuple(float(share) for share in shares))


def _edges(rows: int) -> NDArray[np.int64]:
    """Ranks where classes begin, then `rows`: one rank each at first, then growing by `_GROWTH`."""
    edges = [0]
    while edges[-1] < rows:
        edges.append(min(rows, max(edges[-1] + 1, math.ceil(edges[-1] * _GROWTH))))
    return np.array(edges, dtype=np.int64)


def _slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    spread = x - x.mean()
    return float(spread @ y / (spread @ spread)) if spread.any() else 0.0


def _numpy(numbers: Numbers) -> NDArray[np.generic]:
    return np.asarray(numbers.detach().cpu() if isinstance(numbers, Tensor) else numbers)
