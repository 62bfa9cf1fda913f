"""Steps on dense gradients, which tied embeddings have: our Adam and torch.optim's, in turn.

    python -m experiments.studies.dense_steps

All of them update one table with one gradient; the table is far larger than any cache.
"""

import argparse
import statistics
import time

import torch
from torch import nn

import sketchoptim as so

from ..errors import run_study


def optimizers(table: nn.Parameter) -> dict[str, torch.optim.Optimizer]:
    """The optimizers to compare, each with its own state."""
    ours = {
        memory: so.Adam([{"params": [table], "memory": memory}])
        for memory in ("lean", "row-wise", "paper-v-only", "8-bit")
    }
    return {
        "torch Adam": torch.optim.Adam([table]),
        "torch Adam, fused": torch.optim.Adam([table], fused=True),
        **ours,
    }


def main(arguments: list[str] | None = None) -> None:
    """Prints the median time of a step and its ratio to that of the fused Adam."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    table = nn.Parameter(torch.empty(options.rows, options.dim).uniform_(-0.1, 0.1))
    table.grad = torch.randn(options.rows, options.dim)
    entrants = optimizers(table)
    seconds: dict[str, list[float]] = {name: [] for name in entrants}
    for repetition in range(1 + options.repetitions):
        for name, optimizer in entrants.items():
            begin = time.perf_counter()
            optimizer.step()
            if repetition:  # the first creates the state
                seconds[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"{options.rows} x {options.dim}, threads: {options.threads}")
    for name, median in medians.items():
        ratio = median / medians["torch Adam, fused"]
        print(f"{name:<20}{1e3 * median:>8.0f} ms{ratio:>8.2f}")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_study(main)
