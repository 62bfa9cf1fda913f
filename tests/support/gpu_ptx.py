"""Launches of the GPU's kernels executed as PTX on the CPU, in place of Triton's own launcher."""

from collections.abc import Iterator
from itertools import count

import gpu_compile
import ptx
from torch import Tensor

from sketchoptim.ops._gpu_launches import Launch

_numbers = count(1)


def execute(
    launch: Launch, target: str, *, programs: range | None = None, finds_races: bool = True
) -> ptx.Counts:
    """Executes a launch by the code that it is compiled to; raises `ptx.Fault`."""
    text, shared_bytes = gpu_compile.ptx(launch, target)
    arguments = []
    for parameter in launch.kernel.params:
        argument = launch.arguments[parameter.name]
        if not parameter.is_constexpr:
            is_tensor = isinstance(argument, Tensor)
            arguments.append(argument.data_ptr() if is_tensor else int(argument))
    return ptx.execute(
        ptx.assemble(text),
        arguments,
        launch.grid,
        list(_memory(launch)),
        shared_bytes=shared_bytes,
        seed=next(_numbers),
        programs=programs,
        finds_races=finds_races,
    )


def _memory(launch: Launch) -> Iterator[ptx.Memory]:
    """What the kernel may access: tensors that it is given, or whose addresses it is given."""
    for it in (*launch.arguments.values(), *launch.kept):
        if isinstance(it, Tensor):
            yield ptx.Memory(it.data_ptr(), it.numel() * it.element_size(), it.element_size())
