"""Bytes and launches of one step of a table on a GPU, by arithmetic: a measured table's yardstick.

    python -m experiments.studies.gpu_model
    python -m experiments.studies.gpu_model --bandwidth 3.35 --launch-microseconds 3

Bytes are those of rows and of gradients; a sketch by row and the ids are a few percent of them and
left out. Reading a gradient a second time may be served by the cache, so the time by bandwidth is a
bound from above for ours. A launch stands for one call: a sort is several kernels inside.
"""

import argparse
from dataclasses import dataclass

from ..errors import run_study


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step of one table: 20,480 tokens of text by default, whose frequencies follow Zipf."""

    rows: int = 793_471
    dim: int = 256
    entries: int = 20_480
    touched: int = 9_844
    element_bytes: int = 4

    @property
    def gradient_bytes(self) -> int:
        return self.entries * self.dim * self.element_bytes

    @property
    def touched_bytes(self) -> int:
        """One copy of the rows that the step touches."""
        return self.touched * self.dim * self.element_bytes

    @property
    def table_bytes(self) -> int:
        return self.rows * self.dim * self.element_bytes


@dataclass(frozen=True, kw_only=True)
class Model:
    """What one method moves, calls and keeps."""

    moved_bytes: int
    launches: int
    state_bytes: int

    def microseconds(self, *, terabytes_per_second: float, launch_microseconds: float) -> float:
        """The time by bandwidth plus the time of the launches, as if neither hid the other."""
        by_bandwidth = self.moved_bytes / terabytes_per_second / 1e6
        return by_bandwidth + self.launches * launch_microseconds


# A sort, then begin, inspect, move_rows and finish.
OUR_LAUNCHES = 5
# torch.optim.SparseAdam after coalescing: reads and writes of the touched rows, and operations.
SPARSE_ADAM_PASSES = 40
SPARSE_ADAM_LAUNCHES = 19


def models(case: Case) -> dict[str, Model]:
    """The methods of the table in `experiments bench --device cuda`."""
    rows_moved = 2 * case.touched_bytes
    ours = 2 * case.gradient_bytes + rows_moved  # inspect reads the gradient, and move_rows again
    exact_state = 2 * case.table_bytes
    return {
        "lean": Model(moved_bytes=ours, launches=OUR_LAUNCHES, state_bytes=case.rows // 8 * 4),
        "row-wise": Model(moved_bytes=ours, launches=OUR_LAUNCHES, state_bytes=case.rows * 4),
        "8-bit": Model(
            moved_bytes=ours + 4 * case.touched_bytes // case.element_bytes,
            launches=OUR_LAUNCHES,
            state_bytes=2 * case.rows * case.dim,
        ),
        "exact": Model(  # its gradient is not checked, so it is read once
            moved_bytes=case.gradient_bytes + 3 * rows_moved,
            launches=OUR_LAUNCHES,
            state_bytes=exact_state,
        ),
        "FBGEMM row-wise": Model(
            moved_bytes=case.gradient_bytes + rows_moved, launches=3, state_bytes=case.rows * 4
        ),
        "SparseAdam": Model(
            moved_bytes=case.gradient_bytes + (1 + SPARSE_ADAM_PASSES) * case.touched_bytes,
            launches=SPARSE_ADAM_LAUNCHES,
            state_bytes=exact_state,
        ),
        "fused Adam, dense": Model(
            moved_bytes=7 * case.table_bytes, launches=1, state_bytes=exact_state
        ),
    }


def main(arguments: list[str] | None = None) -> None:
    """Prints bytes, launches and time of each method."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--bandwidth", type=float, default=2.0, help="TB/s; an A100 has 2.0")
    parser.add_argument("--launch-microseconds", type=float, default=5.0, help="of one call")
    options = parser.parse_args(arguments)
    print(f"{'method':20} {'MB moved':>9} {'launches':>9} {'state MB':>9} {'us':>8}")
    for name, model in models(Case()).items():
        time = model.microseconds(
            terabytes_per_second=options.bandwidth, launch_microseconds=options.launch_microseconds
        )
        state = model.state_bytes / 1e6
        print(
            f"{name:20} {model.moved_bytes / 1e6:9.0f} {model.launches:9} {state:9.1f} {time:8.0f}"
        )


if __name__ == "__main__":
    run_study(main)
