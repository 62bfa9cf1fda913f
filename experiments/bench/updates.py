"""Steps over many small tables and along dense gradients."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

import sketchoptim as so

from .cases import Settings
from .fbgemm import fbgemm_tables
from .gradients import Batch
from .measure import Entrant, Timing, measure_in_turn
from .methods import BASELINE, BY_NAME, RATE

_ROWS, _DIM, _IDS, _DENSE_ROWS = 1_000, 16, 8, 16
_STEPS_A_TURN = 200  # of one small table; fewer of several
_SPARSE = (BASELINE, "fbgemm", "lean", "lean-unchecked")


@dataclass(frozen=True, kw_only=True)
class UpdateTimes:
    """Steps of several methods, by title; the first one is what the others are compared with."""

    title: str
    timings: dict[str, Timing]


@dataclass(frozen=True)
class DenseMethod:
    """An optimizer over parameters with dense gradients."""

    title: str
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    is_usual: bool = True
    """Whether it is measured without being named."""


def _ours(
    title: str, memory: str | so.Memory, *, nonfinite: str = "raise", is_usual: bool = True
) -> DenseMethod:
    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return so.AdamW([{"params": parameters, "memory": memory, "nonfinite": nonfinite}], lr=RATE)

    return DenseMethod(f"so.AdamW, {title}", optimizer, is_usual)


DENSE_METHODS = {
    "fused-adamw": DenseMethod(
        "torch AdamW, fused", lambda tables: torch.optim.AdamW(tables, lr=RATE, fused=True)
    ),
    "foreach-adamw": DenseMethod(
        "torch AdamW, foreach", lambda tables: torch.optim.AdamW(tables, lr=RATE, foreach=True)
    ),
    "lean": _ours("lean", "lean"),
    "lean-unchecked": _ours("lean, unchecked", "lean", nonfinite="unchecked"),
    "lean-0.1": _ours("lean without columns", "lean-0.1"),
    "row-wise": _ours("row-wise", "row-wise"),
    "row-wise-columns": _ours("row-wise, columns", so.Memory(second=so.RowWise(columns=True))),
    "paper-v-only": _ours("paper V-only", "paper-v-only", is_usual=False),
    "8-bit": _ours("8-bit", "8-bit", is_usual=False),
}
_FIRST = "fused-adamw"


def small_tables(settings: Settings, absent: frozenset[str]) -> Iterator[UpdateTimes]:
    """Steps over small tables, where most of the time is Python's: sparse, then dense gradients."""
    for count in settings.counts:
        entrants = {
            BY_NAME[name].title: _sparse_step(name, count, settings)
            for name in _SPARSE
            if name not in absent and _is_asked_for(name, settings, first=BASELINE)
        }
        size = f"{count} table{'s' if count > 1 else ''} of"
        title = f"{size} {_ROWS:,} x {_DIM}, sparse gradients of {_IDS} rows"
        yield _measured(title, entrants, settings)
        tables = [nn.Parameter(torch.randn(_DENSE_ROWS, _DIM)) for _ in range(count)]
        for table in tables:
            table.grad = torch.randn_like(table)
        title = f"{size} {_DENSE_ROWS} x {_DIM}, dense gradients"
        yield _measured(title, _dense_steps(tables, settings, loops=_loops(count)), settings)


def dense_steps(settings: Settings) -> Iterator[UpdateTimes]:
    """Steps of one table whose every row moves, which is far larger than any cache."""
    for shape in settings.dense:
        dtype = getattr(torch, shape.dtype)
        table = nn.Parameter(torch.empty(shape.rows, shape.dim, dtype=dtype).uniform_(-0.1, 0.1))
        table.grad = torch.randn_like(table)
        yield _measured(str(shape), _dense_steps([table], settings), settings)


def _is_asked_for(name: str, settings: Settings, *, first: str) -> bool:
    return settings.methods is None or name in settings.methods or name == first


def _loops(count: int) -> int:
    return max(2, _STEPS_A_TURN // count)


def _measured(title: str, entrants: dict[str, Entrant], settings: Settings) -> UpdateTimes:
    timings = measure_in_turn(
        entrants,
        seconds=settings.seconds,
        least=settings.least,
        clock=settings.clock,
        flusher=None,
    )
    return UpdateTimes(title=title, timings=timings)


def _sparse_step(name: str, count: int, settings: Settings) -> Entrant:
    """Steps over tables with gradients of eight rows, some of them twice."""
    batches = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, _ROWS, (_IDS,), generator=generator)
        values = torch.randn(_IDS, _DIM, generator=generator)
        batches.append(Batch(rows=_ROWS, ids=ids, values=values, is_coalesced=False))
    if name == "fbgemm":
        return _fbgemm_step(batches, settings)
    tables = [nn.Parameter(torch.randn(_ROWS, _DIM)) for _ in range(count)]
    for table, batch in zip(tables, batches, strict=True):
        table.grad = batch.gradient
    rival = BY_NAME[name]
    assert rival.optimizer is not None
    step = rival.optimizer(tables, rival.memory).step
    return Entrant(step=step, threads=settings.threads, loops=_loops(count))


def _fbgemm_step(batches: list[Batch], settings: Settings) -> Entrant:
    """FBGEMM's step over tables: its backward pass, with a row of output for each id."""
    tables = fbgemm_tables([(_ROWS, _DIM)] * len(batches), lr=RATE)
    ids = torch.cat([batch.ids for batch in batches])
    offsets = torch.arange(len(ids) + 1)
    gradient = torch.cat([batch.values for batch in batches], 1)
    output = torch.empty(0)

    def prepare(_: int) -> None:
        nonlocal output
        output = tables(ids, offsets)

    return Entrant(
        step=lambda: output.backward(gradient), prepare=prepare, threads=settings.threads
    )


def _dense_steps(
    tables: list[nn.Parameter], settings: Settings, *, loops: int = 1
) -> dict[str, Entrant]:
    """Steps of all methods over the same parameters and gradients, each with its own state."""
    found = {}
    for name, method in DENSE_METHODS.items():
        is_named = settings.methods is not None and name in settings.methods
        if is_named or name == _FIRST or (settings.methods is None and method.is_usual):
            step = method.optimizer(tables).step
            found[method.title] = Entrant(step=step, threads=settings.threads, loops=loops)
    return found
