"""Locks that are free in a forked process, whatever other threads did when it was forked."""

import os
import threading
import weakref

_LOCKS: "list[weakref.ref[threading.RLock]]" = []
_FORKING = threading.Lock()
_held: "list[threading.RLock]" = []
"""The locks that the fork under way has taken."""


def fork_safe_lock() -> "threading.RLock":
    """A reentrant lock that a fork waits for.

    A fork copies one thread only. A lock that another thread held would stay locked in the copy for
    ever, and what it protects would be half changed.
    """
    lock = threading.RLock()
    _LOCKS.append(weakref.ref(lock, _LOCKS.remove))
    return lock


def _before_fork() -> None:
    _FORKING.acquire()
    while fresh := [it for ref in list(_LOCKS) if (it := ref()) is not None and it not in _held]:
        for lock in fresh:
            lock.acquire()
            _held.append(lock)


def _after_fork() -> None:
    while _held:
        _held.pop().release()
    _FORKING.release()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )
