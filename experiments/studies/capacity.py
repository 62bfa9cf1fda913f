"""Bytes of one rank, and bytes that it sends in a step, for tables of up to 10^10 rows.

    python -m experiments.studies.capacity
    python -m experiments.studies.capacity --measure

The first prints the table of docs/howto/capacity.md: exact Adam, row-wise Adagrad and lean, on 1 to
512 ranks that divide the rows. The numbers are the planner's, from what the moments declare;
nothing is allocated or sent. The second steps a table on 2 and 4 ranks of this machine and compares
what went over the loopback device with what the planner computes.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import sketchoptim as so
from sketchoptim._formatting import readable_bytes
from sketchoptim.moments import Name, Table
from sketchoptim.planning._ranks import RankBytes, rank_bytes, rows_of_rank
from sketchoptim.storage import PRESETS, Storage

from ..errors import run_study

_ROWS, _RANKS = (10**8, 10**9, 10**10), (1, 8, 64, 512)
_MEASURED_SHAPE, _MEASURED_STEPS = (8_000_000, 4), 20
_EXACT, _ROW_WISE, _LEAN = (PRESETS[name] for name in ("exact", "row-wise", "lean"))
_METHODS: dict[str, dict[Name, Storage | None]] = {
    "exact Adam": {"first": _EXACT.first, "second": _EXACT.second},
    "row-wise Adagrad": {"second": _ROW_WISE.second},
    "lean": {"second": _LEAN.second},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table, or what ranks have sent."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dim", type=int, default=64, help="columns")
    parser.add_argument("--measure", action="store_true", help="traffic on 2 and 4 ranks instead")
    parser.add_argument("--is-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.is_rank:
        measure_traffic()
    elif options.measure:
        for ranks in (2, 4):
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            program = [f"--nproc-per-node={ranks}", "-m", __spec__.name, "--is-rank"]
            subprocess.run([*launch, *program], check=True)
    else:
        print("\n".join(capacity_table(options.dim)))


def capacity_table(dim: int) -> Iterator[str]:
    """The lines of a Markdown table, for float32 tables of `dim` columns."""
    states = [f"state: {method}" for method in _METHODS]
    yield f"| rows | ranks | weights | {' | '.join(states)} | sent: lean |"
    yield f"| {' | '.join(['---'] * (4 + len(states)))} |"
    for rows in _ROWS:
        table = Table(torch.Size((rows, dim)), torch.float32, torch.device("meta"))
        for ranks in _RANKS:
            found = [_bytes(storages, table, ranks) for storages in _METHODS.values()]
            weights = rows_of_rank(rows, ranks) * dim * 4
            sizes = [weights, *(one.state for one in found), found[-1].sent]
            cells = [f"10^{len(str(rows)) - 1}", str(ranks), *map(readable_bytes, sizes)]
            yield f"| {' | '.join(cells)} |"


def measure_traffic() -> None:
    """Steps a table on this rank, one of several; the first prints what each has sent."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    table = nn.Parameter(distribute_tensor(torch.zeros(_MEASURED_SHAPE), mesh, [Shard(0)]))
    optimizer = so.Adam([{"params": [("table", table)], "memory": "lean"}])
    table.grad = torch.zeros_like(table)
    optimizer.step()
    dist.barrier()
    before = _loopback_bytes()
    for _ in range(_MEASURED_STEPS):
        optimizer.step()
    dist.barrier()
    sent = (_loopback_bytes() - before) / _MEASURED_STEPS / ranks
    if dist.get_rank() == 0:
        planned = so.plan([("table", _MEASURED_SHAPE)], 1.0, ranks=ranks).sent_bytes
        rows, dim = _MEASURED_SHAPE
        print(
            f"{rows:,} x {dim} on {ranks} ranks: a step sends {readable_bytes(sent)} a rank, ",
            end="",
        )
        print(f"{sent / planned:.3f} of the planned {readable_bytes(planned)}")
    dist.destroy_process_group()


def _loopback_bytes() -> int:
    """What all processes of this machine have sent to one another over sockets."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    (numbers,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("lo:"))
    return int(numbers[8])


def _bytes(storages: dict[Name, Storage | None], table: Table, ranks: int) -> RankBytes:
    """What all moments of a method take on a rank."""
    found = [
        rank_bytes(storage, name, table, ranks=ranks)
        for name, storage in storages.items()
        if storage is not None
    ]
    return RankBytes(sum(one.state for one in found), sum(one.sent for one in found))


if __name__ == "__main__":
    run_study(main)
