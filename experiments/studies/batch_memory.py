"""The paper's argument for larger batches: memory that moments do not take is for activations.

    python -m experiments.studies.batch_memory

One member of the paper's Amazon model: 80,000 hashed trigrams of Debian's paths, 1,024 hidden
units, 20,000 buckets, 102.4 million weights. Every measurement is two training steps in its own
process: first the peak memory of each method at one batch size, then the largest batch that still
trains under a limit. The limit is RLIMIT_DATA, set once everything is imported, so that allocated
memory counts, touched or not; where an allocation fails, the batch is too large.
"""

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import torch

import sketchoptim as so
from sketchoptim.nn import MACH, BagEncoder, Bags, FeatureHashing

from ..corpora import labelled_file
from ..data import find_data
from ..errors import run_study
from ..recipes import load_recipe

FEATURES = 80_000
CLASSES = 49_500_000
STEPS = 2
RECIPE = load_recipe("amazon-mach")
DATA = RECIPE.sizes["small"].data
METHODS = RECIPE.contestants


def main(arguments: list[str] | None = None) -> None:
    """Prints a line for each method; with --method, only the memory of two steps."""
    options = parse_arguments(arguments)
    if options.method is not None:
        print(json.dumps(take_steps(options)))
        return
    print(f"{'method':<8}{f'peak MB at {options.batch}':>18}{'state MB':>10}{'largest batch':>15}")
    for method in options.methods:
        free = measure_memory(options, method, options.batch, limit_mb=0)
        assert free is not None
        fits = partial(does_fit, options, method)
        largest = largest_batch(fits, start=options.batch, tolerance=options.tolerance)
        print(
            f"{method:<8}{free['peak_mb']:>18,.0f}{free['state_mb']:>10,.1f}{largest:>15,}",
            flush=True,
        )
    print(f"limit: RLIMIT_DATA of {options.limit_mb:,} MB; batches to {options.tolerance:.0%}")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with train.tsv: path<TAB>package")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--batch", type=int, default=750, help="the paper's with exact Adam")
    parser.add_argument("--limit-mb", type=int, default=2000)
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--buckets", type=int, default=20_000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--method", choices=list(METHODS), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def measure_memory(
    options: argparse.Namespace, method: str, batch: int, limit_mb: int
) -> dict[str, float] | None:
    """The memory of two steps in a new process, or None where the limit was too low."""
    data = find_data(DATA, options.data)
    command = [sys.executable, "-m", "experiments.studies.batch_memory"]
    command += ["--method", method, "--data", str(data)]
    for name in ("dim", "buckets", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    command += ["--batch", str(batch), "--limit-mb", str(limit_mb)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    is_short = "can't allocate memory" in run.stderr or "MemoryError" in run.stderr
    if run.returncode and not is_short:
        raise RuntimeError(f"{' '.join(command)} failed:\n{run.stderr}")
    found: dict[str, float] | None = None if run.returncode else json.loads(run.stdout)
    print(f"{method}, batch {batch}, limit {limit_mb or 'none'}: {found}", file=sys.stderr)
    return found


def does_fit(options: argparse.Namespace, method: str, batch: int) -> bool:
    """Whether two steps with that batch stay below the limit."""
    return measure_memory(options, method, batch, options.limit_mb) is not None


def largest_batch(fits: Callable[[int], bool], *, start: int, tolerance: float) -> int:
    """The largest batch that fits, within a tolerance: by doubling, then by bisection."""
    low, high = 0, start
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, tolerance * high):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def take_steps(options: argparse.Namespace) -> dict[str, float]:
    """The memory of two steps of one method in this process."""
    torch.set_num_threads(options.threads)
    bags, labels = examples(options)
    if options.limit_mb:
        limit = options.limit_mb * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    model = MACH(
        lambda: BagEncoder(FEATURES, options.dim),
        options.dim,
        CLASSES,
        options.buckets,
        members=1,
    )
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    # a group that names a memory also compresses its dense gradients: those of the output layer
    memory = METHODS[options.method].method.memory
    groups = [{"params": weights, "memory": memory}, {"params": others}]
    optimizer = so.Adam(groups, lr=0.01, memory="exact")
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(bags, labels).backward()
        optimizer.step()
    state_bytes = sum(p.state_bytes for p in so.memory_report(optimizer).parameters)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak_mb": peak / 2**20, "state_mb": state_bytes / 2**20}


def examples(options: argparse.Namespace) -> tuple[Bags, torch.Tensor]:
    """A batch of paths as bags of features, and random classes."""
    lines = labelled_file(find_data(DATA, options.data), "train").lines()
    paths = [line.rpartition("\t")[0] for line in islice(lines, options.batch)]
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (len(paths),), generator=generator)
    return FeatureHashing(features=FEATURES)(paths).as_int32(), labels


if __name__ == "__main__":
    run_study(main)
