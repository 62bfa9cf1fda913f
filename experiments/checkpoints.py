"""Checkpoints of a training: a kill at any moment loses the steps since the last one, no more."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sketchoptim as so
from sketchoptim._files import replace_file
from sketchoptim.diagnostics._inspection import read_checkpoint

from .training import Training

_WRITING_SHARE = 0.02  # of the time


class MismatchError(ValueError):
    """A folder has a run with other settings in it."""


def save_checkpoint(path: Path, training: Training, *, about: dict[str, Any]) -> None:
    """Writes the training to `path`, with `about`, which `load_checkpoint` compares."""
    content = {"about": json.dumps(about, sort_keys=True), "training": training.state_dict()}
    so.save_checkpoint(content, path)


class TimedCheckpoints:
    """The checkpoint of a training, replaced every `seconds`.

    Args:
        path: Its file.
        about: The settings of the run, as `about_run` gives them.
        seconds: The interval; infinite for no checkpoints. After the first checkpoint, whose
            writing is timed, the interval is longer where writing would take over 2 % of the time.
    """

    def __init__(self, path: Path, *, about: dict[str, Any], seconds: float) -> None:
        self.path, self.about, self.seconds = path, about, seconds
        self._due = time.monotonic() + seconds

    def save_if_due(self, training: Training) -> None:
        """Writes the checkpoint, if it is due."""
        if time.monotonic() >= self._due:
            self.save(training)

    def save(self, training: Training) -> None:
        """Writes the checkpoint now."""
        started = time.monotonic()
        save_checkpoint(self.path, training, about=self.about)
        ended = time.monotonic()
        self._due = ended + max(self.seconds, (ended - started) / _WRITING_SHARE)


def load_checkpoint(path: Path, training: Training, *, about: dict[str, Any]) -> None:
    """Restores the training from `path`, if its settings are the same."""
    content = read_checkpoint(path, device=training.settings.device)
    if not isinstance(content, dict) or not isinstance(content.get("about"), str):
        raise ValueError(f"{path} must be the checkpoint of a run; remove it")
    check_same(path, json.loads(content["about"]), about)
    training.load_state_dict(content["training"])


def check_same(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises an error that names what differs, where a file has other settings."""
    wanted = json.loads(json.dumps(wanted))  # tuples become lists, as in the file
    different = [
        f"{name} = {there!r}, now {here!r}" for name, there, here in _differences(found, wanted)
    ]
    if different:
        raise MismatchError(
            f"{path} was made with {'; '.join(different)}; "
            "name another output folder, or remove this one"
        )


def _differences(
    one: dict[str, Any], other: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Dotted name and both values of all that differs in two nested dicts."""
    for key in sorted(one.keys() | other.keys()):
        left, right = one.get(key), other.get(key)
        if not (isinstance(left, dict) and isinstance(right, dict)):
            if left != right:
                yield f"{prefix}{key}", left, right
        elif left.get("kind") != right.get("kind"):  # whose other keys cannot be compared
            yield f"{prefix}{key}.kind", left.get("kind"), right.get("kind")
        else:
            yield from _differences(left, right, f"{prefix}{key}.")


def write_json(path: Path, content: object) -> None:
    """Replaces the file at `path` by `content` as JSON."""
    text = json.dumps(content, indent=2) + "\n"
    replace_file(path, lambda file: file.write(text.encode()))


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; remove it") from None
