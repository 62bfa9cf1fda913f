"""Every algorithm a second time: loops over rows in float64, straight from the pseudo-code.

Nothing here is lazy, fused or shared with the library. Moments decay element by element, sketches
are those of `naive_sketches`, rank-one forms keep the whole matrix that they approximate.

A gradient is a dict from row id to vector; `summed` makes one from pairs with repeated ids.
"""

import dataclasses
import math

import numpy as np
from hash_specification import mix
from naive_sketches import ConservativeCountMin, CountMin, CountSketch, Hash

import sketchoptim as so

Rows = dict[int, np.ndarray]


def summed(pairs) -> Rows:
    """The rows of ``(id, vector)`` pairs in ascending order, repeated ids added up."""
    rows: Rows = {}
    for i, vector in pairs:
        rows[i] = rows.get(i, 0.0) + np.asarray(vector, dtype=np.float64)
    return dict(sorted(rows.items()))


# -- moments: `move` takes the rows of a step and gives back their estimates after it --------------


class ExactMoment:
    """One number for each weight; rows without a gradient stay as they are."""

    def __init__(self, n: int, dim: int, fill: float) -> None:
        self.values = np.full((n, dim), fill)

    def move(self, rows: Rows, decay: float, weight: float) -> Rows:
        for i, value in rows.items():
            self.values[i] = decay * self.values[i] + weight * value
        return {i: self.values[i].copy() for i in rows}

    def finish(self, step: int) -> None:
        """What happens to the whole moment after a step."""


class RowWiseMoment(ExactMoment):
    """One number for each row: the mean over the row."""

    def __init__(self, n: int, dim: int, fill: float) -> None:
        super().__init__(n, 1, fill)

    def move(self, rows: Rows, decay: float, weight: float) -> Rows:
        return super().move(row_means(rows), decay, weight)


class RankOneMoment(ExactMoment):
    """Row sums times column sums over the total, of the whole matrix, which decays as a whole."""

    def move(self, rows: Rows, decay: float, weight: float) -> Rows:
        self.values *= decay
        for i, value in rows.items():
            self.values[i] += weight * value
        columns, total = self.values.sum(0), self.values.sum()
        return {i: self.values[i].sum() * columns / total if total else 0 * columns for i in rows}


class TopSingularMoment(ExactMoment):
    """The whole matrix, cut down to its largest singular value after every update."""

    def move(self, rows: Rows, decay: float, weight: float) -> Rows:
        super().move(rows, decay, weight)
        left, singular, right = np.linalg.svd(self.values, full_matrices=False)
        self.values = singular[0] * np.outer(left[:, 0], right[0])
        return {i: self.values[i].copy() for i in rows}


class SketchedMoment:
    """What the forms share: the sketch, cleaning and folding."""

    def __init__(self, storage: so.Sketched, sketch: CountSketch) -> None:
        self.storage, self.sketch = storage, sketch

    def reduced(self, rows: Rows) -> Rows:
        return row_means(rows) if self.storage.granularity == "row" else rows

    def finish(self, step: int) -> None:
        if self.storage.clean_every and step % self.storage.clean_every == 0:
            self.sketch.scale(self.storage.clean_by)
        if step in self.storage.fold_at:
            self.sketch.fold()


class PaperMoment(SketchedMoment):
    """Algorithms 2 to 4: one item after the other, query, update, query."""

    def move(self, rows: Rows, decay: float, weight: float) -> Rows:
        estimates = {}
        for i, value in self.reduced(rows).items():
            old = self.sketch.query(i)
            self.sketch.update(i, (decay - 1) * old + weight * value)
            estimates[i] = self.sketch.query(i)
        return estimates


class BucketMoment(SketchedMoment):
    """The authors' code: one item after the other, each of its buckets decays by itself."""

    def move(self, rows: Rows, decay: float, weight: float) -> Rows:
        sketch, estimates = self.sketch, {}
        for i, value in self.reduced(rows).items():
            for j in range(sketch.hashes.depth):
                bucket, sign = sketch.bucket(j, i), sketch.sign(j, i)
                reading = sign * sketch.counters[j, bucket]
                sketch.counters[j, bucket] = sign * (decay * reading + weight * value)
            estimates[i] = sketch.query(i)
        return estimates


