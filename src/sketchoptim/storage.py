"""Where a moment lives: the storages, the memory that combines two of them, and the presets.

Everything here is configuration: frozen, validated when built, and without tensors. A storage is
one dataclass here and one file in `moments/`, which declares its state and its update.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from . import _hashing
from ._sketch import COUNTER_DTYPES
from ._validation import (
    check_choice,
    check_flag,
    check_int,
    check_keys,
    check_number,
    check_positive,
    check_positive_int,
)

Form = Literal["moments", "ratio"]
Granularity = Literal["row", "element"]
Decay = Literal["linear", "paper", "bucket"]

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in COUNTER_DTYPES}


class Storage:
    """Base of the storages: each is a frozen dataclass of options, known by its class name."""

    is_exact: ClassVar[bool] = False
    """Whether it keeps what torch.optim keeps."""
    collides: ClassVar[bool] = False
    """Whether different rows share numbers."""

    _kinds: ClassVar[dict[str, type["Storage"]]] = {}

    def __init_subclass__(cls) -> None:
        Storage._kinds[cls.__name__] = cls

    def describe(self, width: int | None = None) -> str:
        """The storage in a few words; `width` is that of live counters, where there are any."""
        raise NotImplementedError

    def for_rows(self, rows: int) -> "Storage":
        """What it is for a table with so many rows: itself, or a smaller storage."""
        return self

    def unsuitable_for_first(self) -> str | None:
        """Why it cannot hold a first moment, which is signed and has a number for each column."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """The storage in numbers, strings and lists, for checkpoints."""
        assert dataclasses.is_dataclass(self)
        options = dataclasses.asdict(self)
        return {"kind": type(self).__name__, **{key: _plain(it) for key, it in options.items()}}

    @staticmethod
    def from_dict(where: str, plain: Any) -> "Storage":
        """The storage that `to_dict` described; an error names `where` it was found."""
        kind: Any = plain.get("kind") if isinstance(plain, dict) else plain
        check_choice(f"{where}.kind", kind, tuple(Storage._kinds))
        options = {key: value for key, value in plain.items() if key != "kind"}
        _check_options(where, Storage._kinds[kind], options)
        if "dtype" in options:
            check_choice(f"{where}.dtype", options["dtype"], tuple(_DTYPES))
            options["dtype"] = _DTYPES[options["dtype"]]
        return Storage._kinds[kind](**options)


@dataclass(frozen=True)
class Exact(Storage):
    """One number for each weight, ``[n, dim]``, in the parameter's dtype: as torch.optim."""

    is_exact: ClassVar[bool] = True

    def describe(self, width: int | None = None) -> str:
        return "exact"


@dataclass(frozen=True)
class RowWise(Storage):
    """One number for each row, ``[n]`` in float32: the mean over the row. Second moments only.

    Args:
        columns: Also keep a factor for each column, ``[dim]`` in float32, as in `Sketched`.
    """

    columns: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_flag("columns", self.columns)

    def describe(self, width: int | None = None) -> str:
        return "one a row x one a column" if self.columns else "one a row"

    def unsuitable_for_first(self) -> str | None:
        return "it keeps one number for a row"


@dataclass(frozen=True)
class RankOne(Storage):
    """Row sums ``[n]`` times column sums ``[dim]``: the rank-one factors of least I-divergence.

    The factors are those of the whole table's decayed moment, as in Adafactor. Second moments only.
    """

    def describe(self, width: int | None = None) -> str:
        return "rank one"

    def unsuitable_for_first(self) -> str | None:
        return "its factors have no signs"


@dataclass(frozen=True)
class TopSingular(Storage):
    """The best rank-one approximation in l2, computed again after every update.

    A baseline for comparisons, not for training: a step solves a ``dim x dim`` eigenproblem, and
    runs on one thread.
    """

    def describe(self, width: int | None = None) -> str:
        return "top singular"


@dataclass(frozen=True, kw_only=True)
class Quantized(Storage):
    """A byte for each weight, and a float32 scale for each block of weights.

    For hidden layers, where every weight has a gradient in every step. Codes are spaced as in
    8-bit Adam (Dettmers et al., 2022). Parameters below 4,096 elements and vectors are kept in
    float32.

    Args:
        bits: Bits of a code; 8 is the only choice.
        block: Weights that share a scale, at most. A block does not cross the end of a row, or
            consists of whole rows.
    """

    bits: int = 8
    block: int = 256

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, (8,))
        check_int("block", self.block, least=64, most=2**16)

    def describe(self, width: int | None = None) -> str:
        return f"{self.bits}-bit, blocks of {self.block}"


