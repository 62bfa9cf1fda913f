"""Our optimizer beside torch's, each a pair of its own copy of the parameters and the optimizer."""

import torch

STEPS = 20


def step_both(ours, theirs, gradients):
    """One step of each optimizer on the same gradients; None is no gradient."""
    for parameters, optimizer in (ours, theirs):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()


def check_same_bits(ours, theirs):
    """Both have brought their parameters to the same numbers."""
    for mine, other in zip(ours[0], theirs[0], strict=True):
        assert torch.equal(mine, other)