class LinearMoment(SketchedMoment):
    """Decay everything, add everything, then query everything."""

    def move(self, rows: Rows, decay: float, weight: float) -> Rows:
        self.sketch.scale(decay)
        for i, value in self.reduced(rows).items():
            self.sketch.update(i, weight * value)
        return {i: self.sketch.query(i) for i in rows}


class ConservativeMoment(SketchedMoment):
    """Decay everything, query everything, then raise every bucket to its largest target."""

    sketch: ConservativeCountMin

    def move(self, rows: Rows, decay: float, weight: float) -> Rows:
        self.sketch.scale(decay)
        targets = {}
        for i, value in self.reduced(rows).items():
            targets[i] = self.sketch.query(i) + weight * value
        for i, target in targets.items():
            self.sketch.raise_to(i, target)
        return targets


class ColumnsMoment:
    """A moment by row of what is left of each row after dividing by a factor for each column."""

    def __init__(self, by_row, dim: int) -> None:
        self.by_row, self.sums, self.factors = by_row, np.zeros(dim), np.ones(dim)
        self.steps = 0

    def move(self, rows: Rows, decay: float, weight: float) -> Rows:
        self.steps += 1
        factors = self.factors
        divided = {i: value / factors for i, value in rows.items()}
        estimates = self.by_row.move(divided, decay, weight)
        shares = [
            value / value.mean()
            for i, value in rows.items()
            if value.any() and (mix(i) + self.steps) % 8 == 0
        ]
        if shares:
            self.sums = decay * self.sums + weight * np.mean(shares, 0)
            self.factors = np.maximum(self.sums / self.sums.mean(), 2.0**-20)
        return {i: estimate * factors for i, estimate in estimates.items()}

    def finish(self, step: int) -> None:
        self.by_row.finish(step)


def row_means(rows: Rows) -> Rows:
    return {i: np.array([sum(value) / len(value)]) for i, value in rows.items()}


def moment(storage, name: str, n: int, dim: int, *, number: int = 0, fill: float = 0.0):
    """The naive moment for a storage of the library; None stays None."""
    if storage is None:
        return None
    if isinstance(storage, so.Sketched) and n < storage.array_below:
        storage = so.RowWise(columns=storage.columns)
    if getattr(storage, "columns", False):
        plain = dataclasses.replace(storage, columns=False)
        return ColumnsMoment(moment(plain, name, n, dim, number=number, fill=fill), dim)
    if not isinstance(storage, so.Sketched):
        kinds = {
            so.Exact: ExactMoment,
            so.RowWise: RowWiseMoment,
            so.RankOne: RankOneMoment,
            so.TopSingular: TopSingularMoment,
        }
        return kinds[type(storage)](n, dim, fill)
    hashes = Hash(storage.seed, number, storage.depth)
    width = storage.width or max(1, int(storage.ratio * n / storage.depth))
    columns = dim if storage.granularity == "element" else 1
    if storage.conservative:
        return ConservativeMoment(storage, ConservativeCountMin(hashes, width, columns, fill))
    form = {"linear": LinearMoment, "paper": PaperMoment, "bucket": BucketMoment}[storage.decay]
    sketch = CountSketch if name == "first" else CountMin
    return form(storage, sketch(hashes, width, columns, fill))


# -- optimizers ------------------------------------------------------------------------------------


class Optimizer:
    """One parameter ``x[n, dim]``; a subclass says where a step goes, in units of the rate."""

    def __init__(
        self,
        x: np.ndarray,
        memory: so.Memory,
        *,
        lr: float,
        weight_decay: float = 0.0,
        maximize: bool = False,
        number: int = 0,
        fill: float = 0.0,
    ) -> None:
        self.x = np.array(x, dtype=np.float64)
        self.memory, self.lr = memory, lr
        self.weight_decay, self.maximize = weight_decay, maximize
        self.first, self.second = (
            moment(storage, name, *self.x.shape, number=number, fill=fill)
            for name, storage in (("first", memory.first), ("second", memory.second))
        )
        self.t = 0

    def step(self, gradient: Rows, *, is_sparse: bool) -> None:
        self.t += 1
        rows = {}
        for i, g in gradient.items():
            rows[i] = (-g if self.maximize else g) + self.decay_into_gradient() * self.x[i]
        for i, direction in self.directions(rows, is_sparse).items():
            if self.memory.clip is not None:
                direction = np.clip(direction, -self.memory.clip, self.memory.clip)
            self.x[i] = self.shrink() * self.x[i] - self.rate() * direction
        for kept in (self.first, self.second):
            if kept is not None:
                kept.finish(self.t)

    def decay_into_gradient(self) -> float:
        return self.weight_decay

    def shrink(self) -> float:
        return 1.0

    def rate(self) -> float:
        return self.lr

    def directions(self, rows: Rows, is_sparse: bool) -> Rows:
        raise NotImplementedError


