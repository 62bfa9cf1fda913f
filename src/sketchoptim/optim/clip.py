"""Clipping the norm of sparse and dense gradients together."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from .checks import check_number


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """The total norm of all gradients, which are scaled in place so that it is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, but sparse gradients may be among them. A row that an
    uncoalesced gradient holds several times counts once, with its sum; such gradients are coalesced
    in place of ``parameter.grad``, which the optimizer would otherwise have to do.
    """
    if max_norm != math.inf:  # which measures and clips nothing, as with torch
        check_number("max_norm", max_norm)
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    values = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            values.append(parameter.grad._values())
        else:
            values.append(parameter.grad)
    total = torch.nn.utils.get_total_norm(values, norm_type, error_if_nonfinite)
    # As torch: never scales up, and its 1e-6 keeps a zero norm from dividing by zero.
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for value in values:
        value.mul_(factor.to(value.device))
    return total
