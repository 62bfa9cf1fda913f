"""CountSketch and CountMinSketch: many vectors in few buckets, with an error that is known.

Both keep a table ``[depth, width, dim]``. Each of `depth` hash rows sends an id to one of `width`
buckets; adding a vector adds it to one bucket a hash row, and a query combines the `depth`
readings. Tables are linear, so they scale, fold and merge without knowing what is in them.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from . import _hashing, _rows, theory

TABLE_DTYPES = (torch.float32, torch.bfloat16)
# The lazily applied scale stays within these: float32 tables neither under- nor overflow, and an
# estimate, being no larger than what is stored, does not either.
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-24, 1.0
# Leaves room in float32 for dividing by the smallest scale and for sums of 2^23 such values.
LARGEST_VALUE = 2.0**80
# Ids a public call handles at once, so that adding a million rows needs no million-row temporary.
_IDS_AT_ONCE = 1 << 14


def is_lazy(scale: float) -> bool:
    """Whether the scale can stay a number beside the table."""
    return _SMALLEST_SCALE <= abs(scale) <= _LARGEST_SCALE


class Location(NamedTuple):
    """Where some ids live: a bucket, and a sign where there are signs, in each hash row."""

    buckets: Tensor
    """int64 of shape ``[depth, k]``."""
    signs: Tensor | None
    """+1 or -1 of shape ``[depth, k]``, or None in a count-min sketch."""


class Sketch:
    """What both sketches share; use `CountSketch` or `CountMinSketch`.

    `table` holds the stored numbers; a reading is a stored number times `scale`. The scale is a
    0-d float32 tensor on the CPU, so that decaying a table of any size costs one multiplication.
    A bfloat16 table rounds stochastically, with random bits that are a function of `rounds`, the
    number of writes so far, and of the row that is written, not of its place in the call: the same
    run gives the same bits. A table that was filled with a number before anything was added knows
    that number, as it is stored, so that folding and merging count it once.
    """

    is_signed: bool

    def __init__(
        self,
        depth: int,
        width: int,
        dim: int,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        for name, value in (("depth", depth), ("width", width), ("dim", dim)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}; see for_error() for a size")
        if width > _hashing.MAX_WIDTH:
            raise ValueError(f"width must be <= 2**31, got {width}; use a larger depth instead")
        if dtype not in TABLE_DTYPES:
            raise ValueError(f"dtype must be torch.float32 or torch.bfloat16, got {dtype}")
        if not isinstance(seed, int):
            raise TypeError(f"seed must be an int, got {seed!r}")
        table = torch.zeros(depth, width, dim, dtype=dtype, device=device)
        self._bind(
            table=table,
            scale=torch.ones((), dtype=torch.float32, device="cpu"),
            words=_hashing.seeded(seed, 0, depth).to(table.device),
            rounds=None
            if dtype == torch.float32
            else torch.zeros((), dtype=torch.int64, device="cpu"),
        )

    @classmethod
    def over(cls, **tensors: Any) -> Self:
        """A sketch that works on the given tensors in place: what `tensors()` gave."""
        sketch = cls.__new__(cls)
        sketch._bind(**tensors)
        return sketch

    def _bind(
        self,
        *,
        table: Tensor,
        scale: Tensor,
        words: Tensor,
        rounds: Tensor | None = None,
        start: Tensor | None = None,
    ) -> None:
        self.table, self.scale, self.words = table, scale, words
        self.rounds, self._start = rounds, start

    def tensors(self) -> dict[str, Tensor]:
        """All that the sketch is: table, scale, hash words; how often it rounded; its start."""
        named = {"table": self.table, "scale": self.scale, "words": self.words}
        more = {"rounds": self.rounds, "start": self._start}
        return named | {part: tensor for part, tensor in more.items() if tensor is not None}

    @property
    def start(self) -> float:
        """What a row that was never written reads, but for collisions."""
        return 0.0 if self._start is None else (self._start * self.scale).item()

    @property
    def depth(self) -> int:
        return self.table.shape[0]

    @property
    def width(self) -> int:
        return self.table.shape[1]

    @property
    def dim(self) -> int:
        return self.table.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.table.nbytes

    def __repr__(self) -> str:
        size = f"depth={self.depth}, width={self.width}, dim={self.dim}, dtype={self.table.dtype}"
        return f"{type(self).__name__}({size}, nbytes={self.nbytes:,})"

    # -- public operations -------------------------------------------------------------------

    def add_(self, ids: Tensor, values: Tensor) -> Self:
        """The sketch after adding ``values[k, dim]`` to the vectors of ``ids[k]``; ids may repeat.

        Values that are not finite, or beyond 2^80, are refused: one would poison every row that
        shares its buckets.
        """
        ids = self._checked_ids(ids)
        _check_tensor("values", values)
        if values.shape != (ids.numel(), self.dim):
            expected = f"[{ids.numel()}, {self.dim}]"
            raise ValueError(f"values must have shape {expected}, got {list(values.shape)}")
        if values.device != self.table.device:
            raise ValueError(f"values must be on {self.table.device}, got {values.device}")
        if values.is_complex():
            raise TypeError(f"values must be real, got {values.dtype}")
        low, high = (x.item() for x in torch.aminmax(values)) if values.numel() else (0, 0)
        if not -LARGEST_VALUE <= low <= high <= LARGEST_VALUE:  # as a NaN is not
            raise ValueError(
                "values must be finite and within 2**80, got NaN, inf or more; nothing was added"
            )
        if low < 0 and not self.is_signed:
            raise ValueError("values must be >= 0 in a count-min sketch; see CountSketch for signs")
        self._add_(ids, values.detach())
        return self

    def query(self, ids: Tensor) -> Tensor:
        """The estimated vectors of ``ids[k]``, float32 of shape ``[k, dim]``."""
        return self._estimates(self._checked_ids(ids))

    def scale_(self, factor: float) -> Self:
        """The sketch with every estimate multiplied by `factor`; to decay takes constant time.

        A scale below 2^-24, after thousands of calls, or above 1 is folded into the table as a
        power of two, which rounds nothing. A factor that would make an estimate overflow is refused
        (`tests/test_sketch_scale.py::test_an_estimate_stays_finite_whatever_factors_are_taken`).
        """
        if not math.isfinite(factor) or (factor < 0 and not self.is_signed):
            allowed = "finite" if self.is_signed else "finite and >= 0"
            raise ValueError(f"factor must be {allowed}, got {factor}")
        scale = self.scale.item() * factor
        if scale == 0.0:
            for stored in self._stored:
                stored.zero_()
            scale = 1.0
        elif not is_lazy(scale):
            scale, exponent = math.frexp(scale)
            self._shift_(exponent, factor)
        self.scale.fill_(scale)
        return self

    def fold_(self) -> Self:
        """The sketch at half its width: what adding the same vectors to such a one would give.

        A conservative sketch keeps the larger of two neighbours, which is at least the truth.
        """
        if self.width % 2:
            raise ValueError(
                f"width must be even to fold, got {self.width}; build it with an even width"
            )
        halves = self.table.float().unflatten(1, (-1, 2))
        self.table = self._rounded(self._folded(halves))
        return self

    def merge_(self, other: Self) -> Self:
        """The sketch of both streams: `other` must have the same size, hash words and kind."""
        if type(other) is not type(self) or other.table.shape != self.table.shape:
            raise ValueError(f"other must be like {self!r}, got {other!r}")
        if not torch.equal(other.words, self.words.to(other.words.device)):
            raise ValueError("other must have the same hash words; build both with one seed")
        if not math.isclose(other.start, self.start, rel_tol=1e-5):
            raise ValueError(
                f"other must have started from {self.start:g} as this sketch has, "
                f"got {other.start:g}; start both alike and scale them alike"
            )
        ratio = other.scale.item() / self.scale.item()
        merged = self.table.float() + other.table.to(self.table.device).float() * ratio
        self.table.copy_(self._rounded(merged - self._stored_start))
        return self

    # -- for moments: unchecked, in units of the caller's choice ------------------------------

    def locate(self, ids: Tensor) -> Location:
        """The buckets and signs of ``ids[k]``."""
        buckets = _hashing.buckets(self.words, ids, self.width)
        return Location(buckets, _hashing.signs(self.words, ids) if self.is_signed else None)

    def read(self, at: Location) -> Tensor:
        """What every hash row says: signed, scaled readings, float32 ``[depth, k, dim]``."""
        flat = (at.buckets + self._row_offsets()).flatten()
        stored = self.table.flatten(0, 1).index_select(0, flat).float()
        readings = stored.view(*at.buckets.shape, self.dim).mul_(self.scale.item())
        return readings if at.signs is None else readings.mul_(at.signs.unsqueeze(-1))

    def combine(self, readings: Tensor) -> Tensor:
        """The estimate ``[k, dim]`` that readings ``[depth, k, dim]`` amount to."""
        raise NotImplementedError

    def estimate(self, ids: Tensor) -> Tensor:
        """`query` without the checks."""
        return self.combine(self.read(self.locate(ids)))

    def accumulate_(self, ids: Tensor, values: Tensor) -> None:
        """`add_` without the checks: all rows at once, in order, each hash row for itself."""
        at = self.locate(ids)
        inverse = 1.0 / self.scale.item()
        key = None if self.rounds is None else self.rounding_key()
        for row in range(self.depth):
            signed = values if at.signs is None else values * at.signs[row].unsqueeze(-1)
            stored = (signed * inverse).float()
            if key is None:
                self.table[row].index_add_(0, at.buckets[row], stored)
            else:  # sum a bucket's share in float32, then round once, by the bits of its least id
                unique, position = torch.unique(at.buckets[row], return_inverse=True)
                least = torch.full_like(unique, _hashing.MAX_ID)
                least.scatter_reduce_(0, position, ids, "amin")
                summed = self.table[row].index_select(0, unique).float()
                summed.index_add_(0, position, stored)
                self.table[row].index_copy_(0, unique, self._rounded(summed, at=least, key=key))

    def write_(self, at: Location, readings: Tensor) -> None:
        """Makes the readings at a location with distinct buckets what they are told to be."""
        signed = readings if at.signs is None else readings * at.signs.unsqueeze(-1)
        stored = (signed * (1.0 / self.scale.item())).float()
        # Rounded alike in every hash row: each for itself, the readings would drift apart, and the
        # least of them would be too small in the mean.
        rounded = self._rounded(stored, at=at.buckets[0].expand_as(at.buckets))
        for row in range(self.depth):
            self.table[row].index_copy_(0, at.buckets[row], rounded[row])

    def _add_(self, ids: Tensor, values: Tensor) -> None:
        for part in _parts(ids):
            self.accumulate_(ids[part], values[part].float())

    def _estimates(self, ids: Tensor) -> Tensor:
        parts = [self.estimate(ids[part]) for part in _parts(ids)]
        return torch.cat(parts) if parts else self.estimate(ids)

    def rounding_key(self) -> int:
        """The next 32 bits that stochastic rounding starts from."""
        assert self.rounds is not None
        self.rounds += 1
        return _hashing.mixed(int(self.rounds.item())) & 0xFFFFFFFF

    def _shift_(self, exponent: int, factor: float) -> None:
        """Multiplies the table by 2^exponent, or raises where its dtype cannot hold that."""
        largest = max(abs(extreme.item()) for extreme in torch.aminmax(self.table))
        if largest == 0.0:
            return
        if math.frexp(largest)[1] + exponent > 128:
            raise ValueError(f"factor must leave every estimate finite, got {factor}")
        for part in range(3):  # since 2^exponent itself may not be a float32
            for stored in self._stored:
                stored.mul_(2.0 ** ((exponent + part) // 3))

    @property
    def _stored(self) -> list[Tensor]:
        """What is multiplied by the scale when it is read."""
        return [self.table] if self._start is None else [self.table, self._start]

    @property
    def _stored_start(self) -> float:
        return 0.0 if self._start is None else self._start.item()

    def _row_offsets(self) -> Tensor:
        return torch.arange(self.depth, device=self.table.device).unsqueeze(-1) * self.width

    def _folded(self, halves: Tensor) -> Tensor:
        return halves.sum(2) - self._stored_start

    def _rounded(self, stored: Tensor, at: Tensor | None = None, key: int | None = None) -> Tensor:
        """As the table holds it; rows of the same `at`, under one key, are rounded alike."""
        if self.rounds is None:
            return stored
        if key is None:
            key = self.rounding_key()
        if at is None:
            at = torch.arange(stored.flatten(0, -2).shape[0], device=stored.device)
        columns = torch.arange(self.dim, device=stored.device)
        position = (at.unsqueeze(-1) * self.dim + columns).view(stored.shape)
        return _round_stochastically(stored, position, key, self.table.dtype)

    def _checked_ids(self, ids: Tensor) -> Tensor:
        _check_tensor("ids", ids)
        if ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 1:
            raise TypeError(f"ids must be int64 of shape [k], got {ids.dtype} {list(ids.shape)}")
        if ids.device != self.table.device:
            raise ValueError(f"ids must be on {self.table.device}, got {ids.device}")
        ids = ids.long()
        if ids.numel() and not 0 <= ids.min() <= ids.max() <= _hashing.MAX_ID:
            span = f"{ids.min().item()} to {ids.max().item()}"
            raise ValueError(f"ids must be between 0 and 2**32 - 1, got {span}")
        return ids


class CountSketch(Sketch):
    """A signed sketch: the estimate is the median over the hash rows, right in the mean.

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

    A bfloat16 table rounds up or down, right in the mean: one write leaves an estimate within a
    part in 2^7 (`tests/test_sketch_rounding.py::test_one_write_is_right_to_a_part_in_128`), and
    thousands of small ones leave it some percent off, below the truth as well as above.

    >>> sketch = CountMinSketch(depth=3, width=64, dim=1)
    >>> sketch.add_(torch.tensor([7]), torch.tensor([[2.0]])).query(torch.tensor([7]))
    tensor([[2.]])
    """

    is_signed = False

    def __init__(
        self, depth: int, width: int, dim: int, *, conservative: bool = False, **options: Any
    ) -> None:
        if not isinstance(conservative, bool):
            raise TypeError(f"conservative must be True or False, got {conservative!r}")
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

    def combine(self, readings: Tensor) -> Tensor:
        return readings.amin(0)

    def raise_(self, ids: Tensor, targets: Tensor) -> None:
        """Raises every bucket of ``ids[k]`` to the largest of the ``targets[k, dim]`` in it."""
        at = self.locate(ids)
        stored = (targets * (1.0 / self.scale.item())).float()
        # Rounded once, for all hash rows: the least of several roundings would be too small in the
        # mean, and a maximum of rounded numbers needs no rounding.
        stored = self._rounded(stored, at=ids)
        for row in range(self.depth):
            buckets = at.buckets[row].unsqueeze(-1).expand_as(stored)
            self.table[row].scatter_reduce_(0, buckets, stored, "amax")

    def _add_(self, ids: Tensor, values: Tensor) -> None:
        if not self.conservative:
            return super()._add_(ids, values)
        ids, values = _rows.unique_sums(ids, values.float())
        self.raise_(ids, self._estimates(ids) + values)

    def _folded(self, halves: Tensor) -> Tensor:
        # The larger neighbour is at least the truth, tighter than the sum, and has the start once.
        return halves.amax(2) if self.conservative else super()._folded(halves)


def median(readings: Tensor) -> Tensor:
    """The median over the first dimension; the mean of the middle two when it is even."""
    depth = readings.shape[0]
    if depth == 3:  # a network of comparisons: many times faster than a sort, and the same bits
        a, b, c = readings
        return torch.maximum(torch.minimum(a, b), torch.minimum(torch.maximum(a, b), c))
    ordered = readings.sort(0).values
    middle = ordered[depth // 2]
    return middle if depth % 2 else (ordered[depth // 2 - 1] + middle) * 0.5


def _round_stochastically(x: Tensor, position: Tensor, key: int, dtype: torch.dtype) -> Tensor:
    """`x` as bfloat16, up or down with the probabilities that make the mean right."""
    noise = position * 0x2545F4914F6CDD1D + key
    for shift, factor in ((32, 0x1F58476D1CE4E5B9), (29, 0x14D049BB133111EB)):
        noise = (noise ^ ((noise >> shift) & (2 ** (64 - shift) - 1))) * factor
    bits = x.contiguous().view(torch.int32) + ((noise >> 40) & 0xFFFF).int()
    return (bits & -0x10000).view(torch.float32).to(dtype)


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {value!r}; use torch.tensor()")


def _parts(ids: Tensor) -> Iterator[slice]:
    for start in range(0, ids.numel(), _IDS_AT_ONCE):
        yield slice(start, start + _IDS_AT_ONCE)
