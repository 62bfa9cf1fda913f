"""Adam with a floor under the second moment that costs one number a table.

A row that is touched for the first time has a second moment of (1 - beta2) g^2 and takes a step of
1 / sqrt(1 - beta2) learning rates, 32 for .999. A floor makes the steps of such rows smaller.
"""

import math
from typing import Any

import torch
from torch import Tensor

import sketchoptim as so


class FlooredAdam(so.Adam):
    """Adam whose denominator is sqrt(v) + sqrt(floor * mean), for sparse gradients.

    ``mean`` is the mean of v over all weights of a table, which needs no more than one number::

        mean <- beta2 mean + (1 - beta2) sum(g^2) / weights of the table

    Args:
        params: Groups of named parameters.
        floor: 0 gives Adam.
        options: Those of Adam other than eps.

    Example:
        >>> table = torch.nn.Embedding(1000, 4, sparse=True)
        >>> optimizer = FlooredAdam([{"params": [("table", table.weight)]}], floor=0.1)
        >>> table(torch.tensor([1, 2])).sum().backward()
        >>> optimizer.step()
        >>> f"{optimizer.means['table']:.1e}"
        '2.0e-06'
    """

    def __init__(self, params: list[dict[str, Any]], *, floor: float = 0.0, **options: Any) -> None:
        # eps is an option of a group, so each parameter has one of its own
        groups = [{**group, "params": [pair]} for group in params for pair in group["params"]]
        super().__init__(groups, **options)
        self.floor = floor
        self.means: dict[str, float] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves the rows that have a gradient, with the floors of this step."""
        for group in self.param_groups:
            (weight,), (name,) = group["params"], group["param_names"]
            beta2 = float(group["betas"][1])
            mean = (1 - beta2) * _sum_of_squares(weight.grad) / weight.numel()
            self.means[name] = beta2 * self.means.get(name, 0.0) + mean
            group["eps"] = max(math.sqrt(self.floor * self.means[name]), 1e-8)
        super().step()

    def state_dict(self) -> dict[str, Any]:
        """As Adam's, and the means."""
        return {**super().state_dict(), "means": dict(self.means)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a `state_dict`."""
        rest = dict(state_dict)
        self.means = dict(rest.pop("means"))
        super().load_state_dict(rest)


def _sum_of_squares(gradient: Tensor) -> float:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return float(values.square().sum())
