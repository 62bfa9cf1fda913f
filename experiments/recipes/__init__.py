"""Recipes: the data, model, training and methods of an experiment, in one or two sizes.

A recipe is a TOML file: one of this folder, by its name, or the path of your own.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

from sketchoptim._parsing import check_table, parse_table
from sketchoptim.storage import Memory

from ..classifier import ClassifierSettings
from ..data import DataSettings
from ..methods import Method
from ..models import ModelSettings
from ..recommender import RecommenderSettings
from ..settings import TrainSettings
from ..tasks import ClassOfText, ClassOfView, ItemsOfUser, NextWords, Task
from ..text_classifier import TextClassifierSettings
from ..transformer import TransformerSettings

Size = Literal["full", "small"]

ModelKind = Literal["lstm", "transformer"]
# The data decide what is learnt; for all other kinds that is the next word, and the model's `kind`
# says by which of these.
_LANGUAGE_MODELS: dict[ModelKind, type] = {
    "lstm": ModelSettings,
    "transformer": TransformerSettings,
}
_MODELS: dict[str, type] = {
    "vectors": ClassifierSettings,
    "token-vectors": ClassifierSettings,
    "labelled": TextClassifierSettings,
    "interactions": RecommenderSettings,
}


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """Learning rates to try, in ascending order; a single one is used as it is.

    Args:
        table_lr: Of the tables, tried first; the grid grows while its best rate is at an end.
            Empty keeps the rate of `train`.
        body_lr: Of the dense layers, tried at the best rate of the tables; empty likewise.
    """

    table_lr: tuple[float, ...] = ()
    body_lr: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One size of an experiment.

    Args:
        about: What this size is, in words.
        model, train, sweep: Its settings.
        data: Replaces the recipe's data.
        seeds: Each is trained at the best learning rates, which are found with the first.
        test_words: Words, or examples, of the test and of the validation data that quality is
            measured on at the end; 0 where only memory and speed matter.
        log_every: Steps between lines of the log.
    """

    about: str
    model: (
        ModelSettings
        | TransformerSettings
        | ClassifierSettings
        | TextClassifierSettings
        | RecommenderSettings
    )
    train: TrainSettings
    data: DataSettings
    sweep: SweepSettings = SweepSettings()
    seeds: tuple[int, ...] = (0, 1, 2)
    test_words: int = 1_000_000_000
    log_every: int = 10

    def __post_init__(self) -> None:
        if not self.seeds:
            raise ValueError("seeds must be at least one, got none")
        if self.log_every < 1:
            raise ValueError(f"log_every must be >= 1, got {self.log_every}")

    def task(self, path: Path | None = None) -> Task:
        """The task of this size, on the data at `path` or below the data folder."""
        if isinstance(self.model, ClassifierSettings):
            return ClassOfView(self.data.views(path), self.model)
        if isinstance(self.model, TextClassifierSettings):
            return ClassOfText(self.data.labelled(path), self.model)
        if isinstance(self.model, RecommenderSettings):
            return ItemsOfUser(self.data.interactions(path), self.model)
        return NextWords(self.data.read(path), self.model)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A method of a recipe, with the paper's numbers.

    Args:
        method: How the tables are trained.
        paper: What the paper reports, by name.
        sweeps: Its own rates to try, by size.
        own: What the method is in a size where its memory or its batch is another.
    """

    method: Method
    paper: Mapping[str, float] = field(default_factory=dict)
    sweeps: Mapping[Size, SweepSettings] = field(default_factory=dict)
    own: Mapping[Size, Method] = field(default_factory=dict)

    def method_in(self, size: Size) -> Method:
        """The method as it is in that size."""
        return self.own.get(size, self.method)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An experiment.

    Args:
        name: Of its file.
        title: For headings.
        reference: What in the paper it reproduces.
        metric: The name of the measure of quality; lower is better.
        sizes: Its settings, "full" as in the paper and "small".
        contestants: What is compared, by name; the first is the baseline.
    """

    name: str
    title: str
    reference: str
    metric: str = "perplexity"
    sizes: Mapping[Size, Setting]
    contestants: Mapping[str, Contestant]

    def select(self, names: list[str] | None) -> list[Contestant]:
        """The contestants of these names, all for None."""
        for name in names or []:
            if name not in self.contestants:
                allowed = ", ".join(self.contestants)
                raise ValueError(f"method must be one of {allowed}, got {name!r}")
        return [self.contestants[name] for name in names or self.contestants]

    def sweep(self, contestant: Contestant, size: Size) -> SweepSettings:
        """The rates to try for a contestant: its own, else those of the setting."""
        common = self.sizes[size].sweep
        own = contestant.sweeps.get(size, SweepSettings())
        return SweepSettings(
            table_lr=own.table_lr or common.table_lr, body_lr=own.body_lr or common.body_lr
        )


