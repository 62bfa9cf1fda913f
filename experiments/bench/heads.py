"""Whole training steps of a vocabulary head: hidden states, loss, gradients and the update.

The benchmark takes all methods and both dtypes. Some of them, for a size that takes long:

    python -m experiments.bench.heads 131072x512x4096 --dtype bfloat16 --methods fused --least 1
"""

import argparse
import dataclasses
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sketchoptim as so

from ..machine import extra_memory_bytes
from .cases import Case, Clock, HeadShape, Settings
from .level import run_at
from .measure import Timing, lap_seconds
from .methods import RATE

LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
Sizes = dict[str, float]
BASELINE = "plain-lean"


@dataclass(frozen=True, kw_only=True)
class HeadResult:
    """One method's whole training step."""

    shape: HeadShape
    method: str
    title: str
    total: Timing
    forward: Timing
    backward: Timing
    optimizer: Timing
    ratio: float
    """The median over rounds of its time over the baseline's."""
    peak_bytes: int
    """What a step has resident beyond the weights, the state and the hidden states."""
    bytes_a_weight: float
    """Of the weight, the optimizer's state and the gradient between backward and step."""


class HeadStep:
    """A head with its optimizer."""

    def __init__(
        self, shape: HeadShape, loss_of: LossFunction, optimizer: type[torch.optim.Optimizer] | None
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        dtype = getattr(torch, shape.dtype)
        self.loss_of = loss_of
        self.hidden = torch.randn(shape.tokens, shape.dim, generator=generator).to(dtype)
        self.hidden.requires_grad_()
        self.target = torch.randint(shape.rows, (shape.tokens,), generator=generator)
        weight = torch.empty(shape.rows, shape.dim, dtype=dtype)
        self.weight = nn.Parameter(weight.normal_(0.0, 0.05, generator=generator))
        self.optimizer: torch.optim.Optimizer
        if optimizer is None:
            self.optimizer = so.Adam([{"params": [self.weight], "memory": "lean"}], lr=RATE)
        else:
            self.optimizer = optimizer([self.weight], lr=RATE, fused=True)  # type: ignore[call-arg]
        self.loss = torch.empty(0)
        self.bytes_a_weight = 0.0

    def forward(self) -> None:
        self.loss = self.loss_of(self.hidden, self.weight, self.target)

    def backward(self) -> None:
        self.loss.backward()

    def parts(self) -> list[Callable[[], None]]:
        """Forward, backward and the optimizer's step."""
        return [self.forward, self.backward, self.optimizer.step]

    def end(self) -> None:
        """Frees what belongs to one step; not timed."""
        state = self.optimizer.state[self.weight].values()
        kept = sum(value.nbytes for value in state if isinstance(value, Tensor))
        assert self.weight.grad is not None
        kept += self.weight.nbytes + self.weight.grad.nbytes
        self.bytes_a_weight = kept / self.weight.numel()
        self.loss, self.hidden.grad = torch.empty(0), None
        self.optimizer.zero_grad()

    def run(self) -> None:
        """One step."""
        for part in self.parts():
            part()
        self.end()


def _plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


def _chunked(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """torch's fused loss. Its automatic options are slower: they chunk more finely."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=1024, chunking_method=None)
    return F.linear_cross_entropy(hidden, weight, target, options=options)


@dataclass(frozen=True)
class _Method:
    title: str
    loss_of: LossFunction
    optimizer: type[torch.optim.Optimizer] | None = None
    """None: so.Adam with memory="lean"."""


METHODS = {
    BASELINE: _Method("cross_entropy(linear), lean", _plain),
    "plain-adamw": _Method("cross_entropy(linear), torch AdamW fused", _plain, torch.optim.AdamW),
    "torch-fused": _Method("F.linear_cross_entropy, chunks of 1,024, lean", _chunked),
    "fused": _Method("so.nn.linear_cross_entropy, lean", so.nn.linear_cross_entropy),
}


def step_times(
    shape: HeadShape, names: Sequence[str], least: int, clock: Clock, sizes: Sizes | None = None
) -> dict[str, list[list[float]]]:
    """Seconds of forward, backward and optimizer of whole steps; methods take turns.

    The first turn is not counted. `sizes` receives the bytes a weight of each method.
    """
    methods = {name: METHODS[name] for name in names}
    steps = {name: HeadStep(shape, it.loss_of, it.optimizer) for name, it in methods.items()}
    times: dict[str, list[list[float]]] = {name: [] for name in methods}
    for _ in range(1 + least):
        for name, step in steps.items():
            times[name].append(_timed(step, clock))
    if sizes is not None:
        sizes.update({name: step.bytes_a_weight for name, step in steps.items()})
    return {name: taken[1:] for name, taken in times.items()}


def train_heads(shape: HeadShape, settings: Settings) -> list[HeadResult]:
    """Whole steps with all methods."""
    sizes: Sizes = {}
    times = step_times(shape, tuple(METHODS), settings.least, settings.clock, sizes)
    totals = {name: [sum(parts) for parts in taken] for name, taken in times.items()}
    return [
        HeadResult(
            shape=shape,
            method=name,
            title=method.title,
            total=Timing.of(totals[name]),
            forward=Timing.of([parts[0] for parts in times[name]]),
            backward=Timing.of([parts[1] for parts in times[name]]),
            optimizer=Timing.of([parts[2] for parts in times[name]]),
            ratio=statistics.median(
                own / plain for own, plain in zip(totals[name], totals[BASELINE], strict=True)
            ),
            peak_bytes=peak_bytes(shape, name),
            bytes_a_weight=sizes[name],
        )
        for name, method in METHODS.items()
    ]


def _timed(step: HeadStep, clock: Clock) -> list[float]:
    seconds = lap_seconds(step.parts(), clock=clock)
    step.end()
    return seconds


def peak_bytes(shape: HeadShape, name: str) -> int:
    """What a step of a method has resident beyond its model, in a new process."""
    size = f"{shape.rows}x{shape.dim}x{shape.tokens}"
    command = [sys.executable, "-m", "experiments.bench.heads", size, "--dtype", shape.dtype]
    command += ["--methods", name, "--peak"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout)


def _own_peak_bytes(shape: HeadShape, name: str) -> int:
    """What a step of a method has resident beyond its model, in this process."""
    torch.set_num_threads(1)
    method = METHODS[name]
    small = dataclasses.replace(shape, rows=2_048, tokens=64)
    HeadStep(small, method.loss_of, method.optimizer).run()  # loads libraries
    step = HeadStep(shape, method.loss_of, method.optimizer)
    step.run()  # creates the state
    return extra_memory_bytes(step.run)


def _main() -> None:
    parser = argparse.ArgumentParser(description="A head's training step, by some methods.")
    parser.add_argument("case", type=Case.parse, help="rows x dim x tokens")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--methods", default=f"{BASELINE},torch-fused,fused")
    parser.add_argument("--least", type=int, default=2, help="rounds that are counted")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--level", help="SIMD: v4 (AVX-512), v3 (AVX2) or base")
    parser.add_argument("--peak", action="store_true", help="print a method's peak, not times")
    options = parser.parse_args()
    if options.level is not None:
        run_at(options.level)
    shape = next(it for it in HeadShape.of(options.case) if it.dtype == options.dtype)
    if options.peak:
        print(_own_peak_bytes(shape, options.methods))
        return
    torch.set_num_threads(options.threads)
    clock: Clock = "cpu" if options.threads == 1 else "wall"
    times = step_times(shape, options.methods.split(","), options.least, clock)
    threads = f"{options.threads} thread{'s' if options.threads > 1 else ''}"
    print(f"{shape}: {clock} time, {threads}, torch on {torch.backends.cpu.get_cpu_capability()}")
    totals = {name: [sum(parts) for parts in taken] for name, taken in times.items()}
    for name, taken in totals.items():
        ratios = [own / plain for own, plain in zip(taken, totals[BASELINE], strict=True)]
        ratio, least = statistics.median(ratios), min(taken) / min(totals[BASELINE])
        print(f"  {METHODS[name].title:45s}{min(taken):8.2f} s {ratio:.3f} (least {least:.3f})")


if __name__ == "__main__":
    _main()
