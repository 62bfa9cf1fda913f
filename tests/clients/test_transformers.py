"""A tiny GPT-2 under transformers.Trainer: clipping, scheduling, saving and resuming, no glue."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sketchoptim as so

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when transformers is imported

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

VOCABULARY = 251
LENGTH = 16
STEPS = 40


def sequences(count: int = 256) -> list[dict[str, Tensor]]:
    """Sequences from a random first token, where each token determines the next."""
    token = torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(1))
    tokens = [token]
    for _ in range(LENGTH - 1):
        tokens.append((3 * tokens[-1] + 1) % VOCABULARY)
    return [{"input_ids": row, "labels": row} for row in torch.stack(tokens, dim=1)]


def by_class(model: GPT2LMHeadModel) -> dict[str, object]:
    """The Trainer builds the optimizer: every gradient of GPT-2 is dense, so all is kept exact."""
    return {"optimizer_cls_and_kwargs": (so.AdamW, {"lr": 1e-2})}


def by_torch_class(model: GPT2LMHeadModel) -> dict[str, object]:
    """The same with torch's own AdamW, to compare with."""
    return {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 1e-2})}


def by_instance(model: GPT2LMHeadModel) -> dict[str, object]:
    """The table's group names a memory: it is compressed although its gradient is dense."""
    table = model.transformer.wte.weight
    rest = [parameter for parameter in model.parameters() if parameter is not table]
    optimizer = so.AdamW([{"params": [table], "memory": "lean"}, {"params": rest}], lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
    return {"optimizers": (optimizer, schedule)}


def build_trainer(
    optimizer_of: Callable[..., dict[str, object]], directory: Path, *, model_seed: int = 0
) -> Trainer:
    torch.manual_seed(model_seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=STEPS,
        per_device_train_batch_size=16,
        weight_decay=0.1,
        max_grad_norm=0.5,
        save_steps=STEPS // 2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=0,
    )
    data = sequences()
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data, **optimizer_of(model))


def assert_same_parameters(one: Trainer, other: Trainer) -> None:
    for name, value in other.model.state_dict().items():
        assert torch.equal(one.model.state_dict()[name], value), name


@pytest.fixture(scope="module", params=[by_class, by_instance], ids=lambda build: build.__name__)
def optimizer_of(request):
    return request.param


@pytest.fixture(scope="module")
def finished(optimizer_of, tmp_path_factory) -> Trainer:
    trainer = build_trainer(optimizer_of, tmp_path_factory.mktemp("finished"))
    trainer.loss_before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return trainer


def test_trainer_lowers_the_loss(finished):
    assert finished.evaluate()["eval_loss"] < 0.7 * finished.loss_before


def test_trainer_clips_the_gradient(finished):
    norms = [entry["grad_norm"] for entry in finished.state.log_history if "grad_norm" in entry]
    assert len(norms) == STEPS
    assert max(norms) > finished.args.max_grad_norm  # so that clipping did something


def test_trainer_resumes_bit_for_bit(finished, optimizer_of, tmp_path):
    checkpoint = Path(finished.args.output_dir) / f"checkpoint-{STEPS // 2}"
    # Other initial parameters, so that only what the checkpoint holds can bring the same result.
    resumed = build_trainer(optimizer_of, tmp_path, model_seed=1)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_same_parameters(resumed, finished)


def test_trainer_with_exact_memory_equals_torch_adamw_bit_for_bit(tmp_path):
    ours = build_trainer(by_class, tmp_path / "ours")
    ours.train()
    torchs = build_trainer(by_torch_class, tmp_path / "torch")
    torchs.train()
    assert_same_parameters(ours, torchs)


def test_trainer_compresses_the_table_whose_group_names_a_memory(tmp_path):
    trainer = build_trainer(by_instance, tmp_path)
    trainer.train()
    table, *rest = so.memory_report(trainer.optimizer.optimizer).parameters
    assert table.shape == (VOCABULARY, 32)
    assert 0 < table.state_bytes < VOCABULARY  # less than one byte a row
    assert all(parameter.state_bytes == parameter.exact_bytes for parameter in rest)
