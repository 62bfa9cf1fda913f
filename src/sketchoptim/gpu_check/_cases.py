"""What is compared with the reference on the CPU, case by case."""

import math
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

import sketchoptim as so
from sketchoptim.ops import reference_only

from ..storage import PRESETS
from ._place import Place

_LEAN = PRESETS["lean"].second
assert isinstance(_LEAN, so.Sketched)
# Presets that have kernels. "lean" keeps a sketch here, not the array of its short tables.
MEMORIES = {
    **{name: it for name, it in PRESETS.items() if name != "rank-one"},
    "lean": so.Memory(None, replace(_LEAN, array_below=0)),
    "row-wise x columns": so.Memory(None, so.RowWise(columns=True)),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# In units of the last place of a tensor's largest number. Sums of gradients, multiples of 1/8, are
# exact. What is left are square roots, which torch rounds otherwise on a CPU.
EXACT_UNITS = 4.0
# Sums of arbitrary numbers are associated in another order than on the CPU.
ROUNDED_UNITS = 64.0
STEPS = 3
RATE = 0.5  # a step that is missing is many units of bfloat16


class Skipped(Exception):
    """Why a case cannot be checked here."""


@dataclass(frozen=True)
class Finding:
    """What a case found."""

    units: float
    """The largest difference from the reference, in units of the last place."""
    limit: float
    is_repeatable: bool
    """Whether a second run had the same bits."""

    def verify(self) -> None:
        """Raises what is wrong."""
        if not self.units <= self.limit:
            raise AssertionError(f"{self.units:.1f} units of the last place, at most {self.limit}")
        if not self.is_repeatable:
            raise AssertionError("a second run had other bits")


Task = Callable[[Place], Finding | None]


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The gradients of a run."""

    entries: int
    is_dense: bool = False
    is_rounded: bool = False
    """Whether their sums are rounded."""
    hot: int = 0
    """So many entries have one id."""

    def gradient(self, like: Tensor, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        rows, dim = like.shape
        shape = (rows if self.is_dense else self.entries, dim)
        values = torch.randn(shape, generator=generator)
        if not self.is_rounded:
            values = torch.randint(-8, 9, shape, generator=generator) / 8
        values = values.to(like.dtype)
        if self.is_dense:
            return values.to(like.device)
        ids = (torch.rand(self.entries, generator=generator).square() * rows).long()
        ids[: self.hot] = 7
        found = torch.sparse_coo_tensor(ids[None], values, like.shape, check_invariants=True)
        return found.to(like.device)


def trained(
    device: torch.device,
    shape: tuple[int, int],
    preset: str,
    dtype: torch.dtype,
    batches: Batches,
    tables: int = 1,
) -> list[Tensor]:
    """Tables and their state, on the CPU, after a few steps on a device."""
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for number in range(tables):
        start = torch.randn(shape[0] + number, shape[1], generator=generator)
        parameters.append(nn.Parameter(start.to(dtype).to(device)))
    # A clip: else torch.optim's own function would take dense steps of exact moments.
    memory = replace(MEMORIES[preset], clip=10.0)
    optimizer = so.Adam([{"params": parameters, "memory": memory}], lr=RATE)
    for step in range(STEPS):
        for number, parameter in enumerate(parameters):
            parameter.grad = batches.gradient(parameter, seed=100 * step + number)
        optimizer.step()
    return found_in(optimizer)


def found_in(optimizer: so.Adam) -> list[Tensor]:
    """Parameters and the tensors of their state; raises what the device has refused."""
    optimizer.settle_()
    found: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter].values()
            found += [parameter, *(it for it in state if isinstance(it, Tensor))]
    return [tensor.detach().cpu() for tensor in found]


def compare(place: Place, run: Callable[[torch.device], list[Tensor]], limit: float) -> Finding:
    """Runs twice on the device, and once by the reference on the CPU."""
    with place.stepping():
        found, again = run(place.device), run(place.device)
    with reference_only():
        expected = run(torch.device("cpu"))
    is_repeatable = all(map(torch.equal, found, again))
    units = max(map(_units, found, expected))
    finding = Finding(units, limit, is_repeatable)
    finding.verify()
    return finding


def _units(found: Tensor, expected: Tensor) -> float:
    """The largest difference in units of the last place of the largest number."""
    if found.shape != expected.shape or not found.isfinite().all():
        return math.inf
    difference = (found.double() - expected.double()).abs().max().item()
    if not (difference and found.is_floating_point()):  # codes and counts are the same
        return math.inf if difference else 0.0
    return difference / (torch.finfo(found.dtype).eps * expected.double().abs().max().item())


def _steps(
    place: Place, *, preset: str, dtype: torch.dtype, batches: Batches, tables: int = 1
) -> Finding:
    limit = ROUNDED_UNITS if batches.is_rounded else EXACT_UNITS
    run = partial(
        trained, shape=place.shape, preset=preset, dtype=dtype, batches=batches, tables=tables
    )
    return compare(place, run, limit)


def _head(place: Place) -> Finding:
    """The gradient of a vocabulary's head, which the optimizer computes block by block."""

    def run(device: torch.device) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        classes, dim = place.shape
        weight = nn.Parameter(torch.randn(classes, dim, generator=generator).to(device))
        optimizer = so.Adam([{"params": [weight], "memory": "lean"}], lr=RATE)
        for _ in range(STEPS):
            hidden = torch.randn(16, dim, generator=generator).to(device)
            target = torch.randint(classes, (16,), generator=generator).to(device)
            so.nn.linear_cross_entropy(hidden, weight, target).backward()
            optimizer.step()
            optimizer.zero_grad()
        return found_in(optimizer)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch operations step it, and a warning says so
        # Products of matrices differ by the order of their sums.
        return compare(place, run, limit=2.0**11)


class _Refused:
    """A table that is stepped along a bad gradient."""

    def __init__(self, place: Place) -> None:
        self.table = nn.Parameter(torch.ones(place.shape, device=place.device))
        self.optimizer = so.Adam([self.table], lr=RATE)

    def step_(self, ids: list[int], number: float = 1.0) -> None:
        values = torch.full((len(ids), self.table.shape[1]), number, device=self.table.device)
        indices = torch.tensor([ids], device=self.table.device)
        shape = self.table.shape
        gradient = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
        self.table.grad = gradient
        self.optimizer.step()

    def expect(self, message: str) -> None:
        """Raises unless the step before was refused, and left everything as it was."""
        try:
            self.optimizer.settle_()
        except ValueError as error:
            if not re.search(message, str(error)):
                raise
        else:
            raise AssertionError("the step was not refused")
        if not bool((self.table == 1).all()):
            raise AssertionError("a refused step has changed the table")


def _bad_ids(place: Place) -> None:
    with place.stepping():
        for ids in ([1, place.shape[0]], [-1, 2], [2**40, 3]):
            refused = _Refused(place)
            refused.step_(ids)
            refused.expect("row ids between")


def _bad_values(place: Place) -> None:
    with place.stepping():
        for number in (math.nan, math.inf):
            refused = _Refused(place)
            refused.step_([1, 2], number)
            refused.expect("must be finite")


def _graph(place: Place) -> None:
    """Four replays of a captured step are four steps."""
    if place.is_interpreted:
        raise Skipped("the interpreter has no CUDA graphs")
    tables = [nn.Parameter(torch.ones(place.shape, device=place.device)) for _ in range(2)]
    batches = Batches(entries=500)
    with place.stepping():
        for table in tables:
            table.grad = batches.gradient(table, seed=0)
        optimizers = [so.Adam([table], lr=RATE) for table in tables]
        stream = torch.cuda.Stream(place.device)
        stream.wait_stream(torch.cuda.current_stream(place.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                optimizers[0].step()
        torch.cuda.current_stream(place.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizers[0].step()
        for _ in range(4):
            graph.replay()
        for _ in range(7):
            optimizers[1].step()
        for optimizer in optimizers:
            optimizer.settle_()
    steps = [optimizers[number].state[tables[number]]["step"].item() for number in range(2)]
    if steps != [7, 7] or not torch.equal(*(table.detach() for table in tables)):
        raise AssertionError(f"{steps[0]} and {steps[1]} steps were counted, 7 and 7 expected")


def _side_stream(place: Place) -> Finding:
    if place.is_interpreted:
        raise Skipped("the interpreter has no streams")

    def run(device: torch.device) -> list[Tensor]:
        batches = Batches(entries=500)
        if device.type == "cpu":
            return trained(device, place.shape, "lean", torch.float32, batches)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            found = trained(device, place.shape, "lean", torch.float32, batches)
        stream.synchronize()
        return found

    return compare(place, run, EXACT_UNITS)


def _second_device(place: Place) -> Finding:
    if place.is_interpreted or torch.cuda.device_count() < 2:
        raise Skipped("there is no second device")
    first = place.device.index or 0
    other = Place(f"cuda:{(first + 1) % torch.cuda.device_count()}", place.is_quick)

    def run(device: torch.device) -> list[Tensor]:
        return trained(device, place.shape, "lean", torch.float32, Batches(entries=500))

    with torch.cuda.device(first):  # not the tables' device
        found, again = run(other.device), run(other.device)
    with reference_only():
        expected = run(torch.device("cpu"))
    same = all(map(torch.equal, found, again))
    finding = Finding(max(map(_units, found, expected)), EXACT_UNITS, same)
    finding.verify()
    return finding


def cases(place: Place) -> Iterator[tuple[str, Task]]:
    """Names and tasks; each is independent of the others."""
    many = place.many
    float32, bfloat16 = torch.float32, torch.bfloat16
    for entries in (0, 1, 32, 33, many):
        batches = Batches(entries=entries)
        yield (
            f"lean, {entries} entries",
            partial(_steps, preset="lean", dtype=float32, batches=batches),
        )
    hot = Batches(entries=many, hot=many * 2 // 5)
    yield f"one id {hot.hot} times", partial(_steps, preset="lean", dtype=float32, batches=hot)
    rounded = Batches(entries=many // 5, is_rounded=True)
    yield "sums that are rounded", partial(_steps, preset="lean", dtype=float32, batches=rounded)
    yield "ids outside the table", _bad_ids
    yield "NaN and infinity", _bad_values
    together = Batches(entries=many // 10)
    yield (
        f"{place.tables} tables",
        partial(_steps, preset="lean", dtype=float32, batches=together, tables=place.tables),
    )
    yield "deferred head", _head
    yield "CUDA graph, 4 replays", _graph
    yield "side stream", _side_stream
    yield "second device", _second_device
    presets = ("lean", "lean-0.1", "exact", "8-bit") if place.is_quick else tuple(MEMORIES)
    for preset in presets:
        for dtype in (float32, bfloat16) if place.is_quick else DTYPES:
            for is_dense in (False, True):
                batches = Batches(entries=min(many, 500) // 5, is_dense=is_dense)
                layout = "dense" if is_dense else "sparse"
                yield (
                    f"{preset}, {str(dtype)[6:]}, {layout}",
                    partial(_steps, preset=preset, dtype=dtype, batches=batches),
                )
