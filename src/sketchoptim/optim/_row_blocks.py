"""Exact parameters with deferred gradients: torch.optim's own function, a block of rows at a time.

What it computes for an element depends on no other element, so the bits are those of one call.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from .._rows import Chunk
from ..deferred import DeferredGradient
from ..moments import Name
from ._algorithm import ExactParameter
from ._binding import Binding
from ._state import State


class RowBlock:
    """Some rows of an exact parameter, with their gradient and their moments."""

    def __init__(self, binding: Binding, chunk: Chunk, state: State) -> None:
        self.binding, self.at, self.state = binding, chunk.at, state
        self.local: Tensor = binding.local[chunk.at]
        self.gradient = chunk.gradient.view_as(self.local).to(self.local.dtype)
        self.began_after = binding.began_after

    def exact_values(self, name: Name) -> Tensor:
        """The rows of a moment."""
        return self.binding.exact_values(name)[self.at]


def torch_calls(bindings: Sequence[Binding]) -> Iterator[Sequence[ExactParameter]]:
    """The parameters of each call of torch's function, which must follow before the next one."""
    deferred: list[tuple[Binding, DeferredGradient]] = []
    plain: list[Binding] = []
    for binding in bindings:
        gradient = binding.parameter.grad
        if type(gradient) is DeferredGradient and not gradient.exists:
            deferred.append((binding, gradient))
        else:
            plain.append(binding)
    if plain:
        yield plain
    for binding, gradient in deferred:
        step = binding.state["step"]
        before = step.clone()
        for chunk in gradient.chunks():
            yield [RowBlock(binding, chunk, {"step": before.clone()})]
        step.add_(1)
