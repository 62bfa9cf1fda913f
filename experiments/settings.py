"""How one model is trained: the settings of the training loop."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .methods import Method, OptimizerName, check_body_optimizer

Schedule = Literal["linear", "plateau"]


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How one model is trained.

    Args:
        method: of the tables: a `Method`, or a name for `Method.of`.
        table_lr: first learning rate of the tables.
        body_lr: first learning rate of the dense layers.
        body_optimizer: of the dense layers, with exact moments, in all methods.
        schedule: "linear" lowers the learning rates to zero in equal steps; "plateau" divides them
            by 4 whenever an evaluation is not better than all before it.
        warmup: share of the steps in which "linear" first raises the learning rates from zero.
        steps: updates; or
        epochs: passes over the training text.
        batch: parallel streams of text.
        length: words of each stream in a step.
        clip_norm: largest gradient norm of the dense layers,
        clip_tables: or of all parameters together.
        evaluate_every: steps between evaluations on the validation text; 0 for none.
        evaluate_words: words of the validation text that an evaluation takes.
        seed: of the weights, of dropout and of the negatives.
        device: where the model is.
    """

    method: Method | str = "lean"
    table_lr: float
    body_lr: float = 3e-3
    body_optimizer: OptimizerName = "adam"
    schedule: Schedule = "linear"
    warmup: float = 0.0
    steps: int = 0
    epochs: int = 0
    batch: int = 32
    length: int = 35
    clip_norm: float = 1.0
    clip_tables: bool = False
    evaluate_every: int = 0
    evaluate_words: int = 10_000
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", Method.of(self.method))
        check_body_optimizer(self.body_optimizer)
        _check_device(self.device)
        if self.schedule not in ("linear", "plateau"):
            raise ValueError(f'schedule must be "linear" or "plateau", got {self.schedule!r}')
        if self.schedule == "plateau" and not self.evaluate_every:
            raise ValueError('schedule="plateau" needs evaluate_every, got 0')
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be in [0, 1), got {self.warmup}")
        if self.warmup and self.schedule != "linear":
            raise ValueError(f'warmup must be 0 with schedule="plateau", got {self.warmup}')
        for name in ("table_lr", "body_lr", "clip_norm"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be finite and > 0, got {value}")
        if (self.steps > 0) == (self.epochs > 0):
            raise ValueError(
                f"steps must be >= 1, or epochs instead, got steps={self.steps}, "
                f"epochs={self.epochs}"
            )
        for name in ("batch", "length", "evaluate_words"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("steps", "epochs", "evaluate_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")

    def to_dict(self) -> dict[str, Any]:
        """The same in dicts, numbers and strings."""
        return {**vars(self), "method": self.resolved_method.to_dict()}

    @property
    def resolved_method(self) -> Method:
        """The method, also where it was given by name."""
        assert isinstance(self.method, Method)
        return self.method


def _check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(
            f"device must be one that torch finds, got {name!r}; it finds {count} GPUs"
        )
