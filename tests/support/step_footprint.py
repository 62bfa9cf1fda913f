"""What steps allocate, by the process's and by the allocator's high-water mark.

Run as a script, it measures every case on a table of a million words and prints JSON: in a process
of its own, so that nothing else moves the marks.
"""

import ctypes
import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import sketchoptim as so
from sketchoptim.ops import _native

ROWS, DIM = 793_471, 256
DENSE_ROWS, DENSE_DIM = 100_000, 128
FEW, MANY = 16, 20_000
SPARSE_PRESETS = {
    "native": ("lean", "row-wise", "paper-v-only", "paper-mv"),
    "reference": ("lean", "row-wise", "rank-one", "paper-v-only"),  # paper-mv takes seconds a step
}
DENSE_PRESETS = ("lean", "row-wise", "rank-one")
KNOWN, KNOWN_BYTES = "a known size", 3_000_000
PR_SET_THP_DISABLE = 41
CLEAR_REFS = Path("/proc/self/clear_refs")
CAN_RESET_MARK = os.access(CLEAR_REFS, os.W_OK) and platform.libc_ver()[0] == "glibc"


@dataclass(frozen=True)
class Footprint:
    """What a step took at most, in bytes."""

    process_bytes: int
    """By the process's high-water mark: -1 where the system has none that can be reset."""
    allocated_bytes: int
    """By torch's allocator: all tensors at a time."""
    largest_bytes: int
    """By torch's allocator: the largest single allocation."""
    state_bytes: int
    """What the optimizer keeps afterwards; not in the marks unless the work made it."""


def measured(work: Callable[[], object], state_bytes: int = 0) -> Footprint:
    """The footprint of doing the work, which is done twice, or up to four times.

    Pages that the system took from the process and that it reads again meanwhile raise its mark
    too, so that of several marks the lowest is the work's.
    """
    rise, (allocated, largest) = _process_rise(work), _allocations(work)
    for _ in range(2):
        if rise > 1.25 * allocated:
            rise = min(rise, _process_rise(work))
    return Footprint(rise, allocated, largest, state_bytes)


def _process_rise(work: Callable[[], object]) -> int:
    if not CAN_RESET_MARK:
        work()
        return -1
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free would hide what the work takes
    before = _status("VmRSS")
    CLEAR_REFS.write_text("5")  # resets the mark
    work()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def _allocations(work: Callable[[], object]) -> tuple[int, int]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = largest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak, largest = max(peak, held), max(largest, event.nbytes())
    return peak, largest


def sparse_gradient(touched: int, *, is_coalesced: bool) -> Tensor:
    """Distinct rows, half of which come twice if the gradient is not coalesced."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(ROWS // touched, (touched,), generator=generator)
    ids += torch.arange(touched) * (ROWS // touched)
    if not is_coalesced:
        ids = torch.cat((ids, ids[: touched // 2]))
    values = torch.randn(ids.numel(), DIM, generator=generator)
    gradient = torch.sparse_coo_tensor(ids[None], values, (ROWS, DIM), check_invariants=True)
    return gradient._coalesced_(is_coalesced)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    states = optimizer.state.values()
    return sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor))


def sparse_cases(
    table: Tensor, memory: str, gradients: dict[str, Tensor]
) -> Iterator[tuple[str, Footprint]]:
    optimizer = so.Adam([table], memory=memory)
    for name, gradient in gradients.items():
        table.grad = gradient
        optimizer.step()  # makes the state, and brings the touched rows into memory
        yield f"{memory}, {name}", measured(optimizer.step, state_bytes(optimizer))


def first_step_case(table: Tensor, gradient: Tensor) -> Footprint:
    table.grad = gradient

    def step_of_a_new_optimizer() -> None:
        so.Adam([table], memory="lean").step()

    return measured(step_of_a_new_optimizer)


def dense_case(memory: str) -> Footprint:
    table = torch.nn.Parameter(torch.zeros(DENSE_ROWS, DENSE_DIM))
    table.grad = torch.ones(DENSE_ROWS, DENSE_DIM)
    optimizer = so.Adam([{"params": [table], "memory": memory}])
    optimizer.step()
    return measured(optimizer.step, state_bytes(optimizer))


def backend_cases(table: Tensor, presets: tuple[str, ...]) -> Iterator[tuple[str, Footprint]]:
    gradients = {
        f"{name}, {touched}": sparse_gradient(touched, is_coalesced=name == "coalesced")
        for name in ("coalesced", "uncoalesced")
        for touched in (FEW, MANY)
    }
    for memory in presets:
        yield from sparse_cases(table, memory, gradients)
    yield "lean, first step", first_step_case(table, gradients[f"uncoalesced, {FEW}"])
    for memory in DENSE_PRESETS:
        yield f"{memory}, dense", dense_case(memory)


def all_cases() -> dict[str, Footprint]:
    # Zeros are not in memory before they are written to: 0.8 GB cost nothing.
    table = torch.nn.Parameter(torch.zeros(ROWS, DIM))
    found = {KNOWN: measured(lambda: torch.ones(KNOWN_BYTES, dtype=torch.uint8))}
    if _native.library() is not None:
        cases = backend_cases(table, SPARSE_PRESETS["native"])
        found |= {f"native, {name}": case for name, case in cases}
    with mock.patch.object(_native, "library", return_value=None):
        cases = backend_cases(table, SPARSE_PRESETS["reference"])
        found |= {f"reference, {name}": case for name, case in cases}
    return found


def in_a_process_of_its_own() -> dict[str, Footprint]:
    """What `all_cases` finds where large blocks go back to the system as soon as they are free."""
    limits = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, **limits, "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    cases = json.loads(done.stdout.splitlines()[-1])
    return {name: Footprint(**case) for name, case in cases.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    so.Adam([torch.nn.Parameter(torch.zeros(1))])  # imports what of torch is still missing
    gc.freeze()  # where else every measurement would search for garbage
    if CAN_RESET_MARK:
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # a huge page would hide small ones
    print(json.dumps({name: asdict(case) for name, case in all_cases().items()}))
