"""Adam with a floor under the second moment that costs one number a table.

A row that is touched for the first time has a second moment of (1 - beta2) g^2 and takes a step of
1 / sqrt(1 - beta2) learning rates, 32 for .999. A floor makes the steps of such rows smaller.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

import sketchoptim as so
from sketchoptim.ops import FusedRule, Rule


class FlooredAdam(so.Adam):
    """Adam whose denominator is sqrt(v) + sqrt(floor * mean).

    ``mean`` takes one number for a table. It is the mean of v over all weights of the table, or the
    mean square of the gradient over the rows that a step touches::

        mean <- beta2 mean + (1 - beta2) sum(g^2) / weights of the table, or of the touched rows

    Args:
        params: Groups of named parameters.
        floor: 0 gives Adam.
        over: "table" or "touched".
        is_maximum: The denominator is the larger of the two roots instead of their sum.
        largest_step: Largest root mean square of a row's step, in learning rates.
        options: Those of Adam other than eps.

    Example:
        >>> table = torch.nn.Embedding(1000, 4, sparse=True)
        >>> optimizer = FlooredAdam([{"params": [("table", table.weight)]}], floor=0.1)
        >>> table(torch.tensor([1, 2])).sum().backward()
        >>> optimizer.step()
        >>> f"{optimizer.means['table']:.1e}"
        '2.0e-06'
    """

    def __init__(
        self,
        params: list[dict[str, Any]],
        *,
        floor: float = 0.0,
        over: Literal["table", "touched"] = "table",
        is_maximum: bool = False,
        largest_step: float = math.inf,
        **options: Any,
    ) -> None:
        # eps is an option of a group, so each parameter has one of its own
        groups = [{**group, "params": [pair]} for group in params for pair in group["params"]]
        super().__init__(groups, **options)
        self.floor = floor
        self.over, self.is_maximum, self.largest_step = over, is_maximum, largest_step
        self.means: dict[str, float] = {}
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves the rows that have a gradient, with the floors of this step."""
        self.steps += 1
        for group in self.param_groups:
            (weight,), (name,) = group["params"], group["param_names"]
            beta2 = float(group["betas"][1])
            values = touched_rows(weight.grad)
            count = weight.numel() if self.over == "table" else max(values.numel(), 1)
            mean = (1 - beta2) * float(values.square().sum()) / count
            self.means[name] = beta2 * self.means.get(name, 0.0) + mean
            floor = self.floor * self.means[name]
            if not weight.grad.is_sparse:  # torch adds eps after the correction of the bias there
                floor /= 1 - beta2**self.steps
            group["eps"] = max(math.sqrt(floor), 1e-8)
        super().step()

    def rule(  # type: ignore[override]
        self, group: dict[str, Any], step: int, *, memory: so.Memory, is_sparse: bool
    ) -> FusedRule | Rule:
        """Adam's, or one without kernels for a maximum or a largest step."""
        fused = super().rule(group, step, memory=memory, is_sparse=is_sparse)
        if not self.is_maximum and math.isinf(self.largest_step):
            return fused

        def update(rows: Tensor, gradient: Tensor, _: Tensor | None, second: Tensor) -> Tensor:
            root = second.sqrt() / fused.second_root
            root = root.clamp(min=fused.eps) if self.is_maximum else root + fused.eps
            moved = gradient / root * fused.step_size
            size = moved.square().mean(1, keepdim=True).sqrt()
            return rows - moved * (self.largest_step * float(group["lr"]) / size).clamp(max=1)

        return Rule(update, second=fused.second)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """As Adam's, and the means."""
        return {**super().state_dict(), "means": dict(self.means), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a `state_dict`."""
        rest = dict(state_dict)
        self.means, self.steps = dict(rest.pop("means")), rest.pop("steps")
        super().load_state_dict(rest)


def touched_rows(gradient: Tensor) -> Tensor:
    """The rows that a gradient has: those of a dense one are all."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
