"""The default bits and negatives of `LSHSoftmax`, by the accuracy after training.

    python -m experiments.studies.lsh_defaults                      # about three minutes of a core
    python -m experiments.studies.lsh_defaults --classes 500 --cosine 0 --noise 1

Trains a table of class vectors of 64 numbers with lean Adam on noisy views of class centers, and
prints the share of test views whose largest logit of all classes is their own. The centers are in
clusters of 20 with a cosine of 0.8, so that a class is hard to tell from a few others. Each row has
its own learning rate, chosen on validation views. `per bucket` is the average number of classes in
a bucket, `classes` the number that a view is trained on, `ms` the processor time of a step.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import sketchoptim as so
from sketchoptim.nn import LSHSoftmax, SampledSoftmax, UnigramSampler

from ..corpora.corpus import Part
from ..corpora.vectors import NoisyViews
from ..errors import run_study

DIM, CLUSTER = 64, 20
HELD_OUT, REBUILDS = 2_000, 20
PAPER_BITS = 15

Head = LSHSoftmax | SampledSoftmax


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table: a way to train, and the learning rates to try."""

    name: str
    make: Callable[[int], Head]
    """The layer for a number of steps between rebuilds."""
    rates: tuple[float, ...]
    is_full: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The accuracy, cost and number of classes of one training."""

    accuracy: dict[Literal["valid", "test"], float]
    classes: float
    step_seconds: float


def main(arguments: list[str] | None = None) -> None:
    """Prints a table for each number of classes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--classes", type=int, nargs="+", default=[500, 2_000, 20_000])
    parser.add_argument("--views", type=int, default=15, help="training views of a class")
    parser.add_argument("--full", type=int, default=5_000, help="most classes of a full softmax")
    parser.add_argument("--cosine", type=float, default=0.8, help="of centers in a cluster")
    parser.add_argument("--noise", type=float, default=0.5, help="norm of a view's noise")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if not 0 <= options.cosine <= 1:
        parser.error(f"--cosine must be in [0, 1], got {options.cosine}")
    torch.set_num_threads(1)
    for classes in options.classes:
        centers = clustered(classes, options.cosine, seed=options.seed)
        views = NoisyViews(centers, options.noise, options.seed)
        batch = min(256, max(16, classes // 16))
        steps = options.views * classes // batch
        print(f"\n{classes:,} classes, {steps:,} steps of {batch} views")
        print("layer                      per bucket  classes  accuracy    lr     ms")
        for row in rows(classes, steps=steps, with_full=classes <= options.full):
            outcomes = {
                rate: train(row, rate, views, steps=steps, batch=batch, seed=options.seed)
                for rate in row.rates
            }
            best = max(row.rates, key=lambda rate: outcomes[rate].accuracy["valid"])
            found = outcomes[best]
            print(
                f"{row.name:<37} {found.classes:8.0f} {found.accuracy['test']:9.3f} {best:5.2f} "
                f"{1e3 * found.step_seconds:6.1f}",
                flush=True,
            )


def clustered(classes: int, cosine: float, *, seed: int) -> Tensor:
    """Unit vectors [classes, dim], of which `CLUSTER` each have a common part."""
    generator = torch.Generator().manual_seed(seed)
    clusters = max(1, classes // CLUSTER)
    own = F.normalize(torch.randn(classes, DIM, generator=generator), dim=1)
    common = F.normalize(torch.randn(clusters, DIM, generator=generator), dim=1)
    shared = common[torch.arange(classes) % clusters]
    return F.normalize(cosine**0.5 * shared + (1 - cosine) ** 0.5 * own, dim=1)


def rows(classes: int, *, steps: int, with_full: bool) -> Iterator[Row]:
    """The rows of the table."""
    if with_full:
        full = partial(uniform_head, classes, 1)
        yield Row(name="full softmax", make=full, rates=(0.15, 0.3, 0.6), is_full=True)
    for samples in (16, 64, 256):
        yield Row(
            name=f"uniform, {samples}",
            make=partial(uniform_head, classes, samples),
            rates=(0.05, 0.1, 0.2, 0.4),
        )
    # With more steps, smaller rates are the best.
    rates = (0.15, 0.3, 0.6) if steps < 500 else (0.075, 0.15)
    # The most bits with which a bucket has at least this many classes on average.
    by_rule = [max(1, (classes // least).bit_length() - 1) for least in (32, 8, 2)]
    for bits in (*by_rule, PAPER_BITS):
        for negatives in (0, 16) if bits in (by_rule[1], PAPER_BITS) else (16,):
            yield Row(
                name=f"{bits:2} bits, {negatives:2} negatives {classes / 2**bits:15.1f}",
                make=partial(hashing_head, classes, bits, negatives),
                rates=rates,
            )


def uniform_head(classes: int, samples: int, rebuild_every: int) -> SampledSoftmax:
    """A layer with uniform negatives; there is nothing to rebuild."""
    sampler = UnigramSampler(torch.ones(classes))
    return SampledSoftmax(DIM, classes, samples=samples, sampler=sampler)


def hashing_head(classes: int, bits: int, negatives: int, rebuild_every: int) -> LSHSoftmax:
    """A layer with the classes that hashing finds."""
    return LSHSoftmax(DIM, classes, bits=bits, negatives=negatives, rebuild_every=rebuild_every)


def train(
    row: Row, rate: float, views: NoisyViews, *, steps: int, batch: int, seed: int
) -> Outcome:
    """Trains a table of classes; every row sees the same views in the same order."""
    torch.manual_seed(seed)
    head = row.make(max(1, steps // REBUILDS))
    optimizer = so.Adam(head.named_parameters(), lr=rate, memory="lean")
    seconds = 0.0
    for number in range(steps):
        hidden, labels = views.batch("train", number, batch)
        start = time.process_time()
        loss = full_loss(head, hidden, labels) if row.is_full else head(hidden, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds += time.process_time() - start
    return Outcome(
        accuracy={"valid": accuracy(head, views, "valid"), "test": accuracy(head, views, "test")},
        classes=views.classes if row.is_full else active_classes(head, views),
        step_seconds=seconds / steps,
    )


def full_loss(head: Head, hidden: Tensor, labels: Tensor) -> Tensor:
    """The loss over all classes, with a gradient in the sparse layout, for lean state."""
    weight = F.embedding(torch.arange(head.classes), head.weight, sparse=True)
    return F.cross_entropy(hidden @ weight.T, labels)


def accuracy(head: Head, views: NoisyViews, part: Part) -> float:
    """The share of held-out views whose class has the largest logit of all."""
    hidden, labels = views.batch(part, 0, HELD_OUT)
    return (head.top_k(hidden, 1)[:, 0] == labels).double().mean().item()


def active_classes(head: Head, views: NoisyViews) -> float:
    """The mean number of classes that a view is trained on, besides its own."""
    if isinstance(head, SampledSoftmax):
        return head.samples
    hidden, _ = views.batch("valid", 0, 256)
    return head.candidates(hidden).ids.numel() / len(hidden) + head.negatives


if __name__ == "__main__":
    run_study(main)
