"""What several layers check: sizes, and ids of classes."""

import torch
from torch import Tensor

# what torch's loss functions ignore, and what collators fill the labels of padded batches with
IGNORED = -100


def check_positive(**sizes: int) -> None:
    """Raises where a size is below one."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")


def check_int64(name: str, ids: Tensor) -> None:
    """Raises where ids are not whole numbers of 64 bits."""
    if ids.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, got {ids.dtype}; call {name}.long()")


def span(ids: Tensor) -> tuple[int, int]:
    """The least and the largest id; (0, -1) where there is none."""
    if not ids.numel():
        return 0, -1
    lowest, highest = (int(bound) for bound in ids.aminmax())
    return lowest, highest


def check_span(name: str, found: tuple[int, int], classes: int, *, layer: str) -> None:
    """Raises where ids of such a span are not all classes."""
    lowest, highest = found
    if lowest < 0 or highest >= classes:
        remedy = "map them"
        if highest >= classes:
            remedy = f"construct {layer} with classes > {highest}, or map them"
        elif name == "labels":
            remedy = f"construct {layer} with ignore_index={lowest} if that is padding, or map them"
        raise ValueError(
            f"{name} must lie in [0, {classes - 1}], got values from {lowest} to {highest}; "
            + remedy
        )
