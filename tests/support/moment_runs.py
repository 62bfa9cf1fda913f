"""Moments by themselves, without an optimizer: made, opened and moved step by step."""

import torch
from torch import Tensor

import sketchoptim as so
from sketchoptim import moments
from sketchoptim.moments import Average, Moment, Name, Table
from sketchoptim.storage import Storage

ADAM = Average(0.9, 1 - 0.9)
MOMENTUM = Average(0.9, 1.0)
ADAGRAD = Average(1.0, 1.0)


def opened(
    storage: Storage,
    name: Name = "second",
    *,
    rows: int = 40,
    dim: int = 3,
    fill: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Moment:
    """A fresh moment of a parameter of ``[rows, dim]``."""
    table = Table(torch.Size((rows, dim)), dtype, torch.device("cpu"))
    return moments.open_moment(storage, name, moments.create(storage, name, table, fill))


def moved(
    moment: Moment,
    ids: Tensor,
    values: Tensor,
    average: Average,
    *,
    step: int = 1,
    sizes: list[int] | None = None,
) -> Tensor:
    """The estimates after a step over all rows, handed over in chunks of the given sizes."""
    sizes = [len(ids)] if sizes is None else sizes
    chunks = list(zip(ids.split(sizes), values.split(sizes), strict=True))
    moment.begin_(average, touched=len(ids), step=step)
    if moment.gathers:
        for chunk in chunks:
            moment.gather_(*chunk)
    estimates = torch.cat([moment.update_(*chunk) for chunk in chunks])
    moment.end_()
    moment.maintain_(step)
    return estimates


def estimated(moment: Moment, ids: Tensor, dim: int = 3) -> Tensor:
    """The estimates as they stand: a step by which nothing decays and nothing is added."""
    return moved(moment, ids, torch.zeros(len(ids), dim), Average(1.0, 0.0), step=-1)


def random_rows(
    generator: torch.Generator, *, rows: int = 40, dim: int = 3, is_signed: bool = False
) -> tuple[Tensor, Tensor]:
    """Some distinct ids in ascending order, and a value for each."""
    count = int(torch.randint(1, rows + 1, (), generator=generator))
    ids = torch.randperm(rows, generator=generator)[:count].sort().values
    values = torch.randn(count, dim, generator=generator)
    return ids, values if is_signed else values.square()


def by_element(**options: object) -> so.Sketched:
    """A sketch with few enough buckets that rows collide."""
    return so.Sketched(**{"width": 8, "granularity": "element", **options})


def by_row(**options: object) -> so.Sketched:
    """The same with one number a row."""
    return by_element(granularity="row", **options)
