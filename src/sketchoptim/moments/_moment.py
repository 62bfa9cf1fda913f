"""What a moment is: declared parts, and a thing that takes rows and gives back their estimates."""

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from .._rows import Chunk, RowChunks, Rows
from .._sketch import Sketch
from ..storage import Granularity, Storage

Name = Literal["first", "second"]
# The tensors of a moment, by the name of their part.
Parts = dict[str, Tensor]
SketchForm = Literal["linear", "paper", "bucket", "conservative"]

# torch divides a sum among threads from 2^15 elements on, and its bits then depend on them.
SUMMED_AT_ONCE = 1 << 14


class Average(NamedTuple):
    """How a moment moves: ``moment <- decay * moment + weight * value``."""

    decay: float
    weight: float

    def delta(self, old: Tensor, value: Tensor) -> Tensor:
        """What to add to `old`; for a moving average the form of SparseAdam and of Algorithm 4."""
        if self.weight == 1 - self.decay:
            return (value - old) * self.weight
        if self.decay == 1:  # an overflowed sum stays as it is, where inf * 0 would spoil it
            return value * self.weight
        return old * (self.decay - 1) + value * self.weight

    def after(self, old: Tensor, value: Tensor) -> Tensor:
        """The moment after the value."""
        return old + self.delta(old, value)


@dataclass(frozen=True)
class Table:
    """A parameter as its moments need it: ``[rows, dim]`` after flattening a row."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    key: int | str = 0
    """The parameter's name, else its number in its optimizer: the hash is seeded from it."""
    held: range | None = None
    """The rows that this process holds, where they are divided among processes; None: all."""
    sized_for: int | None = None
    """The rows that it had when its state was made, if it has grown since."""

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def first_rows(self) -> int:
        """The rows by which its storage is chosen and its sketches are sized."""
        return self.rows if self.sized_for is None else self.sized_for

    @property
    def dim(self) -> int:
        return self.shape[1:].numel()


@dataclass(frozen=True)
class Part:
    """One tensor of a moment, declared: checkpoints, reports, plans and kernels read this."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = torch.float32
    """None: the parameter's."""
    by: Literal["row", "bucket", "whole"] = "whole"
    """How a row finds its numbers: at its own index, at its buckets, or all rows share them."""
    combine: Literal["same", "max", "sum", "refused"] = "same"
    """How replicas that saw different rows become one; "same" where they cannot differ."""
    reduced_dtype: torch.dtype | None = None
    """Of what the replicas reduce in a step, if that is not the part itself."""
    is_on_host: bool = False
    """On the CPU whatever the parameter's device: it is read as a Python number."""
    initial: float | Tensor = 0.0
    least: float = -math.inf
    most: float = math.inf
    """Values outside [least, most], and NaN and infinity, are damage."""
    may_overflow: bool = False
    """Whether a run may leave any numbers in it, as one of torch.optim may: none are damage."""
    other_shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes that it may take on during a run."""

    @property
    def sharding(self) -> Literal["rows", "replicated"]:
        """How it is laid out where the parameter's rows are sharded over processes."""
        return "rows" if self.by == "row" else "replicated"

    def held_shape(self, table: Table) -> tuple[int, ...]:
        """The shape of what this process keeps of it."""
        if table.held is None or self.sharding == "replicated":
            return self.shape
        return (len(table.held), *self.shape[1:])

    @property
    def is_bookkeeping(self) -> bool:
        """Whether it holds hash words or a host number instead of the moment's own numbers."""
        return self.is_on_host or self.dtype == torch.int64

    def nbytes(self, parameter_dtype: torch.dtype) -> int:
        return math.prod(self.shape) * (self.dtype or parameter_dtype).itemsize

    def mismatch(self, tensor: Tensor, table: Table, *, is_live: bool) -> str | None:
        """Why a tensor cannot be this part, or None.

        A part in the parameter's dtype may have any float's where it is not live: it will be cast.
        """
        if tensor.layout != torch.strided:
            return f"is {tensor.layout}, not dense"
        shape = self.held_shape(table)
        if tuple(tensor.shape) not in (shape, *self.other_shapes):
            return f"has shape {list(tensor.shape)}, not {list(shape)}"
        dtype = self.dtype or (table.dtype if is_live else None)
        if dtype is None and not tensor.is_floating_point():
            return f"is {tensor.dtype}, not floating point"
        if dtype is not None and tensor.dtype != dtype:
            return f"is {tensor.dtype}, not {dtype}"
        return None

    def damage(self, tensor: Tensor) -> str | None:
        """Why values that a tensor holds cannot be this part's, or None."""
        if not tensor.numel() or tensor.is_meta or self.may_overflow:
            return None
        low, high = (extreme.item() for extreme in torch.aminmax(tensor.detach()))
        if math.isfinite(low) and math.isfinite(high) and self.least <= low <= high <= self.most:
            return None
        limits = f" in [{self.least:g}, {self.most:g}]" if math.isfinite(self.least) else ""
        return f"must be finite{limits}, but ranges from {low:g} to {high:g}"


