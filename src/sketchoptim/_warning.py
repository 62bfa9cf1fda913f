"""Warnings that name a line of the user's program."""

import sys
import warnings

_PACKAGES = ("sketchoptim", "torch")


def warn(message: str) -> None:
    """Warns with the line of the user's program that led here.

    Frames of sketchoptim and torch are skipped: hooks, schedulers, profilers and compiled steps put
    a varying number of them around `step`.
    """
    # What skip_file_prefixes does from Python 3.12 on.
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and _package_of(frame.f_globals) in _PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _package_of(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
