"""A classifier over a table of ids, and what every framework that trains it has to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import sketchoptim as so

ROWS, CLASSES = 5000, 7


class Classifier(nn.Module):
    """A table and dense layers. What it returns is what transformers.Trainer reads the loss of."""

    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 16, sparse=is_sparse)
        self.dense = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(self.dense(self.table(input_ids)), labels)
        return {"loss": loss}


def parameters_of(model: Classifier) -> Any:
    """What to give an optimizer, so that the table is compressed."""
    return model.parameters() if model.table.sparse else so.param_groups(model)


def examples(count: int = 512) -> list[dict[str, Tensor]]:
    """Ids, of which some repeat in a batch, and their classes."""
    ids = torch.rand(count, generator=torch.Generator().manual_seed(1)).square() * ROWS
    return [{"input_ids": id_, "labels": id_ % CLASSES} for id_ in ids.long()]


@contextmanager
def stepped_norms() -> Iterator[list[float]]:
    """The norms of the gradients that every step inside took, whoever calls the optimizer."""
    norms: list[float] = []

    def record(optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = [it for group in optimizer.param_groups for it in group["params"]]
        norms.append(so.clip_grad_norm_(parameters, float("inf")).item())

    handle = register_optimizer_step_post_hook(record)
    try:
        yield norms
    finally:
        handle.remove()


def assert_same_bits(one: nn.Module, other: nn.Module) -> None:
    for name, value in other.state_dict().items():
        assert torch.equal(one.state_dict()[name], value), name


def assert_table_alone_is_compressed(optimizer: torch.optim.Optimizer) -> None:
    """The state of the table takes less than a byte a row, all other state is exact."""
    table, *rest = so.memory_report(optimizer).parameters
    assert table.shape == (ROWS, 16)
    assert 0 < table.state_bytes < ROWS
    assert all(parameter.state_bytes == parameter.exact_bytes for parameter in rest)
