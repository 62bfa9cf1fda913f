"""Steps by the GPU's kernels on tensors of the CPU: interpreted, or recorded and not run."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from sketchoptim import ops
from sketchoptim.ops import reference

pytest.importorskip("triton", reason="triton is not installed: make test-gpu installs it")

from sketchoptim.ops import _gpu_launches, gpu
from sketchoptim.ops._gpu_launches import Launch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The GPU whose PTX is executed instead.
PTX_TARGET = os.environ.get("SKETCHOPTIM_PTX")
IS_EXECUTED = IS_INTERPRETED or PTX_TARGET is not None
# Numbers of a tile in the interpreter, which takes as long for a small one.
INTERPRETED_TILE = 1 << 14
needs_execution = pytest.mark.skipif(
    not IS_EXECUTED, reason="needs TRITON_INTERPRET=1 or SKETCHOPTIM_PTX=sm_80"
)


class Counter:
    """How many steps each backend took."""

    kernels = 0
    reference = 0


def copy_of(launch: Launch) -> Launch:
    """A launch with its arguments of now, which a plan gives to the next step."""
    return Launch(
        launch.kernel, launch.grid, dict(launch.arguments), launch.options, kept=launch.kept
    )


def memory_of(launch: Launch) -> Iterator[Tensor]:
    """What a kernel may access: tensors that it is given, or whose addresses it is given."""
    for it in (*launch.arguments.values(), *itertools.chain(*launch.kept)):
        if isinstance(it, Tensor):
            yield it


@contextmanager
def stepping_by_gpu_kernels(*, is_run: bool = True) -> Iterator[Counter]:
    """Steps within are taken by the GPU's kernels, whose launches may be left out.

    Tiles are larger in the interpreter.
    """
    counter = Counter()
    run = gpu.GpuStep.run_

    def counted(step: gpu.GpuStep) -> None:
        counter.kernels += 1
        run(step)

    def left_out(launch: Any) -> None:
        pass

    tile = INTERPRETED_TILE if is_run and IS_INTERPRETED else _gpu_launches.TILE
    with (
        ops.rehearsing_gpu(),
        mock.patch.object(gpu.GpuStep, "run_", counted),
        mock.patch.object(_gpu_launches, "TILE", tile),
    ):
        if is_run:
            yield counter
        else:
            with mock.patch.object(_gpu_launches.Launch, "run_", left_out):
                yield counter


@contextmanager
def stepping_by_reference() -> Iterator[Counter]:
    """Steps within are taken by the reference, with square roots as IEEE 754 has them."""
    counter = Counter()
    run = reference.ReferenceStep.run_

    def counted(step: reference.ReferenceStep) -> None:
        counter.reference += 1
        run(step)

    with (
        ops.reference_only(),
        mock.patch.object(reference.ReferenceStep, "run_", counted),
        mock.patch.object(Tensor, "sqrt", lambda x: torch.from_numpy(np.sqrt(x.numpy()))),
    ):
        yield counter
