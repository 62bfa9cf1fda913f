"""Bytes of one rank, and bytes that it sends in a step, for tables of up to 10^10 rows.

    python -m experiments.studies.capacity

Prints the table of docs/howto/capacity.md: exact Adam, row-wise Adagrad and lean, on 1 to 512 ranks
that divide the rows. The numbers are the planner's, from what the moments declare; nothing is
allocated or sent.
"""

import argparse
from collections.abc import Iterator, Sequence

import torch

from sketchoptim.diagnostics._ranks import RankBytes, rank_bytes, rows_of_rank
from sketchoptim.diagnostics._text_table import readable_bytes
from sketchoptim.moments import Name, Table
from sketchoptim.storage import PRESETS, Storage

from ..errors import run_study

_ROWS, _RANKS = (10**8, 10**9, 10**10), (1, 8, 64, 512)
_EXACT, _ROW_WISE, _LEAN = (PRESETS[name] for name in ("exact", "row-wise", "lean"))
_METHODS: dict[str, dict[Name, Storage | None]] = {
    "exact Adam": {"first": _EXACT.first, "second": _EXACT.second},
    "row-wise Adagrad": {"second": _ROW_WISE.second},
    "lean": {"second": _LEAN.second},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dim", type=int, default=64, help="columns")
    options = parser.parse_args(arguments)
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
