"""What is measured: the tables, their gradients, and which of them a run takes."""

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from ..data import data_file

Part = Literal["steps", "scaling", "training", "tables", "many", "dense", "bags", "heads"]
Clock = Literal["wall", "cpu"]
Axis = Literal["rows", "touched", "dim", "depth", "threads"]
PARTS: tuple[Part, ...] = get_args(Part)
# Without those that take long, or more than 10 GB.
USUAL_PARTS: tuple[Part, ...] = ("steps", "scaling", "training", "tables", "many", "dense")

COUNTS_NAME = Path("lm1b") / "word_counts_i32.npy"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A table ``[rows, dim]`` and a gradient for `touched` distinct rows of it.

    >>> Case.parse("793471x256x4096")
    Case(rows=793471, dim=256, touched=4096)
    """

    rows: int
    dim: int
    touched: int

    def __post_init__(self) -> None:
        if min(self.rows, self.dim, self.touched) < 1 or self.touched > self.rows:
            raise ValueError(
                f"a case needs rows >= touched >= 1 and dim >= 1, got {self.rows} rows, "
                f"dim {self.dim}, {self.touched} touched"
            )

    @classmethod
    def parse(cls, text: str) -> "Case":
        """The case written as rows x dim x touched rows."""
        try:
            rows, dim, touched = (int(part) for part in text.split("x"))
        except ValueError:
            raise ValueError(
                f"a case is written rows x dim x touched, like 793471x256x4096, got {text!r}"
            ) from None
        return cls(rows=rows, dim=dim, touched=touched)

    def __str__(self) -> str:
        return f"{self.rows}x{self.dim}x{self.touched}"


@dataclass(frozen=True, kw_only=True)
class Point(Case):
    """A case for one point of a sweep; depth applies to sketches."""

    depth: int = 3
    threads: int = 1


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One number of a point takes several values; the others are constant."""

    axis: Axis
    values: tuple[int, ...]
    base: Point
    methods: tuple[str, ...]

    def points(self) -> Iterator[tuple[int, Point]]:
        """Each value with its point."""
        for value in self.values:
            yield value, dataclasses.replace(self.base, **{self.axis: value})


@dataclass(frozen=True, kw_only=True)
class TrainingShape:
    """A whole training step: an embedding under a sampled softmax, both ``[rows, dim]``."""

    rows: int
    dim: int
    tokens: int
    samples: int

    def __str__(self) -> str:
        size = f"two tables of {self.rows:,} x {self.dim}"
        return f"{size}, {self.tokens:,} tokens, {self.samples:,} negatives"


@dataclass(frozen=True, kw_only=True)
class TablesShape:
    """A whole training step of many tables of `dim` columns; each example looks up one row of each.

    Args:
        rows: of each table.
        dim: columns of all tables.
        batch: examples of a step.
    """

    rows: tuple[int, ...]
    dim: int
    batch: int

    def __str__(self) -> str:
        size = f"{len(self.rows)} tables of {min(self.rows):,} to {max(self.rows):,} x {self.dim}"
        return f"{size}, {self.batch:,} examples"


@dataclass(frozen=True, kw_only=True)
class BagsShape:
    """A whole training step of tables whose lookups are pooled.

    Args:
        tables: and how many examples there are, each with a bag of every table.
        ids_a_bag: the mean number of ids in a bag; 1 if all bags have one.
    """

    tables: TablesShape
    ids_a_bag: int

    def __str__(self) -> str:
        return f"{self.tables}, bags of {self.ids_a_bag}"


