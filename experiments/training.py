"""The training loop, from top to bottom.

    experiments demo                                        # on Python's own sources
    experiments train wikitext2-adam --small                # on WikiText-2

Every method of a comparison sees the same words in the same order, starts from the same weights
and takes the same number of steps; only the optimizer of the tables differs.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

import sketchoptim as so
from sketchoptim.ops import LARGEST_GRADIENT

from .corpora import Corpus
from .methods import OptimizerName, build_optimizer
from .models import Model, ModelSettings
from .settings import TrainSettings
from .tasks import NextWords, Task


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The quality on validation data after a step, and the time until then."""

    step: int
    seconds: float
    cpu_seconds: float
    quality: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """A trained model, and the time and memory of its training."""

    model: Any
    """The task's model: a `LanguageModel` for `NextWords`."""
    losses: list[float]
    step_seconds: float
    update_seconds: float
    table_state_bytes: int
    state_bytes: int
    evaluations: list[Evaluation]


class DivergedError(ArithmeticError):
    """The loss is not finite, or gradients are too large to continue."""


def train(
    corpus: Corpus,
    model_settings: ModelSettings,
    settings: TrainSettings,
    *,
    on_step: Callable[[int, float], None] | None = None,
) -> Run:
    """A model trained on `corpus.train`; `on_step(step, loss)` is called after every update."""
    training = Training(NextWords(corpus, model_settings), settings)
    for loss in training.steps():
        if on_step is not None:
            on_step(training.step, loss)
    return training.run()


