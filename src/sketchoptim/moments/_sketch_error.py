"""The error of a sketch, estimated from its counters alone."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _hashing
from .._sketch import CountMinSketch, Sketch
from ._moment import SUMMED_AT_ONCE

# Rows that are asked for although nobody wrote them: enough for an error to within some percent.
_PHANTOMS = 2048


@dataclass(frozen=True)
class SketchError:
    """The error of a sketch's estimates over all rows, in l2 norms."""

    rows: int
    """How many rows the sketch stands for."""
    row_error: float
    """Root mean square over the rows of the norm of (estimate - truth)."""
    row_norm: float
    """Root mean square over the rows of the norm of the truth."""

    @property
    def absolute(self) -> float:
        """The norm of (estimate - truth) over all rows."""
        return self.row_error * math.sqrt(self.rows)

    @property
    def relative(self) -> float:
        """The norm of (estimate - truth) over that of the truth; inf if the truth is 0."""
        if self.row_error == 0.0:
            return 0.0
        return self.row_error / self.row_norm if self.row_norm else math.inf


def estimate_error(sketch: Sketch, rows: int) -> SketchError:
    """How wrong the sketch's estimates of the row ids below `rows` are, from its counters alone.

    The error of a row is what other rows left in its buckets. A row that was never written has the
    same buckets in distribution, and what is read there is nothing but error. With ``P`` ids that
    no row has, and with `start`, the value of the counters before anything was written::

        row_error^2 = mean over P of |estimate - start|^2

    For sums, where a row's error does not depend on the row itself, that is the mean square error
    of all rows but for the row's own share in the counters. A conservative sketch raises a bucket
    only where it must, so there it is an upper bound on average: frequent rows have less error. The
    truth's norm is that of the cells ``c`` of a hash row, less what collisions add to it, the
    median over hash rows::

        count-sketch             sum c^2
        count-min                (width sum c^2 - (sum c)^2) / (width - 1), column by column
        count-min, conservative  sum c^2, where a cell is about its largest row

    On rows that come as words do, by Zipf's law, `absolute` and `relative` are within a factor of
    1.3 of the truth in every form that decays linearly
    (`tests/moments/test_sketch_error.py::test_the_estimate_is_near_the_true_error`). The paper's
    form moves a row towards its own value each time the row is touched, which hides some of
    the error: there the bound is 1.6
    (`tests/moments/test_sketch_error.py::test_the_estimate_covers_the_form_of_the_paper`). In a
    sketch so wide that the error is some percent, a few rows that share every bucket with a heavy
    one make most of it, which depends on the seed: 4 on real text, over eight seeds (measured
    at commit 6c3dbaa).

    Args:
        sketch: Of either kind, as it stands; it is not changed.
        rows: How many rows may have been written; their ids are below that.

    >>> sketch = CountMinSketch(depth=3, width=64, dim=1)
    >>> ids = torch.arange(1000)
    >>> _ = sketch.add_(ids, 1.0 / (1 + ids.float()).unsqueeze(1))
    >>> error = (sketch.query(ids).squeeze(1) - 1.0 / (1 + ids)).norm().item()
    >>> 0.8 < estimate_error(sketch, 1000).absolute / error < 1.25
    True
    """
    if not isinstance(sketch, Sketch):
        raise TypeError(f"sketch must be a CountSketch or CountMinSketch, got {sketch!r}")
    if not 1 <= rows <= _hashing.MAX_ID + 1:
        raise ValueError(f"rows must be between 1 and 2**32, got {rows}")
    squares = [
        (sketch.estimate(ids).double() - sketch.start).square().sum()
        for ids in _phantoms(rows, sketch).split(max(1, SUMMED_AT_ONCE // sketch.dim))
    ]
    mean_square = torch.stack(squares).sum().item() / _PHANTOMS
    return SketchError(
        rows=rows,
        row_error=math.sqrt(mean_square),
        row_norm=math.sqrt(_squared_norm(sketch) / rows),
    )


def occupied_share(sketch: Sketch) -> float:
    """The share of all buckets into which something was written, over all hash rows.

    >>> sketch = CountMinSketch(depth=2, width=4, dim=1).add_(torch.tensor([7]), torch.ones(1, 1))
    >>> occupied_share(sketch)
    0.25
    """
    written = sum(
        int((cells != sketch.start).any(-1).sum())
        for hash_row in range(sketch.depth)
        for cells in _cells(sketch, hash_row)
    )
    return written / (sketch.depth * sketch.width)


def _phantoms(rows: int, sketch: Sketch) -> Tensor:
    """Ids beyond those of the rows; at the very end of the range where there are none."""
    first = min(rows, _hashing.MAX_ID - _PHANTOMS)
    size, generator = (_PHANTOMS,), torch.Generator().manual_seed(0)
    ids = torch.randint(first, _hashing.MAX_ID + 1, size, generator=generator, device="cpu")
    return ids.to(sketch.counters.device)


def _squared_norm(sketch: Sketch) -> float:
    """The squared norm of all that was written, the median over the hash rows."""
    found: list[float] = []
    for hash_row in range(sketch.depth):
        sums, squares = torch.zeros(
            2, sketch.dim, dtype=torch.float64, device=sketch.counters.device
        )
        for cells in _cells(sketch, hash_row):
            written = cells - sketch.start
            sums += written.sum(0)
            squares += written.square().sum(0)
        if isinstance(sketch, CountMinSketch) and not sketch.conservative:
            squares = (sketch.width * squares - sums**2) / max(sketch.width - 1, 1)
        found.append(max(squares.sum().item(), 0.0))
    return statistics.median(found)


def _cells(sketch: Sketch, hash_row: int) -> Iterator[Tensor]:
    """The readings of a hash row's buckets, float64 ``[some, dim]``, a few at a time."""
    scale = sketch.scale.item()
    for part in sketch.counters[hash_row].split(max(1, SUMMED_AT_ONCE // sketch.dim)):
        yield (part.float() * scale).double()
