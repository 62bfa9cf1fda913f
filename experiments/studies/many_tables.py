"""Steps over many tables, where Python is most of a step, and whole steps of embedding bags.

    python -m experiments.studies.many_tables
    ATEN_CPU_CAPABILITY=avx2 python -m experiments.studies.many_tables --threads 2

Prints, for 1, 26 and 200 small tables, the microseconds of a step of so.AdamW (lean) along sparse
and along dense gradients, beside torch's SparseAdam and its foreach and fused AdamW. Then the
milliseconds of a whole step (forward, backward, update) of 26 tables with the sizes of Criteo's, in
nn.EmbeddingBags with deferred and with sparse gradients, and in FBGEMM's row-wise Adagrad if it is
installed. Methods take turns in one process; each number is the least of many.
"""

import argparse
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

import sketchoptim as so
from experiments.bench.cases import TablesShape, criteo_tables
from experiments.bench.fbgemm import absence_reason, fbgemm_tables
from experiments.bench.gradients import TYPICAL_GRADIENT, WordFrequencies
from experiments.machine import machine_facts

_ROWS, _DIM, _IDS, _DENSE_ROWS = 1_000, 16, 8, 16
_LARGE = TablesShape(rows=(1_000_000,), dim=128, batch=40_000)


def small_tables(count: int, *, is_sparse: bool) -> list[nn.Parameter]:
    """Tables with gradients: of eight rows, some of them twice, or dense."""
    tables = []
    for _ in range(count):
        table = nn.Parameter(torch.randn(_ROWS if is_sparse else _DENSE_ROWS, _DIM))
        table.grad = torch.randn_like(table)
        if is_sparse:
            ids = torch.randint(0, _ROWS, (1, _IDS))
            rows = torch.randn(_IDS, _DIM)
            table.grad = torch.sparse_coo_tensor(ids, rows, table.shape, check_invariants=False)
        tables.append(table)
    return tables


def small_steps(count: int) -> dict[str, Callable[[], object]]:
    """A step of each method over so many small tables."""

    def dense() -> list[nn.Parameter]:
        return small_tables(count, is_sparse=False)

    lean = {"params": dense(), "memory": "lean-0.1"}
    return {
        "lean, sparse": so.AdamW(small_tables(count, is_sparse=True), memory="lean-0.1").step,
        "SparseAdam": torch.optim.SparseAdam(small_tables(count, is_sparse=True)).step,
        "lean, dense": so.AdamW([lean]).step,
        "foreach AdamW": torch.optim.AdamW(dense(), foreach=True).step,
        "fused AdamW": torch.optim.AdamW(dense(), fused=True).step,
    }


def bag_steps(shape: TablesShape, ids_a_bag: int) -> dict[str, Callable[[], object]]:
    """A whole step of each method over tables of a shape, on the same batches."""
    frequencies = WordFrequencies.zipf(rows=max(shape.rows))
    generator = np.random.default_rng(0)
    batches = [
        torch.cat(
            [frequencies.tokens(rows, shape.batch * ids_a_bag, generator) for rows in shape.rows]
        )
        for _ in range(3)
    ]
    offsets = torch.arange(shape.batch * len(shape.rows) + 1) * ids_a_bag
    gradient = torch.randn(shape.batch, shape.dim * len(shape.rows)) * TYPICAL_GRADIENT
    steps: dict[str, Callable[[], object]] = {}

    def ours(*, deferred: bool) -> Callable[[], object]:
        tables = {f"table_{number}": (rows, shape.dim) for number, rows in enumerate(shape.rows)}
        bags = so.nn.EmbeddingBags(tables, deferred=deferred)
        optimizer = so.Adam(bags.parameters(), memory="lean-0.1")
        turns = _turns(batches)

        def step() -> None:
            bags(next(turns), offsets).backward(gradient)
            optimizer.step()
            optimizer.zero_grad()

        return step

    if absence_reason() is None:
        tables, turns = (
            fbgemm_tables([(it, shape.dim) for it in shape.rows], lr=1e-3),
            _turns(batches),
        )
        steps["FBGEMM"] = lambda: tables(next(turns), offsets).backward(gradient)
    return steps | {"lean, deferred": ours(deferred=True), "lean, sparse": ours(deferred=False)}


def _turns(batches: list[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from batches


def least_seconds(
    steps: dict[str, Callable[[], object]], *, loops: int, repetitions: int
) -> dict[str, float]:
    """The least time of a step of each method, which take turns."""
    # With one thread the time of the processor, which other processes affect less.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    found = {name: float("inf") for name in steps}
    for step in steps.values():
        step()  # makes the state
    for _ in range(repetitions):
        for name, step in steps.items():
            begin = clock()
            for _ in range(loops):
                step()
            found[name] = min(found[name], (clock() - begin) / loops)
    return found


def show(title: str, found: dict[str, float], base: str) -> None:
    print(title)
    for name, seconds in found.items():
        print(f"  {name:<15} {seconds * 1e6:10.1f} us  {seconds / found[base]:.3f} of {base}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(", ".join(f"{name} {fact}" for name, fact in machine_facts().items()))
    for count in (1, 26, 200):
        steps = small_steps(count)
        found = least_seconds(steps, loops=max(2, 200 // count), repetitions=options.repetitions)
        show(f"{count} small tables", found, "foreach AdamW")
    criteo = criteo_tables(1_000_000)
    for shape, ids_a_bag in ((criteo, 1), (criteo, 20), (_LARGE, 1)):
        found = least_seconds(bag_steps(shape, ids_a_bag), loops=1, repetitions=options.repetitions)
        show(f"{shape}, bags of {ids_a_bag}", found, next(iter(found)))


if __name__ == "__main__":
    main()