class Training:
    """A model in training, which can be saved and restored between any two steps."""

    def __init__(self, task: Task, settings: TrainSettings) -> None:
        self.task = task
        self.settings = settings
        self.total_steps = settings.steps or settings.epochs * task.batches(
            batch=settings.batch, length=settings.length
        )
        self.random: Tensor | None = None
        with self._own_random_numbers():
            self.model = task.model().to(settings.device)
        for table in self.model.named_tables().values():
            table.data = table.data.to(getattr(torch, settings.resolved_method.weights))
        self.negatives = torch.Generator(settings.device).manual_seed(settings.seed)
        # Any: ours or torch's, and studies put others in their place
        self.optimizers: list[Any] = list(build_optimizers(self.model, settings))
        self.schedulers = [self._scheduler(optimizer) for optimizer in self.optimizers]
        self.state: Any = None
        self.step = 0
        self.losses: list[float] = []
        self.step_seconds: list[float] = []
        self.update_seconds: list[float] = []
        self.cpu_seconds = 0.0
        self.evaluations: list[Evaluation] = []

    @property
    def is_evaluated(self) -> bool:
        """Whether the last step was followed by an evaluation."""
        return bool(self.evaluations) and self.evaluations[-1].step == self.step

    @property
    def rows_a_step(self) -> int:
        """Words or examples of a step."""
        is_text = isinstance(self.task, NextWords)
        return self.settings.batch * (self.settings.length if is_text else 1)

    def steps(self) -> Iterator[float]:
        """Takes all steps, and yields the loss after each."""
        while self.step < self.total_steps:
            with self._own_random_numbers():
                loss = self._step_()
            if self.settings.evaluate_every and self.step % self.settings.evaluate_every == 0:
                self._evaluate_()
            yield loss

    def _step_(self) -> float:
        settings = self.settings
        started, cpu_started = time.perf_counter(), time.process_time()
        inputs, labels = self.task.batch(self.step, batch=settings.batch, length=settings.length)
        inputs, labels = inputs.to(settings.device), labels.to(settings.device)
        # kept at the end of a pass too: one wrong context in thousands of steps
        loss, self.state = self.model.loss(inputs, labels, self.state, generator=self.negatives)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        self._clip_()
        value = loss.item()
        if not math.isfinite(value):
            raise self._diverged(f"loss became {value}")
        update_started = time.perf_counter()
        try:
            for optimizer in self.optimizers:
                optimizer.step()
        except ValueError:
            if all(map(_is_usable, self.model.parameters())):
                raise
            raise self._diverged("gradients became too large") from None
        for scheduler in self.schedulers:
            if isinstance(scheduler, LambdaLR):
                scheduler.step()
        ended = time.perf_counter()
        self.step += 1
        self.losses.append(value)
        self.step_seconds.append(ended - started)
        self.update_seconds.append(ended - update_started)
        self.cpu_seconds += time.process_time() - cpu_started
        return value

    def _diverged(self, what: str) -> "DivergedError":
        return DivergedError(
            f"{what} at step {self.step + 1} of method {self.settings.resolved_method.name!r}; "
            f"lower table_lr = {self.settings.table_lr}"
        )

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Gives torch the random numbers of this training, and then the caller's again."""
        device = torch.device(self.settings.device)
        devices = [] if device.type == "cpu" else [device]
        generator = torch.default_generator
        if devices:
            generator = torch.cuda.default_generators[device.index or 0]
        with torch.random.fork_rng(devices=devices):
            if self.random is None:
                torch.manual_seed(self.settings.seed)
            else:
                generator.set_state(self.random)
            yield
            self.random = generator.get_state()

    def _clip_(self) -> None:
        if self.settings.clip_tables:
            so.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        else:  # the updates of tables are bounded by their second moment
            nn.utils.clip_grad_norm_(self.model.named_body().values(), self.settings.clip_norm)

    def _evaluate_(self) -> None:
        found = self.task.measure(self.model, "valid", limit=self.settings.evaluate_words)
        self.evaluations.append(
            Evaluation(
                step=self.step,
                seconds=sum(self.step_seconds),
                cpu_seconds=self.cpu_seconds,
                quality=found,
            )
        )
        for scheduler in self.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(found)

    def _scheduler(self, optimizer: Optimizer) -> LambdaLR | ReduceLROnPlateau:
        if self.settings.schedule == "plateau":
            return ReduceLROnPlateau(optimizer, factor=0.25, patience=0)
        first = self.settings.warmup * self.total_steps

        def factor(step: int) -> float:
            raised = (step + 1) / first if step + 1 < first else 1.0
            return min(raised, 1 - step / self.total_steps)

        return LambdaLR(optimizer, factor)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of optimizer state by parameter."""
        return {
            name: size
            for optimizer in self.optimizers
            for name, size in _state_bytes(optimizer).items()
        }

    def table_state_bytes(self) -> int:
        """Bytes of the tables' state, which progress lines and summaries report."""
        sizes = self.state_bytes()
        return sum(sizes[name] for name in self.model.named_tables())

    def run(self) -> Run:
        """The model, and the time and memory of its training so far."""
        return Run(
            model=self.model,
            losses=self.losses,
            step_seconds=statistics.median(self.step_seconds),
            update_seconds=statistics.median(self.update_seconds),
            table_state_bytes=self.table_state_bytes(),
            state_bytes=sum(self.state_bytes().values()),
            evaluations=self.evaluations,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next steps depend on, in types that `torch.load` reads by default."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "negatives": self.negatives.get_state(),
            "random": self.random,
            "state": self.state,
            "losses": self.losses,
            "step_seconds": self.step_seconds,
            "update_seconds": self.update_seconds,
            "cpu_seconds": self.cpu_seconds,
            "evaluations": [vars(evaluation) for evaluation in self.evaluations],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restores a `state_dict`, from which the training continues bit for bit."""
        self.model.load_state_dict(saved["model"])
        for kept, states in (
            (self.optimizers, saved["optimizers"]),
            (self.schedulers, saved["schedulers"]),
        ):
            for one, state in zip(kept, states, strict=True):
                one.load_state_dict(state)
        self.negatives.set_state(saved["negatives"])
        for name in ("step", "random", "state", "losses", "step_seconds", "update_seconds"):
            setattr(self, name, saved[name])
        self.cpu_seconds = saved["cpu_seconds"]
        self.evaluations = [Evaluation(**evaluation) for evaluation in saved["evaluations"]]


def _state_bytes(optimizer: Optimizer) -> dict[str, int]:
    if isinstance(optimizer, so.optim.Optimizer):
        return {found.name: found.state_bytes for found in so.memory_report(optimizer).parameters}
    return {  # torch's: arrays of moments, and a number of steps, which takes none
        name: sum(getattr(value, "nbytes", 0) for value in optimizer.state[parameter].values())
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }


def _is_usable(parameter: Tensor) -> bool:
    """Whether all numbers of the gradient are small enough for a compressed moment."""
    if parameter.grad is None:
        return True
    values = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
    return bool((values.abs() <= LARGEST_GRADIENT).all())


def build_optimizers(model: Model, settings: TrainSettings) -> list[Optimizer]:
    """The optimizers of a method, first that of the tables, then those of the body if there is one.

    A method's options are for its tables. Muon is for matrices; AdamW trains what else there is.
    """
    method = settings.resolved_method

    def built(
        name: OptimizerName, parameters: dict[str, nn.Parameter], lr: float, **options: Any
    ) -> list[Optimizer]:
        if not parameters:
            return []
        return [build_optimizer(name, [{"params": list(parameters.items()), "lr": lr}], **options)]

    groups: dict[so.Memory, list[tuple[str, nn.Parameter]]] = {}
    for it in model.named_tables().items():
        groups.setdefault(method.memory_of(it[0]), []).append(it)
    tables = [
        {"params": named, "lr": settings.table_lr, "memory": memory}
        for memory, named in groups.items()
    ]
    optimizers = [build_optimizer(method.optimizer, tables, **method.options)]
    name = method.body_optimizer or settings.body_optimizer
    body, lr, memory = model.named_body(), settings.body_lr, method.body_memory
    if name != "muon":
        return optimizers + built(name, body, lr, memory=memory)
    matrices = model.named_matrices()
    others = {name: weight for name, weight in body.items() if name not in matrices}
    return optimizers + built(name, matrices, lr) + built("adamw", others, lr, memory=memory)
