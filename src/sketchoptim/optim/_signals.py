"""Signals that wait until a step is whole."""

import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

# Those whose handlers people write in Python. Reading all signals takes as long as a small step.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
_NUMBERS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))

_Handler = Callable[[int, FrameType | None], Any]


class SignalsWait:
    """Within, the usual signals wait if their handlers are in Python; afterwards they are handled.

    Such a handler may raise, as Ctrl-C does, between any two lines of Python. Python runs handlers
    in the main thread alone, so other threads need no care. One C call needs none either: Python
    runs no handler within it.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, _Handler] = {}
        self._arrived: list[tuple[int, FrameType | None]] = []
        self._is_over = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in _NUMBERS:
                    # Its namesake in `signal` makes an enum of what it finds, which takes longer.
                    handler = _signal.getsignal(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        _signal.signal(number, self._receive)
            except BaseException:  # a signal that came before its turn
                self._restore_()
                raise
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._is_over:  # one that could not be restored, because another one raised meanwhile
            self._handlers[number](number, frame)
        else:
            self._arrived.append((number, frame))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore_()
        for number, frame in self._arrived:
            self._handlers[number](number, frame)

    def _restore_(self) -> None:
        self._is_over = True
        for number, handler in self._handlers.items():
            _signal.signal(number, handler)
