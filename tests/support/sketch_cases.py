"""Sketches of every kind, and streams of updates for them to take in."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import sketchoptim as so
from sketchoptim import _hashing
from sketchoptim._sketch import Sketch

KINDS = ("count-sketch", "count-min", "conservative")
LINEAR_KINDS = KINDS[:2]
COUNT_MIN_KINDS = KINDS[1:]

every_kind = pytest.mark.parametrize("kind", KINDS)
linear_kind = pytest.mark.parametrize("kind", LINEAR_KINDS)
count_min_kind = pytest.mark.parametrize("kind", COUNT_MIN_KINDS)


class Size(NamedTuple):
    depth: int
    width: int
    dim: int


sizes = st.builds(Size, st.integers(1, 6), st.integers(1, 6), st.integers(1, 3))
even_sizes = sizes.map(lambda size: size._replace(width=2 * size.width))
seeds = st.integers(0, 2**32)
few_ids = st.one_of(st.integers(0, 30), st.integers(0, _hashing.MAX_ID))


def build(kind: str, size: Size, seed: int = 0, **options) -> Sketch:
    """An empty sketch."""
    if kind == "count-sketch":
        return so.CountSketch(*size, seed=seed, **options)
    return so.CountMinSketch(*size, seed=seed, conservative=kind == "conservative", **options)


def over(kind: str, tensors: dict[str, Tensor]) -> Sketch:
    """A sketch on the tensors of another."""
    options = {} if kind == "count-sketch" else {"conservative": kind == "conservative"}
    form = so.CountSketch if kind == "count-sketch" else so.CountMinSketch
    return form.over(**tensors, **options)


class Stream(NamedTuple):
    """Updates in their order: ``ids[k]``, which may repeat, and ``values[k, dim]``."""

    ids: Tensor
    values: Tensor

    def __add__(self, other: "Stream") -> "Stream":
        return Stream(torch.cat([self.ids, other.ids]), torch.cat([self.values, other.values]))

    def times(self, factor: float) -> "Stream":
        return Stream(self.ids, self.values * factor)

    def totals(self) -> dict[int, Tensor]:
        """The true vector of each id, in float64."""
        true: dict[int, Tensor] = {}
        for row_id, value in zip(self.ids.tolist(), self.values.double(), strict=True):
            true[row_id] = true.get(row_id, 0) + value
        return true


@st.composite
def streams(draw, dim: int, *, is_signed: bool, longest: int = 12) -> Stream:
    """Small whole numbers for a few ids."""
    value = st.integers(-9 if is_signed else 0, 9)
    updates = draw(
        st.lists(st.tuples(few_ids, st.lists(value, min_size=dim, max_size=dim)), max_size=longest)
    )
    ids = torch.tensor([row_id for row_id, _ in updates], dtype=torch.int64)
    values = torch.tensor([vector for _, vector in updates], dtype=torch.float32)
    return Stream(ids, values.view(-1, dim))


@st.composite
def sized_streams(draw, kind: str, count: int, size=sizes) -> tuple[Size, int, list[Stream]]:
    """A size, a seed, and so many streams that fit."""
    drawn = draw(size)
    is_signed = kind == "count-sketch"
    return (
        drawn,
        draw(seeds),
        [draw(streams(drawn.dim, is_signed=is_signed)) for _ in range(count)],
    )


@st.composite
def histories(draw, kind: str, factors) -> tuple[Size, int, list]:
    """A size, a seed, and operations: a stream to add, a factor to scale by, or a fold."""
    size = draw(even_sizes)
    operations: list = []
    foldable = (size.width & -size.width).bit_length() - 1
    for name in draw(st.lists(st.sampled_from(("add", "add", "scale", "fold")), max_size=8)):
        if name == "add":
            operations.append(draw(streams(size.dim, is_signed=kind == "count-sketch")))
        elif name == "scale":
            operations.append(draw(factors))
        elif foldable > 0:
            foldable -= 1
            operations.append("fold")
    return size, draw(seeds), operations


def replay(sketch: Sketch, operations: list) -> Sketch:
    """The sketch after a history's operations."""
    for operation in operations:
        if isinstance(operation, Stream):
            sketch.add_(*operation)
        elif operation == "fold":
            sketch.fold_()
        else:
            sketch.scale_(operation)
    return sketch


def true_totals(operations: list) -> dict[int, Tensor]:
    """What a replayed history amounts to, without any sketch."""
    true: dict[int, Tensor] = {}
    for operation in operations:
        if isinstance(operation, Stream):
            for row_id, value in operation.totals().items():
                true[row_id] = true.get(row_id, 0) + value
        elif operation != "fold":
            true = {row_id: value * operation for row_id, value in true.items()}
    return true


def readings(sketch: Sketch) -> Tensor:
    """The counters in the units that queries use."""
    return sketch.counters.float() * sketch.scale
