"""Requirements of options, parameters and gradients before a step; errors name the remedy."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._group_options import misspelled_option
from .._validation import PLAIN_TENSORS, check_choice, check_storage, is_wrapper
from ..deferred import DeferredGradient
from ..moments import Name
from ..storage import Memory
from ._shards import layout, local

# Flags of torch.optim, and what to use instead of those that no optimizer here has.
TORCH_FLAGS = {
    "foreach": "",
    "fused": "",
    "capturable": "",
    "amsgrad": "so.Adagrad's second moment never falls either, and torch.optim.Adam has amsgrad",
    "centered": "so.Adam has a first moment, and torch.optim.RMSprop has centered",
    "differentiable": "use the optimizer of torch.optim to differentiate through a step",
}


def is_fixed(value: object) -> bool:
    """Whether an option that is the same object is the same option, unlike a tensor or a list."""
    if isinstance(value, tuple):
        return all(is_fixed(part) for part in value)
    return value is None or isinstance(value, float | int | str | Memory)


def check_is_memory(memory: object) -> None:
    """Raises unless the memory of a group is one."""
    if not isinstance(memory, Memory):
        raise TypeError(
            f"memory of a group must be a Memory, got {memory!r}; presets have names in "
            "add_param_group() and in constructors"
        )


def check_memory(before: Memory, now: Memory) -> None:
    """Raises where the memory of a group is not what its moments were kept in before."""
    if now is not before and now != before:
        raise ValueError(
            f"memory of a group must be kept as in earlier steps, {before}, got {now}; "
            "build a new optimizer to change it"
        )


def check_spelling(group: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises if a key of a group is almost one of the known ones."""
    for key in group:
        option = misspelled_option(key, known)
        if option is not None:
            raise ValueError(
                f"a group must have known options, got {key!r}; did you mean {option!r}?"
            )


def check_group(kind: str, moment_names: Sequence[Name], options: Mapping[str, Any]) -> None:
    """Raises where a group is not one for an optimizer of this kind, which has these moments."""
    for flag, remedy in TORCH_FLAGS.items():
        check_choice(flag, options.get(flag), (None, False, True))
        if remedy and options.get(flag):
            raise ValueError(f"{flag} must be False in {kind}; {remedy}")
    if options.get("foreach") and options.get("fused"):
        raise ValueError("foreach and fused must not both be True; give one of them")
    memory = options["memory"]
    if "second" in moment_names and memory.second is None:
        raise ValueError(f"memory.second must be a storage for {kind}, got None")
    if memory.form == "ratio" and len(moment_names) < 2:
        raise ValueError(f'form="ratio" divides two moments, but {kind} has one')


def check_parameter(parameter: Tensor) -> None:
    """Raises unless the parameter is one that can be stepped."""
    shape = list(parameter.shape)
    if not parameter.is_floating_point():
        raise TypeError(
            f"parameters must be real floating point, got {parameter.dtype} of shape {shape}; keep "
            "complex weights as torch.view_as_real() gives them"
        )
    if parameter.layout != torch.strided:
        raise TypeError(
            f"parameters must be dense tensors, got {parameter.layout} of shape {shape}; only "
            "gradients may be sparse"
        )
    if parameter.is_inference():
        raise ValueError(
            f"the parameter of shape {shape} must not be an inference tensor, which cannot change; "
            "make it outside torch.inference_mode()"
        )
    if any(size > 1 and step == 0 for size, step in zip(shape, parameter.stride(), strict=True)):
        raise ValueError(
            f"the parameter of shape {shape} must have memory of its own for every element, got "
            f"the strides {parameter.stride()}; use clone() on what was expanded"
        )
    check_storage(f"the parameter of shape {shape}", local(parameter))


def check_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Raises unless the gradient is one for the parameter."""
    if gradient.shape != parameter.shape:
        raise ValueError(f"{_gradient_of(parameter)} have that shape, got {list(gradient.shape)}")
    if gradient.dtype != parameter.dtype:
        raise TypeError(f"{_gradient_of(parameter)} be {parameter.dtype}, got {gradient.dtype}")
    if gradient.device != parameter.device:
        raise ValueError(
            f"{_gradient_of(parameter)} be on {parameter.device}, got {gradient.device}"
        )
    if isinstance(gradient, DeferredGradient):
        gradient.check_current()
        if type(parameter) in PLAIN_TENSORS:  # of one layout, as the gradient is
            return
    if gradient.is_sparse:
        if gradient.sparse_dim() != 1:
            raise ValueError(
                f"{_gradient_of(parameter)} be sparse in rows alone (sparse_dim 1), "
                f"got {gradient.sparse_dim()}; make it with to_sparse(1)"
            )
    elif gradient.layout != torch.strided:
        raise TypeError(f"{_gradient_of(parameter)} be dense or sparse COO, got {gradient.layout}")
    elif is_wrapper(gradient) or is_wrapper(parameter):
        found, expected = layout(gradient), layout(parameter)
        if found != expected:
            raise TypeError(f"{_gradient_of(parameter)} be laid out as {expected}, got {found}")
    elif type(gradient) in PLAIN_TENSORS and not gradient.data_ptr():  # empty, or freed
        check_storage("a gradient", gradient)


def _gradient_of(parameter: Tensor) -> str:
    return f"the gradient of the parameter of shape {list(parameter.shape)} must"