def recipe_names() -> list[str]:
    """The names of the recipes that come with the package."""
    return sorted(file.name.removesuffix(".toml") for file in _packaged() if file.is_file())


def load_recipe(name: str) -> Recipe:
    """The recipe of that name, or at that path when it ends in .toml."""
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise FileNotFoundError(f"no recipe at {path}; write one, or name one of the package's")
        return parse_recipe(path.stem, path.read_text(encoding="utf-8"))
    if name not in recipe_names():
        allowed = ", ".join(recipe_names())
        raise ValueError(f"recipe must be a .toml file or one of {allowed}, got {name!r}")
    text = (files(__package__) / f"{name}.toml").read_text(encoding="utf-8")
    return parse_recipe(name, text)


def parse_recipe(name: str, text: str) -> Recipe:
    """The recipe that a TOML text describes."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"recipe {name} is not TOML: {error}") from None
    data, methods = (
        check_table(table.pop(key, {}), where=f"{name}: {key}") for key in ("data", "methods")
    )
    sizes = {
        size: _setting(table.pop(size), data, where=f"{name}: {size}")
        for size in ("full", "small")
        if size in table
    }
    if not sizes:
        raise ValueError(f"{name}: needs a table [small] or [full]")
    if not methods:
        raise ValueError(f"{name}: needs a table [methods.<name>] for each method")
    contestants = {
        key: _contestant(key, value, where=f"{name}: methods.{key}")
        for key, value in methods.items()
    }
    return parse_table(Recipe, table, where=name, name=name, sizes=sizes, contestants=contestants)


def _setting(table: object, common: Mapping[str, Any], *, where: str) -> Setting:
    rest = dict(check_table(table, where=where))
    own = check_table(rest.pop("data", {}), where=f"{where}.data")
    data = parse_table(DataSettings, {**common, **own}, where=f"{where}.data")
    model = dict(check_table(rest.pop("model", {}), where=f"{where}.model"))
    kinds: dict[str, type] = {
        "model": _MODELS.get(data.kind) or _language_model(model, where=f"{where}.model"),
        "train": TrainSettings,
        "sweep": SweepSettings,
    }
    rest["model"] = model
    parts: dict[str, Any] = {
        key: parse_table(kind, rest.pop(key, {}), where=f"{where}.{key}")
        for key, kind in kinds.items()
    }
    return parse_table(Setting, rest, where=where, data=data, **parts)


def _language_model(table: dict[str, Any], *, where: str) -> type:
    """The settings of the kind that the table names; the kind is taken out of it."""
    kind = table.pop("kind", "lstm")
    if kind not in _LANGUAGE_MODELS:
        raise ValueError(f"{where}.kind must be one of {list(_LANGUAGE_MODELS)}, got {kind!r}")
    return _LANGUAGE_MODELS[kind]


def _contestant(name: str, table: object, *, where: str) -> Contestant:
    rest = dict(check_table(table, where=where))
    paper = check_table(rest.pop("paper", {}), where=f"{where}.paper")
    for key, value in paper.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{where}.paper.{key} must be a number, got {value!r}")
    by_size = {
        size: dict(check_table(rest.pop(size), where=f"{where}.{size}"))
        for size in get_args(Size)
        if size in rest
    }
    options = check_table(rest.pop("options", {}), where=f"{where}.options")
    memory = _memory(rest.pop("memory", "lean"), where=f"{where}.memory")
    method = parse_table(Method, rest, where=where, name=name, memory=memory, options=options)
    own: dict[Size, Method] = {}
    for size, table in by_size.items():
        changes = {key: table.pop(key) for key in ("memory", "batch") if key in table}
        if "memory" in changes:
            changes["memory"] = _memory(changes["memory"], where=f"{where}.{size}.memory")
        if changes:
            own[size] = replace(method, **changes)
    sweeps = {
        size: parse_table(SweepSettings, table, where=f"{where}.{size}")
        for size, table in by_size.items()
    }
    return Contestant(method=method, paper=paper, sweeps=sweeps, own=own)


def _memory(table: Any, *, where: str) -> Memory:
    """A memory from a preset's name or from its storages, each a table with a `kind`."""
    try:
        return Memory.of(table) if isinstance(table, str) else Memory.from_dict(table)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def _packaged() -> list[Any]:
    return [file for file in files(__package__).iterdir() if file.name.endswith(".toml")]