class ArrayView(NamedTuple):
    """A kernel's view of one number for each weight, or for each row, at the row's index."""

    values: Tensor
    is_by_row: bool


class SketchView(NamedTuple):
    """A kernel's view of counters, their hash words and their scale, and how they move."""

    sketch: Sketch
    form: SketchForm
    is_by_row: bool


class CodesView(NamedTuple):
    """A kernel's view of 8-bit codes, the scale of each block, and the values of the codes."""

    codes: Tensor
    scales: Tensor
    book: Tensor
    """The 256 numbers that codes stand for, in ascending order."""
    borders: Tensor
    """The 255 numbers halfway between them."""
    block: int
    """Numbers that share a scale, at most; 0 where `codes` are the numbers, in float32."""
    rows: int
    """Whole rows that share a block; 1 where a row has blocks of its own."""


class ColumnsView(NamedTuple):
    """For kernels: a number for each row, and what the factors of the columns follow from."""

    rows: ArrayView | SketchView
    columns: Tensor
    shares: Tensor
    """int64: the sums of a step, where processes that divide rows look for them."""


KernelView = ArrayView | SketchView | CodesView | ColumnsView


class Moment:
    """One moment of one parameter, over tensors that live in the optimizer's state.

    Rows go through it by a `Drive`: `begin_`, then `gather_` with all rows if `gathers`, then
    `update_` with all rows, then `end_`. Rows come in chunks of unique ids, ascending over the
    whole step.

    Where the rows of a table are divided among processes, each process sends its own rows through.
    A moment that `gathers` then keeps apart what they add to parts that all processes have, for
    `take_gathered_`, until the processes have summed it.
    """

    gathers: bool = False
    """Whether a row's estimate depends on rows that come after it."""
    decays_whole: bool = False
    """Whether rows decay in every step, and not only in the steps that touch them."""
    granularity: Granularity = "element"
    """Whether an estimate is one number for a row, or one for each element."""
    sketch: Sketch | None = None
    """The sketch it is kept in, if any."""

    _by_storage: ClassVar[dict[type[Storage], type["Moment"]]] = {}
    average: Average

    def __init_subclass__(cls, *, storage: type[Storage] | None = None) -> None:
        if storage is not None:
            Moment._by_storage[storage] = cls

    @classmethod
    def form_of(cls, storage: Any) -> type["Moment"]:
        """The class for the options of a storage, where there are several."""
        return cls

    @classmethod
    def declare(cls, storage: Any, name: Name, table: Table, fill: float) -> tuple[Part, ...]:
        """The parts of a fresh moment whose every estimate is `fill`."""
        raise NotImplementedError

    @classmethod
    def starts_from_zero(cls, part_names: Container[str]) -> bool:
        """Whether a moment with these parts was declared with a `fill` of zero.

        True as well if the same parts are declared for every `fill`.
        """
        return True

    def __init__(
        self, storage: Storage, name: Name, tensors: Parts, held: range | None = None
    ) -> None:
        """Over tensors that `create` made, for the rows of the table that this process holds."""
        self.storage, self.name, self.tensors, self.held = storage, name, tensors, held

    @property
    def is_exact(self) -> bool:
        """Whether it keeps what torch.optim keeps."""
        return self.storage.is_exact

    def describe(self) -> str:
        """What it is kept in, in a few words."""
        return self.storage.describe(None if self.sketch is None else self.sketch.width)

    def kernel_view(self) -> KernelView | None:
        """The tensors of fused kernels; None if no kernel supports this storage."""
        return None

    def exact_values(self) -> Tensor:
        """The tensor that torch.optim's own functions move, where `is_exact`."""
        raise NotImplementedError

    def begin_(self, average: Average, touched: int, step: int = 1) -> None:
        """Starts step number `step`, of `touched` rows; decays what decays as a whole."""
        self.average = average

    def gather_(self, ids: Tensor, values: Tensor) -> None:
        """Takes in ``values[k, dim]`` of ``ids[k]`` before any estimate is asked for."""

    @property
    def gathered(self) -> Tensor | None:
        """What the rows of this process add to a part that all have; None where nothing is shared.

        The processes sum it between `gather_` and `update_`.
        """
        return None

    def take_gathered_(self) -> None:
        """Takes in what the processes have gathered together."""

    def update_(self, ids: Tensor, values: Tensor) -> Tensor:
        """The estimates after the step, ``[k, dim]`` or ``[k, 1]`` when one stands for a row."""
        raise NotImplementedError

    def readings(self, ids: Tensor) -> Tensor:
        """The estimates of each hash row, ``[depth, k, dim]``, for the ratio form."""
        raise NotImplementedError

    def estimate(self, ids: Tensor) -> Tensor:
        """The estimates as they stand, shaped as `update_` gives them, between two steps."""
        raise NotImplementedError

    def end_(self) -> None:
        """Finishes the step, after all rows."""

    @property
    def added(self) -> Tensor | None:
        """What this step adds to a part that all processes have, where rows are divided among them.

        The processes sum it after `end_`. None where nothing is shared, or nothing is divided.
        """
        return None

    def take_added_(self, average: Average) -> None:
        """Takes in what the processes have added together."""

    def start_rows_(self, added: range, fill: float) -> None:
        """Makes every estimate of rows that were added to a table `fill`, if they share no sketch.

        Their numbers in parts by row are those of a fresh moment already.
        """

    def load_(self, rows: Rows, *, start: float) -> None:
        """Takes in a whole exact moment, while still as it was created, filled with `start`."""
        drive_([Move(self, Average(1.0, 1.0), lambda values: values - start)], rows)

    @property
    def has_maintenance(self) -> bool:
        """Whether `maintain_` may ever do something."""
        return False

    def maintain_(self, step: int) -> bool:
        """Does what is due after step number `step`; returns whether a tensor was replaced."""
        return False

    def overload(self, touched: int, decay: float) -> str | None:
        """Why a step that touches so many rows is too much for it, or None."""
        return None


