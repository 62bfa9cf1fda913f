"""The optimizers that are compared: exact Adam, and Adam with the memories of the grid."""

import re
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import sketchoptim as so

from .rules import FlooredAdam, ScaledAdam, ScaledAdamW

_SCALED = re.compile(r" scaled( \d*\.?\d+)?$")
_FLOORED = re.compile(r" floor (\d*\.?\d+)$")
_SKETCH = re.compile(
    r"(?P<ratio>[\d/]+)( at least (?P<floor>\d+))?( columns)?( and row-wise below (?P<limit>\d+))?$"
)


def memory(method: str, rows: int) -> so.Memory:
    """The memory of a table of `rows` rows under a method.

    "adam", "lean" (the default of version 0.1), "row-wise", "no-first" (exact second moments),
    or the number of counters over the number of rows: "1/8", "1/8 at least 4096". "row-wise" and
    counters also with "columns"; counters then also with " and row-wise below 4096", which is for
    tables of fewer rows.
    " scaled" at the end, also with a factor for dense gradients, and " floor 4" are for `build`.
    """
    method = _FLOORED.sub("", _SCALED.sub("", method))
    columns = " columns" in method
    if method.removesuffix(" columns") == "row-wise":
        return so.Memory(second=so.RowWise(columns=columns))
    if method in ("adam", "lean"):
        return so.Memory.of("exact" if method == "adam" else "lean-0.1")
    if method == "no-first":
        return so.Memory(second=so.Exact())
    found = _SKETCH.match(method)
    if found is None:
        raise ValueError(f"there is no method {method!r}")
    over, _, under = found["ratio"].partition("/")
    counters = rows * int(over) / int(under or 1)
    if found["floor"]:
        counters = max(counters, min(rows, int(found["floor"])))
    if rows < int(found["limit"] or 0):
        return so.Memory(second=so.RowWise(columns=columns))
    width = max(1, int(counters / 3))
    return so.Memory(second=so.Sketched(width=width, conservative=True, columns=columns))


def rule_of(method: str) -> str:
    """The end of a method's name that is no memory."""
    found = _SCALED.search(method) or _FLOORED.search(method)
    return found[0] if found else ""


class Rates(NamedTuple):
    """The learning rate of the tables, and that of all else."""

    tables: float
    rest: float


def build(
    model: nn.Module,
    method: str,
    rates: Rates,
    *,
    tables: Iterable[str],
    is_decoupled: bool = False,
) -> so.Adam:
    """An optimizer of the whole model: `tables` by the method, all else exact.

    "adam" is exact storage everywhere, which is torch.optim's SparseAdam for sparse gradients and
    its Adam or AdamW for dense ones (`tests/optim/test_sparse_equals_torch.py`,
    `tests/optim/test_dense_equals_torch.py`).
    """
    named = {name: it for name, it in model.named_parameters() if it.requires_grad}
    groups: list[dict[str, Any]] = [
        {"params": [(name, named[name])], "memory": memory(method, named[name].shape[0])}
        for name in tables
    ]
    rest = [(name, it) for name, it in named.items() if name not in set(tables)]
    if rest:
        groups.append({"params": rest, "memory": "exact", "lr": rates.rest})
    kind: Any = so.AdamW if is_decoupled else so.Adam
    if scaled := _SCALED.search(method):
        kind = partial(ScaledAdamW if is_decoupled else ScaledAdam, dense=float(scaled[1] or 1))
    if floored := _FLOORED.search(method):
        assert not is_decoupled
        kind = partial(FlooredAdam, floor=float(floored[1]))
    optimizer: so.Adam = kind(groups, lr=rates.tables)
    return optimizer


def scale_rates_(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Sets every rate to `factor` times what it began with."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor


def state_bytes(optimizer: so.Adam, tables: Iterable[str]) -> int:
    """What the state of the tables takes."""
    kept = {it.name: it for it in so.memory_report(optimizer).parameters}
    return sum(kept[name].state_bytes for name in tables)
