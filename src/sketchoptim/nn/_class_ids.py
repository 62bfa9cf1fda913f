"""Checks of class ids, which several layers share."""

from typing import Any

import torch
from torch import Tensor

from .._validation import check_tensor

# The label that torch's loss functions ignore, and that collators pad batches of labels with.
IGNORE_INDEX = -100


def check_int64(name: str, ids: Any) -> Tensor:
    """The ids, where they are an int64 tensor."""
    tensor = check_tensor(name, ids)
    if tensor.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, got {tensor.dtype}; call {name}.long()")
    return tensor


def id_range(ids: Tensor) -> tuple[int, int]:
    """The smallest and the largest id; (0, -1) where there are none."""
    if not ids.numel():
        return 0, -1
    lowest, highest = (int(bound) for bound in ids.aminmax())
    return lowest, highest


def check_range(name: str, found: tuple[int, int], classes: int, *, layer: str) -> None:
    """Raises where ids of this range are not all classes of the layer."""
    lowest, highest = found
    if lowest >= 0 and highest < classes:
        return
    remedy = "map them"
    if highest >= classes:
        remedy = f"construct {layer} with classes > {highest}, or map them"
    elif name == "labels":
        remedy = f"construct {layer} with ignore_index={lowest} if that is padding, or map them"
    raise ValueError(
        f"{name} must lie in [0, {classes - 1}], got values from {lowest} to {highest}; {remedy}"
    )
