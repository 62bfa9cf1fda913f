"""What a step on four short rows costs, where Python is most of it, and what its caches save.

    python -m experiments.studies.small_steps

Prints the time of a step of so.Adam (lean, and exact) over that of torch.optim.SparseAdam, with
warm and with cold caches, each the median of repetitions that take turns in one process; then the
time to build what a step keeps from the one before: the binding of a parameter to its state and
options, and the validated options of a group. Last, a step of 26 exact matrices of 64 x 64 with
dense gradients, by each of torch's implementations, with so.Adam and with torch.optim.Adam. One
thread.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import sketchoptim as so
from experiments.bench.measure import CacheFlusher
from experiments.machine import machine_facts

_ROWS, _DIM, _IDS = 10_000, 16, [1, 5, 9, 7000]
_MATRICES, _SIZE = 26, 64


def stepper(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """An optimizer that has taken a step, with a gradient for the next one."""
    table = nn.Parameter(torch.zeros(_ROWS, _DIM))
    ids, rows = torch.tensor([_IDS]), torch.ones(len(_IDS), _DIM)
    table.grad = torch.sparse_coo_tensor(ids, rows, table.shape, check_invariants=False)
    optimizer = make([table])
    optimizer.step()
    return optimizer


def dense_step(kind: type[torch.optim.Adam] | type[so.Adam], flag: str) -> Callable[[], object]:
    """A step of exact matrices by one of torch's implementations."""
    matrices = [nn.Parameter(torch.zeros(_SIZE, _SIZE)) for _ in range(_MATRICES)]
    for it in matrices:
        it.grad = torch.ones_like(it)
    optimizer = kind(matrices, foreach=flag == "foreach", fused=flag == "fused")
    optimizer.step()
    return optimizer.step


def seconds(task: Callable[[], object], *, loops: int) -> float:
    """The time of one call of the task."""
    begin = time.perf_counter()
    for _ in range(loops):
        task()
    return (time.perf_counter() - begin) / loops


def medians(
    tasks: dict[str, Callable[[], object]], *, repetitions: int, flusher: CacheFlusher | None
) -> dict[str, float]:
    """The median seconds of each task, which take turns."""
    found: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(repetitions):
        for name, task in tasks.items():
            if flusher is not None:
                flusher.flush_()
            found[name].append(seconds(task, loops=1 if flusher else 500))
    return {name: statistics.median(times) for name, times in found.items()}


def rebind(optimizer: so.Adam) -> Callable[[], object]:
    """A step that has to build its binding again."""

    def task() -> None:
        optimizer._bindings.clear()
        optimizer.step()

    return task


def validate_again(optimizer: so.Adam) -> Callable[[], object]:
    """A step that has to validate the options of its group again."""

    def task() -> None:
        optimizer._validated.clear()
        optimizer.step()

    return task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(", ".join(f"{name} {fact}" for name, fact in machine_facts().items()))
    steppers = {
        "SparseAdam": stepper(torch.optim.SparseAdam),
        "lean": stepper(so.Adam),
        "exact": stepper(lambda tables: so.Adam(tables, memory="exact")),
    }
    steps: dict[str, Callable[[], object]] = {name: it.step for name, it in steppers.items()}
    for caches, flusher in (("warm", None), ("cold", CacheFlusher())):
        found = medians(steps, repetitions=options.repetitions, flusher=flusher)
        for name, time_of_step in found.items():
            ratio = time_of_step / found["SparseAdam"]
            print(f"{caches} {name:<11} {time_of_step * 1e6:8.1f} us  {ratio:.3f}")
    lean = steppers["lean"]
    assert isinstance(lean, so.Adam)
    costs = medians(
        {"kept": lean.step, "binding": rebind(lean), "options": validate_again(lean)},
        repetitions=options.repetitions // 4,
        flusher=None,
    )
    for name in ("binding", "options"):
        print(f"without the kept {name}: {costs[name] / costs['kept']:.1f} times the warm step")
    flags = ("one by one", "foreach", "fused")
    dense = {
        f"{module} {flag}": dense_step(kind, flag)
        for flag in flags
        for module, kind in (("torch", torch.optim.Adam), ("so", so.Adam))
    }
    found = medians(dense, repetitions=options.repetitions // 10, flusher=None)
    for name, time_of_step in found.items():
        print(f"{_MATRICES} matrices, {name:<16} {time_of_step * 1e6:8.1f} us")


if __name__ == "__main__":
    main()
