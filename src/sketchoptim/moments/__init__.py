"""First and second moments behind one interface, whatever they are stored in."""

import functools
from typing import Any

import torch
from torch import Tensor

from ..storage import Exact, RankOne, RowWise, Sketched, Storage
from ._exact import ExactMoment
from ._moment import Average, Moment, Moments, Name, Parts, Table
from ._rank_one import RankOneMoment
from ._row_wise import RowWiseMoment
from ._sketched import LinearMoment, SketchedMoment, sketched_moment
from ._top_singular import TopSingularMoment

__all__ = [
    "HOST_PARTS",
    "Average",
    "ExactMoment",
    "LinearMoment",
    "Moment",
    "Moments",
    "Name",
    "Parts",
    "RankOneMoment",
    "RowWiseMoment",
    "SketchedMoment",
    "Table",
    "create",
    "misfit",
    "open_moment",
]

# Tensors that are read as Python numbers stay on the CPU whatever the parameter's device.
HOST_PARTS = frozenset({"scale", "rounds", "start", "items"})


def create(storage: Storage, table: Table, *, fill: float = 0.0) -> Parts:
    """The tensors of a fresh moment whose every estimate is `fill`, by the name of their part."""
    match storage:
        case Exact():
            return ExactMoment.create(table, fill)
        case RowWise():
            return RowWiseMoment.create(table, fill)
        case Sketched():
            return SketchedMoment.create(storage, table, fill)
        case RankOne():
            return RankOneMoment.create(table, fill)
        case _:
            return TopSingularMoment.create(table, fill)


def misfit(storage: Storage, shape: torch.Size, tensors: dict[str, Any]) -> str | None:
    """What keeps these tensors from being a stored moment of a parameter of that shape, or None.

    The dtype of an exact moment is not looked at: it is the parameter's, once it is loaded.
    """
    expected = _on_meta(storage, shape, has_start="start" in tensors)
    found = {part for part, tensor in tensors.items() if isinstance(tensor, Tensor)}
    if found != expected.keys():
        return f"it has {sorted(found) or 'nothing'}, not {list(expected)}"
    for part, like in expected.items():
        tensor, shapes = tensors[part], [like.shape]
        if isinstance(storage, Sketched) and part == "table":
            depth, width, dim = like.shape
            shapes = [torch.Size((depth, folded, dim)) for folded in storage.widths(width)]
        if tensor.shape not in shapes:
            return f"its {part} has shape {list(tensor.shape)}, not {list(like.shape)}"
        if part != "values" and tensor.dtype != like.dtype:
            return f"its {part} is {tensor.dtype}, not {like.dtype}"
    return None


@functools.lru_cache(maxsize=1024)
def _on_meta(storage: Storage, shape: torch.Size, *, has_start: bool) -> dict[str, Tensor]:
    table = Table(shape, torch.float32, torch.device("meta"), 0)
    return create(storage, table, fill=float(has_start))


def open_moment(storage: Storage, name: Name, tensors: Parts) -> Moment:
    """The moment over tensors that `create` made."""
    match storage:
        case Exact():
            return ExactMoment(tensors)
        case RowWise():
            return RowWiseMoment(tensors)
        case Sketched():
            return sketched_moment(storage, name, tensors)
        case RankOne():
            return RankOneMoment(tensors)
        case _:
            return TopSingularMoment(name, tensors)
