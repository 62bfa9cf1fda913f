"""Adam and AdamW."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import adam as torch_adam

from .._group_options import Compress
from .._validation import check_number
from ..moments import Average, Name
from ..ops import FusedRule, Schedule
from ..storage import Memory
from ._algorithm import ExactParameter, Group, Twins
from ._torch_step import torch_step_counts
from .base import Optimizer

_KEYS: dict[Name, str] = {"first": "exp_avg", "second": "exp_avg_sq"}


class Adam(Optimizer):
    """Adam with its moments in the storages that `memory` names; by default half a byte a row.

    In step t::

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        p <- p - lr * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

    Under the default, "lean", m is dropped (the step uses g) and v is the mean of g^2 over a row.
    Sparse gradients move touched rows only and take epsilon as `torch.optim.SparseAdam` does,
    before the bias correction; dense ones as `torch.optim.Adam` does, after it.

    Args:
        params: Parameters, named parameters or groups, as in torch.optim. Options of a group win
            over the ones given here.
        lr: Learning rate.
        betas: Decay of the first and of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Joins the gradient (of touched rows, where it is sparse).
        memory: A preset's name or a `Memory`, for the parameters that `compress` selects.
        compress: The parameters that `memory` applies to; all others are exact. "sparse": those
            with sparse gradients. "tables": also those with dense gradients that are shaped like
            tables, with two dimensions, at least 1,000 rows and 8 times as many rows as columns.
            It is for frameworks that build the optimizer from `model.parameters()`. "all": every
            parameter, the default of a group that names a `memory` itself.
        maximize: Climb instead of descending.
        nonfinite: What a compressed parameter does with a gradient that is not finite: "raise"
            refuses the whole step, "skip" leaves the parameter as it is and counts the step in
            ``state["skipped"]``. "unchecked" does not look, which saves time: for gradients that
            something else has checked, such as a `GradScaler`. Exact parameters do what torch.optim
            does.
        rounding: How new weights of a compressed bfloat16 or float16 parameter are rounded:
            "stochastic", also meant by None, up or down at random so that the mean is right and
            small steps are not lost; or "nearest". The same run gives the same weights. It has no
            effect on wider parameters, nor on exact ones, which are rounded as torch.optim does.
        foreach, fused: As in torch.optim, for exact parameters: which implementation steps them.
        amsgrad, differentiable: Accepted if False, as torch.optim passes them.
        capturable: Accepted; it has no effect. Steps of compressed parameters can be captured in a
            CUDA graph, steps of exact ones cannot.
        decoupled_weight_decay: Accepted if it is False in `Adam` and True in `AdamW`.

    >>> table = torch.nn.Embedding(10_000, 64, sparse=True)
    >>> optimizer = Adam(table.parameters(), lr=0.01)
    >>> table(torch.tensor([1, 2])).sum().backward()
    >>> optimizer.step()
    """

    moment_names = ("first", "second")
    torch_twins: ClassVar[Twins] = {torch.optim.Adam: _KEYS, torch.optim.SparseAdam: _KEYS}
    is_decoupled: ClassVar[bool] = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        memory: str | Memory = "lean",
        compress: Compress = "sparse",
        maximize: bool = False,
        nonfinite: Literal["raise", "skip", "unchecked"] = "raise",
        rounding: Literal["stochastic", "nearest"] | None = None,
        amsgrad: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            memory=memory,
            compress=compress,
            maximize=maximize,
            nonfinite=nonfinite,
            rounding=rounding,
            amsgrad=amsgrad,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )

    def check_options(self, group: Group) -> None:
        super().check_options(group)
        if not isinstance(group["betas"], tuple | list) or len(group["betas"]) != 2:
            raise ValueError(f"betas must be two numbers, got {group['betas']!r}")
        if len({isinstance(beta, Tensor) for beta in group["betas"]}) > 1:
            raise ValueError(f"betas must be two floats or two tensors, got {group['betas']!r}")
        for index, beta in enumerate(group["betas"]):
            check_number(f"betas[{index}]", beta, below=1.0, allow_tensor=True)
        check_number("eps", group["eps"], allow_tensor=True)
        if group.get("foreach") and not group.get("capturable"):
            for name, value in (("lr", group["lr"]), ("betas[0]", group["betas"][0])):
                if isinstance(value, Tensor):
                    raise ValueError(
                        f"{name} must be a number with foreach=True, got {value}; leave foreach out"
                    )
        # As in torch.optim a group has a flag for which of the two it is, and so has a checkpoint.
        if group["decoupled_weight_decay"] is not self.is_decoupled:
            name, other = ("AdamW", "Adam") if self.is_decoupled else ("Adam", "AdamW")
            raise ValueError(
                f"decoupled_weight_decay must be {self.is_decoupled} in {name}, "
                f"got {group['decoupled_weight_decay']!r}; see {other}"
            )

    def rule(self, group: Group, step: int, *, memory: Memory, is_sparse: bool) -> FusedRule:
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        beta1, beta2 = map(float, group["betas"])
        if memory.first is None:
            beta1 = 0.0
        return FusedRule(
            step_size=lr,
            first=None if memory.first is None else Average(beta1, 1 - beta1),
            second=Average(beta2, 1 - beta2),
            schedule=Schedule(step, beta1, beta2, is_after_eps=not is_sparse),
            eps=float(group["eps"]),
            weight_decay=0.0 if self.is_decoupled else decay,
            shrink=1 - lr * decay if self.is_decoupled else 1.0,
            maximize=group["maximize"],
            clip=memory.clip,
            is_ratio=memory.form == "ratio",
        )

    def torch_step_(self, group: Group, parameters: Sequence[ExactParameter]) -> None:
        beta1, beta2 = map(float, group["betas"])
        with torch_step_counts(group, parameters) as counts:
            torch_adam.adam(
                [it.local for it in parameters],
                [it.gradient for it in parameters],
                [it.exact_values("first") for it in parameters],
                [it.exact_values("second") for it in parameters],
                [],
                counts,
                foreach=group.get("foreach"),
                fused=group.get("fused"),
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                # torch.optim's foreach function refuses a tensor, which a scheduler may put there.
                lr=float(group["lr"]) if group.get("foreach") else group["lr"],
                weight_decay=float(group["weight_decay"]),
                eps=float(group["eps"]),
                maximize=group["maximize"],
                decoupled_weight_decay=self.is_decoupled,
            )


class AdamW(Adam):
    """Adam with weight decay apart from the gradient: ``p <- (1 - lr * weight_decay) p``.

    Where a gradient is sparse, touched rows alone decay, each time they are touched. All else is
    as in `Adam`.
    """

    torch_twins: ClassVar[Twins] = {torch.optim.AdamW: _KEYS}
    is_decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        memory: str | Memory = "lean",
        compress: Compress = "sparse",
        maximize: bool = False,
        nonfinite: Literal["raise", "skip", "unchecked"] = "raise",
        rounding: Literal["stochastic", "nearest"] | None = None,
        amsgrad: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = True,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            memory=memory,
            compress=compress,
            maximize=maximize,
            nonfinite=nonfinite,
            rounding=rounding,
            amsgrad=amsgrad,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
