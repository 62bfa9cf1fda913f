"""Diagnoses during training, written to a log at regular intervals."""

from collections.abc import Callable
from typing import Any, Protocol

from torch.utils.hooks import RemovableHandle

from .._validation import check_positive_int
from ..optim.base import Optimizer
from ._diagnose import Diagnosis, diagnose

Log = Callable[[str, float, int], object]


class ScalarWriter(Protocol):
    """The method of TensorBoard's SummaryWriter that `watch` uses."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Writes one number."""


def watch(optimizer: Optimizer, log: Log | ScalarWriter, *, every: int = 500) -> RemovableHandle:
    """Logs a diagnosis after every `every` steps, until the returned handle is removed.

    Each number becomes one call ``log(name, value, step)``, where the name is like
    ``embedding.weight/second/relative_error``, or ``log.add_scalar(name, value, step)`` of a
    TensorBoard ``SummaryWriter``. Steps are counted from the optimizer's first step. Training
    does not change: a watched run has the same bits as an unwatched one
    (`tests/diagnostics/test_watch.py::test_watching_changes_no_bit`).

    Args:
        optimizer: One of ours.
        log: A function, or a SummaryWriter.
        every: Steps between two diagnoses.

    >>> table = torch.nn.Embedding(10_000, 8, sparse=True)
    >>> optimizer = so.Adam([("table", table.weight)])
    >>> seen = {}
    >>> handle = watch(optimizer, lambda name, value, step: seen.update({name: value}), every=1)
    >>> table(torch.arange(832)).sum().backward()
    >>> optimizer.step()
    >>> seen["table/second/load"]
    2.0
    >>> handle.remove()
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be one of sketchoptim's, got {type(optimizer).__name__}")
    check_positive_int("every", every)
    write: Any = getattr(log, "add_scalar", log)
    if not callable(write):
        raise TypeError(f"log must be callable or have add_scalar, got {log!r}")
    # Reading optimizer.state[parameter] leaves an empty state behind.
    steps = (int(state["step"]) for state in optimizer.state.values() if state)
    step = max(steps, default=0)
    last: Diagnosis | None = None

    def after_step(optimizer: Any, *_: object) -> None:
        nonlocal step, last
        step += 1
        if step % every == 0:
            last = diagnose(optimizer, since=last)
            for found in last.findings:
                for name, value in found.scalars().items():
                    write(f"{found.parameter}/{found.quantity}/{name}", value, step)

    return optimizer.register_step_post_hook(after_step)
