"""Deferred gradients in the training loops of users: they train as plain ones do."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

import sketchoptim as so

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when transformers is imported

from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

VOCABULARY, LENGTH, MICRO_BATCHES, STEPS, MAX_NORM = 3000, 12, 8, 3, 0.05
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": LENGTH,
}


def llama(*, is_tied: bool) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=is_tied, **SHAPE))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "untied": lambda: llama(is_tied=False),
    "tied": lambda: llama(is_tied=True),
    "softcap": lambda: Gemma2ForCausalLM(
        Gemma2Config(head_dim=16, num_key_value_heads=1, attn_implementation="eager", **SHAPE)
    ),
    "masked": lambda: BertForMaskedLM(
        BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SHAPE)
    ),
}


def twins(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A model with deferred gradients, and one with plain ones."""
    torch.manual_seed(0)
    plain = build()
    model = copy.deepcopy(plain)
    so.defer_gradients(model)
    return model, plain


def texts() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCABULARY, (2 * MICRO_BATCHES * STEPS, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def optimizer_of(model: nn.Module) -> so.AdamW:
    return so.AdamW(so.param_groups(model), lr=0.01, weight_decay=0.1)


def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)


@contextmanager
def stepped_gradients() -> Iterator[list[bool]]:
    """For each step inside, whether the gradients of all tables are deferred, without rows."""
    found: list[bool] = []

    def look(optimizer: Any, *_: object) -> None:
        parameters = [it for group in optimizer.param_groups for it in group["params"]]
        gradients = [it.grad for it in parameters if it.shape[0] == VOCABULARY and it.dim() > 1]
        found.append(all(isinstance(it, so.DeferredGradient) and not it.exists for it in gradients))

    handle = register_optimizer_step_pre_hook(look)
    try:
        yield found
    finally:
        handle.remove()


def check_trains_as_plain(
    build: Callable[[], nn.Module], train: Callable[[nn.Module], None], tolerance: float = 1e-4
) -> None:
    """Both models end with the same weights, but for rounding; ours without plain gradients."""
    model, plain = twins(build)
    start = copy.deepcopy(plain.state_dict())
    with stepped_gradients() as found:
        train(model)
    assert found == [True] * STEPS
    train(plain)
    for name, value in plain.state_dict().items():
        moved = (value - start[name]).float().norm()
        error = (model.state_dict()[name] - value).float().norm()
        assert error <= tolerance * moved + 1e-6, name


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_trainer_accumulates_clips_and_schedules(build, tmp_path):
    def train(model: nn.Module) -> None:
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=MICRO_BATCHES,
            max_grad_norm=MAX_NORM,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            seed=0,
        )
        optimizer = optimizer_of(model)
        schedule = schedule_of(optimizer)
        Trainer(model, arguments, train_dataset=texts(), optimizers=(optimizer, schedule)).train()

    check_trains_as_plain(build, train)


@pytest.fixture
def fresh_accelerator() -> Iterator[None]:
    """accelerate keeps its settings in the process."""
    states = (AcceleratorState, GradientState, PartialState)
    for state in states:
        state._reset_state()
    yield
    for state in states:
        state._reset_state()


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_accelerate_accumulates_clips_and_schedules(mixed_precision):
    def train(model: nn.Module) -> None:
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=MICRO_BATCHES, mixed_precision=mixed_precision
        )
        model = copy.copy(model)  # accelerate replaces its forward
        optimizer = optimizer_of(model)
        loader = DataLoader(texts(), batch_size=2)
        model, optimizer, data, schedule = accelerator.prepare(
            model, optimizer, loader, schedule_of(optimizer)
        )
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    tolerance = 1e-4 if mixed_precision == "no" else 0.1
    check_trains_as_plain(MODELS["tied"], train, tolerance)


class Lit(lightning.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self):
        optimizer = optimizer_of(self.model)
        return {"optimizer": optimizer, "lr_scheduler": schedule_of(optimizer)}


@pytest.mark.filterwarnings("ignore:.*does not have many workers")  # advice about speed
@pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode")
# Lightning uses a name that torch deprecates.
@pytest.mark.filterwarnings(r"ignore:.isinstance\(treespec, LeafSpec\):FutureWarning")
def test_lightning_accumulates_clips_and_schedules(tmp_path):
    def train(model: nn.Module) -> None:
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            gradient_clip_val=MAX_NORM,
            accumulate_grad_batches=MICRO_BATCHES,
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Lit(model), DataLoader(texts(), batch_size=2))

    check_trains_as_plain(MODELS["untied"], train)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, so.clip_grad_norm_])
def test_a_loop_with_a_grad_scaler_accumulates_clips_and_schedules(clip):
    def train(model: nn.Module) -> None:
        optimizer = optimizer_of(model)
        schedule = schedule_of(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for number, batch in enumerate(DataLoader(texts(), batch_size=2)):
            scaler.scale(model(**batch).loss / MICRO_BATCHES).backward()
            if (number + 1) % MICRO_BATCHES == 0:
                scaler.unscale_(optimizer)
                clip(model.parameters(), MAX_NORM)
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
                optimizer.zero_grad()

    check_trains_as_plain(MODELS["tied"], train)


def test_a_trainer_resumes_with_the_same_bits(tmp_path):
    def trained(model: nn.Module, resume_from: Path | None) -> nn.Module:
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=4,
            per_device_train_batch_size=2,
            save_steps=2,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            seed=0,
        )
        optimizer = optimizer_of(model)
        trainer = Trainer(
            model, arguments, train_dataset=texts(), optimizers=(optimizer, schedule_of(optimizer))
        )
        trainer.train(resume_from_checkpoint=resume_from and str(resume_from))
        return model

    (model, _), (other, _) = twins(MODELS["tied"]), twins(MODELS["tied"])
    trained(model, None)
    trained(other, tmp_path / "checkpoint-2")
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_generation_and_evaluation_compute_plain_logits():
    model, plain = twins(MODELS["tied"])
    words = texts()[0]["input_ids"][None, :4]
    tokens = [it.eval().generate(words, max_new_tokens=4, do_sample=False) for it in (model, plain)]
    assert torch.equal(*tokens)
    with torch.no_grad():
        assert type(model(words).logits) is Tensor
