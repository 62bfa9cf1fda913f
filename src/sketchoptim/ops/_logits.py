"""What a softmax head does with a block of logits between its matrix products.

A block holds the logits of some tokens for a range of classes. It is overwritten while it is in the
cache, by the C++ kernels or, elsewhere, by torch's operations.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from .._rows import arithmetic_dtype
from . import _native

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class SoftmaxLoss:
    """The loss of a token with target y among n classes, and what makes a logit of a product x:

    logit = x + bias, then softcap * tanh(logit / softcap) if there is a cap;
    loss = logsumexp - (1 - smoothing) * logit[y] - smoothing * mean(logits).
    """

    classes: int
    bias: Tensor | None = None
    """``[classes]`` in the dtype of arithmetic."""
    softcap: float | None = None
    smoothing: float = 0.0

    def logits(self, products: Tensor, classes: slice) -> tuple[Tensor, Tensor | None]:
        """The logits for a range of classes, and their derivatives by the products unless 1."""
        logits = products.to(arithmetic_dtype(products.dtype))
        if self.bias is not None:
            logits = logits + self.bias[classes]
        if self.softcap is None:
            return logits, None
        tanh = (logits / self.softcap).tanh_()
        return tanh * self.softcap, tanh.square().neg_().add_(1)


class RunningSoftmax:
    """Sums over the classes of all blocks so far, for each of some tokens.

    Args:
        softmax: The loss.
        target: int64 ``[tokens]``.
        product: Zeros ``[tokens, dim]`` in the dtype of arithmetic for sums over classes that the
            caller adds, of exponentials times something; None if there are no such sums.
    """

    def __init__(
        self, softmax: SoftmaxLoss, target: Tensor, dtype: torch.dtype, product: Tensor | None
    ) -> None:
        self.softmax, self.target, self.product = softmax, target, product
        self.highest = target.new_full(target.shape, -torch.inf, dtype=dtype)
        self.total = torch.zeros_like(self.highest)
        self.sum = torch.zeros_like(self.highest) if softmax.smoothing else None
        self.chosen = torch.zeros_like(self.highest)

    def add_(self, values: Tensor, tokens: slice, classes: slice) -> None:
        """Takes in the products of a block.

        They become exponentials under the highest logit so far, times the derivative of the cap;
        sums under a lower one are rescaled, and so are the rows of `product`.
        """
        library = _library(values)
        if library is None:
            return self._add_by_torch_(values, tokens, classes)
        block = _block(values, self.softmax, self.target[tokens], classes)
        block.highest, block.total = _at(self.highest, tokens), _at(self.total, tokens)
        block.sum, block.chosen = _at(self.sum, tokens), _at(self.chosen, tokens)
        block.product = _at(self.product, tokens)
        block.dim = 0 if self.product is None else self.product.shape[1]
        library.sketchoptim_add_logits(block)

    def _add_by_torch_(self, values: Tensor, tokens: slice, classes: slice) -> None:
        logits, slopes = self.softmax.logits(values, classes)
        highest = torch.maximum(self.highest[tokens], logits.amax(1))
        # If all logits are -inf so far, any number stands for the largest.
        reference = highest.masked_fill(highest == -torch.inf, 0.0)
        factor = (self.highest[tokens] - reference).exp_()
        self.highest[tokens] = highest
        at, is_inside = _targets(self.target[tokens], classes)
        chosen = torch.where(is_inside, logits.gather(1, at)[:, 0], self.chosen[tokens])
        self.chosen[tokens] = chosen
        if self.sum is not None:
            self.sum[tokens] += logits.sum(1)
        exponentials = (logits - reference[:, None]).exp_()
        self.total[tokens] = self.total[tokens] * factor + exponentials.sum(1)
        if self.product is not None:
            self.product[tokens] *= factor[:, None]
            values.copy_(exponentials if slopes is None else exponentials * slopes)

    def logsumexp(self) -> Tensor:
        """The logarithm of the sum of exponentials of each token, ``[tokens]``."""
        return self.highest + self.total.log()

    def losses(self) -> Tensor:
        """The loss of each token, ``[tokens]``."""
        smoothing = self.softmax.smoothing
        losses = self.logsumexp() - (1 - smoothing) * self.chosen
        return (
            losses if self.sum is None else losses - self.sum * (smoothing / self.softmax.classes)
        )

    def chosen_slope(self) -> Tensor | None:
        """The derivative of each target's logit by the product, ``[tokens]``; None if it is 1."""
        if self.softmax.softcap is None:
            return None
        return 1 - (self.chosen / self.softmax.softcap).square()


def differentiate_logits_(
    values: Tensor,
    classes: slice,
    softmax: SoftmaxLoss,
    target: Tensor,
    logsumexp: Tensor,
    coefficient: Tensor,
) -> None:
    """Replaces the products of a block by the gradient of ``coefficient @ losses`` by them."""
    class_share = softmax.smoothing / softmax.classes
    library = _library(values)
    if library is None:
        logits, slopes = softmax.logits(values, classes)
        gradient = (logits - logsumexp[:, None]).exp_().sub_(class_share)
        at, is_inside = _targets(target, classes)
        shares = is_inside.to(gradient.dtype) * (1 - softmax.smoothing)
        gradient.scatter_add_(1, at, -shares[:, None])
        if slopes is not None:
            gradient.mul_(slopes)
        values.copy_(gradient.mul_(coefficient[:, None]))
        return
    block = _block(values, softmax, target, classes)
    block.logsumexp, block.coefficient = logsumexp.data_ptr(), coefficient.data_ptr()
    block.target_share, block.class_share = 1 - softmax.smoothing, class_share
    library.sketchoptim_differentiate_logits(block)


def _targets(target: Tensor, classes: slice) -> tuple[Tensor, Tensor]:
    """Each target's place in a block as a column, and whether it is there at all."""
    at = target - classes.start
    is_inside = (at >= 0) & (at < classes.stop - classes.start)
    return torch.where(is_inside, at, 0)[:, None], is_inside


def _library(values: Tensor) -> ctypes.CDLL | None:
    return _native.library() if values.is_cpu and values.dtype in _DTYPES else None


def _block(
    values: Tensor, softmax: SoftmaxLoss, target: Tensor, classes: slice
) -> _native.LogitBlock:
    assert values.is_contiguous()
    return _native.LogitBlock(
        values=values.data_ptr(),
        bias=_at(softmax.bias, classes),
        target=target.data_ptr(),
        tokens=values.shape[0],
        classes=values.shape[1],
        first_class=classes.start,
        dtype=_DTYPES[values.dtype],
        threads=torch.get_num_threads(),
        softcap=softmax.softcap or 0.0,
    )


def _at(tensor: Tensor | None, rows: slice) -> int | None:
    return None if tensor is None else tensor[rows].data_ptr()
