"""A GPU against the reference, then against the clock: a page to paste into an issue.

    experiments bench --device cuda

First every storage and dtype takes some steps on the device, twice, and by the reference on the
CPU: the largest difference is printed, and whether both runs have the same bits. Then the steps of
several optimizers on one table are timed in turn, from a cold cache, beside the model of
`experiments/studies/gpu_model.py`. All of them together take about 8 GB of the device.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch
from torch import Tensor, nn

import sketchoptim as so
from sketchoptim.ops import reference_only
from sketchoptim.storage import PRESETS

from ..studies.gpu_model import Case, models
from . import fbgemm
from .gradients import Batch, WordFrequencies

RATE = 1e-4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Written before each step, so that it starts from a cold cache: more than the L2 of any GPU.
FLUSHED_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large the two parts are."""

    rows: int = 793_471
    dim: int = 256
    tokens: int = 20_480
    repetitions: int = 100
    checked_rows: int = 2_000
    checked_steps: int = 5


QUICK = Size(rows=20_000, dim=32, tokens=500, repetitions=3, checked_rows=200, checked_steps=2)


def run_on_device(device: str, size: Size) -> Iterator[str]:
    """The lines of the page, as they are known."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device must be one that torch finds, got {device}; see torch.cuda")
    yield from facts(device)
    yield ""
    yield "| memory | dtype | largest difference, in units of the last place | same bits twice |"
    yield "| --- | --- | ---: | --- |"
    for preset in PRESETS:
        for dtype in DTYPES:
            yield checked_line(preset, dtype, device, size)
    yield ""
    yield from timed_lines(device, size)


def facts(device: str) -> Iterator[str]:
    """What the numbers depend on."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    yield f"device: {name}"
    for package in ("sketchoptim", "torch", "triton", "fbgemm-gpu"):
        try:
            yield f"{package}: {version(package)}"
        except PackageNotFoundError:
            yield f"{package}: not installed"


# -- against the reference ------------------------------------------------------------------------


def trained(preset: str, dtype: torch.dtype, device: str, size: Size) -> Tensor:
    """A small table after a few steps along gradients with repeated ids."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(size.checked_rows, 64, generator=generator)
    table = nn.Parameter(start.to(dtype).to(device))
    optimizer = so.Adam([{"params": [table], "memory": preset}], lr=0.01)
    words = WordFrequencies.zipf(rows=size.checked_rows)
    for seed in range(size.checked_steps):
        batch = words.raw(size.checked_rows, 64, size.checked_rows // 2, seed=seed)
        table.grad = moved(batch, device, dtype).gradient
        optimizer.step()
    optimizer.state_dict()  # raises what the device has refused
    return table.detach().cpu()


def checked_line(preset: str, dtype: torch.dtype, device: str, size: Size) -> str:
    """How far the device is from the reference, at the largest weight."""
    found, again = (trained(preset, dtype, device, size) for _ in range(2))
    with reference_only():
        expected = trained(preset, dtype, "cpu", size)
    difference = (found.double() - expected.double()).abs().max().item()
    unit = torch.finfo(dtype).eps * expected.double().abs().max().item()
    is_same = "yes" if torch.equal(found, again) else "NO"
    return f"| {preset} | {str(dtype)[6:]} | {difference / unit:.2f} | {is_same} |"


def moved(batch: Batch, device: str, dtype: torch.dtype) -> Batch:
    return Batch(
        rows=batch.rows,
        ids=batch.ids.to(device),
        values=batch.values.to(device, dtype),
        is_coalesced=batch.is_coalesced,
    )


# -- against the clock ----------------------------------------------------------------------------


class Entrant(NamedTuple):
    """A method: its step, and the bytes of its state after a step."""

    name: str
    step: Callable[[], None]
    state_bytes: Callable[[], int]


def steppers(table: nn.Parameter, batch: Batch, device: str) -> Iterator[Entrant]:
    """What is compared; all update one table, each with its own state."""
    for preset in ("lean", "row-wise", "8-bit", "exact", "paper-mv"):
        ours = so.Adam([{"params": [table], "memory": preset}], lr=RATE)
        yield Entrant(preset, _with_gradient(table, batch.gradient, ours), _state_bytes(ours))
    sparse = torch.optim.SparseAdam([table], lr=RATE)
    step = _with_gradient(table, batch.gradient, sparse)
    yield Entrant("SparseAdam", step, _state_bytes(sparse))
    try:
        tables = fbgemm.fbgemm_tables(
            [(table.shape[0], table.shape[1])], lr=RATE, on_gpu=device.startswith("cuda")
        )
    except ModuleNotFoundError:
        tables = None
    if tables is not None:
        tables = tables.to(device)
        offsets = torch.arange(batch.entries + 1, device=device)

        def backward() -> None:
            tables(batch.ids, offsets).backward(batch.values)

        yield Entrant("FBGEMM row-wise", backward, lambda: table.shape[0] * 4)
    dense = torch.optim.Adam([table], lr=RATE, fused=True)
    step = _with_gradient(table, torch.zeros_like(table), dense)
    yield Entrant("fused Adam, dense", step, _state_bytes(dense))


def _with_gradient(
    table: nn.Parameter, gradient: Tensor, optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
    def step() -> None:
        table.grad = gradient
        optimizer.step()

    return step


def _state_bytes(optimizer: torch.optim.Optimizer) -> Callable[[], int]:
    def total() -> int:
        states = optimizer.state.values()
        return sum(it.nbytes for state in states for it in state.values() if isinstance(it, Tensor))

    return total


def timed_lines(device: str, size: Size) -> Iterator[str]:
    """The table of times."""
    words = WordFrequencies.zipf(rows=size.rows)
    batch = moved(words.raw(size.rows, size.dim, size.tokens, seed=0), device, torch.float32)
    case = Case(rows=size.rows, dim=size.dim, entries=size.tokens, touched=batch.touched)
    table = nn.Parameter(torch.empty(size.rows, size.dim, device=device).uniform_(-0.1, 0.1))
    entrants = list(steppers(table, batch, device))
    times = microseconds_in_turn([it.step for it in entrants], size.repetitions, device)
    predicted = models(case)
    yield f"{size.rows:,} x {size.dim} float32, {size.tokens:,} tokens, {batch.touched:,} rows"
    yield ""
    yield "| method | us, median | us, least | state MB | MB, model | operations, model |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for entrant, found in zip(entrants, times, strict=True):
        model = predicted.get(entrant.name)
        by_model = f"{model.moved_bytes / 1e6:.0f} | {model.operations}" if model else "- | -"
        yield (
            f"| {entrant.name} | {statistics.median(found):.0f} | {min(found):.0f} | "
            f"{entrant.state_bytes() / 1e6:.1f} | {by_model} |"
        )


def microseconds_in_turn(
    steps: list[Callable[[], None]], repetitions: int, device: str
) -> list[list[float]]:
    """The times of single steps of each, all in turn, after three that compile and make state."""
    scratch = torch.zeros(FLUSHED_BYTES // 4, device=device)
    for step in steps:
        for _ in range(3):
            step()
    found: list[list[float]] = [[] for _ in steps]
    for _ in range(repetitions):
        for step, times in zip(steps, found, strict=True):
            scratch.add_(1.0)
            times.append(_microseconds(step, device))
    return found


def _microseconds(step: Callable[[], None], device: str) -> float:
    if not device.startswith("cuda"):
        begin = time.perf_counter()
        step()
        return (time.perf_counter() - begin) * 1e6
    # From the host's call to the end of the device's work: launches are a part of a step.
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) * 1e6
