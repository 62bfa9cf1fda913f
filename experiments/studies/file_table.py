"""What a table larger than memory costs: resident memory, disk, and steps of a table in a file.

    python -m experiments.studies.file_table
    python -m experiments.studies.file_table --rows 1000000000 --dim 16 --dtype bfloat16 --killed

One process trains a `FileEmbedding` of 40 GB with lean Adam, flushes it, and saves the ids. Others
then open the file with none of its pages in memory, read the trained rows back and compare a digest
of them: once with the advice that access is random (madvise), as the layer gives it, and once
without, so that Linux reads neighbours ahead.

With --killed, the same training runs once more in a new file. Halfway it saves a checkpoint and a
copy of the file. It is killed some steps later, by SIGKILL within a step. Another process puts the
copy back, loads the checkpoint and trains the rest. Weights and state must have the same bits.
"""

import argparse
import hashlib
import json
import mmap
import os
import signal
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
_COPY, _CHECKPOINT = "copy.bin", "checkpoint.pt"
_STEPS_BEFORE_THE_KILL = 3


def main(arguments: list[str] | None = None) -> None:
    """Trains and reads back, each in a process of its own, and prints what they took."""
    options = parse_arguments(arguments)
    if options.part is not None:
        part = {"train": train, "read": read}[options.part]
        print(json.dumps(part(options)))
        return
    size = options.rows * options.dim * getattr(torch, options.dtype).itemsize
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        trained = run_part("train", folder, options)
        print(f"{options.rows:,} x {options.dim} {options.dtype}: {size / 1e9:.1f} GB,")
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
        if options.killed:
            os.mkdir(killed := os.path.join(folder, "killed"))
            step = train_until_killed(killed, options)
            print(f"killed after step {step}, resumed from step {options.steps} in a new process:")
            found = run_part("train", killed, options, "--resumed")
            is_same = all(found[key] == trained[key] for key in ("digest", "state_digest"))
            print(f"  {'the same' if is_same else 'OTHER'} bits of weights and state")
            print_memory(found)
            if not is_same:
                raise SystemExit("the run that was killed and resumed differs")


def train_until_killed(folder: str, options: argparse.Namespace) -> int:
    """Starts the training, and kills it after its checkpoint; returns how many steps it took."""
    process = subprocess.Popen(
        part_command("train", folder, options, "--saved"), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= options.steps + _STEPS_BEFORE_THE_KILL:
            process.kill()
            break
    if process.wait() != -signal.SIGKILL:
        raise SystemExit("the training ended before it was killed")
    return int(line)


def print_memory(found: dict[str, Any]) -> None:
    peak, anonymous, file = (found[key] / 1e9 for key in ("VmHWM", "RssAnon", "RssFile"))
    print(f"  resident: peak {peak:.3f} GB; at the end {anonymous:.3f} GB of the process's own and")
    print(f"  {file:.3f} GB of pages of files, {found['libraries'] / 1e9:.3f} GB of it libraries")


def part_command(name: str, folder: str, options: argparse.Namespace, *more: str) -> list[str]:
    """The command of a process of its own."""
    same = ("rows", "dim", "dtype", "steps", "ids")
    numbers = [f"--{key}={getattr(options, key)}" for key in same]
    command = [sys.executable, "-m", __spec__.name, "--part", name, "--folder", folder]
    return [*command, *numbers, *more]


def run_part(name: str, folder: str, options: argparse.Namespace, *more: str) -> dict[str, Any]:
    """What a process of its own prints."""
    command = part_command(name, folder, options, *more)
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Moves the weights of random rows of a new table towards 1, every row twice."""
    libraries = resident()["RssFile"]
    if options.resumed:
        copy_with_holes(options.folder / _COPY, options.folder / _FILE)
    table = open_table(options)
    optimizer = so.Adam(table.parameters(), lr=0.01, memory="lean")
    generator = torch.Generator().manual_seed(0)
    batches = torch.randint(options.rows, (options.steps, options.ids), generator=generator)
    todo = [*batches, *batches]
    if options.resumed:
        checkpoint = torch.load(options.folder / _CHECKPOINT)
        table.load_state_dict(checkpoint["table"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        del checkpoint, todo[: options.steps]
    seconds: list[float] = []
    losses: list[float] = []
    for ids in todo:
        start = time.perf_counter()
        loss = (table(ids) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        if len(seconds) == options.steps:
            memory = resident()
            if options.saved:
                save(table, optimizer, options.folder)
        if options.saved:
            print(len(seconds), flush=True)  # for the process that kills this one
    start = time.perf_counter()
    table.flush()
    flush_seconds = time.perf_counter() - start
    state = [it for it in optimizer.state[table.weight].values() if isinstance(it, torch.Tensor)]
    torch.save(batches.unique(), options.folder / _IDS)
    stat = table.path.stat()
    return {
        "disk_bytes": stat.st_blocks * 512,
        "state_bytes": sum(it.nbytes for it in state),
        "losses": [
            statistics.mean(losses[: options.steps]),
            statistics.mean(losses[-options.steps :]),
        ],
        "first_ms": 1e3 * seconds[0],
        "median_ms": 1e3 * statistics.median(seconds[: options.steps]),
        "again_ms": 1e3 * statistics.median(seconds[-options.steps :]),
        "flush_seconds": flush_seconds,
        "digest": digest(table, batches.unique()),
        "state_digest": hashlib.sha256(b"".join(map(bytes_of, state))).hexdigest(),
        "libraries": libraries,
        **memory,
    }


def open_table(options: argparse.Namespace) -> so.nn.FileEmbedding:
    """The table of the file in the folder, a new one if there is none."""
    path, dtype = options.folder / _FILE, getattr(torch, options.dtype)
    return so.nn.FileEmbedding(path, options.rows, options.dim, dtype)


def save(table: so.nn.FileEmbedding, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Saves a checkpoint and the weights that belong to it."""
    table.flush()
    copy_with_holes(table.path, folder / _COPY)
    state = {"table": table.state_dict(), "optimizer": optimizer.state_dict()}
    so.save_checkpoint(state, folder / _CHECKPOINT)


def copy_with_holes(source: Path, target: Path) -> None:
    """Copies a file into another, which keeps its inode; rows that were not trained stay holes."""
    command = ["cp", "--sparse=always", "--reflink=auto", str(source), str(target)]
    subprocess.run(command, check=True)


def read(options: argparse.Namespace) -> dict[str, Any]:
    """Reads the trained rows from disk, in random order."""
    libraries = resident()["RssFile"]
    file = os.open(options.folder / _FILE, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # no page of it stays in memory
    os.close(file)
    table = open_table(options)
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
        hashed.update(bytes_of(table.weight[part]))
    return hashed.hexdigest()


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bits of a tensor of any dtype."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


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
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ids", type=int, default=2_000, help="of each step")
    parser.add_argument("--folder", type=Path, help="for the file; default: the temporary one")
    parser.add_argument("--killed", action="store_true", help="a run that is killed and resumed")
    parser.add_argument("--part", choices=["train", "read"], help=argparse.SUPPRESS)
    parser.add_argument("--saved", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--resumed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--advice", choices=["random", "normal"], help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_study(main)
