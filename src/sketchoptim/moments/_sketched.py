"""A moment in a sketch, in the four ways it can move."""

import math
from collections.abc import Container, Iterator
from typing import Literal, assert_never

import torch
from torch import Tensor

from .. import _hashing, _pages
from .._rows import Rows
from .._sketch import SMALLEST_SCALE, CountMinSketch, CountSketch, Location, Sketch
from ..storage import Sketched
from ._columns import ColumnsMoment
from ._moment import Average, Moment, Name, Part, Parts, SketchForm, SketchView, Table, row_sums
from ._sketch_error import estimate_error

# Steps between two decisions on folding: about the memory of a moment with a decay of .999.
_FOLD_CHECK_STEPS = 1000


class SketchedMoment(Moment, storage=Sketched):
    """What the forms share: first moments in a count-sketch, second ones in a count-min."""

    form: SketchForm
    storage: Sketched
    sketch: Sketch

    @classmethod
    def form_of(cls, storage: Sketched) -> type[Moment]:
        if storage.columns:
            return ColumnsMoment
        if storage.conservative:
            return ConservativeMoment
        match storage.decay:
            case "linear":
                return LinearMoment
            case "paper":
                return PaperMoment
            case "bucket":
                return BucketMoment
            case _:
                assert_never(storage.decay)

    @classmethod
    def declare(cls, storage: Sketched, name: Name, table: Table, fill: float) -> tuple[Part, ...]:
        depth, width, dim = storage.counters_shape(table.first_rows, table.dim)
        words = _hashing.seeded(storage.seed, table.key, depth)
        parts = [
            Part(
                "counters",
                (depth, width, dim),
                storage.dtype,
                by="bucket",
                combine=cls._combination(storage),
                initial=fill,
                least=0.0 if name == "second" else -math.inf,
                other_shapes=tuple((depth, other, dim) for other in storage.widths(width)),
            ),
            Part("scale", (), is_on_host=True, initial=1.0, least=SMALLEST_SCALE, most=1.0),
            Part("words", tuple(words.shape), torch.int64, initial=words),
        ]
        if storage.dtype != torch.float32:  # how often it was written, for stochastic rounding
            parts.append(Part("writes", (), torch.int64, is_on_host=True, least=0))
        if fill:  # every row has it once, however many share a bucket
            start = torch.tensor(fill, dtype=storage.dtype, device="cpu").float()
            parts.append(Part("start", (), is_on_host=True, initial=start, least=0.0))
        if storage.fold_when is not None:
            items = torch.tensor(table.rows, dtype=torch.int64, device="cpu")
            parts.append(Part("items", (), torch.int64, is_on_host=True, initial=items, least=0))
        return tuple(parts)

    @classmethod
    def starts_from_zero(cls, part_names: Container[str]) -> bool:
        return "start" not in part_names

    @classmethod
    def _combination(cls, storage: Sketched) -> Literal["max", "sum", "refused"]:
        """Replicas of a form that depends on the order of rows cannot become one."""
        if storage.conservative:
            return "max"
        return "sum" if storage.decay == "linear" else "refused"

    def __init__(
        self, storage: Sketched, name: Name, tensors: Parts, held: range | None = None
    ) -> None:
        super().__init__(storage, name, tensors, held)
        self.granularity = storage.granularity
        self.sketch = self._over(tensors["counters"])

    def _over(self, counters: Tensor) -> Sketch:
        """The sketch over counters of its own, with the hash and the scale of this one."""
        parts = {part: self.tensors.get(part) for part in ("scale", "words", "writes", "start")}
        first_id = 0 if self.held is None else self.held.start
        if self.name == "first":
            return CountSketch.over(counters=counters, first_id=first_id, **parts)
        is_conservative = self.storage.conservative
        return CountMinSketch.over(
            conservative=is_conservative, counters=counters, first_id=first_id, **parts
        )

    def kernel_view(self) -> SketchView:
        return SketchView(self.sketch, self.form, self.granularity == "row")

    def start_rows_(self, added: range, fill: float) -> None:
        if "items" in self.tensors:
            self.tensors["items"].add_(len(added))

    def begin_(self, average: Average, touched: int, step: int = 1) -> None:
        super().begin_(average, touched, step)
        self._key = self.sketch.next_key()

    def estimate(self, ids: Tensor) -> Tensor:
        return self.sketch.estimate(ids)

    def load_(self, rows: Rows, *, start: float) -> None:
        # All forms add to fresh counters alike, and need not take their turn for that.
        key = self.sketch.next_key()
        for chunk in rows.chunks():
            self.sketch.accumulate_(chunk.ids, self.to_granularity(chunk.gradient) - start, key)

    @property
    def has_maintenance(self) -> bool:
        storage = self.storage
        return bool(storage.clean_every or storage.fold_at or storage.fold_when)

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
        folded = self.sketch.fold_().counters
        own = _pages.empty(folded.shape, dtype=folded.dtype, device=folded.device).copy_(folded)
        self.tensors["counters"] = self.sketch.counters = own

    def _may_fold(self) -> bool:
        """Whether the error at half the width would keep to `fold_when`."""
        if self.storage.fold_when is None or self.sketch.width % 2:
            return False
        copies = {part: tensor.clone() for part, tensor in self.tensors.items()}
        trial = type(self)(self.storage, self.name, copies)  # over the whole table's rows
        trial.fold_()
        rows = int(self.tensors["items"].item())
        return estimate_error(trial.sketch, rows).relative < self.storage.fold_when

    def overload(self, touched: int, decay: float) -> str | None:
        load, limit = touched / self.sketch.width, load_limit(decay)
        if self.name == "second" or load <= limit:
            return None
        return (
            f"{load:.0f} active rows a bucket a step in the first moment: above {limit:.0f} the "
            "collisions of a sketched first moment exceed it, and training may diverge. Use a "
            "larger ratio, or Memory(first=None)"
        )

    def to_granularity(self, values: Tensor) -> Tensor:
        """The values in the sketch's granularity."""
        if self.granularity == "element":
            return values
        return row_sums(values) / max(1, values.shape[1])


