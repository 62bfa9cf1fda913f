"""A tiny model with a sparse table and dense layers, every way of storing its moments, and the
bits of a run to compare with another's."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sketchoptim as so

ROWS, DIM, CLASSES = 60, 6, 5
OPTIMIZERS = {kind.__name__: kind for kind in (so.Adam, so.AdamW, so.RMSprop, so.Adagrad, so.SGD)}


class TinyModel(nn.Module):
    """Two sparse tables, of which the second may be left alone, and a dense layer."""

    def __init__(self, dtype: torch.dtype = torch.float32, device: str | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM, sparse=True, dtype=dtype, device=device)
        self.late = nn.Embedding(ROWS // 2, DIM, sparse=True, dtype=dtype, device=device)
        self.head = nn.Linear(DIM, CLASSES, dtype=dtype, device=device)

    def forward(self, ids: Tensor, *, uses_late: bool = True) -> Tensor:
        rows = self.table(ids).mean(1)
        if uses_late:
            rows = rows + self.late(ids % self.late.num_embeddings).mean(1)
        return self.head(rows)

    def loss(self, ids: Tensor, *, uses_late: bool = True) -> Tensor:
        labels = ids[:, 0] % CLASSES
        logits = self(ids, uses_late=uses_late).float()
        return nn.functional.cross_entropy(logits, labels)


def seeded(model: TinyModel, seed: int) -> TinyModel:
    """The model with weights that depend on nothing but the seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


