"""GPT-2, Llama and BERT, each from a small configuration: their tables, and a step of Trainer."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from client_models import assert_same_bits

import sketchoptim as so

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when transformers is imported

from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

VOCABULARY, LENGTH = 5000, 16
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": LENGTH,
}


def gpt2(*, positions: int = LENGTH) -> PreTrainedModel:
    """The head shares the weight of the embedding."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=positions,
            n_embd=32,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            loss_type="ForCausalLM",
        )
    )


def llama() -> PreTrainedModel:
    """The head has a weight of its own."""
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **SHAPE))


def bert() -> PreTrainedModel:
    """The head shares the weight of the embedding, and has a bias with an element per word."""
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **SHAPE))


TABLES = {
    gpt2: ["transformer.wte.weight"],
    llama: ["model.embed_tokens.weight", "lm_head.weight"],
    bert: ["bert.embeddings.word_embeddings.weight"],
}


@pytest.mark.parametrize(
    "built",
    [(so.AdamW, {"lr": 0.01, "compress": "tables"}), (lambda: so.AdamW, {"lr": 0.01})],
    ids=["class", "factory"],
)
@pytest.mark.parametrize("build", [gpt2, llama], ids=["gpt2", "llama"])
def test_trainer_builds_the_optimizer_by_one_line(build, built, tmp_path):
    """From flat groups of its own, and from the model in the factory form."""
    model = build()
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    texts = [{"input_ids": it, "labels": it} for it in torch.randint(VOCABULARY, (8, LENGTH))]
    trainer = Trainer(model, arguments, train_dataset=texts, optimizer_cls_and_kwargs=built)
    trainer.train()
    state = trainer.optimizer.optimizer.state
    compressed = {name for name, it in model.named_parameters() if state[it]["is_compressed"]}
    assert compressed == set(TABLES[build])


@pytest.mark.parametrize("build", TABLES, ids=lambda build: build.__name__)
def test_a_vocabulary_grows_in_training(build):
    """The tables that transformers replaces are those that the optimizer gets, tied or not."""
    torch.manual_seed(0)
    model = build()
    optimizer = so.AdamW(model, lr=0.1)

    def step(words: int) -> float:
        ids = torch.randint(words, (4, LENGTH))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    first = step(VOCABULARY)
    model.resize_token_embeddings(VOCABULARY + 100)
    replaced = so.replace_parameters(optimizer, model)
    assert {name for name in replaced if "bias" not in name} == set(TABLES[build])
    members = [it for group in optimizer.param_groups for it in group["params"]]
    assert set(members) == set(model.parameters())
    assert step(VOCABULARY + 100) < 2 * first
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


@pytest.fixture(params=TABLES, ids=lambda build: build.__name__)
def build(request):
    return request.param


def train(
    model: PreTrainedModel, directory: Path, *, resume_from: Path | None = None, **options: Any
) -> torch.optim.Optimizer:
    """The optimizer after two steps of Trainer, of which each is saved."""
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=2,
        per_device_train_batch_size=16,
        max_grad_norm=0.5,
        save_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCABULARY, (32, LENGTH), generator=generator)
    texts = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, arguments, train_dataset=texts, **options)
    trainer.train(resume_from_checkpoint=resume_from and str(resume_from))
    return trainer.optimizer.optimizer


def test_the_right_tables_are_found(build):
    found = so.find_tables(build())
    assert list(found) == TABLES[build]
    assert all(table.shape == (VOCABULARY, 32) for table in found.values())


def test_the_positions_of_a_long_context_are_a_table_unless_it_must_have_more_rows():
    model = gpt2(positions=1024)
    assert list(so.find_tables(model)) == ["transformer.wte.weight", "transformer.wpe.weight"]
    assert list(so.find_tables(model, min_rows=2000)) == ["transformer.wte.weight"]


def test_a_step_of_trainer_keeps_less_than_a_byte_a_row_of_the_tables(build, tmp_path):
    model = build()
    before = {name: table.detach().clone() for name, table in so.find_tables(model).items()}
    groups = so.param_groups(model)
    optimizer = train(model, tmp_path, optimizers=(so.AdamW(groups, lr=1e-3), None))
    kept = {parameter.name: parameter for parameter in so.memory_report(optimizer).parameters}
    for name, table in so.find_tables(model).items():
        assert 0 < kept[name].state_bytes < VOCABULARY
        assert not torch.equal(table, before[name])
    others = [parameter for name, parameter in kept.items() if name not in before]
    assert all(parameter.state_bytes == parameter.exact_bytes for parameter in others)


def test_trainer_resumes_bit_for_bit(build, tmp_path):
    finished, resumed = build(), build()  # with initial parameters that differ
    for model, resume_from in [(finished, None), (resumed, tmp_path / "checkpoint-1")]:
        optimizer = so.AdamW(so.param_groups(model), lr=1e-2)
        train(model, tmp_path, optimizers=(optimizer, None), resume_from=resume_from)
    assert_same_bits(resumed, finished)


def test_tables_that_stay_exact_are_told_of_once(build, tmp_path):
    with pytest.warns(UserWarning, match="so.AdamW.so.param_groups.model") as told:
        train(build(), tmp_path, optimizer_cls_and_kwargs=(so.AdamW, {"lr": 1e-3}))
    (message,) = (str(it.message) for it in told)
    assert message.count(f"[{VOCABULARY}, 32]") == len(TABLES[build])
    assert f"{len(TABLES[build]) * 2 * 4 * VOCABULARY * 32:,} bytes" in message


def test_tables_that_are_exact_on_request_are_not_told_of(build, tmp_path):
    options = {"lr": 1e-3, "memory": "exact"}
    train(build(), tmp_path, optimizer_cls_and_kwargs=(so.AdamW, options))
