"""Sums over segments: the gradients of rows that were looked up."""

import torch
import torch.nn.functional as F
from torch import Tensor


def weighted_sums(
    source: Tensor, at: Tensor, weights: Tensor, *, segment: Tensor, segments: int
) -> Tensor:
    """Sums of weights[i] * source[at[i]] over the i of each segment, [segments, dim].

    The sums have the dtype of the weights. No row is copied, neither before nor after it is
    multiplied.

    Example:
        >>> source, weights = torch.eye(3), torch.tensor([1.0, 2.0, 3.0])
        >>> weighted_sums(source, torch.arange(3), weights, segment=torch.tensor([1, 0, 1]),
        ...               segments=2)
        tensor([[0., 2., 0.],
                [1., 0., 3.]])
    """
    order = segment.argsort(stable=True)
    starts = torch.searchsorted(segment[order], torch.arange(segments, device=segment.device))
    return F.embedding_bag(
        at[order], source.to(weights.dtype), starts, mode="sum", per_sample_weights=weights[order]
    )


def refuse_second_derivative(layer: str) -> None:
    """Raises where a backward pass is asked to be differentiable itself."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"the loss of {layer} can be differentiated once, got create_graph=True; leave that "
            "out or write the loss in torch operations"
        )
