"""Launches of the GPU's kernels, compiled for GPUs that are not there, and what came out."""

import functools
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from gpu_steps import stepping_by_gpu_kernels
from gradients import sparse
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import sketchoptim as so
from sketchoptim.ops import _gpu_launches
from sketchoptim.ops._gpu_launches import OPTIONS, Launch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
_NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def launches_of(
    memory: so.Memory,
    *,
    optimizer: str = "Adam",
    dtype: torch.dtype = torch.float32,
    dim: int = 256,
    is_dense: bool = False,
    tables: int = 1,
) -> list[Launch]:
    """What one step of an optimizer launches, without launching it."""
    found: list[Launch] = []
    zeros = torch.zeros(1000, dim, dtype=dtype)
    parameters = [torch.nn.Parameter(zeros.clone()) for _ in range(tables)]
    group = {"params": parameters, "memory": memory}
    momentum = {"momentum": 0.9} if optimizer == "SGD" else {}
    with (
        stepping_by_gpu_kernels(is_run=False) as taken,
        mock.patch.object(_gpu_launches.Launch, "run_", lambda launch: found.append(launch)),
    ):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
            if not is_dense:
                values = torch.ones(100, dim, dtype=dtype)
                parameter.grad = sparse(torch.arange(100), values, parameter.shape)
        getattr(so, optimizer)([group], lr=0.1, **momentum).step()
    assert taken.kernels == tables
    return found


@dataclass(frozen=True)
class Compiled:
    """One kernel for one GPU."""

    text: str
    """PTX, or the assembly of an AMD GPU."""
    registers: int
    spilled_bytes: int
    shared_bytes: int


def compiled(launch: Launch, target: str) -> Compiled:
    """The kernel of a launch, compiled once for each set of constants and types."""
    constants, types, pointers = [], [], []
    for index, parameter in enumerate(launch.kernel.params):
        argument = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            constants.append(((index,), argument))
            types.append((parameter.name, "constexpr"))
        elif isinstance(argument, torch.Tensor):
            types.append((parameter.name, "*" + _TYPES[argument.dtype]))
            pointers.append(index)
        else:
            types.append((parameter.name, parameter.annotation_type or "i32"))
    names = [name for name in OPTIONS if name != "maxnreg" or target.startswith("sm")]
    options = tuple((name, launch.arguments[name]) for name in names)
    return _compiled(
        launch.kernel, tuple(types), tuple(constants), tuple(pointers), options, target
    )


@functools.cache
def _compiled(
    kernel: Any,
    types: tuple[tuple[str, str], ...],
    constants: tuple[tuple[tuple[int], Any], ...],
    pointers: tuple[int, ...],
    options: tuple[tuple[str, Any], ...],
    target: str,
) -> Compiled:
    source = ASTSource(
        kernel,
        signature=dict(types),
        constexprs=dict(constants),
        # As torch allocates: every tensor starts at a multiple of 16 bytes.
        attrs={(index,): [["tt.divisibility", 16]] for index in pointers},
    )
    result = triton.compile(source, target=TARGETS[target], options=dict(options))
    shared = result.metadata.shared
    if "ptx" not in result.asm:
        text = result.asm["amdgcn"]
        spilled = [int(found) for found in re.findall(r"private_segment_fixed_size: (\d+)", text)]
        # Scalar registers spill into lanes of vector registers, not into memory.
        spills = [int(found) for found in re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)]
        registers = int(re.findall(r"\.vgpr_count:\s+(\d+)", text)[-1])
        return Compiled(text, registers, sum(spilled) + sum(spills), shared)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        Path(path).write_bytes(result.asm["cubin"])
        usage = subprocess.run(
            [_NVIDIA / "cuobjdump", "-res-usage", path], capture_output=True, text=True, check=True
        ).stdout
    # The stack holds what does not fit into registers; the number called LOCAL stays zero.
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return Compiled(result.asm["ptx"], int(found[1]), int(found[2]), shared)
