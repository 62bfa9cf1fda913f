"""A moment in a sketch, in the three ways it can decay."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import _hashing, _pages
from .._rows import Rows
from .._sketch import CountMinSketch, CountSketch, Location, Sketch
from ..storage import Sketched
from ._moment import Average, Moment, Name, Parts, Table, row_sums
from ._sketch_error import estimate_error

# Between two looks at whether a table may fold: what a moment decayed by .999 remembers.
_FOLD_CHECK_STEPS = 1000


class SketchedMoment(Moment):
    """What the forms share: first moments in a count-sketch, second ones in a count-min."""

    def __init__(self, storage: Sketched, name: Name, tensors: Parts) -> None:
        super().__init__(tensors)
        self.storage = storage
        self.sketch: Sketch = (
            CountSketch.over(**_sketch_parts(tensors))
            if name == "first"
            else CountMinSketch.over(conservative=storage.conservative, **_sketch_parts(tensors))
        )

    @staticmethod
    def create(storage: Sketched, table: Table, fill: float) -> Parts:
        shape = storage.table_shape(table.rows, table.dim)
        words = _hashing.seeded(storage.seed, table.number, storage.depth)
        state = {
            "table": _pages.empty(shape, dtype=storage.dtype, device=table.device).fill_(fill),
            "scale": torch.ones((), dtype=torch.float32, device="cpu"),
            "words": words.to(table.device),
        }
        if storage.dtype != torch.float32:
            state["rounds"] = torch.zeros((), dtype=torch.int64, device="cpu")
        if fill:  # which is every row's own, however many share a bucket
            state["start"] = torch.tensor(fill, dtype=storage.dtype, device="cpu").float()
        if storage.fold_when is not None:
            state["items"] = torch.tensor(table.rows, dtype=torch.int64, device="cpu")
        return state

    def estimate(self, ids: Tensor) -> Tensor:
        return self.sketch.estimate(ids)

    def load_(self, rows: Rows, *, start: float) -> None:
        # All forms add to a fresh table alike, and need not take their turn for that.
        for chunk in rows.chunks():
            self.sketch.accumulate_(chunk.ids, self.reduced(chunk.gradient) - start)

    def maintain_(self, step: int) -> bool:
        storage = self.storage
        if storage.clean_every is not None and step % storage.clean_every == 0:
            assert storage.clean_by is not None  # the two come together
            self.sketch.scale_(storage.clean_by)
        folds = step in storage.fold_at or (step % _FOLD_CHECK_STEPS == 0 and self._may_fold())
        if folds:
            self.fold_()
        return folds

    def fold_(self) -> None:
        """Halves the width."""
        folded = self.sketch.fold_().table
        table = _pages.empty(folded.shape, dtype=folded.dtype, device=folded.device).copy_(folded)
        self.tensors["table"] = self.sketch.table = table

    def _may_fold(self) -> bool:
        """Whether the table at half its width would keep to `fold_when`."""
        if self.storage.fold_when is None or self.sketch.width % 2:
            return False
        copies = {part: tensor.clone() for part, tensor in self.tensors.items()}
        name: Name = "first" if self.sketch.is_signed else "second"
        trial = sketched_moment(self.storage, name, copies)
        trial.fold_()
        rows = int(self.tensors["items"].item())
        return estimate_error(trial.sketch, rows).relative < self.storage.fold_when

    def reduced(self, values: Tensor) -> Tensor:
        """The values in the sketch's granularity."""
        if self.storage.granularity == "element":
            return values
        return row_sums(values) / values.shape[1]


class LinearMoment(SketchedMoment):
    """The whole table decays, every row is added, then every row is queried: order-free."""

    gathers = True

    def begin_(self, average: Average, touched: int) -> None:
        super().begin_(average, touched)
        self.sketch.scale_(average.decay)

    def gather_(self, ids: Tensor, values: Tensor) -> None:
        self.sketch.accumulate_(ids, self.reduced(values) * self.average.weight)

    def update_(self, ids: Tensor, values: Tensor) -> Tensor:
        return self.sketch.estimate(ids).to(values.dtype)

    def readings(self, ids: Tensor) -> Tensor:
        """What each hash row says, ``[depth, k, dim]``, for the ratio form."""
        return self.sketch.read(self.sketch.locate(ids))


