"""Warnings that name a line of the user's program."""

import sys
import warnings

_PACKAGES = ("sketchoptim", "torch")


def warn(message: str) -> None:
    """Warns of the line that called, through whatever lies between, what came to warn.

    That is our own calls, and torch's: a hook, a scheduler, a profiler or a compiled step puts
    more of them around `step` than there are without it.
    """
    # What skip_file_prefixes does from Python 3.12 on.
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and _package_of(frame.f_globals) in _PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _package_of(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