@dataclass(frozen=True, kw_only=True)
class Sketched(Storage):
    """A sketch ``[depth, width, dim]`` (or ``[depth, width, 1]`` by row).

    Signed moments go to a `CountSketch`, second moments to a `CountMinSketch`.

    Args:
        ratio: Counters over the numbers that exact storage of the same granularity has. Defaults
            to 1/8 by row and 1/5 by element when no width is given.
        width: Buckets in a hash row, instead of a ratio.
        depth: Hash rows.
        granularity: "row" keeps the mean over a row, "element" a number for each column.
        decay: "linear" decays all counters at once, adds all rows, then queries them. "paper"
            moves each row's estimate in turn, as Algorithms 2 to 4 are written. "bucket" decays
            each bucket that is hit by itself, as the paper's authors' code does.
        conservative: Raise a bucket only as far as the estimates in it need. Linear decay and
            second moments only.
        clean_every: Multiply all counters by `clean_by` after this many steps, again and again.
        clean_by: A factor between 0 and 1.
        fold_at: Steps after which the width halves.
        fold_when: Instead of steps, a bound for the relative error: after every 1,000 steps the
            width halves if the relative error at half the width, estimated from the counters,
            stays below it (`sketchoptim.diagnostics.estimate_error`). The starting width is then a
            multiple of 64.
        dtype: torch.float32, or torch.bfloat16 with stochastic rounding.
        columns: By row only: v is a number of the row, from the sketch, times a factor of the
            column, ``[dim]`` in float32. The factor is the decayed mean over rows of
            ``g_ij^2 / mean_j(g_ij^2)``, in which every row weighs alike, divided by its own mean;
            the sketch keeps the mean over a row of g_ij^2 over these factors
            (`moments/_columns.py` has the formulas). For tables whose columns differ in size, such
            as tied heads.
        array_below: By row only: tables with fewer rows than this keep a number for each row, as
            `RowWise` does, and no counters. There a step touches most rows, nearly every counter
            holds the largest number of the table, and there is little to save.
        seed: Of the hash; under one seed parameters of different names have different hash words.

    A sketch shrinks but never grows: halving adds two neighbours, and a sum cannot be split.
    So start as wide as the first thousand steps can afford, and give `fold_when`. To go on in a
    wider sketch, convert with `to_torch` and `from_torch`: the errors of the narrow one are carried
    over and decay with the moment.
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
    columns: bool = False
    array_below: int = 0

    collides: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("granularity", self.granularity, ("row", "element"))
        check_choice("decay", self.decay, ("linear", "paper", "bucket"))
        check_positive_int("depth", self.depth)
        check_flag("conservative", self.conservative)
        check_flag("columns", self.columns)
        if self.columns and self.granularity != "row":
            raise ValueError(
                f'columns=True needs granularity="row", got granularity="{self.granularity}": a '
                "sketch by element keeps a number for each column already"
            )
        self._check_array()
        if self.conservative and self.decay != "linear":
            raise ValueError(
                f'conservative needs decay="linear", got decay="{self.decay}": '
                "the other forms lower buckets, which a conservative sketch never does"
            )
        if self.dtype not in COUNTER_DTYPES:
            raise ValueError(f"dtype must be torch.float32 or torch.bfloat16, got {self.dtype}")
        check_int("seed", self.seed)
        self._check_cleaning()
        self._check_folding()
        self._check_size()

    def _check_array(self) -> None:
        check_int("array_below", self.array_below, least=0)
        if not self.array_below:
            return
        if self.granularity != "row":
            raise ValueError(
                f'array_below needs granularity="row", got granularity="{self.granularity}"; '
                "give tables with few rows a group with Exact()"
            )
        if self.clean_every is not None:
            raise ValueError(
                f"array_below needs clean_every=None, got clean_every={self.clean_every}: "
                "an array is not cleaned"
            )

    def _check_size(self) -> None:
        if self.ratio is not None and self.width is not None:
            raise ValueError(
                f"give ratio or width, not both; got ratio={self.ratio}, width={self.width}"
            )
        if self.ratio is None and self.width is None:
            object.__setattr__(self, "ratio", 1 / 8 if self.granularity == "row" else 1 / 5)
        if self.ratio is not None:
            check_positive("ratio", self.ratio)
        if self.width is None:
            return
        check_int("width", self.width, least=1, most=_hashing.MAX_WIDTH, remedy="use more depth")
        if self.width % self.width_multiple:
            times = "as its error allows" if self.fold_when else f"{len(self.fold_at)} times"
            raise ValueError(
                f"width must be a multiple of {self.width_multiple} to fold {times}, "
                f"got {self.width}"
            )

    def _check_cleaning(self) -> None:
        if (self.clean_every is None) != (self.clean_by is None):
            raise ValueError(
                "give clean_every and clean_by together, "
                f"got clean_every={self.clean_every}, clean_by={self.clean_by}"
            )
        if self.clean_every is not None:
            check_positive_int("clean_every", self.clean_every)
        if self.clean_by is not None:
            check_number("clean_by", self.clean_by, least=0.0, below=1.0)

    def _check_folding(self) -> None:
        if not isinstance(self.fold_at, Iterable):
            raise TypeError(f"fold_at must be a tuple of steps, got {self.fold_at!r}")
        object.__setattr__(self, "fold_at", tuple(self.fold_at))
        for step in self.fold_at:
            check_positive_int("a step in fold_at", step)
        if len(set(self.fold_at)) != len(self.fold_at):
            raise ValueError(f"fold_at must not repeat a step, got {self.fold_at}")
        if self.fold_when is not None:
            check_positive("fold_when", self.fold_when)
            if self.fold_at:
                raise ValueError(
                    "give fold_at or fold_when, not both; "
                    f"got fold_at={self.fold_at}, fold_when={self.fold_when}"
                )

    def for_rows(self, rows: int) -> Storage:
        return RowWise(columns=self.columns) if rows < self.array_below else self

    def describe(self, width: int | None = None) -> str:
        width = self.width if width is None else width
        size = f"{self.depth} x {width:,}" if width is not None else f"ratio {self.ratio:g}"
        by = "row x column" if self.columns else self.granularity
        return f"by {by}, {size}"

    def unsuitable_for_first(self) -> str | None:
        if self.granularity == "row":
            return 'it keeps one number for a row; use granularity="element"'
        return "a conservative sketch has no signs" if self.conservative else None

    @property
    def width_multiple(self) -> int:
        """The starting width is a multiple of this, so that it can be halved often enough."""
        return 64 if self.fold_when is not None else int(2 ** len(self.fold_at))

    def widths(self, width: int) -> set[int]:
        """The widths that the counters may have over a run that starts with `width`."""
        folds = len(self.fold_at)
        if self.fold_when is not None:
            folds = (width & -width).bit_length() - 1  # until it is odd
        return {width >> fold for fold in range(folds + 1)}

    def counters_shape(self, rows: int, dim: int) -> tuple[int, int, int]:
        """Depth, width and dim of the first counters of a parameter of ``[rows, dim]``."""
        if self.width is not None:
            width = self.width
        else:
            assert self.ratio is not None  # set in __post_init__
            width = int(self.ratio * rows / self.depth)
            width = max(width - width % self.width_multiple, self.width_multiple)
        return self.depth, width, dim if self.granularity == "element" else 1


@dataclass(frozen=True)
class Memory:
    """A storage for each moment; None drops the moment and its update uses the gradient itself.

    Args:
        first: The mean of gradients (Adam) or the momentum buffer (SGD); it has signs.
        second: The mean or sum of squared gradients; without it a step divides by nothing.
        form: "moments" estimates both moments, then divides. "ratio" divides in each hash row,
            where the two share their bucket, and takes the median of the quotients.
        clip: A bound for each element of a step, in units of the learning rate. It keeps a sketched
            first moment over a small second one from moving a weight far.
    """

    first: Storage | None = None
    second: Storage | None = None
    form: Form = "moments"
    clip: float | None = None

    def __post_init__(self) -> None:
        for name in ("first", "second"):
            storage = getattr(self, name)
            if storage is not None and not isinstance(storage, Storage):
                raise TypeError(
                    f"{name} must be one of {', '.join(Storage._kinds)} or None, got {storage!r}"
                )
        reason = None if self.first is None else self.first.unsuitable_for_first()
        if reason is not None:
            raise ValueError(
                f"first must hold signed vectors, which {type(self.first).__name__} cannot: "
                f'{reason}; use Exact(), Sketched(granularity="element") or None'
            )
        check_choice("form", self.form, ("moments", "ratio"))
        if self.form == "ratio":
            self._check_ratio()
        if self.clip is not None:
            check_positive("clip", self.clip)

    def _check_ratio(self) -> None:
        if not (isinstance(self.first, Sketched) and isinstance(self.second, Sketched)):
            raise ValueError('form="ratio" needs first and second to be Sketched')
        if self.first.fold_when is not None:
            raise ValueError(
                'form="ratio" needs both sketches to have one width, which fold_when cannot '
                "promise; use fold_at"
            )
        if self.first != self.second or self.first.decay != "linear":
            raise ValueError(
                'form="ratio" needs first and second to be the same Sketched, with decay="linear"; '
                f"got first={self.first}, second={self.second}"
            )

    @property
    def is_exact(self) -> bool:
        """Whether every storage is exact; a memory without any storage is not."""
        kept = [it for it in (self.first, self.second) if it is not None]
        return bool(kept) and all(storage.is_exact for storage in kept)

    def to_dict(self) -> dict[str, Any]:
        """The memory in dicts, numbers and strings, for checkpoints."""
        return {
            "first": None if self.first is None else self.first.to_dict(),
            "second": None if self.second is None else self.second.to_dict(),
            "form": self.form,
            "clip": self.clip,
        }

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "Memory":
        """The memory that `to_dict` described; a missing key has the constructor's default."""
        _check_options("memory", cls, plain)
        storages = {
            name: Storage.from_dict(name, plain[name])
            for name in ("first", "second")
            if plain.get(name) is not None
        }
        return cls(**{**plain, **storages})

    @classmethod
    def of(cls, choice: "str | Memory | dict[str, Any]") -> "Memory":
        """A preset by its name, or the memory itself, or what `to_dict` makes of it.

        Other libraries build optimizers from the options in a `state_dict`, which are plain.
        """
        if isinstance(choice, Memory):
            return choice
        if isinstance(choice, dict):
            return cls.from_dict(choice)
        if not isinstance(choice, str):
            raise TypeError(f"memory must be a preset's name or a Memory, got {choice!r}")
        if choice not in PRESETS:
            raise ValueError(f"memory must be a Memory or one of {list(PRESETS)}, got {choice!r}")
        return PRESETS[choice]

    def __reduce__(self) -> tuple[Any, ...]:
        # As plain values, which default torch.load reads: wrappers such as ZeroRedundancyOptimizer
        # save parameter groups as they are.
        return _unpickled_memory, (self.to_dict(),)

    def describe(self, rows: int) -> str:
        """The memory of a table with so many rows in a few words: "v by row, 3 x 1,386"."""
        kept = [("m", self.first), ("v", self.second)]
        words = [f"{name} {it.for_rows(rows).describe()}" for name, it in kept if it is not None]
        return ", ".join(words) or "nothing"


