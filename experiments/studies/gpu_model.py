"""Bytes and operations of one step of a table on a GPU, by arithmetic, to hold times against.

    python -m experiments.studies.gpu_model
    python -m experiments.studies.gpu_model --bandwidth 3.35 --operation-microseconds 2

Bytes are those of rows and of gradients; a sketch by row and the ids are a few percent of them and
left out. Reading a gradient a second time may be served by the cache, so the time by bandwidth is a
bound from above for ours. Operations are those of the stream: each kernel and each memset. Those of
a sort follow from the code of torch and CUB, a histogram and then two for each 8 bits of a key.
"""

import argparse
import math
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
    """What one method moves, enqueues and keeps."""

    moved_bytes: int
    operations: int
    state_bytes: int

    def microseconds(self, *, terabytes_per_second: float, operation_microseconds: float) -> float:
        """The time by bandwidth plus that of the operations, as if neither hid the other."""
        by_bandwidth = self.moved_bytes / terabytes_per_second / 1e6
        return by_bandwidth + self.operations * operation_microseconds


def sort_operations(bits: int) -> int:
    """Of a radix sort in torch: two tensors are filled, then memset, histogram, sums and passes."""
    return 5 + 2 * math.ceil(bits / 8)


# collect_keys, begin, inspect, move_rows and finish; coalesced ids need no keys and no sort.
OUR_KERNELS = 5
# torch.optim.SparseAdam: reads and writes of the touched rows, and operations, after those that
# coalesce: a sort of int64 ids, and about five that find equal ones and add them.
SPARSE_ADAM_PASSES = 40
SPARSE_ADAM_OPERATIONS = 19 + 5
# FBGEMM sorts only the bits that ids have, then run lengths, their sums, and three kernels.
FBGEMM_OPERATIONS = 3 + 2 + 3


def models(case: Case) -> dict[str, Model]:
    """The methods that docs/howto/gpu.md compares."""
    rows_moved = 2 * case.touched_bytes
    ours = 2 * case.gradient_bytes + rows_moved  # inspect reads the gradient, and move_rows again
    ours_in_all = OUR_KERNELS + sort_operations(32)
    exact_state = 2 * case.table_bytes
    return {
        "lean": Model(moved_bytes=ours, operations=ours_in_all, state_bytes=case.rows // 8 * 4),
        "row-wise": Model(moved_bytes=ours, operations=ours_in_all, state_bytes=case.rows * 4),
        "8-bit": Model(
            moved_bytes=ours + 4 * case.touched_bytes // case.element_bytes,
            operations=ours_in_all,
            state_bytes=2 * case.rows * case.dim,
        ),
        "exact": Model(  # its gradient is not checked, so it is read once
            moved_bytes=case.gradient_bytes + 3 * rows_moved,
            operations=ours_in_all,
            state_bytes=exact_state,
        ),
        "FBGEMM row-wise": Model(
            moved_bytes=case.gradient_bytes + rows_moved,
            operations=FBGEMM_OPERATIONS + sort_operations(case.rows.bit_length()),
            state_bytes=case.rows * 4,
        ),
        "SparseAdam": Model(
            moved_bytes=case.gradient_bytes + (1 + SPARSE_ADAM_PASSES) * case.touched_bytes,
            operations=SPARSE_ADAM_OPERATIONS + sort_operations(64),
            state_bytes=exact_state,
        ),
        "fused Adam, dense": Model(
            moved_bytes=7 * case.table_bytes, operations=1, state_bytes=exact_state
        ),
    }


def main(arguments: list[str] | None = None) -> None:
    """Prints bytes, operations and time of each method."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--bandwidth", type=float, default=2.0, help="TB/s; an A100 has 2.0")
    parser.add_argument("--operation-microseconds", type=float, default=3.0, help="of the stream")
    options = parser.parse_args(arguments)
    print(f"{'method':20} {'MB moved':>9} {'operations':>10} {'state MB':>9} {'us':>8}")
    for name, model in models(Case()).items():
        time = model.microseconds(
            terabytes_per_second=options.bandwidth,
            operation_microseconds=options.operation_microseconds,
        )
        moved, state = model.moved_bytes / 1e6, model.state_bytes / 1e6
        print(f"{name:20} {moved:9.0f} {model.operations:10} {state:9.1f} {time:8.0f}")


if __name__ == "__main__":
    run_study(main)
