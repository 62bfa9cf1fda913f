"""A program: steps that signals interrupt at random moments; prints how each of them ended.

Each line is "whole", "not begun" or "half", and what was found. It runs in a process of its own,
since a signal may come at any time.
"""

import random
import signal
import sys
import time

import torch
from gradients import sparse

import sketchoptim as so

TABLES, EXACT, TRIALS = 30, 6, 150


def main(kind: str) -> None:
    torch.set_num_threads(1)
    random.seed(0)
    tables = [torch.nn.Parameter(torch.ones(200, 8)) for _ in range(TABLES)]
    dense = [torch.nn.Parameter(torch.ones(40, 40)) for _ in range(EXACT)]
    memory = "paper-mv" if kind == "reference" else "lean"
    groups = [{"params": tables, "memory": memory}, {"params": dense, "memory": "exact"}]
    optimizer = so.Adam(groups, lr=0.1)
    parameters = tables + dense
    for number, parameter in enumerate(parameters):
        ids, rows = torch.tensor([5, 3, number]), torch.ones(3, 8)
        is_table = number < TABLES
        parameter.grad = sparse(ids, rows, parameter.shape) if is_table else torch.ones(40, 40)

    def take_step() -> None:
        if kind == "reference":
            with so.ops.reference_only():
                optimizer.step()
        else:
            optimizer.step()

    take_step()
    begin = time.perf_counter()
    take_step()
    seconds = time.perf_counter() - begin
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    for _ in range(TRIALS):
        before = [it.detach().clone() for it in parameters]
        counts = [int(optimizer.state[it]["step"]) for it in parameters]
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1.2 * seconds))
            take_step()
            time.sleep(1)  # until the signal comes
        except KeyboardInterrupt:
            pass
        moved = {not torch.equal(old, new) for old, new in zip(before, parameters, strict=True)}
        counted = {
            int(optimizer.state[it]["step"]) - count
            for it, count in zip(parameters, counts, strict=True)
        }
        outcome = {(True, 1): "whole", (False, 0): "not begun"}
        found = (moved.pop(), counted.pop()) if len(moved) == len(counted) == 1 else None
        print(outcome.get(found, f"half: {moved} {counted}"), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
