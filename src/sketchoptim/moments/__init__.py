"""First and second moments behind one interface, whatever they are stored in."""

from torch import Tensor

from ..storage import Exact, RankOne, RowWise, Sketched, Storage, TopSingular
from .exact import ExactMoment
from .moment import Average, Moment, Moments, Name, State, Table
from .rank_one import RankOneMoment
from .row_wise import RowWiseMoment
from .sketched import LinearMoment, SketchedMoment, sketched_moment
from .top_singular import TopSingularMoment

__all__ = [
    "HOST_PARTS",
    "Average",
    "ExactMoment",
    "LinearMoment",
    "Moment",
    "Moments",
    "Name",
    "RankOneMoment",
    "RowWiseMoment",
    "SketchedMoment",
    "State",
    "Table",
    "create",
    "fits",
    "open_moment",
]

# Tensors that are read as Python numbers stay on the CPU whatever the parameter's device.
HOST_PARTS = frozenset({"scale", "rounds", "start", "items"})

_PARTS = {
    Exact: {"values"},
    RowWise: {"rows"},
    RankOne: {"table", "scale", "words", "columns"},
    TopSingular: {"rows", "columns"},
}


def create(storage: Storage, table: Table, *, fill: float = 0.0) -> dict[str, Tensor]:
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


def fits(storage: Storage, dim: int, tensors: State) -> bool:
    """Whether the storage can work on these tensors: they are of its kind, depth, dim and dtype."""
    if isinstance(storage, Sketched):
        table = tensors.get("table")
        expected = storage.depth, dim if storage.granularity == "element" else 1, storage.dtype
        return (
            table is not None
            and "columns" not in tensors
            and (table.shape[0], table.shape[2], table.dtype) == expected
        )
    return tensors.keys() == _PARTS[type(storage)]


def open_moment(storage: Storage, name: Name, tensors: State) -> Moment:
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
