import pytest
import torch
import torch.nn.functional as F

from experiments import full_softmax
from experiments.full_softmax import FullSoftmax


def gradients(layer, loss, hidden):
    parameters = [it for it in (hidden, layer.weight, layer.bias) if it is not None]
    return torch.autograd.grad(loss, parameters)


@pytest.mark.parametrize("has_bias", [True, False])
def test_chunks_have_the_loss_and_the_gradients_of_torch(monkeypatch, has_bias):
    monkeypatch.setattr(full_softmax, "_CHUNK_ELEMENTS", 150)  # three tokens of fifty classes
    torch.manual_seed(0)
    layer = FullSoftmax(8, 50, bias=has_bias)
    hidden, labels = torch.randn(2, 5, 8, requires_grad=True), torch.randint(50, (2, 5))
    logits = hidden @ layer.weight.T
    if has_bias:
        torch.nn.init.normal_(layer.bias)
        logits = logits + layer.bias[:, 0]
    wanted = 2 * F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    found = 2 * layer(hidden, labels)
    torch.testing.assert_close(found, wanted)
    for one, other in zip(
        gradients(layer, found, hidden), gradients(layer, wanted, hidden), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_products_in_bfloat16_are_close_and_gradients_stay_in_float32():
    torch.manual_seed(0)
    layer, narrow = FullSoftmax(64, 300), FullSoftmax(64, 300)
    narrow.load_state_dict(layer.state_dict())
    narrow.products = torch.bfloat16
    hidden, labels = torch.randn(40, 64), torch.randint(300, (40,))
    for one in (layer, narrow):
        one(hidden, labels).backward()
    assert narrow.weight.grad.dtype == torch.float32
    error = (narrow.weight.grad - layer.weight.grad).norm() / layer.weight.grad.norm()
    assert 0 < error < 0.01
