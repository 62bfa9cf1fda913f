"""A program: steps on tensors whose memory was freed with ``untyped_storage().resize_(0)``.

Prints one line of JSON for each case: what was freed, of which memory, the error of the step, and
what changed. It runs in a process of its own, since code that reads freed memory may end it.
"""

import json
from collections.abc import Iterator
from typing import NamedTuple

import torch
from gradients import sparse
from tiny_runs import bits, differences
from torch import Tensor, nn

import sketchoptim as so

ROWS, DIM = 40, 4
MEMORIES = ("lean-0.1", "row-wise", "paper-mv", "rank-one", "exact")


class Stepped(NamedTuple):
    """Two tables, each in a group of its own, after two steps and with gradients for a third."""

    bystander: nn.Parameter
    table: nn.Parameter
    optimizer: so.optim.base.Optimizer


def stepped(kind: type, memory: str, *, is_sparse: bool, **options) -> Stepped:
    torch.manual_seed(0)
    tables = [nn.Parameter(torch.randn(ROWS, DIM)) for _ in range(2)]
    groups = [{"params": [table], "memory": memory} for table in tables]
    optimizer = kind(groups, lr=0.1, **options)
    for step in range(3):
        for table in tables:
            rows = torch.randn(5, DIM)
            ids = torch.tensor([1, 3, 8, 8, 20])
            table.grad = sparse(ids, rows, table.shape) if is_sparse else torch.randn(ROWS, DIM)
        if step < 2:
            optimizer.step()
    return Stepped(*tables, optimizer)


def moment_keys(run: Stepped) -> list[str]:
    state = run.optimizer.state[run.table]
    names = ("step", "first_", "second_")
    return [key for key, it in state.items() if key.startswith(names) and isinstance(it, Tensor)]


def outcome(run: Stepped, freed: Tensor) -> dict[str, object]:
    named = [("bystander", run.bystander), ("table", run.table)]
    # What is freed has no bits to compare.
    lost = {
        name
        for name, it in bits_without_copies(run).items()
        if it.untyped_storage().data_ptr() == freed.untyped_storage().data_ptr()
    }
    before = bits(run.optimizer, named)
    freed.untyped_storage().resize_(0)
    try:
        run.optimizer.step()
        error, message = "nothing", ""
    except Exception as caught:  # whatever it is, it is to be reported
        error, message = type(caught).__name__, str(caught)
    for name in lost:  # empty ones in place of the freed, which nothing can read
        replace(run, name)
    after = bits(run.optimizer, named)
    changed = sorted({*differences(before, after)} - lost)
    return {"error": error, "message": message, "changed": changed}


def bits_without_copies(run: Stepped) -> dict[str, Tensor]:
    found = {"table": run.table.data}
    for key, value in run.optimizer.state[run.table].items():
        if isinstance(value, Tensor):
            found[f"table: {key}"] = value
    return found


def replace(run: Stepped, name: str) -> None:
    if name == "table":
        run.table.data = torch.zeros(ROWS, DIM)
    else:
        run.optimizer.state[run.table][name.removeprefix("table: ")] = torch.zeros(())


def cases() -> Iterator[tuple[str, Stepped, Tensor]]:
    for memory in MEMORIES:
        for layout in ("sparse", "dense"):
            start = {"kind": so.Adam, "memory": memory, "is_sparse": layout == "sparse"}
            run = stepped(**start)
            yield f"parameter, {memory}, {layout} gradient", run, run.table
            for key in moment_keys(run):
                run = stepped(**start)
                yield (
                    f"{key}, {memory}, {layout} gradient",
                    run,
                    run.optimizer.state[run.table][key],
                )
            run = stepped(**start)
            if layout == "dense":
                yield f"dense gradient, {memory}", run, run.table.grad
                continue
            yield f"values of a sparse gradient, {memory}", run, run.table.grad._values()
            run = stepped(**start)
            yield f"indices of a sparse gradient, {memory}", run, run.table.grad._indices()
    run = stepped(so.SGD, "lean-0.1", is_sparse=True)
    yield "parameter, stateless", run, run.table
    run = stepped(so.SGD, "lean-0.1", is_sparse=True)
    yield "values of a sparse gradient, stateless", run, run.table.grad._values()


def main() -> None:
    torch.set_num_threads(1)
    for name, run, freed in cases():
        print(json.dumps({"case": name, **outcome(run, freed)}), flush=True)


if __name__ == "__main__":
    main()
