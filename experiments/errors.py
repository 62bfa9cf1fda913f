"""Errors that the user can fix, as one line instead of a traceback."""

import sys
from collections.abc import Callable

_OURS = {"experiments", "sketchoptim"}


class StoppedError(Exception):
    """A training stopped because the user asked for it; its checkpoint is saved."""


def user_message(error: BaseException) -> str | None:
    """One line for the user, or None for an error that is a mistake in the program."""
    if isinstance(error, BrokenPipeError):  # the reader of our output has left; no message helps
        return None
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        if package in _OURS:
            return None
        return f"the package {package} is not installed; run: pip install {package}"
    if isinstance(error, OSError | ValueError):
        return " ".join(str(error).split())
    return None


def run_study(main: Callable[[], None]) -> None:
    """Runs the program of a study; errors that the user can fix end it with one line."""
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        message = user_message(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)
