"""Parameters of classes of their own, such as TorchRec's slices of a batch of tables."""

import torch
from torch import nn

import sketchoptim as so


class Slice(nn.Parameter):
    """A parameter that is a part of a larger tensor."""


def test_a_subclass_without_operations_of_its_own_is_stepped_by_the_kernels():
    torch.manual_seed(0)
    plain = nn.Parameter(torch.randn(40, 8))
    batch = torch.cat([torch.zeros(80), plain.detach().flatten()])
    part = batch[80:].view(40, 8).as_subclass(Slice).requires_grad_()
    optimizers = [so.Adam([{"params": [it], "memory": "lean-0.1"}]) for it in (plain, part)]
    for _ in range(3):
        gradient = torch.randn(40, 8)
        for parameter, optimizer in zip((plain, part), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    binding = optimizers[1]._bindings[id(part)]
    assert binding.fallback_reason == optimizers[0]._bindings[id(plain)].fallback_reason
    assert torch.equal(batch[80:], plain.detach().flatten())
