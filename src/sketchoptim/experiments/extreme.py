"""Extreme classification: the package of a Debian file from its path, among 51,534 packages.

    python benchmarks/debian_contents.py --data <folder>

Paths are hashed to 80,000 trigram features. Every model is one hidden layer over them, trained on
the same paths in the same order; only the output layer and the tables' optimizer differ.
"""

import lzma
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn

import sketchoptim as so

from ..nn import (
    MACH,
    Aggregation,
    BagEncoder,
    Bags,
    FeatureHashing,
    LSHSoftmax,
    SampledSoftmax,
    recall,
)
from ..storage import Memory
from .train import DivergedError

Output = Literal["mach", "sampled", "lsh"]
Method = Literal["exact", "lean", "v-only"]

MEMORIES: dict[Method, str | Memory] = {
    "exact": "exact",
    "lean": "lean",
    # the paper's on Amazon's data: no first moment, the second in a count-min sketch of 1 %
    "v-only": Memory(
        first=None, second=so.Sketched(ratio=0.01, granularity="element", decay="paper")
    ),
}
_LINES = 50_000


@dataclass(frozen=True)
class Examples:
    """Hashed texts and the number of the class of each, int64 [texts]."""

    bags: Bags
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor) -> "Examples":
        """Some of the examples, in the order of `rows`."""
        return Examples(self.bags.take(rows), self.labels[rows])

    def batches(self, size: int) -> Iterator["Examples"]:
        """All of them, so many at a time."""
        for start in range(0, len(self), size):
            yield self.take(torch.arange(start, min(start + size, len(self))))


@dataclass(frozen=True)
class Task:
    """How many classes there are, by falling count, and the examples of three parts."""

    classes: int
    train: Examples
    valid: Examples
    test: Examples


def read_task(
    folder: str | Path,
    hashing: FeatureHashing,
    *,
    rows: int | None = None,
    valid: int = 10_000,
) -> Task:
    """The paths and packages in a folder with `train.tsv.xz` and `test.tsv.xz`.

    Of the training file, `rows` lines are read (all if None), the last `valid` of them for
    validation. Test rows of packages that were not read are left out.
    """
    if rows is not None and rows <= valid:
        raise ValueError(f"rows must be above valid = {valid}, got {rows}")
    train_bags, train_names = _read(Path(folder) / "train.tsv.xz", hashing, rows)
    test_bags, test_names = _read(Path(folder) / "test.tsv.xz", hashing, None)
    counts = Counter(train_names)
    # the name breaks ties, so that numbers do not depend on the order of the lines
    names = sorted(counts, key=lambda name: (-counts[name], name))
    numbers = {name: number for number, name in enumerate(names)}
    known = torch.tensor([i for i, name in enumerate(test_names) if name in numbers])
    labels = torch.tensor([numbers[name] for name in train_names])
    everything, cut = Examples(train_bags, labels), len(labels) - valid
    test_labels = torch.tensor([numbers.get(name, -1) for name in test_names])
    return Task(
        len(names),
        everything.take(torch.arange(cut)),
        everything.take(torch.arange(cut, len(labels))),
        Examples(test_bags, test_labels).take(known),
    )


