"""Steps along dense gradients, which tied embeddings have: our AdamW against torch's fused one.

    python -m experiments.studies.dense_steps

All of them update one table with one gradient, in turn; the table is far larger than any cache.
"""

import argparse
import time

import torch
from torch import nn

import sketchoptim as so

from ..bench.level import run_at
from ..errors import run_study
from ..machine import machine_facts

COLUMNS = so.Sketched(ratio=1 / 8, conservative=True, columns=True)
MEMORIES: dict[str, str | so.Memory] = {
    "lean": "lean-0.1",
    "lean, columns": so.Memory(second=COLUMNS),
    "row-wise": "row-wise",
    "row-wise, columns": so.Memory(second=so.RowWise(columns=True)),
    "V-only": "paper-v-only",
    "8-bit": "8-bit",
}


def optimizers(table: nn.Parameter, memories: list[str]) -> dict[str, torch.optim.Optimizer]:
    """The optimizers to compare, each with its own state."""
    found: dict[str, torch.optim.Optimizer] = {
        "torch AdamW, fused": torch.optim.AdamW([table], fused=True)
    }
    for name in memories:
        group = {"params": [table], "memory": MEMORIES[name]}
        found[name] = so.AdamW([dict(group)])
        found[f"{name}, unchecked"] = so.AdamW([dict(group)], nonfinite="unchecked")
    return found


def main(arguments: list[str] | None = None) -> None:
    """Prints the least processor time of a step, or wall time of threads, and its ratio."""
    options = parse_arguments(arguments)
    if options.level is not None:
        run_at(options.level)
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    shape, dtype = (options.rows, options.dim), getattr(torch, options.dtype)
    table = nn.Parameter(torch.empty(shape, dtype=dtype).uniform_(-0.1, 0.1))
    table.grad = torch.randn(shape).to(dtype)
    entrants = optimizers(table, options.memory)
    seconds: dict[str, list[float]] = {name: [] for name in entrants}
    for repetition in range(1 + options.repetitions):
        for name, optimizer in entrants.items():
            begin = clock()
            optimizer.step()
            if repetition:  # the first creates the state
                seconds[name].append(clock() - begin)
    least = {name: min(times) for name, times in seconds.items()}
    facts = machine_facts()
    print(f"{options.rows} x {options.dim} {options.dtype}, threads: {options.threads}")
    print(f"{facts['processor']}, torch on {facts['simd']}, our kernels {facts['kernels']}")
    for name, time_of_step in least.items():
        ratio = time_of_step / least["torch AdamW, fused"]
        print(f"{name:<30}{1e3 * time_of_step:>8.1f} ms{ratio:>8.2f}")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", nargs="+", choices=MEMORIES, default=[*MEMORIES][:4])
    parser.add_argument("--level", help="a lower SIMD level: v4, v3 or base")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_study(main)
