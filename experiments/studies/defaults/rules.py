"""Two changes of Adam's rule, tried here only: updates of one size, and a floor under v."""

from typing import Any

import torch
from torch import Tensor

import sketchoptim as so
from sketchoptim.optim import Rule

_DECAY = 0.99


class _Scale:
    """The running mean square of a table's updates, over rows with gradients."""

    def __init__(self) -> None:
        self.mean, self.weight = 0.0, 0.0
        self.sums, self.count = 0.0, 0

    def begin_(self) -> None:
        """Takes the last step in."""
        if self.count:
            self.mean = _DECAY * self.mean + (1 - _DECAY) * self.sums / self.count
            self.weight = _DECAY * self.weight + 1 - _DECAY
        self.sums, self.count = 0.0, 0

    def add_(self, gradient: Tensor, direction: Tensor) -> None:
        """Adds rows of this step."""
        self.sums += float(direction.double().square().sum())
        self.count += int(torch.count_nonzero(gradient.any(1))) * gradient.shape[1]

    @property
    def root(self) -> float:
        """Of the steps before this one; 1 in the first."""
        return (self.mean / self.weight) ** 0.5 if self.mean else 1.0


class ScaledAdam(so.Adam):
    """Adam; every group that is not exact has one table, and a number for it.

    Args:
        dense: What updates along dense gradients are multiplied by, besides.
    """

    def __init__(self, *arguments: Any, dense: float, **options: Any) -> None:
        self.dense, self._scales = dense, dict[int, _Scale]()
        super().__init__(*arguments, **options)

    def rule(self, group: Any, step: int, *, memory: so.Memory, is_sparse: bool) -> Any:
        fused = super().rule(group, step, memory=memory, is_sparse=is_sparse)
        if memory.is_exact:
            return fused
        scale = self._scales.setdefault(id(group), _Scale())
        scale.begin_()
        factor = fused.numbers().step_size * (1.0 if is_sparse else self.dense) / scale.root

        def update(
            rows: Tensor, gradient: Tensor, first: Tensor | None, second: Tensor | None
        ) -> Tensor:
            direction = fused.direction(gradient, first, second)
            scale.add_(gradient, direction)
            return rows * fused.shrink - direction * factor

        return Rule(
            update, first=fused.first, second=fused.second, maximize=fused.maximize,
            weight_decay=fused.weight_decay,
        )  # fmt: skip


class FlooredAdam(so.Adam):
    """Adam that divides by the root of v plus `floor` times the mean of v over all rows.

    Every group that is not exact has one table. The mean is that before the step.
    """

    def __init__(self, *arguments: Any, floor: float, **options: Any) -> None:
        self.floor, self._means = floor, dict[int, float]()
        super().__init__(*arguments, **options)

    def rule(self, group: Any, step: int, *, memory: so.Memory, is_sparse: bool) -> Any:
        fused = super().rule(group, step, memory=memory, is_sparse=is_sparse)
        if memory.is_exact:
            return fused
        assert fused.second is not None
        rows, average = group["params"][0].shape[0], fused.second
        mean = self._means.get(id(group), 0.0)
        self._means[id(group)] = average.decay * mean

        def update(
            rows_: Tensor, gradient: Tensor, first: Tensor | None, second: Tensor | None
        ) -> Tensor:
            assert second is not None
            squares = float(gradient.double().square().mean(1).sum())
            self._means[id(group)] += average.weight * squares / rows
            return fused.update(rows_, gradient, first, second + self.floor * mean)

        return Rule(
            update, first=fused.first, second=fused.second, maximize=fused.maximize,
            weight_decay=fused.weight_decay,
        )  # fmt: skip


class ScaledAdamW(ScaledAdam):
    """The same with weight decay apart from the gradient."""

    is_decoupled = True
