"""Sparse and dense tables under transformers.Trainer: clipping, scheduling, saving, resuming."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from client_models import (
    Classifier,
    assert_same_bits,
    assert_table_alone_is_compressed,
    examples,
    parameters_of,
    stepped_norms,
)

import sketchoptim as so

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when transformers is imported

from transformers import Trainer, TrainingArguments

STEPS, MAX_NORM, LEARNING_RATE = 48, 0.2, 0.1


def by_instance(model: Classifier) -> dict[str, Any]:
    """The Trainer adds the schedule."""
    return {"optimizers": (so.AdamW(parameters_of(model), lr=LEARNING_RATE), None)}


def by_class(model: Classifier) -> dict[str, Any]:
    """The Trainer builds the optimizer. Without `params`, it makes two groups of its own."""
    options: dict[str, Any] = {"lr": LEARNING_RATE}
    if not model.table.sparse:
        options["params"] = so.param_groups(model)
    return {"optimizer_cls_and_kwargs": (so.AdamW, options)}


def build_trainer(
    optimizer_of: Callable[[Classifier], dict[str, Any]],
    directory: Path,
    *,
    is_sparse: bool,
    model_seed: int = 0,
) -> Trainer:
    so.enable_sparse_clipping()
    torch.manual_seed(model_seed)
    model = Classifier(is_sparse=is_sparse)
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=STEPS,
        per_device_train_batch_size=32,
        weight_decay=0.1,
        max_grad_norm=MAX_NORM,
        save_steps=STEPS // 2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=0,
    )
    return Trainer(model, arguments, train_dataset=examples(), **optimizer_of(model))


def logged(trainer: Trainer, what: str) -> list[float]:
    return [entry[what] for entry in trainer.state.log_history if what in entry]


@pytest.fixture(scope="module", params=[True, False], ids=["sparse", "dense"])
def is_sparse(request) -> bool:
    return request.param


@pytest.fixture(scope="module", params=[by_instance, by_class], ids=lambda build: build.__name__)
def optimizer_of(request):
    return request.param


@pytest.fixture(scope="module")
def finished(optimizer_of, is_sparse, tmp_path_factory) -> Trainer:
    trainer = build_trainer(optimizer_of, tmp_path_factory.mktemp("run"), is_sparse=is_sparse)
    with stepped_norms() as trainer.clipped_norms:
        trainer.train()
    return trainer


def test_trainer_lowers_the_loss(finished):
    losses = logged(finished, "loss")
    assert sum(losses[-16:]) < 0.8 * sum(losses[:16])


def test_trainer_clips_the_gradient(finished):
    norms = logged(finished, "grad_norm")
    assert len(norms) == STEPS
    assert max(norms) > 1.1 * MAX_NORM  # so that clipping had something to do
    assert max(finished.clipped_norms) == pytest.approx(MAX_NORM, rel=1e-4)


def test_trainer_schedules_the_learning_rate(finished):
    expected = [LEARNING_RATE * (1 - step / STEPS) for step in range(STEPS)]
    assert logged(finished, "learning_rate") == pytest.approx(expected)


def test_trainer_compresses_the_table_alone(finished):
    assert_table_alone_is_compressed(finished.optimizer.optimizer)


def test_trainer_resumes_bit_for_bit(finished, optimizer_of, is_sparse, tmp_path):
    checkpoint = Path(finished.args.output_dir) / f"checkpoint-{STEPS // 2}"
    # Other initial parameters, so that only what the checkpoint holds can bring the same result.
    resumed = build_trainer(optimizer_of, tmp_path, is_sparse=is_sparse, model_seed=1)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_same_bits(resumed.model, finished.model)


def test_trainer_with_exact_memory_equals_torch_adamw_bit_for_bit(tmp_path):
    ours, theirs = (
        build_trainer(
            lambda _, kind=kind, options=options: {"optimizer_cls_and_kwargs": (kind, options)},
            tmp_path / kind.__module__,
            is_sparse=False,
        )
        for kind, options in [
            (so.AdamW, {"lr": LEARNING_RATE, "memory": "exact"}),
            (torch.optim.AdamW, {"lr": LEARNING_RATE}),
        ]
    )
    ours.train()
    theirs.train()
    assert_same_bits(ours.model, theirs.model)
