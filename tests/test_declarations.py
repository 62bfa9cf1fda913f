"""A storage is known to its dataclass and its moment alone; everything else reads declarations."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from storage_cases import MOMENTS, TABLES, each_moment, each_table
from torch import Tensor

from sketchoptim import moments
from sketchoptim._rows import Rows
from sketchoptim.moments import Average, Moment, Move, Name, Table
from sketchoptim.storage import Storage

# -- what a declaration promises -------------------------------------------------------------------


def moment_classes(base: type[Moment] = Moment) -> Iterator[type[Moment]]:
    """The classes of the library that have no subclass."""
    own = [it for it in base.__subclasses__() if it.__module__.startswith("sketchoptim.moments")]
    for kind in own:
        yield from moment_classes(kind)
    if not own:
        yield base


def opened(name: Name, storage: Storage, table: Table, fill: float = 0.0) -> Moment:
    return moments.open_moment(storage, name, moments.create(storage, name, table, fill))


def step_(moment: Moment, values: Tensor, ids: list[int], average: Average) -> None:
    rows = Rows(torch.tensor(ids), values)
    moments.drive_([Move(moment, average, lambda gradient: gradient)], rows)


def test_the_cases_have_every_moment_class():
    opened_classes = {type(opened(*it, TABLES["matrix"])) for it in MOMENTS.values()}
    assert opened_classes == set(moment_classes())


@each_moment
@each_table
@pytest.mark.parametrize("fill", [0.0, 0.5])
def test_fresh_tensors_are_those_that_are_declared(name, storage, table, fill):
    parts = {part.name: part for part in moments.declare(storage, name, table, fill)}
    tensors = moments.create(storage, name, table, fill)
    assert tensors.keys() == parts.keys()
    for part_name, part in parts.items():
        tensor = tensors[part_name]
        assert tuple(tensor.shape) == part.shape
        assert tensor.dtype == (part.dtype or table.dtype)
        assert tensor.nbytes == part.nbytes(table.dtype)
    assert moments.state_mismatch(storage, name, table, tensors) is None
    assert moments.state_damage(storage, name, table, tensors) is None


@each_moment
def test_host_parts_stay_on_the_cpu_and_all_others_follow_the_parameter(name, storage):
    table = dataclasses.replace(TABLES["matrix"], device=torch.device("meta"))
    tensors = moments.create(storage, name, table)
    for part in moments.declare(storage, name, table):
        assert tensors[part.name].is_meta is not part.is_on_host


@each_moment
@pytest.mark.parametrize("table", [TABLES["matrix"], TABLES["many"]], ids=["matrix", "many"])
def test_a_moment_that_moved_is_still_as_declared(name, storage, table):
    moment = opened(name, storage, table)
    values = torch.rand(3, table.dim, generator=torch.Generator().manual_seed(0))
    for number in (1, 2):
        step_(moment, values, [0, 3, 7], Average(0.9, 0.1))
        moment.maintain_(number)
    assert moments.state_mismatch(storage, name, table, moment.tensors) is None
    assert moments.state_damage(storage, name, table, moment.tensors) is None


@each_moment
@pytest.mark.parametrize("table", [TABLES["matrix"], TABLES["many"]], ids=["matrix", "many"])
def test_an_estimate_has_the_declared_granularity(name, storage, table):
    moment = opened(name, storage, table)
    columns = 1 if moment.granularity == "row" else table.dim
    assert moment.estimate(torch.tensor([2, 5])).shape == (2, columns)


@each_moment
@pytest.mark.parametrize("table", [TABLES["matrix"], TABLES["many"]], ids=["matrix", "many"])
def test_rows_that_a_step_does_not_touch_decay_as_declared(name, storage, table):
    moment = opened(name, storage, table)
    row, untouched = torch.linspace(1.0, 2.0, table.dim), torch.tensor([9])
    step_(moment, torch.stack([row, row]), [0, 9], Average(1.0, 1.0))
    before = moment.estimate(untouched)
    step_(moment, row.unsqueeze(0), [0], Average(0.5, 0.5))
    expected = before * 0.5 if moment.decays_whole else before
    assert moment.estimate(untouched) == pytest.approx(expected, rel=0.02)
    assert (before > 0).all()
