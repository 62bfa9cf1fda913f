"""A program: one optimizer that several threads step at the same time.

Prints JSON: the errors of the threads, the steps that the state counted, and whether the weights
are those of as many steps in one thread. It runs in a process of its own, since steps that run into
each other may end it.
"""

import json
import sys
import threading

import torch
from gradients import sparse
from torch import nn

import sketchoptim as so

ROWS, DIM, TOUCHED = 3000, 8, 500
THREADS, STEPS = 4, 50


def started(kind: type, memory: str) -> tuple[nn.Parameter, so.optim.base.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    table = nn.Parameter(torch.randn(ROWS, DIM, generator=generator))
    ids = torch.randint(ROWS, (TOUCHED,), generator=generator)
    table.grad = sparse(ids, torch.randn(TOUCHED, DIM, generator=generator), table.shape)
    return table, kind([table], lr=0.01, memory=memory)


def main(kind: type, memory: str) -> dict[str, object]:
    table, optimizer = started(kind, memory)
    errors: list[str] = []
    barrier = threading.Barrier(THREADS)

    def steps() -> None:
        barrier.wait()
        try:
            for _ in range(STEPS):
                optimizer.step()
        except Exception as error:  # whatever it is, it is to be reported
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=steps) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone, one_by_one = started(kind, memory)
    for _ in range(THREADS * STEPS):
        one_by_one.step()
    return {
        "errors": errors,
        "steps": int(optimizer.state[table]["step"]),
        "is_same": torch.equal(table, alone),
    }


if __name__ == "__main__":
    sys.setswitchinterval(1e-5)  # threads take turns in the middle of a step too
    print(json.dumps(main(getattr(so, sys.argv[1]), sys.argv[2])))
