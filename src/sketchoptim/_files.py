"""Files that are replaced as a whole: after a crash the old content is there, or the new."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch


def save_checkpoint(content: Any, path: str | os.PathLike[str]) -> None:
    """Replaces the file at `path` by what `torch.save` writes, so that no crash leaves half of it.

    `torch.save` empties its file before it writes: killed at that moment, it has destroyed the
    checkpoint before it. This function writes to another file in the same folder, waits until the
    disk has it, and then gives it the name. The folder needs space for both files.

    Example:
        >>> import tempfile, torch
        >>> folder = tempfile.TemporaryDirectory()
        >>> save_checkpoint({"step": 3}, f"{folder.name}/checkpoint.pt")
        >>> torch.load(f"{folder.name}/checkpoint.pt")
        {'step': 3}
        >>> folder.cleanup()
    """
    replace_file(Path(path), lambda file: torch.save(content, file))


def replace_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replaces the file at `path` at once: a reader gets the old content or all of the new."""
    path = path.resolve()  # a symbolic link stays one
    scratch = path.with_name(f".{path.name}.new")  # one that a kill leaves is overwritten later
    with scratch.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Returns once the disk has the names of the files in a folder."""
    if sys.platform == "win32":
        return  # it has no handle of a folder to wait for
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
