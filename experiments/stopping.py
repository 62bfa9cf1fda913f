"""Ctrl-C: a training ends between two steps, so that its checkpoint is whole."""

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Notes the first Ctrl-C or SIGTERM; a second Ctrl-C raises KeyboardInterrupt at once.

    A context manager, which gives the signals back to their former handlers at its end. Outside
    the main thread, where Python delivers no signals, it notes nothing.

    Attributes:
        is_made: Whether a signal has come.
        is_immediate: Raises KeyboardInterrupt on the first signal too, for work between steps
            that changes nothing.
    """

    def __init__(self) -> None:
        self.is_made = False
        self.is_immediate = False
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_repeated, self.is_made = self.is_made, True
        # `reproduce` passes Ctrl-C on as SIGTERM to a run that the terminal has told already
        if is_repeated and number == signal.SIGTERM:
            return
        if is_repeated or self.is_immediate:
            raise KeyboardInterrupt
