"""How good a ranking of classes is."""

from torch import Tensor

from ..ops import TopClasses


def recall(found: Tensor | TopClasses, labels: Tensor) -> float:
    """Recall@k: the mean over examples of the share of their labels among the found classes.

    `found` is the result of `top_k` of any layer, or its ids [batch, k]. `labels` are [batch], or
    [batch, most] padded with -1. Negative numbers are no labels; examples without labels are left
    out; where no example has a label, the recall is NaN.

    Example:
        >>> recall(torch.tensor([[3, 1], [2, 0]]), torch.tensor([1, 7]))
        0.5
    """
    if isinstance(found, TopClasses):
        found = found.ids
    if found.dim() != 2 or labels.shape[:1] != found.shape[:1]:
        raise ValueError(
            f"found must be [batch, k] and labels [batch] or [batch, most], got "
            f"{list(found.shape)} and {list(labels.shape)}; pass what top_k() returned"
        )
    labels = labels.reshape(len(found), -1)
    is_label = labels >= 0
    is_found = (labels[:, :, None] == found[:, None, :]).any(2) & is_label
    has_any = is_label.any(1)
    return (is_found.sum(1)[has_any] / is_label.sum(1)[has_any]).mean().item()
