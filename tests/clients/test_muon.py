"""torch.optim.Muon for the hidden matrices of a model, and ours for tables, norms and biases."""

from pathlib import Path
from typing import Any

import pytest
import torch
from client_models import assert_same_bits, stepped_norms
from torch import Tensor, nn

import sketchoptim as so

WORDS, DIM, LENGTH, STEPS = 5000, 16, 8, 24


class LanguageModel(nn.Module):
    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, DIM, sparse=is_sparse)
        self.positions = nn.Embedding(LENGTH, DIM)  # too small to be worth compressing
        self.block = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.0, batch_first=True)
        self.head = nn.Linear(DIM, WORDS, bias=False)

    def loss(self, words: Tensor) -> Tensor:
        hidden = self.block(self.words(words) + self.positions.weight)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), words.flatten())


def split(model: nn.Module) -> tuple[list[tuple[str, Tensor]], list[dict[str, Any]]]:
    """The hidden matrices, and the groups of all other parameters."""
    groups = so.param_groups(model, tables=["head.weight"], no_decay=["bias", "norm"])
    embeddings = so.find_tables(model, min_rows=1, tables=["head.weight"])
    named = [entry for group in groups for entry in group["params"]]
    hidden = [(name, it) for name, it in named if it.dim() == 2 and name not in embeddings]
    for group in groups:
        group["params"] = [entry for entry in group["params"] if entry not in hidden]
    return hidden, groups


class Run:
    def __init__(self, *, is_sparse: bool, model_seed: int = 0) -> None:
        torch.manual_seed(model_seed)
        self.model = LanguageModel(is_sparse=is_sparse)
        hidden, groups = split(self.model)
        self.muon = torch.optim.Muon(hidden, lr=2e-2)
        self.adamw = so.AdamW(groups, lr=2e-2)
        self.optimizers = [self.muon, self.adamw]
        self.schedules = [
            torch.optim.lr_scheduler.LinearLR(it, 1.0, 0.1, total_iters=STEPS)
            for it in self.optimizers
        ]
        self.batches = torch.Generator().manual_seed(1)
        self.losses: list[float] = []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            words = torch.randint(50, (16, LENGTH), generator=self.batches)
            loss = self.model.loss(words)
            loss.backward()
            so.clip_grad_norm_(self.model.parameters(), 1.0)  # the norm of all, as for one
            for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            self.losses.append(loss.item())

    def parts(self) -> dict[str, Any]:
        names = ["model", "muon", "adamw", "muon_schedule", "adamw_schedule"]
        return dict(zip(names, [self.model, *self.optimizers, *self.schedules], strict=True))

    def save(self, path: Path) -> None:
        state = {name: part.state_dict() for name, part in self.parts().items()}
        torch.save(state | {"batches": self.batches.get_state()}, path)

    def load(self, path: Path) -> None:
        saved = torch.load(path)
        self.batches.set_state(saved["batches"])
        for name, part in self.parts().items():
            part.load_state_dict(saved[name])


@pytest.fixture(scope="module", params=[True, False], ids=["sparse", "dense"])
def is_sparse(request) -> bool:
    return request.param


@pytest.fixture(scope="module")
def finished(is_sparse) -> Run:
    run = Run(is_sparse=is_sparse)
    with stepped_norms() as run.norms:
        run.train(STEPS)
    return run


def names(optimizer: torch.optim.Optimizer) -> list[str]:
    return [name for group in optimizer.param_groups for name in group["param_names"]]


def test_muon_gets_the_hidden_matrices_alone(finished):
    assert names(finished.muon) == [
        "block.self_attn.in_proj_weight",
        "block.self_attn.out_proj.weight",
        "block.linear1.weight",
        "block.linear2.weight",
    ]


def test_every_parameter_has_one_optimizer(finished):
    every = [name for name, _ in finished.model.named_parameters()]
    assert sorted(names(finished.muon) + names(finished.adamw)) == sorted(every)


def test_both_optimizers_together_lower_the_loss(finished):
    assert finished.losses[-1] < 0.6 * finished.losses[0]


def test_one_norm_clips_the_gradients_of_both_optimizers(finished):
    for muon, adamw in zip(finished.norms[::2], finished.norms[1::2], strict=True):
        assert (muon**2 + adamw**2) ** 0.5 < 1.0001


def test_embedding_and_head_are_compressed_and_small_tables_norms_and_biases_exact(finished):
    for parameter in so.memory_report(finished.adamw).parameters:
        if parameter.name in ("words.weight", "head.weight"):
            assert 0 < parameter.state_bytes < WORDS
        else:
            assert parameter.state_bytes == parameter.exact_bytes


def test_one_checkpoint_of_both_resumes_bit_for_bit(finished, is_sparse, tmp_path):
    half = Run(is_sparse=is_sparse)
    half.train(STEPS // 2)
    half.save(tmp_path / "run.pt")
    # Other initial parameters, so that only what was saved can bring the same result.
    resumed = Run(is_sparse=is_sparse, model_seed=1)
    resumed.load(tmp_path / "run.pt")
    resumed.train(STEPS - STEPS // 2)
    assert half.losses + resumed.losses == finished.losses
    assert_same_bits(resumed.model, finished.model)
