"""What a table larger than memory costs: resident memory, disk, and steps of a table in a file.

    python -m experiments.studies.file_table

One process trains a `FileEmbedding` of 40 GB with lean Adam, flushes it, and saves the ids. Others
then open the file with none of its pages in memory, read the trained rows back and compare a digest
of them: once with the advice that rows are met in no order (madvise), as the layer gives it, and
once without, so that Linux reads neighbours ahead.
"""

import argparse
import hashlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import sketchoptim as so

from ..errors import run_study

_STATUS = Path("/proc/self/status")
_FILE, _IDS = "table.bin", "ids.pt"


def main(arguments: list[str] | None = None) -> None:
    """Trains and reads back, each in a process of its own, and prints what they took."""
    options = parse_arguments(arguments)
    if options.part is not None:
        part = {"train": train, "read": read}[options.part]
        print(json.dumps(part(options)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        trained = run_part("train", folder, options)
        print(f"{options.rows:,} x {options.dim} float32: {trained['file_bytes'] / 1e9:.1f} GB,")
        print(f"{options.steps} steps of {options.ids:,} ids with so.Adam(memory='lean')")
        print(f"  on disk           {trained['disk_bytes'] / 1e9:8.3f} GB of touched pages")
        print(f"  optimizer's state {trained['state_bytes'] / 1e9:8.3f} GB")
        print_memory(trained)
        print(f"  first step {trained['first_ms']:.0f} ms, median {trained['median_ms']:.1f} ms")
        print(f"  the same ids again, median {trained['again_ms']:.1f} ms")
        print("  mean loss {:.3f}, of the same ids again {:.3f}".format(*trained["losses"]))
        print(f"  flush {trained['flush_seconds']:.2f} s")
        for advice in ("random", "normal"):
            found = run_part("read", folder, options, "--advice", advice)
            is_same = found["digest"] == trained["digest"]
            print(f"read back in a new process, cold, advice {advice}: {found['rows']:,} rows in")
            print(f"  {found['seconds']:.2f} s, {'the same' if is_same else 'OTHER'} weights")
            print_memory(found)
            if not is_same:
                raise SystemExit("the weights that were read back differ")


def print_memory(found: dict[str, Any]) -> None:
    peak, anonymous, file = (found[key] / 1e9 for key in ("VmHWM", "RssAnon", "RssFile"))
    print(f"  resident: peak {peak:.3f} GB; at the end {anonymous:.3f} GB of the process's own and")
    print(f"  {file:.3f} GB of pages of files, {found['libraries'] / 1e9:.3f} GB of it libraries")


def run_part(name: str, folder: str, options: argparse.Namespace, *more: str) -> dict[str, Any]:
    """What a process of its own prints."""
    numbers = [f"--{key}={getattr(options, key)}" for key in ("rows", "dim", "steps", "ids")]
    command = [sys.executable, "-m", __spec__.name, "--part", name, "--folder", folder]
    done = subprocess.run(
        [*command, *numbers, *more], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Moves the weights of random rows of a new table towards 1, every row twice."""
    libraries = resident()["RssFile"]
    table = so.nn.FileEmbedding(options.folder / _FILE, options.rows, options.dim)
    optimizer = so.Adam(table.parameters(), lr=0.01, memory="lean")
    generator = torch.Generator().manual_seed(0)
    batches = torch.randint(options.rows, (options.steps, options.ids), generator=generator)
    seconds: list[float] = []
    losses: list[float] = []
    for ids in [*batches, *batches]:
        start = time.perf_counter()
        loss = (table(ids) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        if len(seconds) == options.steps:
            memory = resident()
    start = time.perf_counter()
    table.flush()
    flush_seconds = time.perf_counter() - start
    state = optimizer.state[table.weight].values()
    torch.save(batches.unique(), options.folder / _IDS)
    stat = table.path.stat()
    return {
        "file_bytes": stat.st_size,
        "disk_bytes": stat.st_blocks * 512,
        "state_bytes": sum(it.nbytes for it in state if isinstance(it, torch.Tensor)),
        "losses": [
            statistics.mean(losses[: options.steps]),
            statistics.mean(losses[options.steps :]),
        ],
        "first_ms": 1e3 * seconds[0],
        "median_ms": 1e3 * statistics.median(seconds[: options.steps]),
        "again_ms": 1e3 * statistics.median(seconds[options.steps :]),
        "flush_seconds": flush_seconds,
        "digest": digest(table, batches.unique()),
        "libraries": libraries,
        **memory,
    }


def read(options: argparse.Namespace) -> dict[str, Any]:
    """Reads the trained rows from disk, in no order."""
    libraries = resident()["RssFile"]
    file = os.open(options.folder / _FILE, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # no page of it stays in memory
    os.close(file)
    table = so.nn.FileEmbedding(options.folder / _FILE, options.rows, options.dim)
    if options.advice == "normal":
        table._mapping.madvise(mmap.MADV_NORMAL)
    ids = torch.load(options.folder / _IDS)
    shuffled = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))]
    start = time.perf_counter()
    with torch.no_grad():
        for part in shuffled.split(options.ids):
            table(part)
    seconds = time.perf_counter() - start
    memory = resident()
    found = {"rows": len(ids), "seconds": seconds, "digest": digest(table, ids)}
    return {**found, "libraries": libraries, **memory}


@torch.no_grad()
def digest(table: so.nn.FileEmbedding, ids: torch.Tensor) -> str:
    """The digest of the rows in the file, as they are there."""
    hashed = hashlib.sha256()
    for part in ids.split(1000):
        hashed.update(table.weight[part].numpy().tobytes())
    return hashed.hexdigest()


def resident() -> dict[str, int]:
    """Bytes that this process has in memory, by kind; VmHWM is the most it has had."""
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {key: int(fields[key].split()[0]) * 1024 for key in ("VmHWM", "RssAnon", "RssFile")}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=40_000_000)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ids", type=int, default=2_000, help="of each step")
    parser.add_argument("--folder", type=Path, help="for the file; default: the temporary one")
    parser.add_argument("--part", choices=["train", "read"], help=argparse.SUPPRESS)
    parser.add_argument("--advice", choices=["random", "normal"], help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_study(main)