@dataclass(frozen=True, kw_only=True)
class DenseShape:
    """A step of a table ``[rows, dim]`` along a dense gradient, both of a dtype of torch's."""

    rows: int
    dim: int
    dtype: str

    @classmethod
    def of(cls, case: Case) -> tuple["DenseShape", ...]:
        """The case's table, all of it touched, in both dtypes."""
        return tuple(
            cls(rows=case.rows, dim=case.dim, dtype=dtype) for dtype in ("float32", "bfloat16")
        )

    def __str__(self) -> str:
        return f"{self.rows:,} x {self.dim} {self.dtype}, a dense gradient"


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """A whole training step of a vocabulary head ``[rows, dim]`` under given hidden states.

    Args:
        rows: words.
        dim: columns of the weight.
        tokens: of a batch.
        dtype: of weight and hidden states, a name of torch's.
    """

    rows: int
    dim: int
    tokens: int
    dtype: str

    @classmethod
    def of(cls, case: Case) -> tuple["HeadShape", ...]:
        """With as many tokens as the case has touched rows, in both dtypes."""
        return tuple(
            cls(rows=case.rows, dim=case.dim, tokens=case.touched, dtype=dtype)
            for dtype in ("float32", "bfloat16")
        )

    def __str__(self) -> str:
        return f"head of {self.rows:,} x {self.dim} {self.dtype}, {self.tokens:,} tokens"


WIKITEXT2 = Case(rows=33_278, dim=672, touched=700)
WIKITEXT103 = Case(rows=267_735, dim=256, touched=8_192)
LM1B_SMALL = Case(rows=793_471, dim=256, touched=4_096)
LM1B = Case(rows=793_471, dim=256, touched=20_000)
MEGAFACE = Case(rows=80_000, dim=1024, touched=20_000)
CASES = (WIKITEXT2, WIKITEXT103, LM1B_SMALL, LM1B, MEGAFACE)

