"""The native libraries this machine can run, and steps by a chosen one or by the reference."""

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from sketchoptim.ops import Calls, CpuKernels, Reference, _native, cpu, reference

_ORDER = ("base", "v3", "v4")


def _is_built(level: str) -> bool:
    try:
        _native.load(level)
    except OSError as error:
        is_required = os.environ.get("SKETCHOPTIM_REQUIRE_NATIVE") == "1"
        if is_required or "was not built" not in str(error):
            raise
        return False
    return True


# Every level up to that of this machine; none where the package was built without a compiler.
LEVELS = [
    level for level in _ORDER[: _ORDER.index(_native.level()) + 1] if _is_built(_native.level())
]
needs_native = pytest.mark.skipif(not LEVELS, reason="the native kernels were not built")


@functools.cache
def library(level: str) -> ctypes.CDLL:
    """The library of a level, loaded once."""
    return _native.load(level)


class Counter:
    """How many steps each backend took."""

    native = 0
    reference = 0


@contextmanager
def stepping_by(level: str | None, *, threads: int = 1) -> Iterator[Counter]:
    """Steps within are taken by the library of a level, or by the reference for None.

    torch takes square roots from MKL, which rounds one in 150 of them the wrong way. NumPy's are
    those of IEEE 754, as are the kernels', so that a comparison can ask for the same bits.
    """
    counter = Counter()
    run_native, run_reference = Calls.run_, reference.ReferenceStep.run_

    def counted_native(calls: Calls) -> None:
        counter.native += len(calls._parameters)
        run_native(calls)

    def counted_reference(step: reference.ReferenceStep) -> None:
        counter.reference += 1
        run_reference(step)

    chosen = None if level is None else library(level)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with (
            mock.patch.object(_native, "library", return_value=chosen),
            # However little there is to do, it is done by all the threads and in pieces.
            mock.patch.object(_native, "ELEMENTS_FOR_THREADS", 0),
            mock.patch.object(cpu, "CHUNK_ELEMENTS", 20),
            mock.patch.object(Calls, "run_", counted_native),
            mock.patch.object(reference.ReferenceStep, "run_", counted_reference),
            mock.patch.object(Tensor, "sqrt", lambda x: torch.from_numpy(np.sqrt(x.numpy()))),
        ):
            yield counter
    finally:
        torch.set_num_threads(before)


def step_once(backend: CpuKernels | Reference, *args: Any, **options: Any) -> None:
    """Prepares a step, checks it and runs it."""
    step = backend.prepare(*args, **options)
    assert step is not None
    if isinstance(step, CpuKernels):
        calls = Calls()
        assert calls.check_([step])
        calls.run_()
    else:
        step.run_()


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes as integers, so that signs of zeros and NaNs count too."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
