"""One process at a time in an output folder."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NAME = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes out of `folder`, which is created where it is missing.

    The operating system holds the lock for the process, so a killed one leaves nothing behind:
    the file stays, the lock does not.

    Raises:
        ValueError: Another process has the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _NAME).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another run is writing to {folder}; wait for it, or name another output folder"
            ) from None
        yield