def _read(path: Path, hashing: FeatureHashing, rows: int | None) -> tuple[Bags, list[str]]:
    """Features and class names of a file's lines; only one chunk of texts is held at a time."""
    parts: list[Bags] = []
    names: list[str] = []
    with lzma.open(path, "rt", encoding="utf-8") as file:
        lines = islice(file, rows)
        while chunk := [line.rstrip("\n").rsplit("\t", 1) for line in islice(lines, _LINES)]:
            parts.append(hashing([text for text, _ in chunk]).as_int32())
            names += [name for _, name in chunk]
    return Bags.joined(parts), names


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How one model is built and trained.

    Args:
        output: "mach", or a "sampled" or "lsh" softmax over all classes.
        method: where the tables' moments are kept, one of `MEMORIES`.
        table_lr: first learning rate of the tables with sparse gradients; falls linearly to zero.
        body_lr: first learning rate of the other layers, which exact Adam trains in all methods.
        steps: updates.
        batch: paths of a step.
        features: hashed to.
        dim: hidden units.
        members: of MACH.
        buckets: of MACH's members.
        samples: negatives of a batch of the sampled softmax.
        bits: planes of each of the LSH softmax's 16 tables.
        active: classes that a path finds in them, at most, and as many random ones.
        seed: of weights, order and negatives.
    """

    output: Output = "mach"
    method: Method = "lean"
    table_lr: float
    body_lr: float = 1e-2
    steps: int
    batch: int = 512
    features: int = 80_000
    dim: int = 256
    members: int = 4
    buckets: int = 1024
    samples: int = 4096
    bits: int = 15
    active: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (("output", get_args(Output)), ("method", get_args(Method))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be in {list(allowed)}, got {getattr(self, name)!r}")
        for name in ("table_lr", "body_lr"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} must be finite and > 0, got {getattr(self, name)}")
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")


class EncodedSoftmax(nn.Module):
    """A softmax over all classes on top of one hidden layer."""

    def __init__(self, encoder: BagEncoder, head: SampledSoftmax | LSHSoftmax, seed: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, bags: Bags, labels: Tensor) -> Tensor:
        """The loss of a batch."""
        loss: Tensor = self.head(self.encoder(*bags), labels, generator=self.generator)
        return loss


Classifier = MACH | EncodedSoftmax


@dataclass(frozen=True, kw_only=True)
class Run:
    """A trained model and what its training took."""

    model: Classifier
    loss: float
    train_seconds: float
    step_seconds: float
    update_seconds: float
    table_state_bytes: int
    state_bytes: int


def build(classes: int, settings: Settings) -> Classifier:
    """The untrained model."""

    def encoder() -> BagEncoder:
        return BagEncoder(settings.features, settings.dim)

    if settings.output == "mach":
        return MACH(
            encoder,
            settings.dim,
            classes,
            settings.buckets,
            members=settings.members,
            seed=settings.seed,
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return EncodedSoftmax(encoder(), _head(classes, settings), settings.seed)


def _head(classes: int, settings: Settings) -> SampledSoftmax | LSHSoftmax:
    if settings.output == "sampled":
        return SampledSoftmax(settings.dim, classes, samples=settings.samples, bias=True)
    return LSHSoftmax(
        settings.dim,
        classes,
        bits=settings.bits,
        budget=settings.active,
        negatives=settings.active,
        rebuild_every=100,
        bias=True,
        seed=settings.seed,
    )


def train(task: Task, settings: Settings) -> Run:
    """A model trained on `task.train`, over which it passes in random order as often as needed."""
    model = build(task.classes, settings)
    optimizer = build_optimizer(model, settings)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / settings.steps)
    losses, step_seconds, update_seconds = [], [], []
    for batch in islice(_shuffled(task.train, settings), settings.steps):
        step_start = time.perf_counter()
        loss = model(batch.bags, batch.labels)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise DivergedError(f"loss became {losses[-1]} with {settings}; lower table_lr")
        update_start = time.perf_counter()
        optimizer.step()
        scheduler.step()
        end = time.perf_counter()
        step_seconds.append(end - step_start)
        update_seconds.append(end - update_start)
    parameters = so.memory_report(optimizer).parameters
    tables = table_names(model)
    return Run(
        model=model,
        loss=statistics.mean(losses[-20:]),
        train_seconds=sum(step_seconds),
        step_seconds=statistics.median(step_seconds),
        update_seconds=statistics.median(update_seconds),
        table_state_bytes=sum(p.state_bytes for p in parameters if p.name in tables),
        state_bytes=sum(p.state_bytes for p in parameters),
    )


def table_names(model: Classifier) -> set[str]:
    """Names of the parameters that get sparse gradients: the encoders', and an output table's."""
    dense = {"encoder.bias"}
    names = {name for name, _ in model.named_parameters()} - dense
    if isinstance(model, MACH):
        return {name for name in names if name.startswith("bodies.") and name.endswith(".weight")}
    return names


def build_optimizer(model: Classifier, settings: Settings) -> so.Adam:
    """One optimizer for the whole model; only the tables' memory and learning rate differ."""
    tables = table_names(model)
    named = list(model.named_parameters())
    groups = [
        {"params": [pair for pair in named if pair[0] in tables], "lr": settings.table_lr},
        {"params": [pair for pair in named if pair[0] not in tables], "lr": settings.body_lr},
    ]
    return so.Adam(groups, memory=MEMORIES[settings.method])


def _shuffled(examples: Examples, settings: Settings) -> Iterator[Examples]:
    """Batches without end, every pass in an order of its own."""
    generator = torch.Generator().manual_seed(settings.seed)
    while True:
        order = torch.randperm(len(examples), generator=generator)
        for start in range(0, len(examples) - settings.batch + 1, settings.batch):
            yield examples.take(order[start : start + settings.batch])


def recalls(
    model: Classifier,
    examples: Examples,
    at: Sequence[int],
    *,
    aggregation: Aggregation = "mean",
    batch: int = 512,
) -> list[float]:
    """Recall@k for each k of `at`: how many of the labels are among the k best classes of all."""
    found = torch.cat(
        [top_ids(model, part.bags, max(at), aggregation) for part in examples.batches(batch)]
    )
    return [recall(found[:, :k], examples.labels) for k in at]


@torch.no_grad()
def top_ids(model: Classifier, bags: Bags, k: int, aggregation: Aggregation = "mean") -> Tensor:
    """The `k` best classes of each text, int64 [texts, k]: a softmax knows no aggregation."""
    if isinstance(model, MACH):
        return model.top_k(bags, k, aggregation=aggregation).ids
    return model.head.top_k(model.encoder(*bags), k)
