"""Clipping the norm of sparse and dense gradients together."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .._sparse_norm import sparse_norm
from .._torch_private import entries
from .._validation import check_number, is_dtensor
from ._checks import check_gradient
from ._shards import local, whole


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """The total norm of all gradients, which are scaled in place so that it is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, but sparse gradients and DTensors may be among them. A row
    that an uncoalesced gradient holds several times counts once, with its sum in float32 at least;
    the gradient stays uncoalesced, so that a step finds nothing rounded but what was scaled.
    """
    if max_norm != math.inf:  # which measures and clips nothing, as with torch
        check_number("max_norm", max_norm, allow_tensor=True)
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    gradients: list[Tensor] = []
    measured: list[Tensor] = []
    divided: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        gradients.append(gradient)
        if is_dtensor(gradient):
            divided.setdefault(gradient.device_mesh, []).append(gradient)
        elif not gradient.is_sparse:
            if gradient.numel():  # of nothing there is no largest value
                measured.append(gradient)
        else:
            check_gradient(parameter, gradient)
            measured.append(sparse_norm(gradient, norm_type))
    # A norm of norms is the norm of all; the processes of a mesh exchange theirs once.
    for shared in divided.values():
        measured.append(whole(torch.nn.utils.get_total_norm(shared, norm_type)))
    total = torch.nn.utils.get_total_norm(measured, norm_type, error_if_nonfinite)
    # As torch: never scales up, and its 1e-6 keeps a zero norm from dividing by zero.
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    if total.is_cpu and factor == 1:  # as in most steps; on another device, to look is to wait
        return total
    for gradient in gradients:
        _scale_(gradient, factor.to(gradient.device))
    return total


def _scale_(gradient: Tensor, factor: Tensor) -> None:
    if not gradient.is_sparse:
        local(gradient).mul_(factor)
        return
    # Not in the memory of the values: tables whose outputs are added get the very same ones from
    # autograd, and each of them would scale those of all.
    ids, values = entries(gradient)
    gradient.data = torch.sparse_coo_tensor(
        ids,
        values * factor,
        gradient.shape,
        is_coalesced=gradient.is_coalesced(),
        check_invariants=False,
        device=gradient.device,
    )
