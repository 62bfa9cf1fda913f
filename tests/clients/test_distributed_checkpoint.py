"""A run saved and resumed by torch.distributed.checkpoint."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict

import sketchoptim as so

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def build() -> tuple[nn.Module, so.Adam]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(300, 8, sparse=True), nn.Linear(8, 3))
    tables = {"params": model[0].parameters(), "memory": "lean"}
    return model, so.Adam([tables, {"params": model[1].parameters()}], lr=0.05)


def train(model: nn.Module, optimizer: so.Adam, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        ids = torch.randint(300, (32,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids), ids % 3).backward()
        optimizer.step()
    optimizer.zero_grad()  # torch does not save where there are gradients


def save(model: nn.Module, optimizer: so.Adam, folder: Path) -> None:
    both = state_dict.get_state_dict(model, optimizer)
    checkpoint.save(dict(zip(("model", "optimizer"), both, strict=True)), checkpoint_id=folder)


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    model, optimizer = build()
    train(model, optimizer, seed=1)
    save(model, optimizer, tmp_path)
    other, resumed = build()
    both = state_dict.get_state_dict(other, resumed)  # takes a step along zeros
    loaded = dict(zip(("model", "optimizer"), both, strict=True))
    checkpoint.load(loaded, checkpoint_id=tmp_path)
    state_dict.set_state_dict(
        other,
        resumed,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    train(model, optimizer, seed=2)
    train(other, resumed, seed=2)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
