"""ascend() and group(): what ids are like, and equal ones together, against torch.unique."""

import itertools
from typing import NamedTuple

import pytest
import torch
from backends import LEVELS, library, needs_native
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sketchoptim.ops import _native

pytestmark = [needs_native, pytest.mark.parametrize("level", LEVELS)]

GUARD = -7_777_777


class Grouping(NamedTuple):
    """What group() found; its room has guards behind it."""

    ids: Tensor
    starts: Tensor
    order: Tensor
    slots: Tensor
    shared: int


def group(level: str, ids: Tensor) -> Grouping:
    count = ids.numel()
    size = 3 * count + 1
    room, found = torch.full((size + 8,), GUARD), _native.Gradient()
    shared = library(level).sketchoptim_group(ids.data_ptr(), None, count, room.data_ptr(), found)
    assert (room[size:] == GUARD).all()
    here, parts = room[:size], [found.starts, found.order, found.slots]
    words = here.view(torch.int32)
    starts, order, slots = (words[(part - room.data_ptr()) // 4 :] for part in parts)
    unique = here[(found.ids - room.data_ptr()) // 8 :]
    return Grouping(
        unique[: found.rows].clone(),
        starts[: found.rows + 1].long(),
        order[:count].long(),
        slots[: found.rows].long(),
        shared,
    )


def ascend(level: str, ids: Tensor, n: int) -> int:
    return library(level).sketchoptim_ascend(ids.data_ptr(), ids.numel(), n)


def check(found: Grouping, ids: Tensor) -> None:
    """Raises unless the grouping is that of torch.unique and keeps the order of equal ids."""
    unique, counts = torch.unique(ids, return_counts=True)
    assert torch.equal(found.ids, unique)
    assert torch.equal(found.starts.diff(), counts)
    assert found.starts[0] == 0
    has_several = counts > 1
    assert torch.equal(found.slots[has_several], torch.arange(found.shared))
    assert found.shared == has_several.sum()
    assert torch.equal(found.order, torch.sort(ids, stable=True).indices)


def ascend_strictly(ids: list[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(ids))


@given(n=st.sampled_from([1, 2, 10, 2**11, 2**22 + 1, 2**31]), data=st.data())
def test_groups_are_those_of_torch_unique(level, n, data):
    # Few distinct ids, and ids anywhere: both duplicates and every digit of the sort are met.
    some = st.integers(0, n - 1)
    pool = data.draw(st.lists(some, min_size=1, max_size=4))
    drawn = data.draw(st.lists(st.one_of(st.sampled_from(pool), some), max_size=60))
    ids = torch.tensor(drawn, dtype=torch.int64)
    check(group(level, ids), ids)
    assert ascend(level, ids, n) == ascend_strictly(drawn)


@given(data=st.data())
def test_ids_up_to_the_last_that_is_allowed_are_sorted(level, data):
    near = st.integers(2**32 - 3, 2**32 - 1)
    drawn = data.draw(st.lists(st.one_of(near, st.integers(0, 2**32 - 1)), min_size=2, max_size=30))
    ids = torch.tensor([*drawn, drawn[0]])
    check(group(level, ids), ids)
    assert ascend(level, ids, 2**32) == 0


def test_many_entries_are_grouped(level):
    generator = torch.Generator().manual_seed(0)
    ids = (torch.rand(50_000, generator=generator) ** 4 * 793_471).long()
    check(group(level, ids), ids)


@pytest.mark.parametrize("ids", [[], [4], list(range(0, 100, 3))])
def test_ids_that_ascend_strictly_are_known_to(level, ids):
    assert ascend(level, torch.tensor(ids, dtype=torch.int64), 100) == 1


@pytest.mark.parametrize("ids", [[0, 1, 1, 2], [3, 2], [0, 5, 4]])
def test_ids_that_repeat_or_descend_are_known_to(level, ids):
    assert ascend(level, torch.tensor(ids), 6) == 0


@pytest.mark.parametrize("wrong", [-1, -(2**63), 9, 2**31, 2**32, 2**32 + 1, 2**63 - 1])
def test_an_id_outside_the_table_is_found(level, wrong):
    for place in (0, 3, 6):
        ids = torch.tensor([3, 0, 8, 8, 1, 2, 5])
        ids[place] = wrong
        assert ascend(level, ids, 9) == -1


def test_a_table_without_rows_has_no_ids(level):
    assert ascend(level, torch.zeros(1, dtype=torch.int64), 0) == -1
    assert ascend(level, torch.zeros(0, dtype=torch.int64), 0) == 1
