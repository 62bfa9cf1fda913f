"""Contract 6: what a step may take besides the table, measured in a process of its own."""

import pytest
import step_footprint
import torch
from step_footprint import DENSE_DIM, DENSE_ROWS, DIM, FEW, MANY, ROWS, Footprint

import sketchoptim as so
from sketchoptim._rows import CHUNK_ELEMENTS

SPARSE = [
    f"{backend}, {memory}, {kind}"
    for backend, presets in step_footprint.SPARSE_PRESETS.items()
    for memory in presets
    for kind in ("coalesced", "uncoalesced")
]
DENSE = [
    f"{backend}, {memory}, dense"
    for backend in step_footprint.SPARSE_PRESETS
    for memory in step_footprint.DENSE_PRESETS
]
COPY_BYTES = MANY * DIM * 4


@pytest.fixture(scope="module")
def footprints() -> dict[str, Footprint]:
    return step_footprint.in_a_process_of_its_own()


def found(footprints: dict[str, Footprint], name: str) -> Footprint:
    if name.startswith("native") and name not in footprints:
        pytest.skip("the native kernels were not built")
    return footprints[name]


def by_process(footprint: Footprint) -> int:
    if footprint.process_bytes < 0:
        pytest.skip("this system has no high-water mark that can be reset")
    return footprint.process_bytes


def test_both_marks_see_an_allocation_of_known_size(footprints):
    known = footprints[step_footprint.KNOWN]
    assert known.largest_bytes == known.allocated_bytes == step_footprint.KNOWN_BYTES
    assert 0.95 < by_process(known) / step_footprint.KNOWN_BYTES < 1.5


@pytest.mark.parametrize("backend", step_footprint.SPARSE_PRESETS)
def test_lean_keeps_half_a_byte_a_row(footprints, backend):
    state_bytes = found(footprints, f"{backend}, lean, uncoalesced, {MANY}").state_bytes
    assert 0 < state_bytes <= ROWS / 2 + 64 * 1024


@pytest.mark.parametrize("name", SPARSE)
def test_a_step_takes_less_than_two_copies_of_the_touched_rows(footprints, name):
    step = found(footprints, f"{name}, {MANY}")
    assert step.allocated_bytes < 2 * COPY_BYTES
    assert by_process(step) < 2 * COPY_BYTES


@pytest.mark.parametrize("name", SPARSE)
def test_a_step_takes_nothing_of_the_size_of_the_table(footprints, name):
    """With a few rows touched, all that a step takes is less than a byte for each row."""
    step = found(footprints, f"{name}, {FEW}")
    assert step.allocated_bytes < ROWS
    assert by_process(step) < ROWS


@pytest.mark.parametrize("backend", step_footprint.SPARSE_PRESETS)
def test_making_the_state_takes_nothing_of_the_size_of_the_table(footprints, backend):
    first = found(footprints, f"{backend}, lean, first step")
    assert ROWS / 4 < first.allocated_bytes < ROWS
    assert by_process(first) < ROWS


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_gradient_goes_through_in_chunks(footprints, name):
    dense = found(footprints, name)
    assert dense.allocated_bytes <= 8 * CHUNK_ELEMENTS * 4
    assert by_process(dense) < DENSE_ROWS * DENSE_DIM * 4 / 4


def test_state_dict_and_report_agree_on_half_a_byte_a_row():
    table = torch.nn.Parameter(torch.zeros(ROWS, 1))
    table.grad = torch.sparse_coo_tensor(
        torch.tensor([[5]]), torch.ones(1, 1), (ROWS, 1), check_invariants=True
    )
    optimizer = so.Adam([table])
    optimizer.step()
    saved = optimizer.state_dict()["state"][0].values()
    tensors = [value for value in saved if isinstance(value, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in tensors) <= ROWS / 2 + 64 * 1024
    assert so.memory_report(optimizer).state_bytes <= ROWS / 2 + 64 * 1024
