"""Whole training steps of a vocabulary head: hidden states, loss, gradients and the update.

A method's memory is measured in a process of its own:
python -m experiments.bench.heads ROWS DIM TOKENS DTYPE METHOD
"""

import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sketchoptim as so

from ..machine import extra_memory_bytes
from .cases import Clock, HeadShape, Settings
from .measure import Timing, lap_seconds
from .methods import RATE

LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
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


def train_heads(shape: HeadShape, settings: Settings) -> list[HeadResult]:
    """Whole steps with all methods, which take turns; the first turn is not counted."""
    steps = {name: HeadStep(shape, it.loss_of, it.optimizer) for name, it in METHODS.items()}
    times: dict[str, list[list[float]]] = {name: [] for name in METHODS}
    for _ in range(1 + settings.least):
        for name, step in steps.items():
            times[name].append(_timed(step, settings.clock))
    totals = {name: [sum(parts) for parts in taken[1:]] for name, taken in times.items()}
    sizes = {name: step.bytes_a_weight for name, step in steps.items()}
    steps.clear()
    return [
        HeadResult(
            shape=shape,
            method=name,
            title=method.title,
            total=Timing.of(totals[name]),
            forward=Timing.of([parts[0] for parts in times[name][1:]]),
            backward=Timing.of([parts[1] for parts in times[name][1:]]),
            optimizer=Timing.of([parts[2] for parts in times[name][1:]]),
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
    command = [sys.executable, "-m", "experiments.bench.heads", *map(str, astuple(shape)), name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout)


def _main(rows: str, dim: str, tokens: str, dtype: str, name: str) -> None:
    torch.set_num_threads(1)
    method = METHODS[name]
    small = HeadShape(rows=2_048, dim=int(dim), tokens=64, dtype=dtype)
    HeadStep(small, method.loss_of, method.optimizer).run()  # loads libraries
    shape = HeadShape(rows=int(rows), dim=int(dim), tokens=int(tokens), dtype=dtype)
    step = HeadStep(shape, method.loss_of, method.optimizer)
    step.run()  # creates the state
    print(extra_memory_bytes(step.run))


if __name__ == "__main__":
    _main(*sys.argv[1:])
