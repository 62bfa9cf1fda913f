"""The training loop, from top to bottom.

    sketchoptim demo                                        # on Python's own sources
    python benchmarks/wikitext2.py --data <folder>          # on WikiText-2

Every method of a comparison sees the same words in the same order, starts from the same weights
and takes the same number of steps; only the optimizer of the tables differs.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Literal, get_args

import torch
from torch import Tensor, nn

import sketchoptim as so

from ..optim.base import Optimizer
from .data import Corpus, segments
from .models import LanguageModel, ModelSettings, State, detached

Method = Literal[
    "exact", "lean", "row-wise", "rank-one", "paper-mv", "paper-v", "paper-v-only",
    "adagrad-exact", "adagrad-lean",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How one model is trained.

    Args:
        method: memory preset of `so.Adam` for the tables, or of `so.Adagrad` after "adagrad-".
        table_lr: first learning rate of the tables; falls linearly to zero.
        body_lr: first learning rate of the dense layers, which exact Adam trains in all methods.
        steps: updates.
        batch: parallel streams of text.
        length: words of each stream in a step.
        clip_norm: largest gradient norm of the dense layers.
        seed: of the weights and of the negatives.
    """

    method: Method = "lean"
    table_lr: float
    body_lr: float = 3e-3
    steps: int
    batch: int = 32
    length: int = 35
    clip_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            allowed = ", ".join(map(repr, get_args(Method)))
            raise ValueError(f"method must be one of {allowed}, got {self.method!r}")
        for name in ("table_lr", "body_lr", "clip_norm"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be finite and > 0, got {value}")
        for name in ("steps", "batch", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A trained model and what its training took."""

    model: LanguageModel
    losses: list[float]
    step_seconds: float
    update_seconds: float
    table_state_bytes: int
    state_bytes: int


class DivergedError(ArithmeticError):
    """The loss stopped being a finite number."""


def train(
    corpus: Corpus,
    model_settings: ModelSettings,
    settings: TrainSettings,
    *,
    on_step: Callable[[int, float], None] | None = None,
) -> Run:
    """A model trained on `corpus.train`; `on_step(step, loss)` is called after every update."""
    with torch.random.fork_rng(devices=[]):  # leaves the caller's random numbers alone
        torch.manual_seed(settings.seed)
        model = LanguageModel(len(corpus.vocabulary), model_settings)
    negatives = torch.Generator().manual_seed(settings.seed)
    optimizers = build_optimizers(model, settings)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / settings.steps)
        for optimizer in optimizers
    ]
    losses, step_seconds, update_seconds = [], [], []
    state: State | None = None
    passes = chain.from_iterable(
        segments(corpus.train, batch=settings.batch, length=settings.length) for _ in repeat(None)
    )
    for step, (words, labels) in zip(range(settings.steps), passes, strict=False):
        step_start = time.perf_counter()
        # the state outlives the end of a pass: one wrong context in thousands of steps
        hidden, state = model(words, state)
        state = detached(state)
        loss = model.softmax(hidden, labels, generator=negatives)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        # the tables need no clipping: their second moment bounds the updates
        nn.utils.clip_grad_norm_(model.named_body().values(), settings.clip_norm)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise DivergedError(
                f"loss became {losses[-1]} at step {step + 1} of method {settings.method!r}; "
                f"lower table_lr = {settings.table_lr}"
            )
        update_start = time.perf_counter()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        end = time.perf_counter()
        step_seconds.append(end - step_start)
        update_seconds.append(end - update_start)
        if on_step is not None:
            on_step(step + 1, losses[-1])
    state_bytes = {
        parameter.name: parameter.state_bytes
        for optimizer in optimizers
        for parameter in so.memory_report(optimizer).parameters
    }
    return Run(
        model=model,
        losses=losses,
        step_seconds=statistics.median(step_seconds),
        update_seconds=statistics.median(update_seconds),
        table_state_bytes=sum(state_bytes[name] for name in model.named_tables()),
        state_bytes=sum(state_bytes.values()),
    )


def build_optimizers(model: LanguageModel, settings: TrainSettings) -> list[Optimizer]:
    """The optimizers of one method: one for the whole model unless the tables use Adagrad."""
    tables = {"params": list(model.named_tables().items()), "lr": settings.table_lr}
    body = {"params": list(model.named_body().items()), "lr": settings.body_lr}
    if settings.method.startswith("adagrad-"):
        memory = settings.method.removeprefix("adagrad-")
        return [so.Adagrad([tables], memory=memory), so.Adam([body], memory="exact")]
    return [so.Adam([tables, body], memory=settings.method)]


@torch.no_grad()
def perplexity(model: LanguageModel, ids: Tensor, *, words: int | None = None) -> float:
    """exp of the mean full-softmax loss over the first `words` words of a text, all if None."""
    state: State | None = None
    total, count = 0.0, 0
    for inputs, labels in segments(ids[:words], batch=16, length=64):
        hidden, state = model(inputs, state)
        total += model.softmax.full_loss(hidden, labels, reduction="sum").item()
        count += labels.numel()
    return math.exp(min(total / count, 700.0))  # a diverged model is bad, not an OverflowError
