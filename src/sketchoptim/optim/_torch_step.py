"""What the step functions of torch.optim are called with, for exact parameters."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ._algorithm import ExactParameter, Group


@contextmanager
def torch_step_counts(group: Group, parameters: Sequence[ExactParameter]) -> Iterator[list[Tensor]]:
    """The counts of steps, which torch.optim's function raises by one.

    The counts live on the CPU in float64. The fused functions of a GPU read counts in float32 on
    that GPU, so they get copies.
    """
    devices = {it.local.device for it in parameters}
    if any(it.type == "cuda" for it in devices) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a step of exact parameters cannot be captured in a CUDA graph, since their steps are "
            "counted on the CPU; capture compressed parameters alone"
        )
    counts: list[Tensor] = [it.state["step"] for it in parameters]
    if not group.get("fused") or devices == {torch.device("cpu")}:
        yield counts
        return
    numbers = torch.tensor([float(count) for count in counts], dtype=torch.float32)
    copies = {device: numbers.to(device).unbind() for device in devices}
    yield [copies[it.local.device][index] for index, it in enumerate(parameters)]
    for count in counts:
        count += 1
