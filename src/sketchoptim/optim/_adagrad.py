"""Adagrad."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import adagrad as torch_adagrad

from .._group_options import Compress
from .._validation import check_number
from ..moments import Average
from ..ops import FusedRule, Schedule
from ..storage import Memory
from ._algorithm import ExactParameter, Group, Twins
from ._torch_step import torch_step_counts
from .base import Optimizer


class Adagrad(Optimizer):
    """Adagrad with its sum of squares in the storage that `memory` names.

    In step t::

        v <- v + g^2
        p <- p - lr / (1 + (t - 1) lr_decay) * g / (sqrt(v) + eps)

    Args:
        params: Parameters, named parameters or groups, as in torch.optim.
        lr: Learning rate.
        lr_decay: How fast the learning rate falls with the step.
        weight_decay: Joins the gradient (of touched rows, where it is sparse).
        initial_accumulator_value: The value that v starts from.
        eps: Added to the root of the sum.
        memory, compress, maximize, nonfinite, rounding: As in `Adam`; `memory.first` is not used.
        foreach, fused, differentiable: As in `Adam`.
    """

    moment_names = ("second",)
    torch_twins: ClassVar[Twins] = {torch.optim.Adagrad: {"second": "sum"}}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        memory: str | Memory = "lean",
        compress: Compress = "sparse",
        maximize: bool = False,
        nonfinite: Literal["raise", "skip", "unchecked"] = "raise",
        rounding: Literal["stochastic", "nearest"] | None = None,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
            memory=memory,
            compress=compress,
            maximize=maximize,
            nonfinite=nonfinite,
            rounding=rounding,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )

    def check_options(self, group: Group) -> None:
        super().check_options(group)
        for name in ("lr_decay", "eps", "initial_accumulator_value"):
            check_number(name, group[name], allow_tensor=True)

    def fill(self, group: Group) -> float:
        return float(group["initial_accumulator_value"])

    def rule(self, group: Group, step: int, *, memory: Memory, is_sparse: bool) -> FusedRule:
        return FusedRule(
            step_size=float(group["lr"]),
            second=Average(1.0, 1.0),
            schedule=Schedule(step, rate_decay=float(group["lr_decay"])),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            maximize=group["maximize"],
            clip=memory.clip,
        )

    def torch_step_(self, group: Group, parameters: Sequence[ExactParameter]) -> None:
        with torch_step_counts(group, parameters) as counts:
            torch_adagrad.adagrad(
                [it.local for it in parameters],
                [it.gradient for it in parameters],
                [it.exact_values("second") for it in parameters],
                counts,
                foreach=group.get("foreach"),
                fused=group.get("fused"),
                lr=group["lr"],
                weight_decay=float(group["weight_decay"]),
                lr_decay=float(group["lr_decay"]),
                eps=float(group["eps"]),
                maximize=group["maximize"],
            )
