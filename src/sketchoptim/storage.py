"""Where a moment lives: the storage choices, what they combine to, and the presets.

Everything here is configuration: frozen, validated when built, and without tensors. `Memory` names
a storage for the first and for the second moment; optimizers take one for each parameter group.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from . import _hashing
from ._sketch import TABLE_DTYPES

Form = Literal["moments", "ratio"]
Granularity = Literal["row", "element"]
Decay = Literal["linear", "paper", "bucket"]

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TABLE_DTYPES}


@dataclass(frozen=True)
class Exact:
    """One number for each weight, ``[n, dim]``, in the parameter's dtype: as torch.optim."""


@dataclass(frozen=True)
class RowWise:
    """One number for each row, ``[n]`` in float32: the mean over the row. Second moments only."""


@dataclass(frozen=True)
class RankOne:
    """Row sums ``[n]`` times column sums ``[dim]``: the rank-one factors of least I-divergence.

    The factors are those of the whole table's decayed moment, as in Adafactor. Second moments only.
    """


@dataclass(frozen=True)
class TopSingular:
    """The best rank-one approximation in l2, found anew after every update.

    A baseline to compare with, not to train with: a step costs a ``dim x dim`` eigenproblem.
    """


@dataclass(frozen=True, kw_only=True)
class Sketched:
    """A sketch ``[depth, width, dim]`` (or ``[depth, width, 1]`` by row).

    Signed moments go to a `CountSketch`, second moments to a `CountMinSketch`.

    Args:
        ratio: Table elements over the elements exact storage of the same granularity has. Defaults
            to 1/8 by row and 1/5 by element when no width is given.
        width: Buckets in a hash row, instead of a ratio.
        depth: Hash rows.
        granularity: "row" keeps the mean over a row, "element" a number for each column.
        decay: "linear" decays the whole table at once, adds all rows, then queries them. "paper"
            moves each row's estimate in turn, as Algorithms 2 to 4 are written. "bucket" decays
            each bucket that is hit by itself, as the paper's authors' code does.
        conservative: Raise a bucket only as far as the estimates in it need. Linear decay and
            second moments only.
        clean_every: Multiply the table by `clean_by` after every so many steps.
        clean_by: A factor between 0 and 1.
        fold_at: Steps after which the width halves.
        fold_when: Instead of steps, a bound for the relative error: after every 1,000 steps the
            width halves if the table at half its width would, by its own estimate, be wrong by
            less (`sketchoptim.diagnostics.estimate_error`). The starting width is a multiple of 64.
        dtype: torch.float32, or torch.bfloat16 with stochastic rounding.
        seed: Of the hash; under one seed two parameters never share their hash words.

    A table shrinks but never grows. Halving adds two neighbours, and a sum does not tell what its
    parts were: a wider table would have to hash anew rows that nobody kept. So start wide, as wide
    as the first thousand steps can afford, and give `fold_when`. A run whose table turns out too
    narrow goes on in a wider one through `to_torch` and `from_torch`: what the narrow one had wrong
    is carried along as if it were true, and decays with the moment.
    """

    ratio: float | None = None
    width: int | None = None
    depth: int = 3
    granularity: Granularity = "row"
    decay: Decay = "linear"
    conservative: bool = False
    clean_every: int | None = None
    clean_by: float | None = None
    fold_at: tuple[int, ...] = ()
    fold_when: float | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        _check_choice("granularity", self.granularity, ("row", "element"))
        _check_choice("decay", self.decay, ("linear", "paper", "bucket"))
        if self.ratio is not None and self.width is not None:
            raise ValueError(
                f"give ratio or width, not both; got ratio={self.ratio}, width={self.width}"
            )
        if self.ratio is None and self.width is None:
            object.__setattr__(self, "ratio", 1 / 8 if self.granularity == "row" else 1 / 5)
        if self.ratio is not None:
            _check_positive("ratio", self.ratio)
        if self.width is not None:
            _check_whole("width", self.width)
            if self.width > _hashing.MAX_WIDTH:
                raise ValueError(
                    f"width must be <= 2**31, got {self.width}; use a larger depth instead"
                )
        _check_whole("depth", self.depth)
        if not isinstance(self.conservative, bool):
            raise TypeError(f"conservative must be True or False, got {self.conservative!r}")
        if self.conservative and self.decay != "linear":
            raise ValueError(
                f'conservative needs decay="linear", got decay="{self.decay}": '
                "the other forms lower buckets, which a conservative sketch never does"
            )
        if (self.clean_every is None) != (self.clean_by is None):
            raise ValueError(
                "give clean_every and clean_by together, "
                f"got clean_every={self.clean_every}, clean_by={self.clean_by}"
            )
        if self.clean_every is not None:
            _check_whole("clean_every", self.clean_every)
        if self.clean_by is not None:
            _check_real("clean_by", self.clean_by)
            if not 0 <= self.clean_by < 1:
                raise ValueError(f"clean_by must be in [0, 1), got {self.clean_by}")
        if not isinstance(self.fold_at, Iterable):
            raise TypeError(f"fold_at must be a tuple of steps, got {self.fold_at!r}")
        object.__setattr__(self, "fold_at", tuple(self.fold_at))
        for step in self.fold_at:
            _check_whole("a step in fold_at", step)
        if len(set(self.fold_at)) != len(self.fold_at):
            raise ValueError(f"fold_at must not repeat a step, got {self.fold_at}")
        if self.fold_when is not None:
            _check_positive("fold_when", self.fold_when)
            if self.fold_at:
                raise ValueError(
                    "give fold_at or fold_when, not both; "
                    f"got fold_at={self.fold_at}, fold_when={self.fold_when}"
                )
        if self.width is not None and self.width % self.folds_into:
            times = "as its error allows" if self.fold_when else f"{len(self.fold_at)} times"
            raise ValueError(
                f"width must be a multiple of {self.folds_into} to fold {times}, got {self.width}"
            )
        if self.dtype not in _DTYPES.values():
            raise ValueError(f"dtype must be torch.float32 or torch.bfloat16, got {self.dtype}")
        if not isinstance(self.seed, int):
            raise TypeError(f"seed must be an int, got {self.seed!r}")

    @property
    def folds_into(self) -> int:
        """What the starting width is a multiple of, so that it can fold as often as asked."""
        return 64 if self.fold_when is not None else int(2 ** len(self.fold_at))

    def widths(self, width: int) -> set[int]:
        """The widths that a table may come to have, from a starting width on."""
        folds = len(self.fold_at)
        if self.fold_when is not None:
            folds = (width & -width).bit_length() - 1  # until it is odd
        return {width >> fold for fold in range(folds + 1)}

    def table_shape(self, rows: int, dim: int) -> tuple[int, int, int]:
        """Depth, width and dim of the table that a parameter of ``[rows, dim]`` starts with."""
        if self.width is not None:
            width = self.width
        else:
            assert self.ratio is not None  # set in __post_init__
            width = int(self.ratio * rows / self.depth)
            width = max(width - width % self.folds_into, self.folds_into)
        return self.depth, width, dim if self.granularity == "element" else 1


