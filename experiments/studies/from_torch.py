"""WikiText-2: a run of torch.optim that is converted to ours halfway, and the same run as it is.

    python -m experiments.studies.from_torch --output build/from_torch

One-layer LSTM between a sparse embedding and a sampled softmax. torch.optim.SparseAdam trains the
tables and torch.optim.Adam the LSTM, both under a falling learning rate, up to half of the steps.
From there each run continues twice from the same weights: as it is, and through `so.from_torch`
with its schedulers. Writes the losses of every step as JSON and plots them.
"""

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import sketchoptim as so

from ..corpora import Corpus, segments
from ..errors import run_study
from ..models import LanguageModel, ModelSettings, State
from ..recipes import load_recipe
from ..tasks import perplexity

MODEL = ModelSettings(dim=256, hidden=256, samples=1024)
WIKITEXT2 = load_recipe("wikitext2-adam").sizes["small"].data
TABLE_LR, BODY_LR = 0.03, 3e-3
SMOOTHED_OVER = 20
VALID_WORDS = 40_000


@dataclass
class Training:
    """The model, optimizers and random numbers of a run."""

    model: LanguageModel
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[LambdaLR]
    negatives: torch.Generator
    state: State | None = None

    @classmethod
    def start(cls, classes: int, *, seed: int, steps: int) -> "Training":
        torch.manual_seed(seed)
        model = LanguageModel(classes, MODEL)
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.SparseAdam(list(model.named_tables().items()), lr=TABLE_LR),
            torch.optim.Adam(list(model.named_body().items()), lr=BODY_LR),
        ]
        schedulers = [
            LambdaLR(optimizer, lambda step: 1 - step / steps) for optimizer in optimizers
        ]
        return cls(model, optimizers, schedulers, torch.Generator().manual_seed(seed))

    def convert(self, memory: str) -> "Training":
        """A copy with our optimizers."""
        twin = copy.deepcopy(self)
        twin.optimizers = [
            so.from_torch(optimizer, memory, schedulers=[scheduler])
            for optimizer, scheduler in zip(twin.optimizers, twin.schedulers, strict=True)
        ]
        return twin

    def train(self, pairs: list[tuple[Tensor, Tensor]]) -> list[float]:
        """The loss of every step."""
        losses = []
        for words, labels in pairs:
            loss, self.state = self.model.loss(words, labels, self.state, generator=self.negatives)
            self.model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.named_body().values(), 1.0)
            for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
                optimizer.step()
                scheduler.step()
            losses.append(loss.item())
        return losses


def main(arguments: list[str] | None = None) -> None:
    """Trains, prints a line for each seed, writes the JSON and the figure."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    corpus = WIKITEXT2.read(options.data)
    results = [measure(corpus, seed, options) for seed in options.seeds]
    options.output.mkdir(parents=True, exist_ok=True)
    report = {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "torch": torch.__version__,
        "memory": options.memory,
        "steps": options.steps,
        "runs": results,
    }
    path = options.output / "from_torch.json"
    path.write_text(json.dumps(report) + "\n", encoding="utf-8")
    draw(report, options.output / "from_torch.png")
    for way in ("torch", "ours"):
        found = [run["valid"][way] for run in results]
        spread = f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else ""
        print(f"{way}: validation perplexity {statistics.mean(found):.1f}{spread}")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="WikiText-2; default: below SKETCHOPTIM_DATA")
    parser.add_argument("--memory", default="lean", choices=list(so.storage.PRESETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000, help="1866 is about one pass")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=Path("build/from_torch"), help="folder")
    return parser.parse_args(arguments)


def measure(corpus: Corpus, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The losses of one seed in the first half, and both ways in the second."""
    half = options.steps // 2
    pairs = all_pairs(corpus.train)
    training = Training.start(len(corpus.vocabulary), seed=seed, steps=options.steps)
    before = training.train(list(islice(pairs, half)))
    at_half = perplexity(training.model, corpus.valid, words=VALID_WORDS)
    rest = list(islice(pairs, options.steps - half))
    ways = {"ours": training.convert(options.memory), "torch": training}
    after = {way: run.train(rest) for way, run in ways.items()}
    valid = {
        way: perplexity(run.model, corpus.valid, words=VALID_WORDS) for way, run in ways.items()
    }
    around = {way: statistics.mean(losses[:SMOOTHED_OVER]) for way, losses in after.items()}
    last = statistics.mean(before[-SMOOTHED_OVER:])
    print(
        f"seed {seed}: mean loss of the {SMOOTHED_OVER} steps before {last:.3f}, "
        f"after in torch {around['torch']:.3f}, in ours {around['ours']:.3f}; perplexity then "
        f"{at_half:.1f}, at the end in torch {valid['torch']:.1f}, in ours {valid['ours']:.1f}",
        flush=True,
    )
    return {
        "seed": seed, "before": before, "after": after, "valid_at_half": at_half, "valid": valid,
    }  # fmt: skip


def all_pairs(ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The training text, repeated without end."""
    return chain.from_iterable(segments(ids, batch=32, length=35) for _ in repeat(None))


def smooth_losses(losses: list[float]) -> list[float]:
    """Means over `SMOOTHED_OVER` steps at a time."""
    whole = len(losses) // SMOOTHED_OVER * SMOOTHED_OVER
    return [
        statistics.mean(losses[start : start + SMOOTHED_OVER])
        for start in range(0, whole, SMOOTHED_OVER)
    ]


def draw(report: dict[str, Any], path: Path) -> None:
    """Loss over steps, one line for each seed; below, the difference of the two ways."""
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    half = report["steps"] // 2
    colours = {"torch": "tab:blue", "ours": "tab:orange"}
    names = {"torch": "torch.optim goes on", "ours": f'so.from_torch(..., "{report["memory"]}")'}
    for number, run in enumerate(report["runs"]):
        before = smooth_losses(run["before"])
        label = "torch.optim.SparseAdam and Adam" if number == 0 else None
        top.plot(middles(0, before), before, color="grey", lw=1, label=label)
        after = {way: smooth_losses(losses) for way, losses in run["after"].items()}
        for way, losses in after.items():
            label = names[way] if number == 0 else None
            top.plot(middles(half, losses), losses, color=colours[way], lw=1.2, label=label)
        differences = [
            ours - torchs for ours, torchs in zip(after["ours"], after["torch"], strict=True)
        ]
        bottom.plot(middles(half, differences), differences, lw=1.2, label=f"seed {run['seed']}")
    for axes in (top, bottom):
        axes.axvline(half, color="black", ls=":", lw=1)
        axes.grid(alpha=0.3)
        axes.legend()
    bottom.axhline(0, color="black", lw=0.8)
    steps = f"mean of {SMOOTHED_OVER} steps"
    top.set_ylabel(f"loss of the sampled softmax,\nnats a word ({steps})")
    bottom.set_ylabel("ours - torch, nats a word")
    bottom.set_xlabel("step")
    top.set_title("WikiText-2: converted halfway, and not converted")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def middles(start: int, values: list[float]) -> list[float]:
    """The steps at which smoothed values are plotted."""
    return [start + (number + 0.5) * SMOOTHED_OVER for number in range(len(values))]


if __name__ == "__main__":
    run_study(main)
