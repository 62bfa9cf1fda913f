"""A training saved so that a kill at any moment loses the steps since the last save, no more."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from ..diagnostics._inspection import read_checkpoint
from ..optim._checkpoint import differences
from .train import Training

_WRITING = 0.02  # share of the time


class MismatchError(ValueError):
    """A folder holds a run with other settings."""


def save_checkpoint(path: Path, training: Training, *, about: dict[str, Any]) -> None:
    """Writes the training to `path`; `about` says what it is, and is compared when loading."""
    content = {"about": json.dumps(about, sort_keys=True), "training": training.state_dict()}
    replace_file(path, lambda file: torch.save(content, file))


class TimedCheckpoints:
    """A training's checkpoint, written again every so many seconds.

    Args:
        path: Its file.
        about: What the training is.
        seconds: To the first checkpoint, and from one to the next; infinite for none. From the
            first on, whose writing shows how long it takes, more where that would be over 2 % of
            the time.
    """

    def __init__(self, path: Path, *, about: dict[str, Any], seconds: float) -> None:
        self.path, self.about, self.seconds = path, about, seconds
        self._due = time.monotonic() + seconds

    def save_if_due(self, training: Training) -> None:
        """Writes the checkpoint, if its time has come."""
        started = time.monotonic()
        if started < self._due:
            return
        save_checkpoint(self.path, training, about=self.about)
        ended = time.monotonic()
        self._due = ended + max(self.seconds, (ended - started) / _WRITING)


def load_checkpoint(path: Path, training: Training, *, about: dict[str, Any]) -> None:
    """Goes on with the training from `path`, if that was made by the same settings."""
    content = read_checkpoint(path, device=training.settings.device)
    if not isinstance(content, dict) or not isinstance(content.get("about"), str):
        raise ValueError(f"{path} must be the checkpoint of a run; remove it")
    check_same(path, json.loads(content["about"]), about)
    training.load_state_dict(content["training"])


def check_same(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises, naming what differs, where a file was made by other settings."""
    wanted = json.loads(json.dumps(wanted))  # tuples become lists, as in the file
    different = [
        f"{name} = {there!r}, now {here!r}"
        for name, (there, here) in differences(found, wanted).items()
    ]
    if different:
        raise MismatchError(
            f"{path} was made with {'; '.join(different)}; "
            "name another output folder, or remove this one"
        )


def replace_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Puts a whole new file in the place of `path`: whoever reads sees the old or the new one."""
    scratch = path.with_name(f".{path.name}.new")  # what a kill leaves is written over next time
    with scratch.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def write_json(path: Path, content: object) -> None:
    """Puts `content` into `path` as JSON, all of it or nothing."""
    text = json.dumps(content, indent=2) + "\n"
    replace_file(path, lambda file: file.write(text.encode()))


def read_json(path: Path) -> Any:
    """What a JSON file holds."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; remove it") from None
