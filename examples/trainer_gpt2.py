"""A GPT-2 under Hugging Face Trainer, with the state of its word table compressed.

    pip install sketchoptim transformers accelerate
    python trainer_gpt2.py

The table's gradients are dense, as in all models of transformers: `so.param_groups` finds the table
and compresses it all the same. The model comes from a configuration, so nothing is downloaded.
"""

import argparse
import os
import re
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import sketchoptim as so

LENGTH = 32


def read_sources() -> tuple[list[dict[str, torch.Tensor]], int]:
    """Python's own modules in pieces of `LENGTH` words, and the number of distinct words."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    words = re.findall(r"\w+|[^\w\s]+", text)
    ids = {word: number for number, (word, _) in enumerate(Counter(words).most_common())}
    pieces = torch.tensor([ids[word] for word in words]).split(LENGTH)[:-1]
    return [{"input_ids": piece, "labels": piece} for piece in pieces], len(ids)


def main() -> None:
    """Trains, and ends with status 1 if the model did not learn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)  # the model is tiny: threads would wait for one another
    torch.manual_seed(0)
    pieces, words = read_sources()
    print(f"{len(pieces) * LENGTH:,} words, {words:,} of them distinct")
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=words,
            n_positions=LENGTH,
            n_embd=64,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    groups = so.param_groups(model, lr=0.03, no_decay=["bias", "ln_"])  # of the table
    print(groups)
    optimizer = so.AdamW(groups, lr=0.001, weight_decay=0.01)  # of all else
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=16,
            max_grad_norm=1.0,
            warmup_steps=10,
            logging_steps=50,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=pieces[100:],
            eval_dataset=pieces[:100],
            optimizers=(optimizer, None),
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
    report = so.memory_report(optimizer)
    print(f"state: {report.state_bytes:,} bytes instead of AdamW's {report.exact_bytes:,}")
    print(f"loss on held-out text: {before:.2f} before training, {after:.2f} after")
    if after > before - 2:
        raise SystemExit("the model did not learn")


if __name__ == "__main__":
    main()
