"""Instructions and bytes of a step's kernels, counted while their PTX is executed on the CPU.

    make ptx-counts

The table and its tokens are those of `experiments.studies.gpu_model`. An instruction is one of a
warp in PTX, of which the assembler makes one or a few of the GPU's own. Bytes are sectors of 32
that a warp reads or writes, in the cache or not. Times are by arithmetic: as if every scheduler of
an A100 began an instruction in each cycle, and as if all bytes came from memory.
"""

import argparse
from dataclasses import replace
from unittest import mock

import gpu_ptx
import torch
from gpu_steps import stepping_by_gpu_kernels
from gradients import sparse
from ptx import Counts
from torch import Tensor

import sketchoptim as so
from experiments.studies.gpu_model import Case, models
from sketchoptim.ops._gpu_launches import Launch
from sketchoptim.storage import PRESETS

SECTOR_BYTES = 32
# An A100: 108 multiprocessors of four schedulers at 1.41 GHz, and 2.0 TB/s.
INSTRUCTIONS_A_MICROSECOND = 108 * 4 * 1.41e3
BYTES_A_MICROSECOND = 2.0e6
MEMORIES = ("lean", "lean-0.1", "row-wise", "8-bit", "exact")


def tokens(case: Case) -> Tensor:
    """Ids whose frequencies fall like those of words."""
    generator = torch.Generator().manual_seed(0)
    frequencies = 1 / torch.arange(1, case.rows + 1, dtype=torch.float64)
    return torch.multinomial(frequencies, case.entries, replacement=True, generator=generator)


def counted(memory: str, case: Case, target: str) -> dict[str, Counts]:
    """What each kernel of one step executes."""
    found: dict[str, Counts] = {}

    def execute(launch: Launch) -> None:
        found[launch.kernel.__name__] = gpu_ptx.execute(launch, target, finds_races=False)

    table = torch.nn.Parameter(torch.zeros(case.rows, case.dim))
    # A clip: else torch.optim's own function would take steps of exact moments.
    optimizer = so.Adam([{"params": [table], "memory": replace(PRESETS[memory], clip=10.0)}])
    with stepping_by_gpu_kernels(), mock.patch.object(Launch, "run_", execute):
        values = torch.ones(case.entries, case.dim)
        table.grad = sparse(tokens(case), values, table.shape)
        optimizer.step()
    return found


def line(memory: str, dim: int, kernel: str, counts: Counts) -> str:
    by_issue = counts.instructions / INSTRUCTIONS_A_MICROSECOND
    moved = counts.sectors * SECTOR_BYTES
    return (
        f"| {memory} | {dim} | {kernel} | {counts.instructions / 1e6:.2f} | {by_issue:.1f} "
        f"| {moved / 1e6:.1f} | {moved / BYTES_A_MICROSECOND:.1f} | {counts.longest_warp} |"
    )


def main() -> None:
    """Prints a line for each kernel, and one for the step."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--target", default="sm_80", choices=["sm_80", "sm_90"])
    parser.add_argument("--memory", nargs="+", default=MEMORIES, choices=MEMORIES)
    parser.add_argument("--dim", type=int, nargs="+", default=[16, 64, 256])
    options = parser.parse_args()
    print(f"{options.target}; MB by the model of bytes in brackets; us are of a model")
    print("| memory | columns | kernel | million instructions | us | MB | us | longest warp |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for name in options.memory:
        for dim in options.dim:
            case = Case(dim=dim)
            found = counted(name, case, options.target)
            for kernel, counts in found.items():
                print(line(name, dim, kernel, counts), flush=True)
            instructions = sum(it.instructions for it in found.values())
            moved = sum(it.sectors for it in found.values()) * SECTOR_BYTES
            by_model = models(case)[name.removesuffix("-0.1")].moved_bytes
            print(
                f"| {name} | {dim} | all | {instructions / 1e6:.2f} "
                f"| {instructions / INSTRUCTIONS_A_MICROSECOND:.1f} "
                f"| {moved / 1e6:.1f} ({by_model / 1e6:.1f}) "
                f"| {moved / BYTES_A_MICROSECOND:.1f} | |",
                flush=True,
            )


if __name__ == "__main__":
    main()
