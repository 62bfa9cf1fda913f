"""Rows beyond 2^31, in a table of which only the shape is there."""

import pytest
from gpu_steps import IS_INTERPRETED

if IS_INTERPRETED:
    pytest.skip("the interpreter's process cannot compile", allow_module_level=True)

import gpu_ptx
import ptx
from gpu_compile import launches_of

import sketchoptim as so
from sketchoptim.storage import PRESETS

# The first row whose number is above the largest int32.
ROW, DIM = 2**31, 64
CODED = so.Memory(None, so.Quantized(block=1024))


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("kernel", "memory"),
    [("inspect", PRESETS["lean-0.1"]), ("move_rows", PRESETS["lean-0.1"]), ("move_blocks", CODED)],
)
def test_a_program_behind_the_largest_int32_accesses_its_own_rows(kernel, memory, target):
    """Its first access is out of the bounds of the little memory there is, by what it should."""
    found = launches_of(memory, dim=DIM, is_dense=True)
    launch = next(it for it in found if it.kernel.__name__ == kernel)
    rows_at_once = launch.arguments["ROWS"] * launch.arguments.get("BLOCK_ROWS", 1)
    program = ROW // rows_at_once
    launch.arguments.update(count=ROW + 4096, row_count=ROW + 4096)
    launch.arguments["flag"].zero_()
    launch.grid = (program + 1, 1, 1)
    with pytest.raises(ptx.Fault, match="out of bounds") as fault:
        gpu_ptx.execute(launch, target, programs=range(program, program + 1))
    offset = fault.value.address - launch.arguments["entries"].data_ptr()
    assert 4 * DIM * ROW <= offset < 4 * DIM * (ROW + rows_at_once)