Storage = Exact | RowWise | Sketched | RankOne | TopSingular
_STORAGES = {kind.__name__: kind for kind in (Exact, RowWise, Sketched, RankOne, TopSingular)}


@dataclass(frozen=True)
class Memory:
    """A storage for each moment; None drops the moment and its update uses the gradient itself.

    Args:
        first: The mean of gradients (Adam) or the momentum buffer (SGD); it has signs.
        second: The mean or sum of squared gradients; without it there is nothing to divide by.
        form: "moments" estimates both moments, then divides. "ratio" divides in each hash row,
            where the two share their bucket, and takes the median of the quotients.
        clip: A bound for each element of a step, in units of the learning rate: what keeps a
            sketched first moment over a small second one from moving a weight far.
    """

    first: Storage | None = None
    second: Storage | None = None
    form: Form = "moments"
    clip: float | None = None

    def __post_init__(self) -> None:
        for name in ("first", "second"):
            storage = getattr(self, name)
            if storage is not None and type(storage) not in _STORAGES.values():
                raise TypeError(
                    f"{name} must be one of {', '.join(_STORAGES)} or None, got {storage!r}"
                )
        self._check_first()
        _check_choice("form", self.form, ("moments", "ratio"))
        if self.form == "ratio":
            self._check_ratio()
        if self.clip is not None:
            _check_positive("clip", self.clip)

    def _check_first(self) -> None:
        first = self.first
        if isinstance(first, RowWise | RankOne):
            raise ValueError(
                f"first must hold signed vectors, which {type(first).__name__} cannot; "
                'use Exact(), Sketched(granularity="element") or None'
            )
        if isinstance(first, Sketched) and first.granularity == "row":
            raise ValueError(
                "first must hold a vector for each row, which a sketch by row cannot; "
                'use Sketched(granularity="element") or None'
            )
        if isinstance(first, Sketched) and first.conservative:
            raise ValueError(
                "first must hold signed vectors, which a conservative sketch cannot; "
                "use conservative=False"
            )

    def _check_ratio(self) -> None:
        if not (isinstance(self.first, Sketched) and isinstance(self.second, Sketched)):
            raise ValueError('form="ratio" needs first and second to be Sketched')
        if self.first.fold_when is not None:
            raise ValueError(
                'form="ratio" needs both tables to have one width, which fold_when cannot promise; '
                "use fold_at"
            )
        if self.first != self.second or self.first.decay != "linear":
            raise ValueError(
                'form="ratio" needs first and second to be the same Sketched, with decay="linear"; '
                f"got first={self.first}, second={self.second}"
            )

    def to_dict(self) -> dict[str, Any]:
        """The same in dicts, numbers and strings, for checkpoints."""
        return {
            "first": _storage_to_dict(self.first),
            "second": _storage_to_dict(self.second),
            "form": self.form,
            "clip": self.clip,
        }

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "Memory":
        """The memory that `to_dict` described; what is left out is as in the constructor."""
        _check_keys("memory", cls, plain)
        storages = {name: _storage_from_dict(name, plain.get(name)) for name in ("first", "second")}
        return cls(**{**plain, **storages})

    @classmethod
    def of(cls, choice: "str | Memory") -> "Memory":
        """A preset by its name, or the memory itself."""
        if isinstance(choice, Memory):
            return choice
        if not isinstance(choice, str):
            raise TypeError(f"memory must be a preset's name or a Memory, got {choice!r}")
        if choice not in PRESETS:
            raise ValueError(f"memory must be a Memory or one of {list(PRESETS)}, got {choice!r}")
        return PRESETS[choice]


