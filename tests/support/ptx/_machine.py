"""One launch of an assembled kernel."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from ._assembler import Program
from ._library import Job, Range, Result, run

# In the order of `enum Fault`.
_FAULTS = (
    "",
    "a misaligned access",
    "an access out of bounds",
    "an access out of bounds of shared memory",
    "a barrier or an exchange that not all lanes of a warp take part in",
    "a lane that runs off the end of the code",
    "a race between two programs",
    "a race between two warps of a program",
    "a race between two lanes of one store",
    "more instructions than are allowed",
)


class Fault(Exception):
    """What the machine found wrong with a launch."""

    def __init__(self, description: str, address: int) -> None:
        super().__init__(description)
        self.address = address


class Memory(NamedTuple):
    """A piece of memory that a launch may access."""

    address: int
    bytes: int
    element: int
    """Bytes of a number: accesses to one number are compared with each other."""


class Counts(NamedTuple):
    """What a launch executed: instructions of whole warps."""

    instructions: int
    loads: int
    """From global memory, like stores."""
    stores: int
    sectors: int
    """Of 32 bytes that they access; neighbouring lanes share them."""
    atomics: int
    barriers: int
    longest_warp: int
    """Instructions of the warp that executed most."""
    longest_loads: int
    longest_program: int


def execute(
    program: Program,
    arguments: Sequence[int],
    grid: tuple[int, ...],
    memory: Sequence[Memory],
    *,
    shared_bytes: int,
    seed: int = 1,
    resident: int = 8,
    programs: range | None = None,
    finds_races: bool = True,
    most_instructions: int = 10**10,
) -> Counts:
    """Executes the programs of a grid, interleaved at random; raises `Fault`.

    `programs` are all of the grid, or a part.
    """
    grid = (*grid, 1, 1)[:3]
    chosen = range(grid[0] * grid[1] * grid[2]) if programs is None else programs
    assert chosen.step == 1
    missing = program.parameters - len(arguments)  # pointers to scratch that no kernel uses
    values = [*arguments, *[0] * missing, *program.constants]
    ranges = _merged(memory)
    job = Job(
        code=program.code,
        length=program.length,
        registers=program.registers,
        fixed=program.fixed,
        values=(ctypes.c_uint64 * len(values))(*[value & (2**64 - 1) for value in values]),
        warps=program.warps,
        shared_bytes=shared_bytes,
        ranges=(Range * len(ranges))(*ranges),
        range_count=len(ranges),
        finds_races=finds_races,
        grid=(ctypes.c_uint32 * 3)(*grid),
        first_program=chosen.start,
        programs=len(chosen),
        seed=seed,
        resident=resident,
    )
    result = Result()
    if run(ctypes.byref(job), most_instructions, ctypes.byref(result)):
        raise Fault(_description(program, result, ranges), result.address)
    return Counts(**{name: int(getattr(result, name)) for name in Counts._fields})


def _description(program: Program, result: Result, ranges: Sequence[tuple[int, int, int]]) -> str:
    text = f"{program.name}: {_FAULTS[result.fault]}"
    if result.address:
        near = min(ranges, key=lambda it: abs(it[0] - result.address), default=(0, 0, 0))
        text += f" at {result.address:#x}, {result.address - near[0]} bytes from a tensor's first"
    for line in {result.line, result.other_line} - {0}:
        text += f"\n  line {line}: {program.lines[line - 1].strip()}"
    return text


def _merged(memory: Sequence[Memory]) -> list[tuple[int, int, int]]:
    """Begin, end and element of disjoint pieces, in ascending order."""
    found: list[list[int]] = []
    for address, length, element in sorted(memory):
        if not length:
            continue
        if found and address < found[-1][1]:
            found[-1][1] = max(found[-1][1], address + length)
            found[-1][2] = min(found[-1][2], element)
        else:
            found.append([address, address + length, element])
    return [(begin, end, element) for begin, end, element in found]
