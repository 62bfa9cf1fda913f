"""Interpreted launches whose programs run in another order, with a log of what each accesses.

The interpreter runs programs one after the other, as a GPU does not. So they are reversed or
shuffled, and an access that depends on the order is a fault: of two programs to one address, at
least one of which writes, unless both are atomic. So is an access outside the launch's tensors.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import numpy as np
import numpy.typing as npt
from gpu_steps import memory_of
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from sketchoptim.ops._gpu_launches import Launch

Addresses = npt.NDArray[np.int64]
Handle = interpreter.TensorHandle


class Fault(Exception):
    """What is wrong with the accesses of a launch."""


def run_checked(run: Callable[[Launch], None], launch: Launch, draw: random.Random) -> None:
    """Runs a launch, its programs in reverse or shuffled; raises `Fault`."""
    log = _Log(launch)
    builder = interpreter.interpreter_builder
    set_index = builder.set_grid_idx
    load, store, change = (
        builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw,
    )  # fmt: skip
    programs: list[tuple[int, int, int]] = []

    def set_other_index(x: int, y: int, z: int) -> None:
        if not programs:  # the first one: the grid is known
            programs.extend(itertools.product(*map(range, builder.grid_dim)))
            programs.reverse()
            if draw.random() < 0.5:
                draw.shuffle(programs)
            log.order = iter(programs)
        log.program += 1
        set_index(*next(log.order))

    def logged_load(pointers, mask, *others):
        log.note("read", pointers, mask)
        return load(pointers, mask, *others)

    def logged_store(pointers, values, mask, *others):
        log.note("write", pointers, mask)
        return store(pointers, values, mask, *others)

    def logged_change(operation, pointers, values, mask, *others):
        log.note("atomic", pointers, mask)
        return change(operation, pointers, values, mask, *others)

    with (
        mock.patch.object(builder, "set_grid_idx", set_other_index),
        mock.patch.object(builder, "create_masked_load", logged_load),
        mock.patch.object(builder, "create_masked_store", logged_store),
        mock.patch.object(builder, "create_atomic_rmw", logged_change),
    ):
        try:
            run(launch)
        except InterpreterError as error:
            raise Fault(log.fault) if log.fault else error from None
    log.check_races()


class _Log:
    """The addresses that programs have accessed, by kind."""

    def __init__(self, launch: Launch) -> None:
        self.name = launch.kernel.__name__
        self.fault = ""
        self.program = -1
        self.order: Iterator[tuple[int, int, int]] = iter(())
        self.accesses: dict[str, list[tuple[int, Addresses]]] = {
            "read": [], "write": [], "atomic": [],
        }  # fmt: skip
        pieces = sorted({(it.data_ptr(), it.data_ptr() + it.nbytes) for it in memory_of(launch)})
        self.begins = np.array([begin for begin, _ in pieces], np.int64)
        # A piece may lie within one that begins before it.
        self.ends = np.maximum.accumulate(np.array([end for _, end in pieces], np.int64))

    def note(self, kind: str, pointers: Handle, mask: Handle) -> None:
        """Notes an access; raises if it is out of bounds."""
        is_accessed = np.broadcast_to(mask.data.astype(bool), pointers.data.shape)
        addresses = pointers.data[is_accessed].astype(np.int64)
        if not addresses.size:
            return
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        place = np.searchsorted(self.begins, addresses, side="right") - 1
        is_outside = (place < 0) | (addresses + size > self.ends[np.maximum(place, 0)])
        if is_outside.any():
            self.fault = f"{self.name}: a {kind} out of bounds at {addresses[is_outside][0]:#x}"
            raise Fault(self.fault)
        self.accesses[kind].append((self.program, np.unique(addresses)))

    def check_races(self) -> None:
        """Raises if two programs access one address and the order matters."""
        pairs = (("write", "write"), ("read", "write"), ("read", "atomic"), ("write", "atomic"))
        owners = {kind: _owners(accesses) for kind, accesses in self.accesses.items()}
        for one, other in pairs:
            (at, first, last), (there, other_first, other_last) = owners[one], owners[other]
            common, i, j = np.intersect1d(at, there, assume_unique=True, return_indices=True)
            is_race = np.minimum(first[i], other_first[j]) != np.maximum(last[i], other_last[j])
            if is_race.any():
                raise Fault(
                    f"{self.name}: a race between two programs, {one} and {other}, at "
                    f"{is_race.sum()} addresses, {common[is_race][0]:#x} first"
                )


def _owners(accesses: Sequence[tuple[int, Addresses]]) -> tuple[Addresses, Addresses, Addresses]:
    """Distinct addresses, and the first and the last program that accessed each."""
    if not accesses:
        return (np.zeros(0, np.int64),) * 3
    addresses = np.concatenate([it for _, it in accesses])
    programs = np.concatenate([np.full(it.size, program) for program, it in accesses])
    order = np.argsort(addresses, kind="stable")
    addresses, programs = addresses[order], programs[order]
    found, begins = np.unique(addresses, return_index=True)
    return found, np.minimum.reduceat(programs, begins), np.maximum.reduceat(programs, begins)
