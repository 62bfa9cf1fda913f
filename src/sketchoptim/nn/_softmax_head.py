"""The cross entropy of a softmax over the rows of a weight, in two sweeps over blocks of rows.

The first sweep gives the losses and the gradient of the hidden states, by sums under a running
maximum, as in flash attention with the weight as keys and values. The second one recomputes the
logits of a block when the gradient of its rows is read. No logits of all classes exist, and no
gradient of all rows.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .._rows import arithmetic_dtype
from .._torch_private import linear_by_onednn
from ..deferred import Part, Reader, Scale
from ..ops import RunningSoftmax, SoftmaxLoss, differentiate_logits_


class BlockSize(NamedTuple):
    """The most logits that exist at once."""

    classes: int
    tokens: int


# On a CPU 2 MB: fewer make the products slower, and more leave the cache. Measured with 512 and 640
# columns.
_ON_CPU = BlockSize(512, 1024)
_ON_CPU_IN_HALF = BlockSize(1024, 1024)
# Each block costs launches.
_ON_DEVICE = BlockSize(8192, 4096)
_FREED_BYTES = 1 << 24


def block_size(hidden: Tensor) -> BlockSize:
    """The block size for products of hidden states, which have the products' dtype."""
    if not hidden.is_cpu:
        return _ON_DEVICE
    return _ON_CPU_IN_HALF if hidden.dtype.itemsize == 2 else _ON_CPU


def _keep_freed_blocks(device: torch.device) -> None:
    """Lets malloc keep the memory of a block for the next one.

    glibc gives free memory at the end of its heap back to the system above a threshold: twice the
    largest block that was freed so far. New pages for each block take up to 8 % of a step.
    """
    if device.type == "cpu":
        torch.empty(_FREED_BYTES, dtype=torch.uint8, device="cpu")


def blocks(begin: int, end: int, size: int) -> Iterator[slice]:
    """A range of classes or tokens as ranges of at most `size`."""
    for start in range(begin, end, size):
        yield slice(start, min(start + size, end))