def _unpickled_memory(plain: dict[str, Any]) -> Memory:
    return Memory.from_dict(plain)


torch.serialization.add_safe_globals([_unpickled_memory])


def _plain(value: object) -> object:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return list(value) if isinstance(value, tuple) else value


def _check_options(name: str, kind: type, plain: Any) -> None:
    check_keys(
        name,
        plain,
        optional=[field.name for field in dataclasses.fields(kind)],
        remedy="use the version of sketchoptim that wrote it",
    )


# In tables with fewer rows the default keeps a number for each row.
FEW_ROWS = 4096
# The default of version 0.1.
_LEAN_0_1 = Sketched(granularity="row", ratio=1 / 8, depth=3, decay="linear", conservative=True)
_LEAN = dataclasses.replace(_LEAN_0_1, columns=True, array_below=FEW_ROWS)
_PAPER = Sketched(granularity="element", ratio=0.2, depth=3, decay="paper")

PRESETS = {
    "lean": Memory(first=None, second=_LEAN),
    "lean-0.1": Memory(first=None, second=_LEAN_0_1),
    "exact": Memory(first=Exact(), second=Exact()),
    "8-bit": Memory(first=Quantized(), second=Quantized()),
    "paper-mv": Memory(first=_PAPER, second=_PAPER),
    "paper-v": Memory(first=Exact(), second=_PAPER),
    "paper-v-only": Memory(first=None, second=_PAPER),
    "row-wise": Memory(first=None, second=RowWise()),
    "rank-one": Memory(first=None, second=RankOne()),
}
