"""What is compared: an optimizer for the tables and where its moments live."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

import sketchoptim as so
from sketchoptim.storage import PRESETS


def _sparse_adam(
    groups: list[dict[str, Any]], *, memory: so.Memory | str = "exact", **options: Any
) -> torch.optim.SparseAdam:
    if so.Memory.of(memory) != PRESETS["exact"]:
        raise ValueError(
            'memory must be "exact" with optimizer "sparse-adam", which is torch\'s, '
            f"got {memory!r}"
        )
    return torch.optim.SparseAdam(groups, **options)


OptimizerName = Literal["adam", "rmsprop", "adagrad", "sgd", "sparse-adam"]
_OPTIMIZERS: dict[OptimizerName, Callable[..., torch.optim.Optimizer]] = {
    "adam": so.Adam,
    "rmsprop": so.RMSprop,
    "adagrad": so.Adagrad,
    "sgd": so.SGD,
    "sparse-adam": _sparse_adam,
}
_OPTIONS: dict[OptimizerName, dict[str, Any]] = {"sgd": {"momentum": 0.9}}
# a name becomes a part of a folder's name and an argument of a command
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class Method:
    """How tables are trained.

    Args:
        name: Its name in commands and files: letters, digits, "-", "_" and ".".
        title: Its name in tables; `name` by default.
        optimizer: The optimizer of the tables. "sparse-adam" is torch's; all others are ours.
        memory: A preset or a memory for the tables; "exact" for "sparse-adam".
        options: Further arguments of the tables' optimizer, such as `betas`. "sgd" has
            `momentum=0.9` unless it is given here.

    Example:
        >>> Method.of("adagrad-lean").optimizer
        'adagrad'
    """

    name: str
    title: str = ""
    optimizer: OptimizerName = "adam"
    memory: so.Memory | str = "lean"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                "a method's name must be letters, digits, '-', '_' and '.', the first of them a "
                f"letter or digit, got {self.name!r}"
            )
        object.__setattr__(self, "title", self.title or self.name)
        check_optimizer("optimizer", self.optimizer)
        object.__setattr__(self, "memory", so.Memory.of(self.memory))
        try:
            group = {"params": [torch.zeros(1)]}
            build_optimizer(self.optimizer, [group], memory=self.memory, **self.options)
        except TypeError as error:
            raise ValueError(f"options of method {self.name!r}: {error}") from None

    @classmethod
    def of(cls, choice: "str | Method") -> "Method":
        """The method itself; "sparse-adam"; or a preset, of Adam, or as "<optimizer>-<preset>"."""
        if isinstance(choice, Method):
            return choice
        names = {preset: ("adam", preset) for preset in PRESETS}
        for optimizer in get_args(OptimizerName):
            if optimizer != "sparse-adam":
                names |= {f"{optimizer}-{preset}": (optimizer, preset) for preset in PRESETS}
        names["sparse-adam"] = ("sparse-adam", "exact")
        if choice not in names:
            allowed = ", ".join(map(repr, names))
            raise ValueError(f"method must be one of {allowed}, got {choice!r}")
        found, preset = names[choice]
        return cls(name=choice, optimizer=found, memory=preset)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """The same in dicts, numbers and strings."""
        assert isinstance(self.memory, so.Memory)  # the constructor looked it up
        return {
            "name": self.name,
            "title": self.title,
            "optimizer": self.optimizer,
            "memory": self.memory.to_dict(),
            "options": dict(self.options),
        }


def check_optimizer(name: str, value: str) -> None:
    """Raises ValueError unless `value` is the name of an optimizer."""
    if value not in _OPTIMIZERS:
        raise ValueError(f"{name} must be one of {list(_OPTIMIZERS)}, got {value!r}")


def build_optimizer(
    name: OptimizerName, groups: list[dict[str, Any]], **options: Any
) -> torch.optim.Optimizer:
    """The optimizer of that name over parameter groups."""
    return _OPTIMIZERS[name](groups, **{**_OPTIONS.get(name, {}), **options})
