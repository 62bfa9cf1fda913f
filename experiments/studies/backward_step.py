"""How much memory a step inside the backward pass saves: the peak of the whole process.

    python -m experiments.studies.backward_step

An embedding under a sampled softmax of LM1B's size, with nothing between them. Each combination
trains in a process of its own: sparse or dense gradients; lean Adam after the backward pass or
inside it, or torch's SparseAdam or Adam after it. Dense gradients are what torch leaves for
`weight[ids]` and for an `nn.Embedding` without `sparse=True`.
"""

import argparse
import json
import subprocess
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sketchoptim as so

from ..bench.gradients import WordFrequencies
from ..errors import run_study
from ..machine import peak_memory_bytes

_WAYS = {"torch": "torch, after", "after": "lean, after", "inside": "lean, inside"}
_GRADIENTS = ("sparse", "dense")


class DenseSampledSoftmax(nn.Module):
    """A softmax over the label and shared negatives, in torch operations: its gradient is dense."""

    def __init__(self, dim: int, classes: int, *, samples: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, dim).uniform_(-0.05, 0.05))
        self.samples = samples

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The mean loss, with negatives drawn uniformly."""
        negatives = torch.randint(len(self.weight), (self.samples,))
        ids, at = torch.cat([labels, negatives]).unique(return_inverse=True)
        rows = self.weight[ids]
        label_at, drawn_at = at.split([len(labels), self.samples])
        own = (hidden * rows[label_at]).sum(1, keepdim=True)
        logits = torch.cat([own, hidden @ rows[drawn_at].T], 1)
        return F.cross_entropy(logits, torch.zeros_like(labels))


class LanguageModel(nn.Module):
    """An embedding under a sampled softmax."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        is_sparse = options.gradients == "sparse"
        head = so.nn.SampledSoftmax if is_sparse else DenseSampledSoftmax
        self.embedding = nn.Embedding(options.rows, options.dim, sparse=is_sparse)
        nn.init.uniform_(self.embedding.weight, -0.05, 0.05)
        self.head = head(options.dim, options.rows, samples=options.samples)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch."""
        loss: Tensor = self.head(self.embedding(words), labels)
        return loss


def main(arguments: list[str] | None = None) -> None:
    """Trains every combination in a process of its own and prints its peak."""
    options = parse_arguments(arguments)
    if options.way is not None:
        print(json.dumps(train(options)))
        return
    print(f"two tables of {options.rows:,} x {options.dim}, {options.tokens:,} tokens,")
    print(f"{options.samples:,} negatives, {options.steps} steps; peak memory of the process")
    for gradients in _GRADIENTS:
        for way, title in _WAYS.items():
            found = run_part(gradients, way, options)
            print(
                f"{gradients} gradients, {title:13} {found['peak'] / 1e9:6.2f} GB, of it "
                f"{found['libraries'] / 1e9:.2f} GB before the model",
                flush=True,
            )


def run_part(gradients: str, way: str, options: argparse.Namespace) -> dict[str, int]:
    """What a process of its own prints."""
    sizes = ("rows", "dim", "tokens", "samples", "steps", "threads")
    numbers = [f"--{key}={getattr(options, key)}" for key in sizes]
    command = [sys.executable, "-m", __spec__.name, f"--gradients={gradients}", f"--way={way}"]
    done = subprocess.run([*command, *numbers], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, int] = json.loads(done.stdout)
    return found


def train(options: argparse.Namespace) -> dict[str, int]:
    """The peak of a process that trains one combination, and its peak before that."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    libraries = peak_memory_bytes()
    model = LanguageModel(options)
    optimizers = build_optimizers(model, options)
    words = WordFrequencies.zipf(rows=options.rows)
    generator = np.random.default_rng(0)
    for _ in range(options.steps):
        batch = [words.tokens(options.rows, options.tokens, generator) for _ in range(2)]
        model(*batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"peak": peak_memory_bytes(), "libraries": libraries}


def build_optimizers(model: nn.Module, options: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """The optimizers to step after the backward pass; none where it steps them itself."""
    if options.way == "torch":
        is_sparse = options.gradients == "sparse"
        kind = torch.optim.SparseAdam if is_sparse else torch.optim.Adam
        return [kind(list(model.parameters()))]
    if options.way == "after":
        return [so.Adam(table_groups(model))]
    step_in_backward(model)
    return []


def table_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Groups in which both tables are compressed; no layer type shows that the head is one."""
    return so.param_groups(model, tables=[name for name, _ in model.named_parameters()])


def step_in_backward(model: nn.Module) -> None:
    """Steps each parameter, with an optimizer of its own, as soon as its gradient is complete."""
    for group in table_groups(model):
        for name, parameter in group["params"]:
            optimizer = so.Adam([{**group, "params": [(name, parameter)]}])

            def step(_: Tensor, optimizer: so.Adam = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=793_471)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=20_480, help="of a batch")
    parser.add_argument("--samples", type=int, default=1_024, help="negatives of a batch")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gradients", choices=_GRADIENTS, help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=[*_WAYS], help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_study(main)
