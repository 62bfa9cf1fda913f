"""What the checksums of a checkpoint cost, beside what saving and loading take anyway.

    python -m experiments.studies.checkpoint_digests

A table has exact and lean Adam state after one dense step. Each round times `state_dict()`, a save
of what it gave to a file, and `load_state_dict()`, with the checksums and without them (the digest
taken out, and left out of what is made). The least of several rounds, in CPU time.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import sketchoptim as so
from sketchoptim.optim import _digests

from ..errors import run_study


def main(arguments: list[str] | None = None) -> None:
    """Prints a line for each memory."""
    parser = argparse.ArgumentParser(prog="checkpoint_digests")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    print(f"{options.rows:,} x {options.dim} float32, Adam; ms of CPU time, least of several")
    for memory in ("exact", "lean"):
        times = measure(memory, options.rows, options.dim, options.rounds)
        numbers = "  ".join(f"{name} {1e3 * seconds:8.2f}" for name, seconds in times.items())
        print(f"{memory:6}  {numbers}")


def measure(memory: str, rows: int, dim: int, rounds: int) -> dict[str, float]:
    """The least CPU time of each part."""
    table = torch.nn.Parameter(torch.zeros(rows, dim))
    optimizer = so.Adam([{"params": [table], "memory": memory}])
    generator = torch.Generator().manual_seed(0)
    table.grad = torch.randn(rows, dim, generator=generator)
    optimizer.step()
    table.grad = None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pt"

        def without_digests() -> dict[str, Any]:
            with mock.patch.object(_digests, "digest", return_value=None):
                saved = optimizer.state_dict()
            del saved["state"][0][_digests.DIGEST]
            return saved

        saved, bare = optimizer.state_dict(), without_digests()
        parts: dict[str, Callable[[], object]] = {
            "save": lambda: torch.save(bare, path),
            "state_dict": optimizer.state_dict,
            "without digest": without_digests,
            "load_state_dict": lambda: optimizer.load_state_dict(saved),
            "without a digest": lambda: optimizer.load_state_dict(bare),
        }
        found = dict.fromkeys(parts, float("inf"))
        for _ in range(rounds):
            for name, part in parts.items():
                start = time.process_time()
                part()
                found[name] = min(found[name], time.process_time() - start)
    return found


if __name__ == "__main__":
    run_study(main)