def products(
    hidden: Tensor, weight: Tensor, classes: slice
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For some tokens at a time: which, their products ``[tokens, classes]``, and the rows.

    `hidden` has the dtype of the products, ``[tokens, dim]``.
    """
    rows = weight[classes].to(hidden.dtype)
    for tokens in blocks(0, hidden.shape[0], block_size(hidden).tokens):
        yield tokens, _product(hidden[tokens], rows.T), rows


def _product(left: Tensor, right: Tensor) -> Tensor:
    if left.is_cpu and left.dtype == torch.float32:
        product = linear_by_onednn(left, right.T)
        if product is not None:
            return product
    if torch.is_autocast_enabled(left.device.type):  # the operands have their dtypes already
        with torch.autocast(left.device.type, enabled=False):
            return left @ right
    return left @ right


class Losses(NamedTuple):
    """What the first sweep gives."""

    losses: Tensor
    """The loss of each token, ``[tokens]``."""
    logsumexp: Tensor
    """``[tokens]``."""
    by_hidden: Tensor | None
    """The gradient of each token's loss by its hidden state, ``[tokens, dim]``."""


def losses_of(
    hidden: Tensor, weight: Tensor, target: Tensor, softmax: SoftmaxLoss, *, is_trained: bool
) -> Losses:
    """The loss of each token; if `is_trained`, also its gradient by the hidden state.

    Args:
        hidden: ``[tokens, dim]`` in the dtype of the products.
        weight: ``[classes, dim]``.
        target: int64 ``[tokens]``, contiguous and below `classes`.
        softmax: The loss.
        is_trained: Whether the gradient is wanted.
    """
    _keep_freed_blocks(hidden.device)
    dtype = arithmetic_dtype(hidden.dtype)
    by_hidden = torch.zeros_like(hidden, dtype=dtype) if is_trained else None
    # With a cap, each token has its own mean of the rows; otherwise it is the mean of all rows.
    by_mean = None
    if by_hidden is not None and softmax.smoothing and softmax.softcap is not None:
        by_mean = torch.zeros_like(by_hidden)
    running = RunningSoftmax(softmax, target, dtype, by_hidden)
    for classes in blocks(0, weight.shape[0], block_size(hidden).classes):
        for tokens, values, rows in products(hidden, weight, classes):
            if by_mean is not None:
                _, slopes = softmax.logits(values, classes)
                assert slopes is not None
                by_mean[tokens].add_(_product(slopes.to(values.dtype), rows))
            running.add_(values, tokens, classes)
            if by_hidden is not None:
                by_hidden[tokens].add_(_product(values, rows))
    if by_hidden is not None:
        by_hidden /= running.total[:, None]
        of_target = weight[target].to(dtype) * (1 - softmax.smoothing)
        slope = running.chosen_slope()
        by_hidden -= of_target if slope is None else of_target * slope[:, None]
        if softmax.smoothing:
            mean = weight.sum(0, dtype=dtype) if by_mean is None else by_mean
            by_hidden -= mean * (softmax.smoothing / softmax.classes)
    return Losses(running.losses(), running.logsumexp(), by_hidden)


class SoftmaxHead(Part):
    """The gradient of a weight whose product with hidden states enters a softmax cross entropy.

    Row i is the sum over tokens of ``coefficient * (softmax - target)[i] * hidden``, from logits
    that are recomputed when it is read.

    All tensors but the weight must be the part's own: activations and other parameters may change
    before the rows are read.

    Args:
        weight: ``[classes, dim]``.
        hidden: ``[tokens, dim]`` in the dtype of the products.
        target: int64 ``[tokens]``.
        logsumexp: ``[tokens]`` in the dtype of arithmetic.
        coefficient: The gradient of each token's loss, ``[tokens]`` in the same dtype.
        softmax: The loss.
    """

    owned = ("hidden", "target", "logsumexp", "coefficient", "bias")
    borrowed = ("weight",)
    block_rows: int

    def __init__(
        self,
        weight: Tensor,
        hidden: Tensor,
        target: Tensor,
        logsumexp: Tensor,
        coefficient: Tensor,
        softmax: SoftmaxLoss,
    ) -> None:
        self.weight, self.hidden, self.target = weight.detach(), hidden, target
        self.logsumexp, self.coefficient = logsumexp, coefficient.contiguous()
        self.bias, self.softcap, self.smoothing = softmax.bias, softmax.softcap, softmax.smoothing
        self.block_rows = block_size(hidden).classes
        super().__init__(weight, is_sparse=False)

    @property
    def softmax(self) -> SoftmaxLoss:
        """The loss."""
        return SoftmaxLoss(self.shape[0], self.bias, self.softcap, self.smoothing)

    def reader(self) -> Reader:
        return _HeadReader(self)

    def bound(self) -> Tensor:
        """The largest sum over tokens of ``|coefficient * hidden|``: no probability is above 1."""
        if not self.hidden.numel():
            return self.logsumexp.new_zeros(())
        magnitude = (self.hidden * self.coefficient[:, None]).abs().sum(0).amax()
        return magnitude + (self.logsumexp * 0).sum()  # NaN unless those are finite

    def bias_gradient(self) -> Tensor:
        """The gradient of the bias, ``[classes]``, by a sweep over all rows."""
        reader, size = _HeadReader(self), self.block_rows
        return torch.cat([reader.bias_gradient(at) for at in blocks(0, self.shape[0], size)])


class _HeadReader:
    """One pass over the rows; logits are recomputed for a block of them."""

    def __init__(self, part: SoftmaxHead) -> None:
        _keep_freed_blocks(part.device)
        self.part, self.softmax = part, part.softmax
        # Half precision holds probabilities, but not always their products with a coefficient.
        coefficient = part.coefficient
        largest = coefficient.abs().amax() if coefficient.numel() else coefficient.new_ones(())
        self.coefficient = torch.where(largest > 0, coefficient / largest, coefficient)
        self.scale: Scale = float(largest) if largest.is_cpu else largest

    def add_(self, out: Tensor, at: slice | Tensor) -> None:
        assert isinstance(at, slice)  # all rows differ from zero
        for classes in blocks(at.start, at.stop, self.part.block_rows):
            total = out[classes.start - at.start : classes.stop - at.start]
            for tokens, gradient in self._logit_gradients(classes):
                product = _product(gradient.T, self.part.hidden[tokens])
                if isinstance(self.scale, float):
                    total.add_(product, alpha=self.scale)
                else:
                    total.addcmul_(product.to(total.dtype), self.scale)

    def bias_gradient(self, at: slice) -> Tensor:
        """The gradient of the bias of a range of classes."""
        total = self.coefficient.new_zeros(at.stop - at.start)
        for _, gradient in self._logit_gradients(at):
            total += gradient.sum(0, dtype=total.dtype)
        return total * self.scale

    def _logit_gradients(self, at: slice) -> Iterator[tuple[slice, Tensor]]:
        part = self.part
        for tokens, values, _ in products(part.hidden, part.weight, at):
            differentiate_logits_(
                values,
                at,
                self.softmax,
                part.target[tokens],
                part.logsumexp[tokens],
                self.coefficient[tokens],
            )
            yield tokens, values
