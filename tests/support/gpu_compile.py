"""Launches of the GPU's kernels, compiled for GPUs that are not there, and what came out."""

import functools
import hashlib
import json
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from gpu_steps import copy_of, stepping_by_gpu_kernels
from gradients import sparse
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

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
    entries: int = 100,
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
        mock.patch.object(
            _gpu_launches.Launch, "run_", lambda launch: found.append(copy_of(launch))
        ),
    ):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
            if not is_dense:
                values = torch.ones(entries, dim, dtype=dtype)
                parameter.grad = sparse(torch.arange(entries), values, parameter.shape)
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


class Source(NamedTuple):
    """What a launch asks the compiler for: equal ones are compiled once."""

    kernel: Any
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[tuple[int], Any], ...]
    pointers: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    target: str

    @classmethod
    def of(cls, launch: Launch, target: str) -> "Source":
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
                types.append((parameter.name, parameter.annotation_type or _int_type(argument)))
        names = [name for name in OPTIONS if name != "maxnreg" or target.startswith("sm")]
        options = tuple((name, launch.options[name]) for name in names if name in launch.options)
        return cls(launch.kernel, tuple(types), tuple(constants), tuple(pointers), options, target)

    def ast(self) -> ASTSource:
        return ASTSource(
            self.kernel,
            signature=dict(self.types),
            constexprs=dict(self.constants),
            # As torch allocates: every tensor starts at a multiple of 16 bytes.
            attrs={(index,): [["tt.divisibility", 16]] for index in self.pointers},
        )


def _int_type(value: int) -> str:
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compiled(launch: Launch, target: str) -> Compiled:
    """The kernel of a launch, compiled once for each set of constants and types."""
    return _compiled(Source.of(launch, target))


def check_types(launch: Launch, target: str = "sm_90") -> None:
    """Raises what the front end of the compiler finds wrong: types of branches that disagree."""
    _stages(Source.of(launch, target), until="source")


def ptx(launch: Launch, target: str) -> tuple[str, int]:
    """The PTX of a launch and its bytes of shared memory, without the assembler; kept in files."""
    return _ptx(Source.of(launch, target))


@functools.cache
def _ptx(source: Source) -> tuple[str, int]:
    options = repr((sorted(source.options), triton.__version__, source.target))
    key = hashlib.sha256((source.ast().hash() + options).encode()).hexdigest()
    path = Path(os.environ.get("TRITON_CACHE_DIR", tempfile.gettempdir())) / f"{key}.ptx.json"
    if path.exists():
        text, shared = json.loads(path.read_text())
        return text, shared
    metadata = _stages(source, until="ptx")
    found = (metadata["text"], metadata["shared"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(found, file)
    os.replace(file.name, path)  # other processes may be at it
    return found


@functools.cache
def _stages(source: Source, until: str) -> dict[str, Any]:
    """What the stages of the compiler up to a given one leave behind, that one's text included."""
    backend = make_backend(TARGETS[source.target])
    options = backend.parse_options(dict(source.options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    ast = source.ast()
    module = ast.make_ir(
        TARGETS[source.target],
        options,
        backend.get_codegen_implementation(options),
        backend.get_module_map(),
        context,
    )
    stages: dict[str, Any] = {}
    metadata: dict[str, Any] = {"target": TARGETS[source.target], **options.__dict__}
    backend.add_stages(stages, options, ast.language)
    for name, stage in stages.items():
        if until == "source":
            return {}
        module = stage(module, metadata)
        if name == until:
            break
    return {**metadata, "text": module}


@functools.cache
def _compiled(source: Source) -> Compiled:
    target = source.target
    result = triton.compile(source.ast(), target=TARGETS[target], options=dict(source.options))
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
