"""A language model with Gemma 3's vocabulary under transformers' Trainer: time, memory, perplexity.

    python -m experiments.studies.gemma_vocabulary                # time and memory of each method
    python -m experiments.studies.gemma_vocabulary --perplexity   # deferred against plain gradients

The model is a `Gemma3ForCausalLM` with few layers, whose embedding of 262,144 x 640 is tied to its
head; a batch has 1,024 tokens of WikiText-2. Each method trains in a process of its own, for a few
steps. Its peak is what the process has resident beyond the model; the time of a step is the least
of those after the first. Perplexities are of the validation text, with WikiText-2's own vocabulary
and 128 columns, for the same seeds with deferred and with plain gradients. Needs transformers,
and bitsandbytes and torchao for their AdamW8bit. One thread.
"""

import argparse
import importlib
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import sketchoptim as so
from sketchoptim._formatting import readable_bytes

from ..corpora import Corpus, read_wikitext
from ..data import find_file
from ..errors import run_study
from ..machine import extra_memory_bytes, machine_facts

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when transformers is imported

BATCH, LENGTH = 8, 128
EVALUATIONS = 5
LEARNING_RATE = 1e-3


class Shape(NamedTuple):
    """Of the model: words and columns of its table, and layers."""

    words: int
    dim: int
    layers: int


GEMMA = Shape(262_144, 640, 2)
TINY = Shape(33_278, 8, 1)
SMALL = Shape(33_278, 128, 2)


def deferred(model: nn.Module) -> torch.optim.Optimizer:
    """Lean, with deferred gradients of the table."""
    print(so.defer_gradients(model), file=sys.stderr)
    return plain(model)


def plain(model: nn.Module) -> torch.optim.Optimizer:
    """Lean, with plain gradients."""
    return so.AdamW(so.param_groups(model), lr=LEARNING_RATE)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """torch.optim.AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def bitsandbytes(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW8bit of bitsandbytes."""
    return _adamw_8bit("bitsandbytes", model)


