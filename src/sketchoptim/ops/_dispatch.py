"""The backend that steps a parameter: fused kernels if there are some, else the reference."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import ClassVar, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from ..moments import Moments
from . import _native, cpu
from ._rule import AnyRule


class PreparedStep(Protocol):
    """A step that is checked, at once or by `Calls`; until it is run, nothing has changed."""

    @property
    def touched(self) -> int:
        """How many rows it moves."""

    @property
    def is_finite(self) -> bool:
        """Whether every gradient that would reach the moments is finite, and its square is too."""


class RunnableStep(PreparedStep, Protocol):
    """A step that runs by itself, not by `Calls`."""

    def run_(self) -> None:
        """Moves the moments and the touched rows of the parameter."""


class Kernels(Protocol):
    """The fused kernels of one backend, bound to one parameter and its moments.

    They hold for the tensors they were made with, as long as those stay where they are in memory.
    """

    counts_steps: ClassVar[bool]
    """Whether they are `CountingKernels`."""

    def prepare(
        self, gradient: Tensor, rule: AnyRule, *, is_checked: bool, rounding_key: int | None
    ) -> "cpu.CpuKernels | RunnableStep | None":
        """The next step, one at a time; None where there is no kernel for this gradient or rule.

        A gradient of another shape, dtype or device than the parameter gives None too.

        Unless `is_checked`, the gradient is taken to be finite. With a key, new rows of bfloat16 or
        float16 are rounded stochastically by the bits of `_rounding.noise`, else to nearest.
        """

    def unsupported_reason(self, gradient: Tensor, rule: AnyRule) -> str:
        """Why `prepare` gave None, and the remedy."""


class Settled(NamedTuple):
    """What a device has done beyond what the host knew."""

    extra_steps: int
    """Steps that the device took and the host did not count: negative for refused ones."""
    refused_values: int
    """Steps refused because a gradient was not finite."""
    refused_ids: int
    """Steps refused because a row id was outside the table."""


class CountingKernels(Kernels, Protocol):
    """Kernels whose device checks gradients and counts steps, while the host goes on."""

    def has_refused(self) -> bool:
        """Whether the device has reported refusals that `settle_` did not return yet; no wait."""

    def settle_(self) -> Settled:
        """Waits for the device, and gives the host's moments what the device has counted."""

    def launch_together_(self, steps: Sequence[PreparedStep]) -> None:
        """Starts steps of several tables at once, where the same kernels take them."""


def counts_steps(kernels: Kernels) -> TypeGuard[CountingKernels]:
    """Whether the device of these kernels checks gradients and counts steps by itself."""
    return kernels.counts_steps


_is_reference_only = ContextVar("is_reference_only", default=False)


@contextmanager
def reference_only() -> Iterator[None]:
    """Parameters bound within are stepped by the reference, as where no kernels were built."""
    token = _is_reference_only.set(True)
    try:
        yield
    finally:
        _is_reference_only.reset(token)


_is_gpu_rehearsed = ContextVar("_is_gpu_rehearsed", default=False)


@contextmanager
def rehearsing_gpu() -> Iterator[None]:
    """Parameters bound within are stepped by the GPU's kernels, on tensors of the CPU as well.

    Triton's interpreter executes them, or a driver that stands in for that of a GPU.
    """
    token = _is_gpu_rehearsed.set(True)
    try:
        yield
    finally:
        _is_gpu_rehearsed.reset(token)


def find_kernels(
    parameter: Tensor,
    moments: Moments,
    *,
    first_row: int = 0,
    step_count: Tensor | None = None,
) -> tuple[Kernels | None, str | None]:
    """The kernels for a parameter with these moments, or the reason why there are none.

    Neither where the whole process runs on the reference, which has been said already. Where the
    parameter is a part of a larger table, from its row `first_row` on, gradients and moments by row
    keep the part's numbers, while sketches and rounding take those of the table. The CPU's kernels
    count steps in `step_count`, one float64.
    """
    if _is_reference_only.get():
        return None, None
    if parameter.device.type == "cuda" or _is_gpu_rehearsed.get():
        return _gpu_kernels(parameter, moments, first_row)
    if parameter.device.type != "cpu":
        return None, f"there are no kernels for the device {parameter.device} yet"
    if _native.library() is None:
        return None, None
    reason = cpu.unsupported_reason(parameter, moments, first_row)
    if reason is not None:
        return None, reason
    return cpu.CpuKernels(parameter, moments, first_row=first_row, step_count=step_count), None


def describe_backend(device: torch.device) -> str:
    """The kernels that step most parameters on a device; their results have the same bits."""
    if _is_reference_only.get():
        return "reference"
    if device.type == "cuda":
        return "reference" if gpu_module() is None else "triton"
    return "native" if device.type == "cpu" and _native.library() is not None else "reference"


def gpu_module() -> ModuleType | None:
    """The kernels in Triton, imported when they are first asked for; None without triton."""
    try:
        from . import gpu
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        return None
    return gpu


def _gpu_kernels(
    parameter: Tensor, moments: Moments, first_row: int
) -> tuple[Kernels | None, str | None]:
    gpu = gpu_module()
    if gpu is None:
        return None, "triton is not installed; torch's builds for GPUs bring it along"
    reason = gpu.unsupported_reason(parameter, moments, first_row)
    if reason is not None:
        return None, reason
    return gpu.GpuKernels(parameter, moments, first_row), None
