"""group(): equal ids together in ascending order, against torch.unique."""

import ctypes
import itertools
from typing import NamedTuple

import pytest
import torch
from backends import LEVELS, library, needs_native
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytestmark = [needs_native, pytest.mark.parametrize("level", LEVELS)]

both_widths = pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
GUARD = -7_777_777


class Grouping(NamedTuple):
    """What group() found, with guards behind every buffer that it wrote to."""

    rows: int
    order: Tensor
    starts: Tensor
    slots: Tensor
    unique: Tensor

    def is_untouched(self) -> bool:
        return all(bool((part == GUARD).all()) for part in self[1:])


def group(level: str, ids: Tensor, n: int) -> Grouping:
    count = ids.numel()
    sizes = (2 * count, count, count + 1, count + 1, count)
    buffers = [torch.full((size + 8,), GUARD) for size in sizes]
    call = library(level).sketchoptim_group
    if ids.dtype == torch.int32:
        call = library(level).sketchoptim_group_int32
    pointers = [ctypes.c_void_p(buffer.data_ptr()) for buffer in buffers]
    rows = call(ids.data_ptr(), count, n, *pointers)
    for buffer, size in zip(buffers, sizes, strict=True):
        assert (buffer[size:] == GUARD).all()
    parts = [buffer[:size] for buffer, size in zip(buffers, sizes, strict=True)]
    return Grouping(rows, *parts[1:])


def check(found: Grouping, ids: Tensor) -> None:
    """Raises unless the grouping is that of torch.unique and keeps the order of equal ids."""
    unique, counts = torch.unique(ids.long(), return_counts=True)
    assert found.rows == unique.numel()
    assert torch.equal(found.unique[: found.rows], unique)
    assert torch.equal(found.starts[: found.rows + 1].diff(), counts)
    assert found.starts[0] == 0
    assert torch.equal(found.slots[: found.rows + 1].diff(), (counts > 1).long())
    assert found.slots[0] == 0
    assert torch.equal(found.order, torch.sort(ids, stable=True).indices)


def ascend_strictly(ids: list[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(ids))


@both_widths
@given(n=st.sampled_from([1, 2, 10, 2**11, 2**22 + 1, 2**31]), data=st.data())
def test_groups_are_those_of_torch_unique(level, dtype, n, data):
    # Few distinct ids, and ids anywhere: both duplicates and every digit of the sort are met.
    some = st.integers(0, n - 1)
    pool = data.draw(st.lists(some, min_size=1, max_size=4))
    drawn = data.draw(st.lists(st.one_of(st.sampled_from(pool), some), max_size=60))
    ids = torch.tensor(drawn, dtype=dtype)
    found = group(level, ids, n)
    if ascend_strictly(drawn):
        assert found.rows == 0
        assert found.is_untouched()
    else:
        check(found, ids)


@given(data=st.data())
def test_ids_up_to_the_last_that_is_allowed_are_sorted(level, data):
    near = st.integers(2**32 - 3, 2**32 - 1)
    drawn = data.draw(st.lists(st.one_of(near, st.integers(0, 2**32 - 1)), min_size=2, max_size=30))
    ids = torch.tensor([*drawn, drawn[0]])
    check(group(level, ids, 2**32), ids)


@both_widths
def test_many_entries_are_grouped(level, dtype):
    generator = torch.Generator().manual_seed(0)
    ids = (torch.rand(50_000, generator=generator) ** 4 * 793_471).to(dtype)
    check(group(level, ids, 793_471), ids)


@both_widths
@pytest.mark.parametrize("count", [0, 1])
def test_no_id_and_one_id_are_as_they_should_be(level, dtype, count):
    found = group(level, torch.full((count,), 4, dtype=dtype), 5)
    assert found.rows == 0
    assert found.is_untouched()


@both_widths
def test_ids_that_ascend_strictly_are_left_where_they_are(level, dtype):
    found = group(level, torch.arange(0, 100, 3, dtype=dtype), 100)
    assert found.rows == 0
    assert found.is_untouched()


@both_widths
def test_ids_that_ascend_but_repeat_are_grouped(level, dtype):
    ids = torch.tensor([0, 1, 1, 2], dtype=dtype)
    check(group(level, ids, 3), ids)


@both_widths
@pytest.mark.parametrize("wrong", [-1, -(2**31), 9, 2**31 - 1])
@pytest.mark.parametrize("place", [0, 3, 6])
def test_an_id_outside_the_table_is_refused(level, dtype, wrong, place):
    ids = torch.tensor([3, 0, 8, 8, 1, 2, 5], dtype=dtype)
    ids[place] = wrong
    found = group(level, ids, 9)
    assert found.rows == -1
    assert found.is_untouched()


@pytest.mark.parametrize("wrong", [2**32, 2**32 + 1, 2**63 - 1, -(2**63)])
def test_an_id_that_32_bits_do_not_hold_is_refused(level, wrong):
    assert group(level, torch.tensor([1, wrong, 0]), 9).rows == -1


@both_widths
def test_a_table_without_rows_has_no_ids(level, dtype):
    assert group(level, torch.zeros(1, dtype=dtype), 0).rows == -1
    assert group(level, torch.zeros(0, dtype=dtype), 0).rows == 0
