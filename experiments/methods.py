"""What is compared: an optimizer for the tables and where its moments live."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

import sketchoptim as so
from sketchoptim.storage import PRESETS

Weights = Literal["float32", "bfloat16", "float16"]
OptimizerName = Literal[
    "adam", "adamw", "rmsprop", "adagrad", "sgd", "sparse-adam", "adafactor", "muon",
]  # fmt: skip
_OURS: dict[OptimizerName, Callable[..., torch.optim.Optimizer]] = {
    "adam": so.Adam,
    "adamw": so.AdamW,
    "rmsprop": so.RMSprop,
    "adagrad": so.Adagrad,
    "sgd": so.SGD,
}
_OTHERS: dict[OptimizerName, Callable[..., torch.optim.Optimizer]] = {
    "sparse-adam": torch.optim.SparseAdam,
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,
}
_OPTIONS: dict[OptimizerName, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    # so that the rates and the weight decay of AdamW suit it
    "muon": {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.01},
}
# a name becomes a part of a folder's name and an argument of a command
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class Method:
    """How tables are trained.

    Args:
        name: Its name in commands and files: letters, digits, "-", "_" and ".".
        title: Its name in tables; `name` by default.
        optimizer: The optimizer of the tables. "sparse-adam", "adafactor" and "muon" are torch's;
            all others are the library's.
        memory: A preset or a memory for the tables; "exact" where the optimizer is not the
            library's.
        memories: Other memories for tables whose names begin so.
        options: Further arguments of the tables' optimizer, such as `betas`. "sgd" has
            `momentum=0.9` unless it is given here.
        weights: The dtype of the tables.
        batch: Its own batch, where the saved memory is used for a larger one; 0 takes the
            setting's.
        body_optimizer: Of the dense layers; None takes the setting's.
        body_memory: A preset for the dense layers.

    Example:
        >>> Method.of("adagrad-lean").optimizer
        'adagrad'
    """

    name: str
    title: str = ""
    optimizer: OptimizerName = "adam"
    memory: so.Memory | str = "lean"
    memories: Mapping[str, so.Memory | str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: Weights = "float32"
    batch: int = 0
    body_optimizer: OptimizerName | None = None
    body_memory: str = "exact"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                "a method's name must be letters, digits, '-', '_' and '.', the first of them a "
                f"letter or digit, got {self.name!r}"
            )
        object.__setattr__(self, "title", self.title or self.name)
        check_optimizer("optimizer", self.optimizer)
        if self.body_optimizer is not None:
            check_body_optimizer(self.body_optimizer)
        if self.batch < 0:
            raise ValueError(f"batch must be >= 0, got {self.batch}")
        object.__setattr__(self, "memory", so.Memory.of(self.memory))
        memories = {name: so.Memory.of(memory) for name, memory in self.memories.items()}
        object.__setattr__(self, "memories", memories)
        try:
            for memory in (self.memory, *memories.values()):
                group = {"params": [("table", torch.zeros(1, 1))], "memory": memory}
                build_optimizer(self.optimizer, [group], **self.options)
        except TypeError as error:
            raise ValueError(f"options of method {self.name!r}: {error}") from None

    @classmethod
    def of(cls, choice: "str | Method") -> "Method":
        """The method itself; "sparse-adam"; or a preset, of Adam, or as "<optimizer>-<preset>"."""
        if isinstance(choice, Method):
            return choice
        names = {preset: ("adam", preset) for preset in PRESETS}
        for optimizer in _OURS:
            names |= {f"{optimizer}-{preset}": (optimizer, preset) for preset in PRESETS}
        names["sparse-adam"] = ("sparse-adam", "exact")
        if choice not in names:
            allowed = ", ".join(map(repr, names))
            raise ValueError(f"method must be one of {allowed}, got {choice!r}")
        found, preset = names[choice]
        return cls(name=choice, optimizer=found, memory=preset)  # type: ignore[arg-type]

    def memory_of(self, table: str) -> so.Memory:
        """The memory of a table, by its name."""
        own = (memory for name, memory in self.memories.items() if table.startswith(name))
        return so.Memory.of(next(own, self.memory))

    def to_dict(self) -> dict[str, Any]:
        """The same in dicts, numbers and strings."""
        assert isinstance(self.memory, so.Memory)  # the constructor looked it up
        memories = {name: so.Memory.of(memory).to_dict() for name, memory in self.memories.items()}
        return {
            "name": self.name,
            "title": self.title,
            "optimizer": self.optimizer,
            "memory": self.memory.to_dict(),
            # Only if there are any: a run of an earlier version is continued by its description.
            **({"memories": memories} if memories else {}),
            "options": dict(self.options),
            "weights": self.weights,
            "batch": self.batch,
            "body_optimizer": self.body_optimizer,
            "body_memory": self.body_memory,
        }


def check_optimizer(name: str, value: str) -> None:
    """Raises ValueError unless `value` is the name of an optimizer."""
    if value not in get_args(OptimizerName):
        raise ValueError(f"{name} must be one of {list(get_args(OptimizerName))}, got {value!r}")


def check_body_optimizer(value: str) -> None:
    """Raises ValueError unless `value` is the name of an optimizer for dense layers."""
    check_optimizer("body_optimizer", value)
    if value == "sparse-adam":
        raise ValueError('body_optimizer must take dense gradients, got "sparse-adam"; use "adam"')


def build_optimizer(
    name: OptimizerName,
    groups: list[dict[str, Any]],
    *,
    memory: so.Memory | str = "exact",
    **options: Any,
) -> torch.optim.Optimizer:
    """The optimizer of that name over parameter groups, in `memory` unless a group has its own.

    Dense gradients are compressed too.

    Raises:
        ValueError: It is not one of the library's and `memory` is not "exact".
    """
    options = {**_OPTIONS.get(name, {}), **options}
    groups = [{"memory": memory, **group} for group in groups]
    if name in _OURS:
        return _OURS[name](groups, **options)
    for group in groups:
        kept = group.pop("memory")
        if so.Memory.of(kept) != PRESETS["exact"]:
            raise ValueError(
                f'memory must be "exact" with optimizer "{name}", which is not ours, got {kept!r}'
            )
    return _OTHERS[name](groups, **options)
