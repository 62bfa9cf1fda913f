"""Sparse and dense tables in a training loop of accelerate: clipping, saving and resuming."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from client_models import (
    Classifier,
    assert_same_bits,
    assert_table_alone_is_compressed,
    examples,
    parameters_of,
    stepped_norms,
)
from torch.utils.data import DataLoader

import sketchoptim as so

EPOCHS, MAX_NORM = 4, 0.2


class Run:
    """A model under accelerate, with a schedule and gradients accumulated over two batches."""

    def __init__(self, *, is_sparse: bool, model_seed: int = 0) -> None:
        so.enable_sparse_clipping()
        torch.manual_seed(model_seed)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = Classifier(is_sparse=is_sparse)
        optimizer = so.AdamW(parameters_of(model), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
        data = DataLoader(examples(), batch_size=32)
        self.model, self.optimizer, self.schedule, self.data = self.accelerator.prepare(
            model, optimizer, schedule, data
        )
        self.losses: list[float] = []
        self.norms: list[float] = []

    def train(self, epochs: int) -> None:
        for _ in range(epochs):
            for batch in self.data:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch)["loss"]
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        parameters = self.model.parameters()
                        norm = self.accelerator.clip_grad_norm_(parameters, MAX_NORM)
                        self.norms.append(norm.item())
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                self.losses.append(loss.item())


@pytest.fixture(autouse=True, scope="module")
def fresh_accelerator():
    """accelerate keeps its settings in the process: give them back as they were."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture(scope="module", params=[True, False], ids=["sparse", "dense"])
def is_sparse(request) -> bool:
    return request.param


@pytest.fixture(scope="module")
def finished(is_sparse) -> Run:
    run = Run(is_sparse=is_sparse)
    with stepped_norms() as run.clipped_norms:
        run.train(EPOCHS)
    return run


def test_accelerate_lowers_the_loss(finished):
    assert sum(finished.losses[-16:]) < 0.7 * sum(finished.losses[:16])


def test_accelerate_clips_the_gradient(finished):
    assert len(finished.norms) == EPOCHS * 8
    assert max(finished.norms) > 1.1 * MAX_NORM  # so that clipping had something to do
    assert max(finished.clipped_norms) == pytest.approx(MAX_NORM, rel=1e-4)


def test_accelerate_compresses_the_table_alone(finished):
    assert_table_alone_is_compressed(finished.optimizer.optimizer)


def test_accelerate_resumes_bit_for_bit(finished, is_sparse, tmp_path):
    half = Run(is_sparse=is_sparse)
    half.train(EPOCHS // 2)
    half.accelerator.save_state(str(tmp_path))
    # Other initial parameters, so that only what was saved can bring the same result.
    resumed = Run(is_sparse=is_sparse, model_seed=1)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.train(EPOCHS - EPOCHS // 2)
    assert half.losses + resumed.losses == finished.losses
    assert_same_bits(resumed.model, finished.model)
