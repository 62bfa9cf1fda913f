"""Several tables in one sequence of launches, against each by itself."""

import contextvars
import threading
import time
from unittest import mock

import pytest
import torch
from gpu_steps import needs_execution, stepping_by_gpu_kernels
from gradients import sparse, unchecked
from torch import Tensor

import sketchoptim as so
from sketchoptim.ops import gpu
from sketchoptim.ops._gpu_launches import Launch
from sketchoptim.storage import PRESETS

pytestmark = needs_execution

COLUMNS = so.Memory(None, so.Sketched(width=64, conservative=True, columns=True))
SHAPES = ((60, 8), (9, 8), (200, 8), (50, 12))


def gradients(seed: int, dtype: torch.dtype, *, is_dense: bool = False) -> list[Tensor]:
    """One for each table; the third has no entries in the second step."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, (rows, dim) in enumerate(SHAPES):
        count = 0 if seed == 1 and number == 2 else 45
        ids = torch.randint(rows, (count,), generator=generator)
        values = torch.randint(-8, 9, (count, dim), generator=generator) / 8
        gradient = sparse(ids, values.to(dtype), (rows, dim))
        found.append(gradient.to_dense() if is_dense else gradient)
    return found


def trained(preset: str, dtype: torch.dtype, *, is_together: bool, is_dense: bool) -> list[Tensor]:
    tables = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]
    memory = COLUMNS if preset == "columns" else PRESETS[preset]
    memory = so.Memory(memory.first, memory.second, clip=1.0)
    optimizer = so.Adam([{"params": tables, "memory": memory}], lr=0.1)
    groups = gpu.groups_of if is_together else lambda steps: []
    with stepping_by_gpu_kernels(), mock.patch.object(gpu, "groups_of", groups):
        for seed in range(2):
            for table, gradient in zip(
                tables, gradients(seed, dtype, is_dense=is_dense), strict=True
            ):
                table.grad = gradient
            optimizer.step()
        states = optimizer.state_dict()["state"].values()
    kept = [it for state in states for it in state.values() if isinstance(it, Tensor)]
    return [*(table.detach() for table in tables), *kept]


@pytest.mark.parametrize(
    ("preset", "dtype", "is_dense"),
    [
        ("lean-0.1", torch.float32, False),
        ("lean-0.1", torch.bfloat16, False),
        ("row-wise", torch.float16, False),
        ("exact", torch.float32, False),
        ("8-bit", torch.float32, False),
        ("lean-0.1", torch.float32, True),
        ("columns", torch.float32, False),
    ],
)
def test_tables_stepped_together_have_the_bits_of_each_by_itself(preset, dtype, is_dense):
    together = trained(preset, dtype, is_together=True, is_dense=is_dense)
    alone = trained(preset, dtype, is_together=False, is_dense=is_dense)
    assert all(map(torch.equal, together, alone))


def test_three_tables_of_one_width_are_one_sequence_and_the_fourth_another():
    launched = []
    tables = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = so.Adam(tables)
    with stepping_by_gpu_kernels(is_run=False):
        for table, gradient in zip(tables, gradients(0, torch.float32), strict=True):
            table.grad = gradient
        run = mock.patch.object(
            Launch, "run_", lambda it: launched.append((it.kernel.__name__, it.grid[1]))
        )
        with run:
            optimizer.step()
    names = ["collect_keys", "begin", "inspect", "move_rows", "finish"]
    assert launched == [*((name, 3) for name in names), *((name, 1) for name in names)]


def test_tables_are_launched_one_by_one_while_a_graph_is_captured():
    """A graph would read the words of a launch together from host memory in each replay."""
    launched = []
    tables = [torch.nn.Parameter(torch.ones(30, 8)) for _ in range(2)]
    optimizer = so.Adam(tables)
    run = mock.patch.object(Launch, "run_", lambda it: launched.append(it.kernel.__name__))
    capturing = mock.patch.object(gpu, "is_capturing", return_value=True)
    with stepping_by_gpu_kernels(is_run=False):
        for table in tables:
            table.grad = sparse(torch.tensor([1, 2]), torch.ones(2, 8), table.shape)
        optimizer.step()
        with run, capturing:
            optimizer.step()
    assert launched == ["collect_keys", "begin", "inspect", "move_rows", "finish"] * 2


def test_two_threads_whose_tables_have_the_same_launches_take_turns():
    launched = []

    def run_(launch: Launch) -> None:
        launched.append(threading.get_ident())
        time.sleep(0.002)

    def step_() -> None:
        tables = [torch.nn.Parameter(torch.ones(30, 8)) for _ in range(2)]
        optimizer = so.Adam(tables)
        for table in tables:
            table.grad = sparse(torch.tensor([1, 2]), torch.ones(2, 8), table.shape)
        start.wait()
        optimizer.step()

    start = threading.Barrier(2)
    with stepping_by_gpu_kernels(is_run=False), mock.patch.object(Launch, "run_", run_):
        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(step_,)) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(launched) == 10
    assert len({*launched[:5]}) == len({*launched[5:]}) == 1


def test_a_bad_id_of_one_table_leaves_the_others_alone():
    with stepping_by_gpu_kernels():
        tables = [torch.nn.Parameter(torch.ones(30, 8)) for _ in range(3)]
        optimizer = so.Adam(tables)
        for table, ids in zip(tables, ([1, 2], [-5, 3], [29, 29]), strict=True):
            table.grad = unchecked(ids, table)
        optimizer.step()
    assert [bool((table != 1).any()) for table in tables] == [True, False, True]
    assert tables[2][29].ne(1).all()
    with pytest.raises(ValueError, match="row ids between 0 and 29"):
        optimizer.state_dict()
