"""The output layers: the time of a training step, the error of sampling, the recall of hashing.

    python -m experiments.studies.softmax_layers                     # all three parts
    python -m experiments.studies.softmax_layers speed --threads 2
    python -m experiments.studies.softmax_layers repeats

speed: forward and backward of `SampledSoftmax` over 793,471 x 256, of the same loss in torch
operations, and of the three matrix products that both need.
repeats: bias and spread of the sampled gradient for each way to treat repeats.
hashing: time and recall of `LSHSoftmax`, by bits and tables.
"""

import argparse
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sketchoptim.nn import LogUniformSampler, LSHSoftmax, Negatives, SampledSoftmax

from ..bench.measure import Timing, lap_seconds
from ..errors import run_study

CLASSES, DIM = 793_471, 256
SHAPES = ((20_480, 1_024), (20_480, 256), (2_560, 8_192), (2_560, 1_024), (2_560, 256))
PARTS = ("speed", "repeats", "hashing")


def main(arguments: list[str] | None = None) -> None:
    """Prints the parts that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", default=[], metavar="|".join(PARTS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args(arguments)
    if not set(options.parts) <= set(PARTS):
        parser.error(f"parts must be of {', '.join(PARTS)}, got {' '.join(options.parts)}")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    for part in options.parts or PARTS:
        {"speed": speed, "repeats": repeats, "hashing": hashing}[part](options)


def draw_words(count: int) -> Tensor:
    """Random ids by Zipf's law."""
    return LogUniformSampler(CLASSES).draw(count, generator=None, device=torch.device("cpu"))


# Speed


def speed(options: argparse.Namespace) -> None:
    """Prints the medians of three ways to take the same batch, which take turns."""
    head = SampledSoftmax(DIM, CLASSES, samples=1, bias=True)
    print(f"forward and backward over {CLASSES:,} x {DIM}, {options.threads} thread(s), ms")
    print("  tokens  negatives  distinct    layer  torch ops  products  layer / ops  / products")
    for tokens, samples in SHAPES:
        head.samples = samples
        distinct = Negatives.draw(head.sampler, samples, repeats="merged").ids.numel()
        times: dict[str, list[float]] = {"layer": [], "ops": [], "products": []}
        for _ in range(options.repetitions + 1):  # the first does not count
            hidden = torch.randn(tokens, DIM, requires_grad=True)
            labels = draw_words(tokens)
            ways = {
                "layer": partial(forward_and_backward, head, hidden, labels),
                "ops": partial(forward_and_backward, partial(composed_loss, head), hidden, labels),
                "products": partial(products, hidden.detach(), distinct),
            }
            for name, way in ways.items():
                head.zero_grad()
                times[name] += lap_seconds([way], clock=options.clock)
        layer, ops, floor = (Timing.of(taken[1:]).median for taken in times.values())
        print(
            f"{tokens:8,} {samples:10,} {distinct:9,} {1e3 * layer:8.1f} {1e3 * ops:10.1f} "
            f"{1e3 * floor:9.1f} {layer / ops:12.2f} {layer / floor:11.2f}",
            flush=True,
        )


def forward_and_backward(
    loss: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, labels: Tensor
) -> None:
    """The part of a training step before its optimizer."""
    loss(hidden, labels).backward()


def composed_loss(head: SampledSoftmax, hidden: Tensor, labels: Tensor) -> Tensor:
    """The loss in torch operations: lookups with sparse gradients, a mask, logsumexp."""
    negatives = Negatives.draw(head.sampler, head.samples, repeats="merged")
    ids = torch.cat([labels, negatives.ids])
    rows = F.embedding(ids, head.weight, sparse=True)
    offsets = -negatives.log_expected_count(head.sampler.probability(ids)).float()
    assert head.bias is not None
    offsets = offsets + F.embedding(ids, head.bias, sparse=True).squeeze(-1)
    label_rows, drawn_rows = rows.split([labels.numel(), negatives.ids.numel()])
    label_logits = (hidden * label_rows).sum(-1) + offsets[: labels.numel()]
    drawn_logits = hidden @ drawn_rows.T + offsets[labels.numel() :]
    drawn_logits = drawn_logits.masked_fill(labels[:, None] == negatives.ids, -math.inf)
    losses: Tensor = torch.logaddexp(label_logits, drawn_logits.logsumexp(-1)) - label_logits
    return losses.mean()


