"""Launches of the GPU's kernels executed as PTX on the CPU, in place of Triton's own launcher."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpu_compile
import gpu_steps
import ptx
import triton
from torch import Tensor

from experiments.studies.gpu_host import StandInDriver, driven_by
from sketchoptim.ops._gpu_launches import Launch

_numbers = itertools.count(1)


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
        [
            ptx.Memory(it.data_ptr(), it.nbytes, it.element_size())
            for it in gpu_steps.memory_of(launch)
        ],
        shared_bytes=shared_bytes,
        seed=next(_numbers),
        programs=programs,
        finds_races=finds_races,
    )


class PtxDriver(StandInDriver):
    """A driver for Triton whose launches are executed; bounds and races are checked elsewhere."""

    def __init__(self) -> None:
        super().__init__(self._launcher)
        self.launched: list[str] = []
        self.text = ""

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Steps within are taken by the GPU's kernels and end at this driver."""

        def keep_text(module: Any, function: Any, name: str, files: Any, key: str) -> None:
            self.text = next(Path(files[it]).read_text() for it in files if it.endswith(".ptx"))

        loading = triton.knobs.runtime.kernel_load_start_hook
        loading.add(keep_text)
        try:
            with driven_by(self):
                yield
        finally:
            loading.remove(keep_text)

    def _launcher(self, source: Any, metadata: Any) -> Callable[..., None]:
        is_given = [not it.is_constexpr for it in source.fn.params]
        texts: list[str] = []

        def launch(x: int, y: int, z: int, *others: Any) -> None:
            texts.extend([self.text] if not texts else [])  # the kernel has just been loaded
            self.launched.append(source.fn.__name__)
            given = zip(others[-len(is_given) :], is_given, strict=True)
            arguments = [it for it, is_argument in given if is_argument]
            ptx.execute(
                ptx.assemble(texts[0]),
                [it.data_ptr() if isinstance(it, Tensor) else int(it) for it in arguments],
                (x, y, z),
                [ptx.Memory(1, 2**62, 1)],
                shared_bytes=metadata.shared,
                seed=next(_numbers),
                finds_races=False,
            )

        return launch
