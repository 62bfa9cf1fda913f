"""The part that both sketches share: hashing, counters, their scale and their rounding."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from . import _hashing, _rounding, _rows
from ._validation import check_int, check_positive_int

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

COUNTER_DTYPES = (torch.float32, torch.bfloat16)
# The lazily applied scale stays within these bounds, so float32 counters neither under- nor
# overflow. An estimate is no larger than its counters, so it does not overflow either.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-24, 1.0
# Leaves room in float32 to divide by the smallest scale and to sum 2^23 values of this size.
LARGEST_VALUE = 2.0**80
# Ids that a public call handles at once, so adding a million rows needs no million-row temporary.
_IDS_AT_ONCE = 1 << 14


class Location(NamedTuple):
    """The buckets of some ids, and their signs in a signed sketch, in each hash row."""

    buckets: Tensor
    """int64 of shape ``[depth, k]``."""
    signs: Tensor | None
    """+1 or -1 of shape ``[depth, k]``, or None in a count-min sketch."""


class Sketch:
    """What `CountSketch` and `CountMinSketch` have in common.

    `counters` holds the stored numbers; a reading is a counter times `scale`. The scale is a 0-d
    float32 tensor on the CPU, so decaying a sketch of any size costs one multiplication.

    bfloat16 counters are rounded stochastically. Each row is rounded once per hash row, in
    ascending order of ids, by bits that are a function of a key, the id and the column
    (`_rounding`); the key is a function of `writes`, the number of writes so far. The same run
    gives the same bits. `writes` is None for float32 counters, which are not rounded.

    A sketch whose counters were filled with a number before anything was added keeps that number
    in `start`, as it is stored, so that folding and merging count it once.
    """

    is_signed: bool
    first_id: int = 0
    """Added to every id that a moment names: its rows are a part of a table, from here on."""

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
            check_positive_int(name, value, remedy="see for_error() for a size")
        check_int("width", width, most=_hashing.MAX_WIDTH, remedy="use more depth instead")
        if dtype not in COUNTER_DTYPES:
            raise ValueError(f"dtype must be torch.float32 or torch.bfloat16, got {dtype}")
        check_int("seed", seed)
        counters = torch.zeros(depth, width, dim, dtype=dtype, device=device)
        is_rounded = dtype != torch.float32
        self._bind(
            counters=counters,
            scale=torch.ones((), dtype=torch.float32, device="cpu"),
            words=_hashing.seeded(seed, 0, depth).to(counters.device),
            writes=torch.zeros((), dtype=torch.int64, device="cpu") if is_rounded else None,
        )

    @classmethod
    def over(cls, *, first_id: int = 0, **tensors: Any) -> Self:
        """A sketch that works in place on the given tensors, as `tensors()` returns them."""
        sketch = cls.__new__(cls)
        sketch._bind(**tensors)
        sketch.first_id = first_id
        return sketch

    def _bind(
        self,
        *,
        counters: Tensor,
        scale: Tensor,
        words: Tensor,
        writes: Tensor | None = None,
        start: Tensor | None = None,
    ) -> None:
        self.counters, self.scale, self.words = counters, scale, words
        self.writes, self._start = writes, start

    def tensors(self) -> dict[str, Tensor]:
        """All of its state: counters, scale and words; writes and start where it has them."""
        named = {"counters": self.counters, "scale": self.scale, "words": self.words}
        optional = {"writes": self.writes, "start": self._start}
        return named | {part: tensor for part, tensor in optional.items() if tensor is not None}

    @property
    def start(self) -> float:
        """The estimate of a row that was never written and collides with none."""
        return 0.0 if self._start is None else (self._start * self.scale).item()

    @property
    def depth(self) -> int:
        return self.counters.shape[0]

    @property
    def width(self) -> int:
        return self.counters.shape[1]

    @property
    def dim(self) -> int:
        return self.counters.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the counters."""
        return self.counters.nbytes

    def __repr__(self) -> str:
        size = (
            f"depth={self.depth}, width={self.width}, dim={self.dim}, dtype={self.counters.dtype}"
        )
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
        if values.device != self.counters.device:
            raise ValueError(f"values must be on {self.counters.device}, got {values.device}")
        if values.is_complex():
            raise TypeError(f"values must be real, got {values.dtype}")
        low, high = (x.item() for x in torch.aminmax(values)) if values.numel() else (0, 0)
        if not -LARGEST_VALUE <= low <= high <= LARGEST_VALUE:  # true for NaN
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
        """The sketch with every estimate multiplied by `factor`; a decay takes constant time.

        A scale below 2^-24, after thousands of calls, or above 1 is moved into the counters as a
        power of two, which is exact. A factor that would make an estimate overflow is refused
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
        elif not SMALLEST_SCALE <= abs(scale) <= LARGEST_SCALE:
            scale, exponent = math.frexp(scale)
            self._shift_(exponent, factor)
        self.scale.fill_(scale)
        return self

    def fold_(self) -> Self:
        """The sketch at half its width, as if every vector had been added at that width.

        A conservative sketch keeps the larger of two neighbours, which is at least the truth.
        """
        if self.width % 2:
            raise ValueError(
                f"width must be even to fold, got {self.width}; build it with an even width"
            )
        pairs = self.counters.float().unflatten(1, (-1, 2))
        self.counters = self._as_counters(self._fold_pairs(pairs))
        return self

    def merge_(self, other: Self) -> Self:
        """The sketch of both streams: `other` must have the same size, hash words and kind."""
        if type(other) is not type(self) or other.counters.shape != self.counters.shape:
            raise ValueError(f"other must be like {self!r}, got {other!r}")
        if not torch.equal(other.words, self.words.to(other.words.device)):
            raise ValueError("other must have the same hash words; build both with one seed")
        if not math.isclose(other.start, self.start, rel_tol=1e-5):
            raise ValueError(
                f"other must have started from {self.start:g} as this sketch has, "
                f"got {other.start:g}; start both alike and scale them alike"
            )
        ratio = other.scale.item() / self.scale.item()
        merged = self.counters.float() + other.counters.to(self.counters.device).float() * ratio
        self.counters.copy_(self._as_counters(merged - self._stored_start))
        return self

    def all_reduce_(self, group: "ProcessGroup | None" = None) -> Self:
        """The sketch of the streams of all processes of a group, in each of them, by one sum.

        Counters add up, so the result is `merge_` of all: up to rounding, the sketch of the whole
        stream in one process. Sums of conservative sketches are never below the truth, and never
        above a plain count-min sketch of the whole stream
        (`tests/distributed/test_merging.py`).

        Sketches that are not alike are refused in all processes, and nothing changes.
        """
        import torch.distributed as dist

        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, (self._likeness(), self.start), group)
        for rank, (likeness, start) in enumerate(found):
            if likeness != found[0][0] or not math.isclose(start, found[0][1], rel_tol=1e-5):
                raise ValueError(
                    "sketches of all processes must be of one kind, size, dtype, seed and start, "
                    f"but rank {rank} of the group differs from rank 0; build and scale them alike"
                )
        total = self.counters.float().mul_(self.scale.item())
        dist.all_reduce(total, group=group)
        total -= (len(found) - 1) * self.start
        self.counters.copy_(self._as_counters(total.div_(self.scale.item())))
        return self

    def _likeness(self) -> tuple[Any, ...]:
        """What sketches must have in common to be merged, in plain values."""
        size = tuple(self.counters.shape)
        return type(self).__name__, size, str(self.counters.dtype), self.words.tolist()

    # -- for moments: unchecked --------------------------------------------------------------

    def next_key(self) -> int | None:
        """The key of the next write's rounding, 32 bits; None for counters that are not rounded.

        Call it once per step, and pass it to every call that writes during the step.
        """
        if self.writes is None:
            return None
        self.writes += 1
        return _hashing.splitmix64(int(self.writes.item())) & 0xFFFFFFFF

    def locate(self, ids: Tensor) -> Location:
        """The buckets and signs of ``ids[k]``."""
        ids = self._hashed(ids)
        buckets = _hashing.buckets(self.words, ids, self.width)
        return Location(buckets, _hashing.signs(self.words, ids) if self.is_signed else None)

    def read(self, at: Location) -> Tensor:
        """The signed and scaled reading of every hash row, float32 ``[depth, k, dim]``."""
        counters = self._flat_counters().index_select(0, self._flat(at.buckets)).float()
        readings = counters.view(*at.buckets.shape, self.dim).mul_(self.scale.item())
        return readings if at.signs is None else readings.mul_(at.signs.unsqueeze(-1))

    def combine(self, readings: Tensor) -> Tensor:
        """The estimate ``[k, dim]`` from readings ``[depth, k, dim]``."""
        raise NotImplementedError

    def estimate(self, ids: Tensor) -> Tensor:
        """`query` without the checks."""
        return self.combine(self.read(self.locate(ids)))

    def accumulate_(self, ids: Tensor, values: Tensor, key: int | None) -> None:
        """`add_` without the checks; under a key, ids must ascend strictly."""
        at = self.locate(ids)
        inverse = 1.0 / self.scale.item()
        if key is not None:
            return self._accumulate_rounded_(ids, values, at, inverse, key)
        for row in range(self.depth):
            signed = values if at.signs is None else values * at.signs[row].unsqueeze(-1)
            _rows.add_rows_(self.counters[row], at.buckets[row], (signed * inverse).float())

    def _accumulate_rounded_(
        self, ids: Tensor, values: Tensor, at: Location, inverse: float, key: int
    ) -> None:
        """Adds one row after the other to its buckets, and rounds each bucket every time."""
        noise = _rounding.noise(key, self._hashed(ids), self.dim)
        counters, buckets = self._flat_counters(), self._flat(at.buckets)
        for turn in _turns(buckets):
            here, rows = buckets[turn], turn % ids.numel()
            signed = values[rows]
            if at.signs is not None:
                signed = signed * at.signs.flatten()[turn].unsqueeze(-1)
            summed = counters[here].float() + (signed * inverse).float()
            counters.index_copy_(0, here, _rounding.to_bfloat16(summed, noise[rows]))

    def write_(self, at: Location, ids: Tensor, readings: Tensor, key: int | None) -> None:
        """Stores readings ``[depth, k, dim]`` at the location of ``ids[k]``.

        No two of the ids may share a bucket.
        """
        signed = readings if at.signs is None else readings * at.signs.unsqueeze(-1)
        stored = self._round((signed * (1.0 / self.scale.item())).float(), ids, key)
        self._flat_counters().index_copy_(0, self._flat(at.buckets), stored.flatten(0, 1))

    def _add_(self, ids: Tensor, values: Tensor) -> None:
        key = self.next_key()
        if key is not None:  # a row is rounded once, however often its id repeats
            ids, values = _rows.unique_sums(ids, values.float())
        for part in _parts(ids):
            self.accumulate_(ids[part], values[part].float(), key)

    def _estimates(self, ids: Tensor) -> Tensor:
        parts = [self.estimate(ids[part]) for part in _parts(ids)]
        return torch.cat(parts) if parts else self.estimate(ids)

    def _shift_(self, exponent: int, factor: float) -> None:
        """Multiplies the counters by 2^exponent, or raises where their dtype cannot hold that."""
        largest = max(abs(extreme.item()) for extreme in torch.aminmax(self.counters))
        if largest == 0.0:
            return
        if math.frexp(largest)[1] + exponent > 128:
            raise ValueError(f"factor must leave every estimate finite, got {factor}")
        for part in range(3):  # since 2^exponent itself may not be a float32
            for stored in self._stored:
                stored.mul_(2.0 ** ((exponent + part) // 3))

    @property
    def _stored(self) -> list[Tensor]:
        """The tensors that are multiplied by the scale when they are read."""
        return [self.counters] if self._start is None else [self.counters, self._start]

    @property
    def _stored_start(self) -> float:
        return 0.0 if self._start is None else self._start.item()

    def _flat_counters(self) -> Tensor:
        """The counters of all hash rows in one list of buckets, ``[depth * width, dim]``."""
        return self.counters.view(-1, self.dim)

    def _flat(self, buckets: Tensor) -> Tensor:
        """Buckets ``[depth, k]`` as indices of `_flat_counters`, ``[depth * k]``."""
        rows = torch.arange(self.depth, device=buckets.device).unsqueeze(-1)
        return (buckets + rows * self.width).flatten()

    def _fold_pairs(self, pairs: Tensor) -> Tensor:
        return pairs.sum(2) - self._stored_start

    def _round(self, stored: Tensor, ids: Tensor, key: int | None) -> Tensor:
        """``stored[..., k, dim]`` in the dtype of the counters.

        All hash rows of an id are rounded by the same bits. Independently rounded, the readings
        would drift apart, and the least of them would be biased towards zero.
        """
        if key is None:
            return stored
        noise = _rounding.noise(key, self._hashed(ids), self.dim)
        return _rounding.to_bfloat16(stored, noise)

    def _hashed(self, ids: Tensor) -> Tensor:
        """The ids as they are hashed."""
        return ids + self.first_id if self.first_id else ids

    def _as_counters(self, stored: Tensor) -> Tensor:
        """New values of all counters in their dtype, rounded by the number of the bucket."""
        key = self.next_key()
        if key is None:
            return stored
        buckets = torch.arange(stored.shape[0] * stored.shape[1], device=stored.device)
        noise = _rounding.noise(key, buckets, self.dim)
        return _rounding.to_bfloat16(stored.flatten(0, 1), noise).view(stored.shape)

    def _checked_ids(self, ids: Tensor) -> Tensor:
        _check_tensor("ids", ids)
        if ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 1:
            raise TypeError(f"ids must be int64 of shape [k], got {ids.dtype} {list(ids.shape)}")
        if ids.device != self.counters.device:
            raise ValueError(f"ids must be on {self.counters.device}, got {ids.device}")
        ids = ids.long()
        if ids.numel() and not 0 <= ids.min() <= ids.max() <= _hashing.MAX_ID:
            span = f"{ids.min().item()} to {ids.max().item()}"
            raise ValueError(f"ids must be between 0 and 2**32 - 1, got {span}")
        return ids


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {value!r}; use torch.tensor()")


def _parts(ids: Tensor) -> Iterator[slice]:
    for start in range(0, ids.numel(), _IDS_AT_ONCE):
        yield slice(start, start + _IDS_AT_ONCE)


def _turns(buckets: Tensor) -> Iterator[Tensor]:
    """Positions ``0..k-1`` of ``buckets[k]`` in groups without a repeated bucket.

    Group ``r`` holds the position at which each bucket occurs for the ``r``-th time, so going
    through the groups keeps the order of the positions within every bucket.
    """
    order = torch.argsort(buckets, stable=True)
    positions = torch.arange(buckets.numel(), device=buckets.device)
    ordered = buckets[order]
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    first = torch.where(is_first, positions, 0).cummax(0).values if buckets.numel() else positions
    turns = positions - first
    sizes = torch.bincount(turns).tolist()
    yield from order[torch.argsort(turns, stable=True)].split(sizes)