def products(hidden: Tensor, distinct: int) -> None:
    """The products alone: logits, gradient of the hidden vectors, gradient of the rows."""
    rows = torch.ones(distinct, DIM)
    for part in hidden.split(max(1, 2**21 // distinct)):
        logits = part @ rows.T
        logits @ rows
        logits.T @ part


# Repeats


def repeats(options: argparse.Namespace) -> None:
    """Prints the error of the table's gradient over the norm of the full softmax's."""
    classes, dim, tokens, rounds = 20_000, 32, 256, 200
    head = SampledSoftmax(dim, classes, samples=1, bias=True)
    probabilities = head.sampler.probability(torch.arange(classes))
    with torch.no_grad():  # like a trained model, whose bias is about the log frequency
        nn.init.normal_(head.weight, std=0.3)
        assert head.bias is not None
        head.bias[:, 0] = probabilities.log()
        hidden = torch.randn(tokens, dim)
        logits = hidden @ head.weight.T + head.bias[:, 0]
        labels = logits.softmax(-1).multinomial(1)[:, 0]
    weight = head.weight.detach().clone().requires_grad_()
    F.cross_entropy(hidden @ weight.T + head.bias.detach()[:, 0], labels).backward()
    full = weight.grad
    assert full is not None
    print(f"gradient of {classes:,} x {dim} by {tokens} tokens, over the full gradient's norm")
    print("  columns   repeats    draws     bias   spread    error")
    for draws in (100, 400, 1600):
        columns = Negatives.draw(head.sampler, draws, repeats="merged").ids.numel()
        for choice in ("merged", "kept", "redrawn"):
            # the same number of columns, since the time depends on it
            head.samples, head.repeats = columns if choice == "redrawn" else draws, choice
            mean, square = torch.zeros_like(full), 0.0
            for _ in range(rounds):
                head.zero_grad()
                head(hidden, labels).backward()
                assert head.weight.grad is not None
                error = head.weight.grad.to_dense() - full
                mean += error / rounds
                square += error.square().sum().item() / rounds
            variance = (square - mean.square().sum().item()) * rounds / (rounds - 1)
            bias = math.sqrt(max(0.0, square - variance))
            size = full.norm().item()
            print(
                f"{columns:9,} {choice:>9} {head.samples:8,} {bias / size:8.3f} "
                f"{math.sqrt(variance) / size:8.3f} {math.sqrt(square) / size:8.3f}",
                flush=True,
            )


# Hashing


def hashing(options: argparse.Namespace) -> None:
    """Prints time and recall for hidden vectors at 45 degrees to their label's row."""
    classes, tokens = 51_534, 1_024
    print(f"LSHSoftmax over {classes:,} x {DIM}, {tokens:,} examples, budget 256")
    print("  bits  tables  build s  step ms  candidates  recall@1  recall@10")
    for bits, tables in ((15, 16), (12, 16), (10, 16), (8, 8)):
        head = LSHSoftmax(DIM, classes, bits=bits, tables=tables, budget=256, negatives=0)
        labels = torch.randint(classes, (tokens,))
        rows = F.normalize(head.weight.detach()[labels])
        hidden = (rows + F.normalize(torch.randn(tokens, DIM))).requires_grad_()
        (build,) = lap_seconds([head.rebuild_], clock=options.clock)
        head.steps = 1  # no second build
        step = partial(forward_and_backward, head, hidden, labels)
        taken = Timing.of(lap_seconds([step] * options.repetitions, clock=options.clock))
        found = head.candidates(hidden).ids.numel() / tokens
        print(
            f"{bits:6} {tables:7} {build:8.2f} {1e3 * taken.median:8.0f} {found:11.1f} "
            f"{head.recall(hidden, 1):9.2f} {head.recall(hidden, 10):10.3f}",
            flush=True,
        )


if __name__ == "__main__":
    run_study(main)