def torchao(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW8bit of torchao, which compiles its step."""
    return _adamw_8bit("torchao", model)


def _adamw_8bit(package: str, model: nn.Module) -> torch.optim.Optimizer:
    optim: Any = importlib.import_module(f"{package}.optim")
    optimizer: torch.optim.Optimizer = optim.AdamW8bit(model.parameters(), lr=LEARNING_RATE)
    return optimizer


METHODS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    it.__name__: it for it in (deferred, plain, adamw, bitsandbytes, torchao)
}
PACKAGES = ("bitsandbytes", "torchao")


def build_model(shape: Shape, seed: int) -> nn.Module:
    """Gemma 3's architecture with random weights."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        vocab_size=shape.words,
        hidden_size=shape.dim,
        intermediate_size=4 * shape.dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model: nn.Module = Gemma3ForCausalLM(config)
    return model


class StepTimes:
    """A callback of Trainer that takes the processor time of whole steps."""

    def __init__(self) -> None:
        from transformers import TrainerCallback

        class Callback(TrainerCallback):
            def on_step_begin(_, *args: Any, **kwargs: Any) -> None:
                self.begin = time.process_time()

            def on_step_end(_, *args: Any, **kwargs: Any) -> None:
                self.seconds.append(time.process_time() - self.begin)

        self.callback, self.begin = Callback(), 0.0
        self.seconds: list[float] = []


def examples(text: Tensor, count: int) -> list[dict[str, Tensor]]:
    """The first sequences of a text, as Trainer takes them."""
    rows = text[: count * LENGTH].view(count, LENGTH).long()
    return [{"input_ids": row, "labels": row} for row in rows]


def build_trainer(model: nn.Module, method: str, text: Tensor, steps: int, seed: int) -> Any:
    """A Trainer for `steps` steps, with clipping and a linear schedule."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        max_grad_norm=1.0,
        logging_steps=max(1, steps // 10),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=seed,
    )
    return Trainer(
        model,
        arguments,
        train_dataset=examples(text, text.numel() // LENGTH),
        optimizers=(METHODS[method](model), None),
    )


def measure(method: str, corpus: Corpus, steps: int) -> dict[str, float]:
    """Seconds of a step, and bytes beyond the resident model."""
    build_trainer(build_model(TINY, seed=0), method, corpus.train, 1, seed=0).train()  # imports
    model = build_model(GEMMA, seed=0)
    weights = sum(it.nbytes for it in model.parameters())
    times = StepTimes()

    def train() -> None:
        trainer = build_trainer(model, method, corpus.train, steps, seed=0)
        trainer.add_callback(times.callback)
        trainer.train()

    extra = extra_memory_bytes(train)
    return {"seconds": min(times.seconds[1:]), "extra_bytes": extra, "weights": weights}


def perplexities(method: str, corpus: Corpus, steps: int, seed: int) -> list[float]:
    """Of the beginning of the validation text, at `EVALUATIONS` times during the training."""
    from transformers import TrainerCallback

    model = build_model(SMALL, seed)
    found: list[float] = []

    class Evaluation(TrainerCallback):
        def on_step_end(_, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % (steps // EVALUATIONS) == 0:
                found.append(perplexity(model, corpus.valid))

    trainer = build_trainer(model, method, corpus.train, steps, seed)
    trainer.add_callback(Evaluation)
    trainer.train()
    return found


@torch.no_grad()
def perplexity(model: nn.Module, text: Tensor) -> float:
    """Of the first 8,192 words of a text."""
    model.eval()
    losses = [
        float(model(input_ids=rows, labels=rows).loss)
        for rows in text[: 64 * LENGTH].view(-1, BATCH, LENGTH).long()
    ]
    model.train()
    return math.exp(statistics.fmean(losses))


def compare_perplexities(corpus: Corpus, steps: int, seeds: int) -> None:
    """Prints those of both kinds of gradients for each seed."""
    last: dict[str, list[float]] = {"plain": [], "deferred": []}
    for seed in range(seeds):
        for method, numbers in last.items():
            found = perplexities(method, corpus, steps, seed)
            numbers.append(found[-1])
            print(f"seed {seed}, {method:8s}: " + " ".join(f"{it:.3f}" for it in found), flush=True)
    differences = [b / a - 1 for a, b in zip(*last.values(), strict=True)]
    spread = statistics.stdev(last["plain"]) / statistics.fmean(last["plain"])
    print(
        f"{steps} steps, deferred over plain: {statistics.fmean(differences):+.3%} on average, at "
        f"most {max(map(abs, differences)):.3%}; standard deviation between seeds {spread:.3%}"
    )


def compare_methods(methods: list[str], steps: int, data: Path) -> None:
    """Prints time and memory of each method, over those of torch's AdamW."""
    results: dict[str, dict[str, float]] = {}
    for method in methods:
        if method in PACKAGES and importlib.util.find_spec(method) is None:
            print(f"{method} is left out: not installed")
            continue
        command = [sys.executable, "-m", "experiments.studies.gemma_vocabulary", "--child", method]
        command += ["--steps", str(steps), "--data", str(data)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        results[method] = result = json.loads(done.stdout.splitlines()[-1])
        base = next(iter(results.values()))
        seconds, extra = result["seconds"], result["extra_bytes"]
        print(
            f"{method:12s} {seconds:7.1f} s a step ({seconds / base['seconds']:.2f} of "
            f"{next(iter(results))}'s), {readable_bytes(int(extra))} beyond the model of "
            f"{readable_bytes(int(result['weights']))} ({extra / base['extra_bytes']:.3f})",
            flush=True,
        )


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--methods", default="adamw,bitsandbytes,torchao,plain,deferred")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--perplexity", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="WikiText-2; default: below SKETCHOPTIM_DATA")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    expected = "wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens"
    data = find_file("wikitext-2", options.data, expected=expected, option="--data")
    if options.child is not None:
        print(json.dumps(measure(options.child, read_wikitext(data), options.steps)))
        return
    print(", ".join(f"{name} {fact}" for name, fact in machine_facts().items()))
    if options.perplexity:
        compare_perplexities(read_wikitext(data), options.steps or 200, options.seeds)
    else:
        compare_methods(options.methods.split(","), options.steps or 3, data)


if __name__ == "__main__":
    run_study(main)
