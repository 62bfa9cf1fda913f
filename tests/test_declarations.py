"""A storage is known to its dataclass and its moment alone; everything else reads declarations."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from source_checks import lines_with_open_matches, lines_with_parts, lines_with_types
from storage_cases import MOMENTS, STORAGES, TABLES, each_moment, each_table
from torch import Tensor

from sketchoptim import moments
from sketchoptim._rows import Rows
from sketchoptim.moments import Average, Moment, Move, Name, Table
from sketchoptim.storage import Storage

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "sketchoptim"


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


@each_moment
def test_a_description_is_in_words_of_its_own(name, storage):
    others = [other for other in STORAGES.values() if type(other) is not type(storage)]
    assert storage.describe() not in [other.describe() for other in others]
    assert opened(name, storage, TABLES["matrix"]).describe()


# -- no other code knows a storage by its type or by its parts -------------------------------------


def found_under(paths: list[Path], find: Callable[[str], list[int]]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}"
        for path in paths
        for line in find(path.read_text(encoding="utf-8"))
    ]


def sources(*, but: tuple[str, ...]) -> list[Path]:
    """The files of the package, without those named, and of the experiments."""
    package = [
        path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in but
    ]
    return sorted([*package, *(ROOT / "experiments").rglob("*.py")])


def test_only_moments_and_storage_ask_for_the_type_of_a_storage_or_a_moment():
    assert found_under(sources(but=("moments", "storage.py")), lines_with_types) == []


def test_only_moments_and_the_sketch_itself_name_a_part():
    # A sketch lists its own tensors by the names of its constructor's arguments.
    assert found_under(sources(but=("moments", "_sketch.py")), lines_with_parts) == []


def test_every_match_ends_in_assert_never():
    assert found_under(sorted(PACKAGE.rglob("*.py")), lines_with_open_matches) == []


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(storage, Sketched)",
        "isinstance(storage, so.Exact | None)",
        "issubclass(kind, (RowWise, Exact))",
        "isinstance(moment, moments.ExactMoment)",
        "type(storage) is Exact",
        "type(storage) in (Exact, RowWise)",
        "type(storage).__name__ == 'Exact'",
        "{Exact: 'exact'}[type(storage)]",
        "match storage:\n    case so.Sketched(depth=3): pass",
        "match name:\n    case 'Sketched': pass",
    ],
)
def test_a_question_for_a_type_is_found(source):
    assert len(lines_with_types(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "state['second_values']",
        "state.get('first_counters')",
        "lookup(state, 'second_rows')",
        "state[f'{name}_values']",
    ],
)
def test_the_key_of_a_part_is_found(source):
    assert lines_with_parts(source) == [1]


@pytest.mark.parametrize(
    "source",
    [
        "tensors['counters']",
        "tensors.pop('words', None)",
        "{'counters': it}",
        "part == 'scale'",
        "part in ('rows', 'columns')",
        "key.removeprefix('scale')",
        "NUMBERS = ('values', 'other')",
        "[tensors[part] for part in ('rows', 'other')]",
        "match part:\n    case 'words': pass",
    ],
)
def test_the_name_of_a_part_is_found_where_there_are_moments(source):
    assert lines_with_parts(source) == []
    for begin in ("from .. import moments", "from ._state import parts_of", "moment.tensors"):
        assert len(lines_with_parts(f"{begin}\n{source}")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "Sketched(width=4)",
        "isinstance(thing, Memory) and isinstance(it, Moment)",
        "memory == Memory(second=Exact())",
        "check_positive_int('rows', rows)",
        "raise ValueError('values must be finite')",
        "view.values",
        "match view:\n    case ArrayView(): pass\n    case _: assert_never(view)",
    ],
)
def test_what_is_neither_is_not_found(source):
    for find in (lines_with_types, lines_with_parts, lines_with_open_matches):
        assert find(f"from .. import moments\n{source}") == []


@pytest.mark.parametrize(
    "last",
    ["case 'b': pass", "case _: pass", "case _ if x: assert_never(x)", "case _: raise ValueError"],
)
def test_a_match_that_may_fall_through_is_found(last):
    assert lines_with_open_matches(f"match x:\n    case 'a': pass\n    {last}") == [1]
