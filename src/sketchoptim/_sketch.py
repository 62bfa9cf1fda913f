"""CountSketch and CountMinSketch: many vectors in few buckets, with an error that is known.

Both keep counters ``[depth, width, dim]``. Each of `depth` hash rows maps an id to one of `width`
buckets; adding a vector adds it to one bucket per hash row, and a query combines the `depth`
readings. Counters are linear, so a sketch scales, folds and merges without knowing its ids.
"""

from typing import Any, Self

import torch
from torch import Tensor

from . import _rows, theory
from ._sketch_base import (
    COUNTER_DTYPES,
    LARGEST_SCALE,
    LARGEST_VALUE,
    SMALLEST_SCALE,
    Location,
    Sketch,
)
from ._validation import check_flag

__all__ = [
    "COUNTER_DTYPES",
    "LARGEST_SCALE",
    "LARGEST_VALUE",
    "SMALLEST_SCALE",
    "CountMinSketch",
    "CountSketch",
    "Location",
    "Sketch",
    "median",
]


class CountSketch(Sketch):
    """A signed sketch: the estimate is the median over the hash rows, unbiased.

    With ``width >= 8 / epsilon^2`` and ``depth >= 2.42 ln(items dim / delta)``, for every id and
    column at once, with probability at least ``1 - delta``::

        |estimate - x| <= epsilon * l2 norm of the column over all ids

    (`tests/test_sketch.py::test_count_sketch_error_stays_within_its_published_bound`).

    >>> sketch = CountSketch(depth=3, width=64, dim=2)
    >>> _ = sketch.add_(torch.tensor([7, 7]), torch.tensor([[1.0, -2.0], [1.0, 0.0]]))
    >>> sketch.query(torch.tensor([7]))
    tensor([[ 2., -2.]])
    """

    is_signed = True

    def combine(self, readings: Tensor) -> Tensor:
        return median(readings)

    @classmethod
    def for_error(
        cls, epsilon: float, delta: float, items: int, dim: int, **options: Any
    ) -> "CountSketch":
        """The smallest sketch that keeps the bound above for `items` ids of `dim` columns."""
        size = theory.count_sketch_size(epsilon=epsilon, delta=delta, items=items, dim=dim)
        return cls(size.depth, size.width, dim, **options)


class CountMinSketch(Sketch):
    """A sketch of non-negative vectors: the estimate is the least reading, never below the truth.

    With ``width >= e / epsilon`` and ``depth >= ln(items dim / delta)``, for every id and column
    at once, with probability at least ``1 - delta``::

        x <= estimate <= x + epsilon * l1 norm of the column over all ids

    (`tests/test_sketch.py::test_count_min_error_stays_within_its_published_bound`). A conservative
    sketch raises a bucket only as far as the estimates that fall into it need, so it is never above
    the plain one. One call of `add_` is one update there: all estimates are read before any bucket
    is raised, so that the order of ids does not matter.

    bfloat16 counters are rounded up or down without bias. One write leaves an estimate within one
    part in 2^7 (`tests/test_sketch_rounding.py::test_one_write_is_right_to_a_part_in_128`);
    thousands of small writes leave it a few percent off, below the truth as well as above.

    >>> sketch = CountMinSketch(depth=3, width=64, dim=1)
    >>> sketch.add_(torch.tensor([7]), torch.tensor([[2.0]])).query(torch.tensor([7]))
    tensor([[2.]])
    """

    is_signed = False

    def __init__(
        self, depth: int, width: int, dim: int, *, conservative: bool = False, **options: Any
    ) -> None:
        check_flag("conservative", conservative)
        super().__init__(depth, width, dim, **options)
        self.conservative = conservative

    @classmethod
    def over(cls, *, conservative: bool = False, **tensors: Any) -> Self:
        sketch = super().over(**tensors)
        sketch.conservative = conservative
        return sketch

    @classmethod
    def for_error(
        cls, epsilon: float, delta: float, items: int, dim: int, **options: Any
    ) -> "CountMinSketch":
        """The smallest sketch that keeps the bound above for `items` ids of `dim` columns."""
        size = theory.count_min_size(epsilon=epsilon, delta=delta, items=items, dim=dim)
        return cls(size.depth, size.width, dim, **options)

    def merge_(self, other: Self) -> Self:
        if isinstance(other, CountMinSketch) and other.conservative != self.conservative:
            raise ValueError("other must be conservative exactly if this sketch is")
        return super().merge_(other)

    def _likeness(self) -> tuple[Any, ...]:
        return *super()._likeness(), self.conservative

    def combine(self, readings: Tensor) -> Tensor:
        return readings.amin(0)

    def raise_(self, at: Location, ids: Tensor, targets: Tensor, key: int | None) -> None:
        """Raises every bucket of ``ids[k]`` to the largest of the ``targets[k, dim]`` in it.

        Targets are rounded before the maximum is taken, so the order of ids does not matter.
        """
        stored = self._round((targets * (1.0 / self.scale.item())).float(), ids, key)
        for row, buckets in enumerate(at.buckets):
            index = buckets.unsqueeze(-1).expand_as(stored)
            self.counters[row].scatter_reduce_(0, index, stored, "amax")

    def _add_(self, ids: Tensor, values: Tensor) -> None:
        if not self.conservative:
            return super()._add_(ids, values)
        ids, values = _rows.unique_sums(ids, values.float())
        self.raise_(self.locate(ids), ids, self._estimates(ids) + values, self.next_key())

    def _fold_pairs(self, pairs: Tensor) -> Tensor:
        # The larger neighbour is at least the truth, tighter than the sum, and has the start once.
        return pairs.amax(2) if self.conservative else super()._fold_pairs(pairs)


def median(readings: Tensor) -> Tensor:
    """The median over the first dimension; the mean of the middle two when it is even."""
    depth = readings.shape[0]
    if depth == 3:  # a network of comparisons: many times faster than a sort, and the same bits
        a, b, c = readings
        return torch.maximum(torch.minimum(a, b), torch.minimum(torch.maximum(a, b), c))
    ordered = readings.sort(0).values
    middle = ordered[depth // 2]
    return middle if depth % 2 else (ordered[depth // 2 - 1] + middle) * 0.5