class ConservativeMoment(SketchedMoment):
    """The whole table decays; rows read it as it then is, and raise their buckets to their targets.

    A row's estimate is its own target, what it read plus its own share, which never lies below
    the truth. A bucket ends as the maximum of what it was and of the targets that fall into it,
    so neither the order of rows nor the number of threads matters.
    """

    sketch: CountMinSketch

    def begin_(self, average: Average, touched: int) -> None:
        super().begin_(average, touched)
        self.sketch.scale_(average.decay)
        # Raising waits until all rows have read: in a list of targets, or, when there are more of
        # them than counters, in a copy of the table, so that nothing of the size of n is kept.
        self._targets: list[tuple[Tensor, Tensor]] = []
        self._raised: CountMinSketch | None = None
        if touched * self.sketch.dim > self.sketch.table.numel():
            parts = {**_sketch_parts(self.tensors), "table": self.sketch.table.clone()}
            self._raised = CountMinSketch.over(conservative=True, **parts)

    def update_(self, ids: Tensor, values: Tensor) -> Tensor:
        targets = self.sketch.estimate(ids) + self.reduced(values) * self.average.weight
        if self._raised is None:
            self._targets.append((ids, targets))
        else:
            self._raised.raise_(ids, targets)
        return targets

    def load_(self, rows: Rows, *, start: float) -> None:
        for chunk in rows.chunks():  # a fresh table reads `start` for all, so the truth is a target
            self.sketch.raise_(chunk.ids, self.reduced(chunk.gradient))

    def end_(self) -> None:
        if self._raised is not None:
            self.sketch.table.copy_(self._raised.table)
        for ids, targets in self._targets:
            self.sketch.raise_(ids, targets)
        del self._targets, self._raised  # as large as the table, and of no use between steps


class ItemMoment(SketchedMoment):
    """Rows take their turn in ascending order: each reads, moves and writes before the next.

    Rows without a common bucket do not see each other, so they go together, in waves: the same
    bits as one at a time.
    """

    def update_(self, ids: Tensor, values: Tensor) -> Tensor:
        values = self.reduced(values)
        estimates = torch.empty_like(values)
        at = self.sketch.locate(ids)
        for wave in _waves(at.buckets):
            signs = None if at.signs is None else at.signs[:, wave]
            here = Location(at.buckets[:, wave], signs)
            estimates[wave] = self._move_(here, self.sketch.read(here), values[wave])
        return estimates

    def _move_(self, at: Location, readings: Tensor, values: Tensor) -> Tensor:
        raise NotImplementedError


class PaperMoment(ItemMoment):
    """Algorithms 2 to 4: every reading moves by what the row's own estimate has to move.

    The second query needs no reading: a median or minimum of ``readings + delta`` is that of the
    readings plus delta, in float32 too, since rounding keeps order
    (`tests/moments/test_sketched.py::test_the_second_query_of_the_paper_is_free`).
    """

    def _move_(self, at: Location, readings: Tensor, values: Tensor) -> Tensor:
        estimate = self.sketch.combine(readings)
        delta = self.average.delta(estimate, values)
        self.sketch.write_(at, readings + delta)
        return estimate + delta


class BucketMoment(ItemMoment):
    """The paper's authors' code: every bucket that is hit decays by itself, holding an average.

    A light row lowers the buckets of a heavy one, so the minimum can lie below the truth.
    """

    def _move_(self, at: Location, readings: Tensor, values: Tensor) -> Tensor:
        moved = self.average.moved(readings, values)
        self.sketch.write_(at, moved)
        return self.sketch.combine(moved)


def sketched_moment(storage: Sketched, name: Name, tensors: Parts) -> SketchedMoment:
    """The moment that the storage describes, over existing tensors."""
    if storage.conservative:
        return ConservativeMoment(storage, name, tensors)
    forms = {"linear": LinearMoment, "paper": PaperMoment, "bucket": BucketMoment}
    return forms[storage.decay](storage, name, tensors)


def _sketch_parts(tensors: Parts) -> dict[str, Tensor | None]:
    return {part: tensors.get(part) for part in ("table", "scale", "words", "rounds", "start")}


def _waves(buckets: Tensor) -> Iterator[Tensor]:
    """Positions ``0..k-1`` in groups: a row comes after every earlier row it shares a bucket with.

    Within a group no bucket repeats, so that a group can be read and written at once.
    """
    latest: list[dict[int, int]] = [{} for _ in range(buckets.shape[0])]
    waves: list[list[int]] = []
    for position, addresses in enumerate(buckets.t().tolist()):
        wave = 0
        for row, bucket in zip(latest, addresses, strict=True):
            wave = max(wave, row.get(bucket, 0))
        for row, bucket in zip(latest, addresses, strict=True):
            row[bucket] = wave + 1
        if wave == len(waves):
            waves.append([])
        waves[wave].append(position)
    for positions in waves:
        yield torch.tensor(positions, device=buckets.device)
