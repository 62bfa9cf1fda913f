"""What must hold of options, gradients and state before a step; errors say what to do."""

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .. import moments
from ..moments import Name
from ..storage import Memory, Storage
from ._slot import Slot, State, parts


def check_number(name: str, value: Any, *, least: float = 0.0, below: float = math.inf) -> None:
    """Raises unless ``least <= value < below``; a tensor of one element counts as its number."""
    if type(value) is float and least <= value < below:
        return  # as nearly always: a step has ten of them to check
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not least <= float(value) < below:
        allowed = f">= {least:g} and finite" if below == math.inf else f"in [{least:g}, {below:g})"
        raise ValueError(f"{name} must be {allowed}, got {value}")


def check_flag(name: str, value: Any) -> None:
    """Raises unless the value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def is_fixed(value: object) -> bool:
    """Whether an option that is the same object is the same option, unlike a tensor or a list."""
    if isinstance(value, tuple):
        return all(is_fixed(part) for part in value)
    return isinstance(value, float | int | str | Memory)


def check_memory(before: Memory | None, now: Memory) -> None:
    """Raises where the memory of a group is not what its moments were kept in before."""
    if now is not before and now != before:
        raise ValueError(
            f"memory of a group must be kept as in earlier steps, {before}, got {now}; "
            "build a new optimizer to change it"
        )


def check_state(
    name: str, state: State, storages: dict[Name, Storage], shape: torch.Size, *, remedy: str
) -> None:
    """Raises unless the state, live or saved, is one for a parameter of such a shape."""
    check_number(f"step of {name}", state.get("step"))
    check_flag(f"is_compressed of {name}", state.get("is_compressed"))
    known = state.get("shape")
    found = known.tolist() if isinstance(known, Tensor) else None
    if found != list(shape):
        raise ValueError(
            f"the state of {name} must be for shape {list(shape)}, got {found}; {remedy}"
        )
    for moment, storage in storages.items():
        misfit = moments.misfit(storage, shape, parts(state, moment))
        if misfit is not None:
            raise ValueError(
                f"the {moment} moment of {name} must be kept in {storage}, but {misfit}; {remedy}"
            )


def check_live_state(parameter: Tensor, state: State, storages: dict[Name, Storage]) -> None:
    """Raises unless the state is one that steps of the parameter can go on from as it is."""
    name = f"the parameter of shape {list(parameter.shape)}"
    remedy = (
        "build the optimizer after the model is resized or converted, and put state into it with "
        "load_state_dict()"
    )
    step = state.get("step")
    if not (isinstance(step, Tensor) and step.dtype == torch.float32 and step.is_cpu):
        raise TypeError(
            f"step of {name} must be torch.float32 on the CPU, got {step!r}; "
            "fill the tensor that is there, or use load_state_dict()"
        )
    for key in ("first_values", "second_values"):
        dtype = state[key].dtype if key in state else parameter.dtype
        if dtype != parameter.dtype:
            raise TypeError(
                f"{name} is {parameter.dtype} but was {dtype} in earlier steps; {remedy}"
            )
    check_state(name, state, storages, parameter.shape, remedy=remedy)


def check_parameter(parameter: Tensor) -> None:
    """Raises unless the parameter is one that can be stepped."""
    if not parameter.is_floating_point():
        raise TypeError(
            f"parameters must be real floating point, got {parameter.dtype} of shape "
            f"{list(parameter.shape)}; keep complex weights as torch.view_as_real() gives them"
        )
    if parameter.layout != torch.strided:
        raise TypeError(
            f"parameters must be dense tensors, got {parameter.layout} of shape "
            f"{list(parameter.shape)}; only gradients may be sparse"
        )


def check_gradient(parameter: Tensor | Slot, gradient: Tensor) -> None:
    """Raises unless the gradient is one for the parameter, of which a slot knows as much."""
    if not gradient.is_sparse and gradient.layout != torch.strided:
        raise TypeError(f"{_gradient_of(parameter)} be dense or sparse COO, got {gradient.layout}")
    if gradient.shape != parameter.shape:
        raise ValueError(f"{_gradient_of(parameter)} have that shape, got {list(gradient.shape)}")
    if gradient.dtype != parameter.dtype:
        raise TypeError(f"{_gradient_of(parameter)} be {parameter.dtype}, got {gradient.dtype}")
    if gradient.device != parameter.device:
        raise ValueError(
            f"{_gradient_of(parameter)} be on {parameter.device}, got {gradient.device}"
        )
    if gradient.is_sparse and gradient.sparse_dim() != 1:
        raise ValueError(
            f"{_gradient_of(parameter)} be sparse in rows alone (sparse_dim 1), "
            f"got {gradient.sparse_dim()}; make it with to_sparse(1)"
        )


def _gradient_of(parameter: Tensor | Slot) -> str:
    return f"the gradient of the parameter of shape {list(parameter.shape)} must"