def load_limit(decay: float) -> float:
    """Active rows a bucket a step above which a sketched first moment is mostly collisions."""
    return 2 / (1 - decay) if decay < 1 else math.inf


class LinearMoment(SketchedMoment):
    """All counters decay, every row is added, then every row is queried: order-free."""

    form = "linear"
    gathers = True
    decays_whole = True
    _added: Sketch | None = None  # what this process adds, where rows are divided among several

    def begin_(self, average: Average, touched: int, step: int = 1) -> None:
        super().begin_(average, touched, step)
        self.sketch.scale_(average.decay)
        if self.held is not None:
            self._added = self._over(torch.zeros_like(self.sketch.counters))

    def gather_(self, ids: Tensor, values: Tensor) -> None:
        sketch = self.sketch if self._added is None else self._added
        sketch.accumulate_(ids, self.to_granularity(values) * self.average.weight, self._key)

    @property
    def gathered(self) -> Tensor | None:
        return None if self._added is None else self._added.counters

    def take_gathered_(self) -> None:
        if self._added is not None:
            self.sketch.counters.add_(self._added.counters)
            self._added = None

    def update_(self, ids: Tensor, values: Tensor) -> Tensor:
        return self.sketch.estimate(ids).to(values.dtype)

    def readings(self, ids: Tensor) -> Tensor:
        return self.sketch.read(self.sketch.locate(ids))


class ConservativeMoment(SketchedMoment):
    """All counters decay; rows read them as they then are, and raise them to their targets.

    A row's estimate is its own target, what it read plus its own share, which is never below the
    truth. A bucket ends as the maximum of its old value and of the targets that fall into it, so
    neither the order of rows nor the number of threads matters.
    """

    form = "conservative"
    decays_whole = True
    sketch: CountMinSketch

    def begin_(self, average: Average, touched: int, step: int = 1) -> None:
        super().begin_(average, touched, step)
        self.sketch.scale_(average.decay)
        # Raising waits until all rows have read: in a list of targets, or, when there are more of
        # them than counters, in a copy of the counters, so that nothing of size n is kept.
        self._targets: list[tuple[Location, Tensor, Tensor]] = []
        self._raised: CountMinSketch | None = None
        if touched * self.sketch.dim > self.sketch.counters.numel():
            raised = self._over(self.sketch.counters.clone())
            assert isinstance(raised, CountMinSketch)  # conservative sketches are of second moments
            self._raised = raised

    def update_(self, ids: Tensor, values: Tensor) -> Tensor:
        at = self.sketch.locate(ids)
        readings = self.sketch.read(at)
        targets = self.sketch.combine(readings) + self.to_granularity(values) * self.average.weight
        if self._raised is None:
            self._targets.append((at, ids, targets))
        else:
            self._raised.raise_(at, ids, targets, self._key)
        return targets

    def load_(self, rows: Rows, *, start: float) -> None:
        key = self.sketch.next_key()
        for chunk in rows.chunks():  # fresh counters read `start`, so the truth is the target
            at = self.sketch.locate(chunk.ids)
            self.sketch.raise_(at, chunk.ids, self.to_granularity(chunk.gradient), key)

    def end_(self) -> None:
        if self._raised is not None:
            self.sketch.counters.copy_(self._raised.counters)
        for at, ids, targets in self._targets:
            self.sketch.raise_(at, ids, targets, self._key)
        del self._targets, self._raised  # as large as the counters, and of no use between steps


class ItemMoment(SketchedMoment):
    """Rows go one after another in ascending order: each reads, moves and writes before the next.

    Rows without a common bucket are independent, so they go together, in waves, with the
    same bits as one at a time.
    """

    def update_(self, ids: Tensor, values: Tensor) -> Tensor:
        values = self.to_granularity(values)
        estimates = torch.empty_like(values)
        at = self.sketch.locate(ids)
        for wave in _waves(at.buckets):
            signs = None if at.signs is None else at.signs[:, wave]
            here = Location(at.buckets[:, wave], signs)
            readings, estimates[wave] = self._after(self.sketch.read(here), values[wave])
            self.sketch.write_(here, ids[wave], readings, self._key)
        return estimates

    def _after(self, readings: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The readings after the values, and the estimate that they amount to."""
        raise NotImplementedError


class PaperMoment(ItemMoment):
    """Algorithms 2 to 4: every reading moves by what the row's own estimate has to move.

    The second query needs no reading: a median or minimum of ``readings + delta`` is that of the
    readings plus delta, in float32 too, since rounding keeps order
    (`tests/moments/test_sketched.py::test_the_second_query_of_the_paper_is_free`).
    """

    form = "paper"

    def _after(self, readings: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        estimate = self.sketch.combine(readings)
        delta = self.average.delta(estimate, values)
        return readings + delta, estimate + delta


class BucketMoment(ItemMoment):
    """The paper's authors' code: every bucket that is hit decays by itself, holding an average.

    A light row lowers the buckets of a heavy one, so the minimum can lie below the truth.
    """

    form = "bucket"

    def _after(self, readings: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        moved = self.average.after(readings, values)
        return moved, self.sketch.combine(moved)

    def load_(self, rows: Rows, *, start: float) -> None:
        raise ValueError(
            'decay="bucket" keeps averages of whole buckets, which cannot be made from moments; '
            'use decay="paper" or "linear"'
        )


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