def _storage_to_dict(storage: Storage | None) -> dict[str, Any] | None:
    if storage is None:
        return None
    plain = {"kind": type(storage).__name__, **dataclasses.asdict(storage)}
    if isinstance(storage, Sketched):
        plain["dtype"] = str(storage.dtype).removeprefix("torch.")
        plain["fold_at"] = list(storage.fold_at)
    return plain


def _storage_from_dict(name: str, plain: dict[str, Any] | None) -> Storage | None:
    if plain is None:
        return None
    chosen: Any = plain.get("kind") if isinstance(plain, dict) else plain
    _check_choice(f"{name}.kind", chosen, tuple(_STORAGES))
    kind = _STORAGES[chosen]
    options = {key: value for key, value in plain.items() if key != "kind"}
    _check_keys(name, kind, options)
    if "dtype" in options:
        _check_choice("dtype", options["dtype"], tuple(_DTYPES))
        options["dtype"] = _DTYPES[options["dtype"]]
    storage: Storage = kind(**options)
    return storage


def _check_keys(name: str, kind: type, plain: dict[str, Any]) -> None:
    if not isinstance(plain, dict):
        raise TypeError(f"{name} must be a dict as to_dict() gives it, got {plain!r}")
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(plain.keys() - known)
    if unknown:
        raise ValueError(
            f"{name} must have no keys but {sorted(known)}, got {unknown}; "
            "use the version of sketchoptim that wrote them"
        )


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {list(allowed)}, got {value!r}")


def _check_real(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")


def _check_positive(name: str, value: float) -> None:
    _check_real(name, value)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and > 0, got {value}")


def _check_whole(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be >= 1, got {value}")


_LEAN = Sketched(granularity="row", ratio=1 / 8, depth=3, decay="linear", conservative=True)
_PAPER = Sketched(granularity="element", ratio=0.2, depth=3, decay="paper")

PRESETS = {
    "lean": Memory(first=None, second=_LEAN),
    "exact": Memory(first=Exact(), second=Exact()),
    "paper-mv": Memory(first=_PAPER, second=_PAPER),
    "paper-v": Memory(first=Exact(), second=_PAPER),
    "paper-v-only": Memory(first=None, second=_PAPER),
    "row-wise": Memory(first=None, second=RowWise()),
    "rank-one": Memory(first=None, second=RankOne()),
}
