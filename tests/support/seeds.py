"""Random numbers that a test says itself."""

import torch


def generator(seed: int) -> torch.Generator:
    """A fresh generator, the same for every call with that seed."""
    return torch.Generator().manual_seed(seed)
