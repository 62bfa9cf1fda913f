"""The output layers: where a training step's time goes, what sampling costs, what hashing finds.

    python benchmarks/softmax_layers.py                     # all three parts
    python benchmarks/softmax_layers.py speed --threads 2
    python benchmarks/softmax_layers.py repeats

speed: forward and backward of `SampledSoftmax` over 793,471 x 256, beside the same loss written in
torch operations and beside the three matrix products that neither can do without.
repeats: bias and spread of the sampled gradient for each way to treat repeats.
hashing: what `LSHSoftmax` costs and finds, by bits and tables.
"""

import argparse
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sketchoptim.nn import LogUniformSampler, LSHSoftmax, Negatives, SampledSoftmax

from ..bench.measure import Timing, laps

CLASSES, DIM = 793_471, 256
SHAPES = ((20_480, 1_024), (20_480, 256), (2_560, 8_192), (2_560, 1_024), (2_560, 256))
PARTS = ("speed", "repeats", "hashing")


def main() -> None:
    """Prints the parts that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", default=[], metavar="|".join(PARTS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args()
    if not set(options.parts) <= set(PARTS):
        parser.error(f"parts must be of {', '.join(PARTS)}, got {' '.join(options.parts)}")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    for part in options.parts or PARTS:
        {"speed": speed, "repeats": repeats, "hashing": hashing}[part](options)


def words(count: int) -> Tensor:
    """Ids by Zipf's law."""
    return LogUniformSampler(CLASSES).draw(count, generator=None, device=torch.device("cpu"))


# Speed


def speed(options: argparse.Namespace) -> None:
    """Medians of three ways through the same batch, in turn."""
    head = SampledSoftmax(DIM, CLASSES, samples=1, bias=True)
    print(f"forward and backward over {CLASSES:,} x {DIM}, {options.threads} thread(s), ms")
    print("  tokens  negatives  distinct    layer  torch ops  products  layer / ops  / products")
    for tokens, samples in SHAPES:
        head.samples = samples
        distinct = Negatives.draw(head.sampler, samples, repeats="merged").ids.numel()
        times: dict[str, list[float]] = {"layer": [], "ops": [], "products": []}
        for _ in range(options.repetitions + 1):  # the first does not count
            hidden = torch.randn(tokens, DIM, requires_grad=True)
            labels = words(tokens)
            ways = {
                "layer": partial(forward_and_backward, head, hidden, labels),
                "ops": partial(forward_and_backward, partial(composed_loss, head), hidden, labels),
                "products": partial(products, hidden.detach(), distinct),
            }
            for name, way in ways.items():
                head.zero_grad()
                times[name] += laps([way], clock=options.clock)
        layer, ops, floor = (Timing.of(taken[1:]).median for taken in times.values())
        print(
            f"{tokens:8,} {samples:10,} {distinct:9,} {1e3 * layer:8.1f} {1e3 * ops:10.1f} "
            f"{1e3 * floor:9.1f} {layer / ops:12.2f} {layer / floor:11.2f}",
            flush=True,
        )


def forward_and_backward(
    loss: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, labels: Tensor
) -> None:
    """What a training step does before its optimizer."""
    loss(hidden, labels).backward()


def composed_loss(head: SampledSoftmax, hidden: Tensor, labels: Tensor) -> Tensor:
    """The loss as one would write it: lookups with sparse gradients, a mask, logsumexp."""
    drawn = Negatives.draw(head.sampler, head.samples, repeats="merged")
    ids = torch.cat([labels, drawn.ids])
    rows = F.embedding(ids, head.weight, sparse=True)
    offsets = -drawn.log_expected_count(head.sampler.probability(ids)).float()
    assert head.bias is not None
    offsets = offsets + F.embedding(ids, head.bias, sparse=True).squeeze(-1)
    label_rows, drawn_rows = rows.split([labels.numel(), drawn.ids.numel()])
    label_logits = (hidden * label_rows).sum(-1) + offsets[: labels.numel()]
    drawn_logits = hidden @ drawn_rows.T + offsets[labels.numel() :]
    drawn_logits = drawn_logits.masked_fill(labels[:, None] == drawn.ids, -math.inf)
    return (torch.logaddexp(label_logits, drawn_logits.logsumexp(-1)) - label_logits).mean()


def products(hidden: Tensor, distinct: int) -> None:
    """Logits, gradient of the hidden vectors, gradient of the rows: products and nothing else."""
    rows = torch.ones(distinct, DIM)
    for part in hidden.split(max(1, 2**21 // distinct)):
        logits = part @ rows.T
        logits @ rows
        logits.T @ part


# Repeats


def repeats(options: argparse.Namespace) -> None:
    """How far the gradient of the table is from the full softmax's, over its norm."""
    classes, dim, tokens, rounds = 20_000, 32, 256, 200
    head = SampledSoftmax(dim, classes, samples=1, bias=True)
    law = head.sampler.probability(torch.arange(classes))
    with torch.no_grad():  # as in a trained model, where the bias is about the log frequency
        nn.init.normal_(head.weight, std=0.3)
        assert head.bias is not None
        head.bias[:, 0] = law.log()
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
            # the same number of columns, which is what time depends on
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
    """Cost and recall on hidden vectors at an angle of 45 degrees to their label's row."""
    classes, tokens = 51_534, 1_024
    print(f"LSHSoftmax over {classes:,} x {DIM}, {tokens:,} examples, budget 256")
    print("  bits  tables  build s  step ms  candidates  recall@1  recall@10")
    for bits, tables in ((15, 16), (12, 16), (10, 16), (8, 8)):
        head = LSHSoftmax(DIM, classes, bits=bits, tables=tables, budget=256)
        labels = torch.randint(classes, (tokens,))
        rows = F.normalize(head.weight.detach()[labels])
        hidden = (rows + F.normalize(torch.randn(tokens, DIM))).requires_grad_()
        (build,) = laps([head.rebuild_], clock=options.clock)
        head.steps = 1  # no second build
        step = partial(forward_and_backward, head, hidden, labels)
        taken = Timing.of(laps([step] * options.repetitions, clock=options.clock))
        found = head.candidates(hidden).ids.numel() / tokens
        print(
            f"{bits:6} {tables:7} {build:8.2f} {1e3 * taken.median:8.0f} {found:11.1f} "
            f"{head.recall(hidden, 1):9.2f} {head.recall(hidden, 10):10.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