_SWEPT = ("sparse-adam", "exact", "lean")
_SKETCHES = ("lean", "paper-v-only", "linear-v")
SWEEPS = (
    Sweep(
        axis="rows",
        values=(50_000, 100_000, 200_000, 400_000, 793_471),
        base=Point(rows=793_471, dim=256, touched=4_096),
        methods=_SWEPT,
    ),
    Sweep(
        axis="touched",
        values=(256, 1_024, 4_096, 16_384, 65_536),
        base=Point(rows=267_735, dim=256, touched=4_096),
        methods=_SWEPT,
    ),
    Sweep(
        axis="dim",
        values=(16, 64, 256, 1_024),
        base=Point(rows=80_000, dim=256, touched=4_096),
        methods=_SWEPT,
    ),
    Sweep(
        axis="depth",
        values=(1, 2, 3, 4, 5),
        base=Point(rows=267_735, dim=256, touched=4_096),
        methods=_SKETCHES,
    ),
    Sweep(
        axis="threads",
        values=(1, 2, 4, 8),
        base=Point(rows=267_735, dim=256, touched=20_000),
        methods=(*_SWEPT, "paper-v-only"),
    ),
)
# The paper trains LM1B with batches of 1,024 x 20 words; its authors' first code took 128 x 20 and
# 8,192 negatives. Fewer negatives suit a CPU, where matrix products are slow.
TRAINING = tuple(
    TrainingShape(rows=793_471, dim=256, tokens=tokens, samples=samples)
    for tokens, samples in (
        *((20_480, 1_024), (20_480, 256)),
        *((2_560, 8_192), (2_560, 1_024), (2_560, 256)),
    )
)
# Distinct values of the 26 categorical features of Criteo's Kaggle Display Advertising Challenge:
# the sizes that facebookresearch/dlrm finds in them (--arch-embedding-size). Tables are capped, as
# by its --max-ind-range: SparseAdam's state of all rows would take 17 GB at 64 columns.
_CRITEO = (
    *(1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194),
    *(27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)

HEADS = tuple(
    shape
    for rows in (32_768, 131_072)
    for tokens in (1_024, 4_096)
    for shape in HeadShape.of(Case(rows=rows, dim=512, touched=tokens))
)


def criteo_tables(most_rows: int) -> TablesShape:
    """The 26 tables of a DLRM for Criteo's data, none larger than `most_rows`."""
    return TablesShape(rows=tuple(min(rows, most_rows) for rows in _CRITEO), dim=64, batch=2_048)


def bags_of(most_rows: int) -> tuple[BagsShape, ...]:
    """The same tables with bags of one id and of twenty, and one table of `most_rows`."""
    tables = criteo_tables(most_rows)
    single = TablesShape(rows=(most_rows,), dim=128, batch=40_000)
    return (
        BagsShape(tables=tables, ids_a_bag=1),
        BagsShape(tables=tables, ids_a_bag=20),
        BagsShape(tables=single, ids_a_bag=1),
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole run.

    Args:
        cases: tables and coalesced gradients; each table also gets one raw gradient.
        tokens: entries of a raw gradient, with duplicates.
        methods: names of `methods.RIVALS` and `updates.DENSE_METHODS`; None takes all usual ones.
        sweeps: how the time grows.
        training: whole training steps of a language model.
        tables: whole training steps of many tables.
        counts: of small tables that one step moves.
        dense: steps along dense gradients.
        bags: whole training steps of tables whose lookups are pooled.
        heads: whole training steps of a vocabulary head.
        parts: which of these are run.
        threads: of torch and of the kernels; the sweep over threads has its own.
        clock: "wall" is the time that a user waits. "cpu" is processor time, which other processes
            affect less; it is for one thread only.
        seconds: time for a method in each comparison; it is repeated as often as fits.
        least: repetitions of even the slowest method.
        batches: different gradients that take turns.
        seed: of ids and gradients.
        cores: of the machine.
    """

    cases: tuple[Case, ...] = CASES
    tokens: int = 20_480
    methods: tuple[str, ...] | None = None
    sweeps: tuple[Sweep, ...] = SWEEPS
    training: tuple[TrainingShape, ...] = TRAINING
    tables: tuple[TablesShape, ...] = (criteo_tables(1_000_000),)
    counts: tuple[int, ...] = (1, 26, 200)
    dense: tuple[DenseShape, ...] = DenseShape.of(Case(rows=1_000_000, dim=128, touched=1_000_000))
    bags: tuple[BagsShape, ...] = bags_of(1_000_000)
    heads: tuple[HeadShape, ...] = HEADS
    parts: tuple[Part, ...] = USUAL_PARTS
    threads: int = 1
    clock: Clock = "wall"
    seconds: float = 1.0
    least: int = 5
    batches: int = 3
    seed: int = 0
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)

    def __post_init__(self) -> None:
        for name in ("tokens", "threads", "least", "batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.clock not in get_args(Clock):
            raise ValueError(f"clock must be wall or cpu, got {self.clock!r}")
        if self.clock == "cpu" and self.threads > 1:
            raise ValueError(f"the cpu clock is for one thread, got {self.threads} threads")
        for part in self.parts:
            if part not in PARTS:
                raise ValueError(
                    f"part must be one of {', '.join(PARTS)}, got {part!r}; see --only"
                )

    @classmethod
    def quick(cls) -> "Settings":
        """The smaller tables with fewer repetitions: about a minute."""
        rows, touched = SWEEPS[:2]
        return cls(
            cases=CASES[:2],
            sweeps=(
                dataclasses.replace(rows, values=rows.values[:3]),
                dataclasses.replace(touched, values=touched.values[:4]),
            ),
            training=(TrainingShape(rows=100_000, dim=256, tokens=2_560, samples=1_024),),
            tables=(criteo_tables(100_000),),
            counts=(1, 26),
            dense=DenseShape.of(Case(rows=100_000, dim=128, touched=100_000)),
            bags=bags_of(100_000)[:1],
            heads=HEADS[:2],
            seconds=0.2,
            least=3,
        )

    def most_rows(self) -> int:
        """Rows of the largest table."""
        swept = [point.rows for sweep in self.sweeps for _, point in sweep.points()]
        return max([case.rows for case in self.cases] + swept + [t.rows for t in self.training])


def default_counts() -> Path | None:
    """Where LM1B's word counts are below the data folder; None where no such folder is set."""
    return data_file(str(COUNTS_NAME))
