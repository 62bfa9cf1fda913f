"""Momentum in rank-one factors: the paper's baseline LR-NMF, applied to a variable with signs.

The factors are sums of rows and of columns. They are the best non-negative ones for a variable
without signs, such as a second moment. A momentum has signs, and the sum of all its numbers, by
which the product of the factors is divided, may be close to zero. The paper reports a perplexity
of 176 where momentum has 94.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class RankOneMomentum(torch.optim.Optimizer):
    """SGD whose momentum is kept as row sums and column sums, for sparse gradients.

    In each step, with r and c the sums of the momentum's rows and columns and s the sum of c::

        r <- momentum r + row sums of g,    c <- momentum c + column sums of g
        p[i] <- p[i] - lr r[i] c / s        for the rows i of g

    Where s is zero a step is zero.

    Example:
        >>> table = torch.nn.Embedding(10, 4, sparse=True)
        >>> optimizer = RankOneMomentum(table.parameters(), lr=0.1)
        >>> table(torch.tensor([1, 2])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[table.weight]["rows"].shape
        torch.Size([10])
    """

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Moves the rows that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move_(weight, weight.grad.coalesce(), group["lr"], group["momentum"])
        return loss

    def _move_(self, weight: Tensor, gradient: Tensor, lr: float, momentum: float) -> None:
        state = self.state[weight]
        if not state:
            state["rows"] = weight.new_zeros(weight.shape[0])
            state["columns"] = weight.new_zeros(weight.shape[1])
        ids, values = gradient.indices()[0], gradient.values()
        state["rows"].mul_(momentum).index_add_(0, ids, values.sum(1))
        state["columns"].mul_(momentum).add_(values.sum(0))
        total = state["columns"].sum()
        if total != 0:
            share = state["rows"][ids] / total
            weight.index_add_(0, ids, share[:, None] * state["columns"], alpha=-lr)
