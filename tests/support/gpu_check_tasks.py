"""Tasks for the worker of `sketchoptim check gpu`, which imports them in a process of its own."""

import os
import time

from sketchoptim.gpu_check._cases import Finding, Skipped
from sketchoptim.gpu_check._place import Place


def passes(place: Place) -> None:
    pass


def kills_its_process(place: Place) -> None:
    os._exit(7)


def takes_too_long(place: Place) -> None:
    time.sleep(600)


def raises_an_error(place: Place) -> None:
    raise RuntimeError("a | b")


def is_skipped(place: Place) -> None:
    raise Skipped("there is none")


def is_off(place: Place) -> Finding:
    finding = Finding(units=5.0, limit=4.0, is_repeatable=True)
    finding.verify()
    return finding