@functools.cache
def batches(count: int, *, seed: int = 1, rows: int = ROWS) -> list[Tensor]:
    """Ids of shape ``[5, 2]``, low ones more often than high ones."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.rand(5, 2, generator=generator).square() * rows).long().clamp_max(rows - 1)
        for _ in range(count)
    ]


@dataclass(frozen=True, eq=False)
class Plan:
    """An optimizer class with its options, and the memory of its compressed parameters."""

    optimizer: type[so.optim.base.Optimizer]
    memory: str | so.Memory
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, model: TinyModel) -> so.optim.base.Optimizer:
        """The optimizer over three groups: sparse tables, a compressed dense weight, a bias."""
        tables = [model.table.weight, model.late.weight]
        groups = [
            {"params": tables},
            {"params": [model.head.weight], "memory": self.memory},
            {"params": [model.head.bias]},
        ]
        return self.optimizer(groups, **{"lr": 0.05, "memory": self.memory} | self.options)


@dataclass
class Run:
    """A model and its optimizer, on their way."""

    model: TinyModel
    optimizer: so.optim.base.Optimizer

    @classmethod
    def start(
        cls,
        plan: Plan,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | None = None,
        seed: int = 0,
    ) -> "Run":
        model = seeded(TinyModel(dtype, device), seed)
        return cls(model, plan.build(model))

    def backward(self, ids: Tensor, *, uses_late: bool = True) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model.loss(ids, uses_late=uses_late)
        loss.backward()
        return loss

    def train(self, ids_of_steps: Iterable[Tensor], *, uses_late: bool = True) -> "Run":
        for ids in ids_of_steps:
            self.backward(ids, uses_late=uses_late)
            self.optimizer.step()
        return self

    def bits(self) -> dict[str, Any]:
        """Copies of all parameters, all state and all options, to compare with `same_bits`."""
        return bits(self.optimizer, self.model.named_parameters())


def bits(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parameter in named:
        found[name] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}: {key}"] = value
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        found |= {f"group {number}: {key}": value for key, value in options.items()}
        found[f"group {number}: size"] = len(group["params"])
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in found.items()
    }


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """The names under which two runs differ by a bit, a dtype, a shape or a device."""
    different = sorted(left.keys() ^ right.keys())
    for name in left.keys() & right.keys():
        ours, theirs = left[name], right[name]
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            is_same = (
                ours.dtype == theirs.dtype
                and ours.device == theirs.device
                and ours.shape == theirs.shape
                and _stored_bits(ours) == _stored_bits(theirs)
            )
        else:
            is_same = type(ours) is type(theirs) and (ours == theirs or _are_nan(ours, theirs))
        if not is_same:
            different.append(name)
    return different


def _stored_bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _are_nan(*values: Any) -> bool:
    return all(isinstance(value, float) and math.isnan(value) for value in values)


def _sketched(**options: Any) -> so.Sketched:
    return so.Sketched(width=8, **options)


def _memories() -> dict[str, str | so.Memory]:
    named: dict[str, str | so.Memory] = {name: name for name in so.storage.PRESETS}
    for dtype in (torch.float32, torch.bfloat16):
        suffix = str(dtype).removeprefix("torch.")
        for granularity in ("row", "element"):
            for decay in ("linear", "paper", "bucket"):
                one = _sketched(granularity=granularity, decay=decay, dtype=dtype)
                named[f"{decay} by {granularity}, {suffix}"] = so.Memory(second=one)
            one = _sketched(granularity=granularity, conservative=True, dtype=dtype)
            named[f"conservative by {granularity}, {suffix}"] = so.Memory(second=one)
        for decay in ("linear", "paper", "bucket"):
            one = _sketched(granularity="element", decay=decay, dtype=dtype)
            named[f"{decay} first and second, {suffix}"] = so.Memory(first=one, second=one)
        one = _sketched(granularity="element", dtype=dtype)
        named[f"ratio, {suffix}"] = so.Memory(first=one, second=one, form="ratio", clip=1.0)
    for decay in ("linear", "paper", "bucket"):
        one = _sketched(
            granularity="element", decay=decay, fold_at=(2, 5), clean_every=3, clean_by=0.5
        )
        named[f"{decay}, cleaned and folded"] = so.Memory(first=one, second=one)
    one = _sketched(conservative=True, fold_at=(2, 5), clean_every=3, clean_by=0.5)
    named["conservative, cleaned and folded"] = so.Memory(second=one)
    one = dataclasses.replace(one, dtype=torch.bfloat16)
    named["conservative, cleaned and folded, bfloat16"] = so.Memory(second=one)
    named["columns"] = so.Memory(second=_sketched(conservative=True, columns=True))
    # The one table of the model has more rows, the other one fewer.
    one = _sketched(conservative=True, columns=True, array_below=ROWS)
    named["columns, few rows"] = so.Memory(second=one)
    named["columns, row-wise"] = so.Memory(second=so.RowWise(columns=True))
    one = _sketched(columns=True, fold_at=(2, 5), clean_every=3, clean_by=0.5)
    named["columns, cleaned and folded"] = so.Memory(second=one)
    named["top singular"] = so.Memory(second=so.TopSingular())
    named["top singular twice"] = so.Memory(first=so.TopSingular(), second=so.TopSingular())
    named["exact second alone"] = so.Memory(second=so.Exact())
    named["exact, clipped"] = so.Memory(first=so.Exact(), second=so.Exact(), clip=1.0)
    named["of even depth"] = so.Memory(second=_sketched(depth=4, granularity="element", seed=5))
    return named


MEMORIES = _memories()


def _plans() -> dict[str, Plan]:
    named = {f"Adam, {name}": Plan(so.Adam, memory) for name, memory in MEMORIES.items()}
    for name in ("lean-0.1", "exact", "paper-mv"):
        named[f"AdamW, {name}"] = Plan(so.AdamW, name, {"weight_decay": 0.1})
    kept = ("lean-0.1", "exact", "paper-v-only", "row-wise", "rank-one", "top singular", "columns")
    for name in kept:
        memory = MEMORIES[name]
        named[f"Adagrad, {name}"] = Plan(so.Adagrad, memory, {"lr_decay": 0.1})
        named[f"RMSprop, {name}"] = Plan(so.RMSprop, memory, {"weight_decay": 0.1})
    named["Adagrad, filled"] = Plan(so.Adagrad, "lean-0.1", {"initial_accumulator_value": 0.1})
    for name in (
        "lean-0.1",
        "exact",
        "paper-mv",
        "top singular twice",
        "linear, cleaned and folded",
    ):
        named[f"SGD, {name}"] = Plan(so.SGD, MEMORIES[name], {"momentum": 0.9, "dampening": 0.1})
    named["SGD, nesterov"] = Plan(so.SGD, "paper-mv", {"momentum": 0.9, "nesterov": True})
    named["SGD, no momentum"] = Plan(so.SGD, "paper-mv", {"momentum": 0.0})
    return named


PLANS = _plans()
PRESET_PLANS = {name: Plan(so.Adam, name) for name in so.storage.PRESETS}


def each(named: dict[str, Plan]) -> pytest.MarkDecorator:
    """Gives the test every plan, under its name."""
    return pytest.mark.parametrize("plan", named.values(), ids=named.keys())
