"""Host time of a step on a GPU, without a GPU: ours, torch's and Triton's.

    PYTHONPATH=build/triton python -m experiments.studies.gpu_host

Tables are on the CPU, and a stand-in takes the place of the GPU's driver: steps go through the
optimizer, the plan of launches and Triton's code, up to the launcher that enqueues a kernel, which
returns at once. Then the same steps with nothing in place of Triton's code, and with nothing in
place of the sort of ids either, which runs on the CPU here and is enqueued on a GPU. The three take
turns. `make test-gpu` installs triton.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import sketchoptim as so
from sketchoptim.ops import rehearsing_gpu

from ..errors import run_study

ROWS, DIM, ENTRIES = 5000, 64, 256
# Steps in a row of one kind: a first one finds other code in the caches.
TURN = 20


class StandInDriver:
    """What Triton needs of a driver, for an A100 that is not there.

    Args:
        launcher: Makes, from the source of a kernel and its metadata, what enqueues it.
    """

    def __init__(self, launcher: Any = lambda source, metadata: _launch_nothing) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 80, 32)
        self.launcher_cls = launcher
        self.utils = SimpleNamespace(
            load_binary=lambda name, kernel, shared, device: (1, name, 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 166_912},
        )

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _launch_nothing(*arguments: Any) -> None:
    pass


@contextmanager
def driven_by(driver: StandInDriver) -> Iterator[None]:
    """Steps within are taken by the GPU's kernels, and end at this driver."""
    from triton.runtime.driver import driver as drivers

    with rehearsing_gpu(), mock.patch.object(drivers, "_active", driver):
        yield


@contextmanager
def without_launches() -> Iterator[None]:
    """Steps within do all but Triton's part."""
    from sketchoptim.ops._gpu_launches import Launch

    with mock.patch.object(Launch, "run_", _launch_nothing):
        yield


@contextmanager
def without_sorts() -> Iterator[None]:
    """Steps within neither launch nor sort."""

    def given(keys: Tensor, *, stable: bool, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return out

    def nothing(keys: Tensor, *, stable: bool) -> tuple[Tensor, Tensor]:
        return keys, keys

    with (
        without_launches(),
        mock.patch.object(torch, "sort", given),
        mock.patch.object(Tensor, "sort", nothing),
    ):
        yield


# What is left of a step, by what is left out.
PARTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "whole": nullcontext,
    "no launch": without_launches,
    "no sort": without_sorts,
}


def microseconds(tables: int, *, steps: int) -> dict[str, list[float]]:
    """The host times of single steps of lean tables, whose kernels have been compiled."""
    parameters = [torch.nn.Parameter(torch.zeros(ROWS, DIM)) for _ in range(tables)]
    optimizer = so.Adam(parameters, lr=1e-3)
    ids = torch.randint(ROWS, (1, ENTRIES), generator=torch.Generator().manual_seed(0))
    values = torch.ones(ENTRIES, DIM)
    for parameter in parameters:
        parameter.grad = torch.sparse_coo_tensor(
            ids, values, parameter.shape, check_invariants=True
        )
    for _ in range(5):
        optimizer.step()
    found: dict[str, list[float]] = {name: [] for name in PARTS}
    for number in range(steps * len(PARTS)):
        name = list(PARTS)[number // TURN % len(PARTS)]
        with PARTS[name]():
            begin = time.perf_counter()
            optimizer.step()
            found[name].append((time.perf_counter() - begin) * 1e6)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Prints the host time of a step of one table and of several."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tables", type=int, nargs="+", default=[1, 26])
    parser.add_argument("--steps", type=int, default=500, help="timed, of each")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}; us, least")
    print("| tables | whole | Triton's launches | the sort, on a CPU | ours | ours, median |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    with driven_by(StandInDriver()):
        for tables in options.tables:
            found = microseconds(tables, steps=options.steps)
            whole, no_launch, ours = (min(found[name]) for name in PARTS)
            print(
                f"| {tables} | {whole:.0f} | {whole - no_launch:.0f} | {no_launch - ours:.0f} "
                f"| {ours:.0f} | {statistics.median(found['no sort']):.0f} |"
            )


if __name__ == "__main__":
    run_study(main)
