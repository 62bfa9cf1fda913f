"""What steps cost on a device: ours beside those of torch, bitsandbytes and FBGEMM."""

import importlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import sketchoptim as so

from ._cases import Skipped
from ._place import Place
from ._report import Timing

RATE = 1e-4
OURS = ("lean", "row-wise", "8-bit", "exact")
# A product of square matrices of this size keeps the device busy while the host enqueues a step.
_BUSY = 8192


@dataclass(frozen=True)
class Sizes:
    """Of the timed tables."""

    rows: int
    columns: int
    tables: int
    entries: int
    """Of each table, in a step."""

    @classmethod
    def all(cls, place: Place) -> "Iterator[Sizes]":
        if place.is_interpreted:
            yield cls(40, 8, 1, 10)
            yield cls(40, 8, 2, 10)
            return
        for columns in (64,) if place.is_quick else (16, 64, 256):
            yield cls(500_000, columns, 1, 20_480)
            yield cls(50_000, columns, 26, 2_048)


@dataclass
class Method:
    """A step, what has to be done before each, and the tensors that it keeps."""

    step: Callable[[], object]
    kept: Callable[[], int]
    """Bytes."""
    prepare: Callable[[], object] = field(default=lambda: None)


Task = Callable[[Place], Timing]


def timings(place: Place) -> Iterator[tuple[str, Task]]:
    """Names and tasks; each makes its tables, and leaves nothing behind."""
    for sizes in Sizes.all(place):
        for name, make in _METHODS.items():
            label = f"{name}, {sizes.tables} x {sizes.columns}"
            yield label, partial(_timed, name=name, make=make, sizes=sizes)


def _timed(
    place: Place, *, name: str, make: Callable[[Place, Sizes], Method], sizes: Sizes
) -> Timing:
    repetitions = 2 if place.is_interpreted else 10 if place.is_quick else 30
    with place.stepping():
        method = make(place, sizes)
        before = 0 if place.is_interpreted else torch.cuda.memory_allocated(place.device)
        for _ in range(3):
            method.prepare()
            method.step()
        device, host = _microseconds(place, method, repetitions)
        launches = None if place.is_interpreted else _launches(place, method)
        kept = method.kept()
        if not place.is_interpreted:
            kept = max(kept, torch.cuda.memory_allocated(place.device) - before)
    return Timing(name, sizes.tables, sizes.columns, device, host, launches, kept / 1e6)


def _microseconds(place: Place, method: Method, repetitions: int) -> tuple[float | None, float]:
    """Medians of the device's and of the host's time of a step.

    The device is busy with something else while the host enqueues the step, so that the time
    between two events is that of the device alone.
    """
    host: list[float] = []
    device: list[float] = []
    busy = None if place.is_interpreted else torch.zeros(_BUSY, _BUSY, device=place.device)
    for _ in range(repetitions):
        method.prepare()
        place.synchronize()
        if busy is None:
            host.append(_host_microseconds(method))
            continue
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        busy @ busy
        events[0].record()
        host.append(_host_microseconds(method))
        events[1].record()
        place.synchronize()
        device.append(events[0].elapsed_time(events[1]) * 1e3)
    return statistics.median(device) if device else None, statistics.median(host)


def _host_microseconds(method: Method) -> float:
    begin = time.perf_counter()
    method.step()
    return (time.perf_counter() - begin) * 1e6


def _launches(place: Place, method: Method) -> int | None:
    """Kernels, copies and fills of one step, by torch's profiler; None if it finds none."""
    method.prepare()
    place.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        method.step()
        place.synchronize()
    found = [it for it in profile.events() if it.device_type.name == "CUDA"]
    return len(found) or None


# -- methods ---------------------------------------------------------------------------------------


def _tables(place: Place, sizes: Sizes, *, is_dense: bool) -> list[nn.Parameter]:
    """Tables with a gradient each."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(sizes.tables):
        table = nn.Parameter(torch.zeros(sizes.rows, sizes.columns, device=place.device))
        table.grad = torch.zeros_like(table) if is_dense else _sparse(table, sizes, generator)
        found.append(table)
    return found


def _ids(sizes: Sizes, generator: torch.Generator) -> Tensor:
    """Ids whose frequencies fall like those of words."""
    uniform = torch.rand(sizes.entries, generator=generator, dtype=torch.float64)
    return (sizes.rows**uniform - 1).long().clamp_(0, sizes.rows - 1)


def _sparse(table: Tensor, sizes: Sizes, generator: torch.Generator) -> Tensor:
    ids = _ids(sizes, generator).to(table.device)
    values = torch.full((sizes.entries, sizes.columns), 0.125, device=table.device)
    return torch.sparse_coo_tensor(ids[None], values, table.shape, check_invariants=False)


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Method:
    def kept() -> int:
        states = optimizer.state.values()
        return sum(it.nbytes for state in states for it in state.values() if isinstance(it, Tensor))

    return Method(optimizer.step, kept)


def _ours(place: Place, sizes: Sizes, *, preset: str) -> Method:
    tables = _tables(place, sizes, is_dense=False)
    return _of_optimizer(so.Adam([{"params": tables, "memory": preset}], lr=RATE))


def _sparse_adam(place: Place, sizes: Sizes) -> Method:
    return _of_optimizer(torch.optim.SparseAdam(_tables(place, sizes, is_dense=False), lr=RATE))


def _fused_adamw(place: Place, sizes: Sizes) -> Method:
    tables = _tables(place, sizes, is_dense=True)
    return _of_optimizer(torch.optim.AdamW(tables, lr=RATE, fused=True))


def _bitsandbytes(place: Place, sizes: Sizes) -> Method:
    if place.is_interpreted:
        raise Skipped("it is timed on a GPU")
    module = _module("bitsandbytes")
    return _of_optimizer(module.optim.AdamW8bit(_tables(place, sizes, is_dense=True), lr=RATE))


def _fbgemm(place: Place, sizes: Sizes) -> Method:
    """Row-wise Adagrad in the backward pass; the forward pass is not timed."""
    if place.is_interpreted:
        raise Skipped("it is timed on a GPU")
    _module("fbgemm_gpu")
    name = "fbgemm_gpu.split_table_batched_embeddings_ops_"
    training, common = _module(f"{name}training"), _module(f"{name}common")
    configs = _module("fbgemm_gpu.split_embedding_configs")
    where = (common.EmbeddingLocation.DEVICE, training.ComputeDevice.CUDA)
    tables = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(sizes.rows, sizes.columns, *where)] * sizes.tables,
        optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=RATE,
        device=place.device,
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.cat([_ids(sizes, generator) for _ in range(sizes.tables)]).to(place.device)
    offsets = torch.arange(ids.numel() + 1, device=place.device)
    output = [torch.empty(0)]
    values = [torch.empty(0)]

    def prepare() -> None:
        output[0] = tables(ids, offsets)
        values[0] = torch.full_like(output[0], 0.125)

    def step() -> None:
        output[0].backward(values[0])

    return Method(step, lambda: sizes.rows * sizes.tables * 4, prepare)


def _module(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise Skipped(f"{error.name} is not installed") from error
        except OSError as error:
            raise Skipped(f"{name} was built for another torch: {error}") from error


_METHODS: dict[str, Callable[[Place, Sizes], Method]] = {
    **{preset: partial(_ours, preset=preset) for preset in OURS},
    "SparseAdam": _sparse_adam,
    "AdamW, fused, dense": _fused_adamw,
    "bitsandbytes AdamW, 8-bit, dense": _bitsandbytes,
    "FBGEMM row-wise": _fbgemm,
}
