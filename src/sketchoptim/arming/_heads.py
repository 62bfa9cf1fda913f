"""Output heads whose logits and gradients are deferred."""

import torch
from torch import Tensor, nn

from .._torch_private import disable_dynamo
from ..nn import LinearCrossEntropy
from ._layers import ArmedLayer, is_trained
from ._logits import deferred_logits
from ._replicas import followed


class ArmedLinear(ArmedLayer, nn.Linear):
    """An `nn.Linear` whose result only a cross entropy reads, and which need not exist for it."""

    armed_kind = nn.Linear

    @disable_dynamo
    def forward(self, input: Tensor) -> Tensor:
        is_cast = torch.is_autocast_enabled(input.device.type)
        is_valid = is_cast or input.dtype == self.weight.dtype  # else torch's error
        if not (is_trained(self.weight) and is_valid):
            return super().forward(input)
        return deferred_logits(input, followed(self.weight), self.bias)


class ArmedLinearCrossEntropy(ArmedLayer, LinearCrossEntropy):
    """A fused head, whose gradient is deferred anyway; under DDP it is exchanged."""

    armed_kind = LinearCrossEntropy

    def read(self) -> Tensor:
        return followed(self.weight) if is_trained(self.weight) else self.weight
