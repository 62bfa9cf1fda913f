"""Stochastic gradient descent with momentum."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import sgd as torch_sgd

from .._group_options import Compress
from .._validation import check_flag, check_number
from ..moments import Average, Name
from ..ops import FusedRule, Schedule
from ..storage import Memory, Storage
from ._algorithm import ExactParameter, Group, Twins
from .base import Optimizer


class SGD(Optimizer):
    """SGD with its momentum in the storage that `memory` names.

    A step is::

        m <- momentum m + (1 - dampening) g
        p <- p - lr * (g + momentum m  if nesterov, else  m)

    As in torch.optim, the first step with momentum does not dampen. Under "lean", the default, and
    every other memory without a first moment, the momentum of a compressed parameter is dropped: it
    steps by ``lr * g``, and needs a learning rate ``1 / (1 - momentum)`` times as large as with
    momentum.
    ``memory="paper-mv"`` keeps the momentum in a count-sketch, as Algorithm 2 does.

    Args:
        params: Parameters, named parameters or groups, as in torch.optim.
        lr: Learning rate.
        momentum: Decay of the momentum; 0 for none.
        dampening: Share of the gradient that does not enter the momentum.
        weight_decay: Joins the gradient (of touched rows, where it is sparse).
        nesterov: Look ahead; needs momentum and no dampening.
        memory, compress, maximize, nonfinite, rounding: As in `Adam`; `memory.second` is not used.
        foreach, fused, differentiable: As in `Adam`.
    """

    moment_names = ("first",)
    torch_twins: ClassVar[Twins] = {torch.optim.SGD: {"first": "momentum_buffer"}}
    late_moments = ("first",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
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
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
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
        check_number("momentum", group["momentum"], below=1.0, allow_tensor=True)
        check_number("dampening", group["dampening"], allow_tensor=True)
        check_flag("nesterov", group["nesterov"])
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise ValueError(
                "nesterov needs momentum > 0 and dampening = 0, "
                f"got momentum={group['momentum']}, dampening={group['dampening']}"
            )

    def storages(self, group: Group, memory: Memory) -> dict[Name, Storage]:
        return super().storages(group, memory) if group["momentum"] else {}

    def void_option(self, group: Group, memory: Memory) -> str | None:
        momentum = float(group["momentum"])
        if not momentum or memory.first is not None:
            return None
        return (
            f"momentum={momentum:g} is dropped for compressed parameters, since memory has no "
            f"first moment: they step by lr * g. Give their group a learning rate "
            f"{1 / (1 - momentum):.3g} times as large, or keep the momentum in a sketch with "
            'memory="paper-mv"'
        )

    def rule(self, group: Group, step: int, *, memory: Memory, is_sparse: bool) -> FusedRule:
        momentum = float(group["momentum"])
        has_momentum = bool(momentum) and memory.first is not None
        weight = 1.0 if step == 1 else 1 - float(group["dampening"])
        return FusedRule(
            step_size=float(group["lr"]),
            first=Average(momentum, weight) if has_momentum else None,
            schedule=Schedule(step),
            nesterov=momentum if has_momentum and group["nesterov"] else None,
            weight_decay=float(group["weight_decay"]),
            maximize=group["maximize"],
            clip=memory.clip,
        )

    def torch_step_(self, group: Group, parameters: Sequence[ExactParameter]) -> None:
        has_momentum = bool(group["momentum"])
        # torch.optim starts from no buffer at all, which is how it leaves the first step undamped.
        # Its fused function takes parameters of which all have a buffer, or none.
        starting = [it for it in parameters if it.state["step"] <= it.began_after]
        going_on = [it for it in parameters if it.state["step"] > it.began_after]
        if going_on:
            buffers = [it.exact_values("first") if has_momentum else None for it in going_on]
            _torch_sgd_(group, going_on, buffers)
        if starting:
            buffers = [None] * len(starting)
            _torch_sgd_(group, starting, buffers)
            for it, buffer in zip(starting, buffers, strict=True):
                if buffer is not None:  # its strides are those of the gradient; kernels need ours
                    it.exact_values("first").copy_(buffer)
        for it in parameters:
            it.state["step"] += 1


def _torch_sgd_(
    group: Group, parameters: Sequence[ExactParameter], buffers: list[Tensor | None]
) -> None:
    torch_sgd.sgd(
        [it.local for it in parameters],
        [it.gradient for it in parameters],
        buffers,
        foreach=group.get("foreach"),
        fused=group.get("fused"),
        weight_decay=float(group["weight_decay"]),
        momentum=float(group["momentum"]),
        lr=group["lr"],
        dampening=float(group["dampening"]),
        nesterov=group["nesterov"],
        maximize=group["maximize"],
    )