def squares(rows: Rows) -> Rows:
    return {i: g * g for i, g in rows.items()}


class SGD(Optimizer):
    """Algorithm 2, with torch's dampening and Nesterov."""

    def __init__(self, x, memory, *, momentum=0.0, dampening=0.0, nesterov=False, **options):
        super().__init__(x, so.Memory(first=memory.first, clip=memory.clip), **options)
        self.momentum, self.dampening, self.nesterov = momentum, dampening, nesterov

    def directions(self, rows: Rows, is_sparse: bool) -> Rows:
        if self.first is None or self.momentum == 0:
            return rows
        weight = 1.0 if self.t == 1 else 1.0 - self.dampening
        m = self.first.move(rows, self.momentum, weight)
        if self.nesterov:
            return {i: g + self.momentum * m[i] for i, g in rows.items()}
        return m


class Adagrad(Optimizer):
    """Algorithm 3, with torch's falling rate and starting value."""

    def __init__(
        self, x, memory, *, lr_decay=0.0, initial_accumulator_value=0.0, eps=1e-10, **options
    ):
        super().__init__(x, memory, fill=initial_accumulator_value, **options)
        self.lr_decay, self.eps = lr_decay, eps

    def rate(self) -> float:
        return self.lr / (1 + (self.t - 1) * self.lr_decay)

    def directions(self, rows: Rows, is_sparse: bool) -> Rows:
        v = self.second.move(squares(rows), 1.0, 1.0)
        return {i: g / (np.sqrt(v[i]) + self.eps) for i, g in rows.items()}


class RMSprop(Optimizer):
    """The moving average of squares without bias correction."""

    def __init__(self, x, memory, *, alpha=0.99, eps=1e-8, **options):
        super().__init__(x, memory, **options)
        self.alpha, self.eps = alpha, eps

    def directions(self, rows: Rows, is_sparse: bool) -> Rows:
        v = self.second.move(squares(rows), self.alpha, 1 - self.alpha)
        return {i: g / (np.sqrt(v[i]) + self.eps) for i, g in rows.items()}


class Adam(Optimizer):
    """Algorithm 4; epsilon as SparseAdam has it for sparse gradients, as Adam for dense ones."""

    def __init__(self, x, memory, *, betas=(0.9, 0.999), eps=1e-8, **options):
        super().__init__(x, memory, **options)
        self.betas, self.eps = betas, eps

    def directions(self, rows: Rows, is_sparse: bool) -> Rows:
        beta1, beta2 = self.betas
        v = self.second.move(squares(rows), beta2, 1 - beta2)
        if self.first is None:
            return {i: self.quotient(g, v[i], 0.0, is_sparse) for i, g in rows.items()}
        m = self.first.move(rows, beta1, 1 - beta1)
        if self.memory.form == "ratio":
            return {i: self.median_quotient(i, is_sparse) for i in rows}
        return {i: self.quotient(m[i], v[i], beta1, is_sparse) for i in rows}

    def quotient(self, m, v, beta1: float, is_sparse: bool) -> np.ndarray:
        first_correction = 1 - beta1**self.t
        second_correction = 1 - self.betas[1] ** self.t
        if is_sparse:
            rate = math.sqrt(second_correction) / first_correction
            return rate * m / (np.sqrt(v) + self.eps)
        return (m / first_correction) / (np.sqrt(v / second_correction) + self.eps)

    def median_quotient(self, i: int, is_sparse: bool) -> np.ndarray:
        pairs = zip(self.first.sketch.readings(i), self.second.sketch.readings(i), strict=True)
        return np.median([self.quotient(m, v, self.betas[0], is_sparse) for m, v in pairs], axis=0)


class AdamW(Adam):
    """Adam whose weight decay shrinks touched rows instead of joining their gradient."""

    def __init__(self, x, memory, *, weight_decay=1e-2, **options):
        super().__init__(x, memory, weight_decay=weight_decay, **options)

    def decay_into_gradient(self) -> float:
        return 0.0

    def shrink(self) -> float:
        return 1 - self.lr * self.weight_decay