class Moments(NamedTuple):
    """The moments of one parameter; None for one that is not kept."""

    first: Moment | None
    second: Moment | None


class Move(NamedTuple):
    """How rows enter one moment: the average, and what of a gradient is averaged."""

    moment: Moment
    average: Average
    values: Callable[[Tensor], Tensor]


class Drive:
    """Sends rows through moments: the one place that begins, gathers, updates and ends.

    Args:
        moves: The moments; their rows go through together.
        rows: What a step touches.
        gradients: The chunks to take instead of those of `rows`, called once for each pass.
        step: The number of the step.
    """

    def __init__(
        self,
        moves: Sequence[Move],
        rows: RowChunks,
        gradients: Callable[[], Iterator[Chunk]] | None = None,
        step: int = 1,
    ) -> None:
        self.moves, self.touched, self.step = moves, len(rows), step
        self.chunks = rows.chunks if gradients is None else gradients

    def gather_(self) -> None:
        """Begins, and shows all rows to the moments whose estimates depend on all of them."""
        for move in self.moves:
            move.moment.begin_(move.average, self.touched, self.step)
        gathering = [move for move in self.moves if move.moment.gathers]
        if gathering:
            for chunk in self.chunks():
                for move in gathering:
                    move.moment.gather_(chunk.ids, move.values(chunk.gradient))

    def update_(
        self,
        visit: Callable[[Chunk, list[Tensor]], None] | None = None,
        *,
        as_readings: bool = False,
    ) -> None:
        """Moves the moments, after `gather_`, and ends.

        Args:
            visit: Called with each chunk and the estimates of its rows, one for each moment.
            as_readings: Estimates are `readings`, which the caller combines itself.
        """
        for move in self.moves:
            move.moment.take_gathered_()
        for chunk in self.chunks():
            estimates = [
                move.moment.readings(chunk.ids)
                if as_readings
                else move.moment.update_(chunk.ids, move.values(chunk.gradient))
                for move in self.moves
            ]
            if visit is not None:
                visit(chunk, estimates)
        for move in self.moves:
            move.moment.end_()


def drive_(moves: Sequence[Move], rows: Rows) -> None:
    """Sends rows through moments at once."""
    drive = Drive(moves, rows)
    drive.gather_()
    drive.update_()


def row_sums(values: Tensor) -> Tensor:
    """The sums ``[k, 1]`` over ``values[k, dim]``, the same bits for any number of threads."""
    parts = [part.sum(1, keepdim=True) for part in values.split(SUMMED_AT_ONCE, 1)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1).sum(1, keepdim=True)
