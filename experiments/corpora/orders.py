"""Random orders of examples, which do not depend on when they are asked for."""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=4)
def shuffled(size: int, seed: int) -> Tensor:
    """The numbers 0 to `size - 1` in a random order, int64 [size]."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))
