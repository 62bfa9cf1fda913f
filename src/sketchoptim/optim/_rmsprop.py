"""RMSprop."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import rmsprop as torch_rmsprop

from .._group_options import Compress
from .._validation import check_number
from ..moments import Average
from ..ops import FusedRule, Schedule
from ..storage import Memory
from ._algorithm import ExactParameter, Group, Twins
from ._torch_step import torch_step_counts
from .base import Optimizer


class RMSprop(Optimizer):
    """RMSprop with its mean of squares in the storage that `memory` names.

    A step is::

        v <- alpha v + (1 - alpha) g^2
        p <- p - lr * g / (sqrt(v) + eps)

    Args:
        params: Parameters, named parameters or groups, as in torch.optim.
        lr: Learning rate.
        alpha: Decay of the mean.
        eps: Added to the root of the mean.
        weight_decay: Joins the gradient (of touched rows, where it is sparse).
        memory, compress, maximize, nonfinite, rounding: As in `Adam`; `memory.first` is not used.
        foreach, capturable, differentiable: As in `Adam`.
        momentum, centered: Accepted if 0 and False, as torch.optim passes them.
    """

    moment_names = ("second",)
    torch_twins: ClassVar[Twins] = {torch.optim.RMSprop: {"second": "square_avg"}}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        memory: str | Memory = "lean",
        compress: Compress = "sparse",
        maximize: bool = False,
        nonfinite: Literal["raise", "skip", "unchecked"] = "raise",
        rounding: Literal["stochastic", "nearest"] | None = None,
        momentum: float = 0.0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            alpha=alpha,
            eps=eps,
            weight_decay=weight_decay,
            memory=memory,
            compress=compress,
            maximize=maximize,
            nonfinite=nonfinite,
            rounding=rounding,
            momentum=momentum,
            centered=centered,
            capturable=capturable,
            foreach=foreach,
            differentiable=differentiable,
        )

    def check_options(self, group: Group) -> None:
        super().check_options(group)
        check_number("alpha", group["alpha"], below=1.0, allow_tensor=True)
        if group.get("momentum"):
            raise ValueError(
                f"momentum must be 0 in RMSprop, got {group['momentum']}; see so.Adam, which has a "
                "first moment"
            )
        check_number("eps", group["eps"], allow_tensor=True)

    def rule(self, group: Group, step: int, *, memory: Memory, is_sparse: bool) -> FusedRule:
        alpha = float(group["alpha"])
        return FusedRule(
            step_size=float(group["lr"]),
            second=Average(alpha, 1 - alpha),
            schedule=Schedule(step),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            maximize=group["maximize"],
            clip=memory.clip,
        )

    def torch_step_(self, group: Group, parameters: Sequence[ExactParameter]) -> None:
        with torch_step_counts(group, parameters) as counts:
            torch_rmsprop.rmsprop(
                [it.local for it in parameters],
                [it.gradient for it in parameters],
                [it.exact_values("second") for it in parameters],
                [],
                [],
                counts,
                foreach=group.get("foreach"),
                lr=group["lr"],
                alpha=float(group["alpha"]),
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
                momentum=0.0,
                centered=False,
                maximize=group["maximize"],
            )
