"""Layers whose tables are submodules: their attributes, and states from before they were."""

import copy
import io

import pytest
import torch
from torch import nn

from sketchoptim.nn import MACH, BagEncoder, LSHSoftmax, SampledSoftmax

LAYERS = {
    "sampled": lambda: SampledSoftmax(4, 30, samples=8, bias=True),
    "without bias": lambda: SampledSoftmax(4, 30, samples=8),
    "lsh": lambda: LSHSoftmax(4, 30, bits=3, tables=2, budget=8, bias=True),
    "bags": lambda: BagEncoder(30, 4),
    "mach": lambda: MACH(lambda: BagEncoder(30, 4), 4, 50, 10, members=2),
}
OLD_NAMES = {
    ".table.weight": ".weight",
    ".bias_table.weight": ".bias",
    ".activation.bias": ".bias",
}


def before_submodules(state: dict) -> dict:
    """A state as version 0.1.0 wrote it."""
    renamed = {}
    for key, value in state.items():
        new = next((new for new in OLD_NAMES if key.endswith(new)), "")
        renamed[key.removesuffix(new) + OLD_NAMES.get(new, "")] = value
    return renamed


@pytest.mark.parametrize("name", LAYERS)
def test_states_from_before_load(name):
    trained, fresh = (nn.ModuleDict({"layer": LAYERS[name]()}) for _ in range(2))
    old = before_submodules(trained.state_dict())
    assert old.keys() != trained.state_dict().keys()
    fresh.load_state_dict(old)
    for key, value in trained.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(fresh.state_dict()[key], value), key


def test_a_state_with_an_unknown_key_is_refused():
    head = LAYERS["without bias"]()
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"bias_table\.weight"'):
        head.load_state_dict({**head.state_dict(), "bias": torch.zeros(30, 1)})


def test_an_optimizer_state_from_before_loads():
    # Parameters are in the order that they had, by which the state of an optimizer is kept.
    assert [tuple(it.shape) for it in BagEncoder(30, 4).parameters()] == [(30, 4), (4,)]
    assert [it.shape[1] for it in LAYERS["sampled"]().parameters()] == [4, 1]


def test_a_weight_is_tied_by_assignment():
    embedding, head = nn.Embedding(30, 4, sparse=True), LAYERS["sampled"]()
    head.weight = embedding.weight
    assert head.table.weight is embedding.weight
    assert [name for name, _ in head.named_parameters()] == ["table.weight", "bias_table.weight"]


@pytest.mark.parametrize("name", ["sampled", "bags"])
def test_a_bias_can_be_replaced(name):
    layer = LAYERS[name]()
    new = nn.Parameter(torch.ones_like(layer.bias))
    layer.bias = new
    assert layer.bias is new
    assert any(parameter is new for parameter in layer.parameters())


def test_a_bias_can_be_removed():
    head = LAYERS["sampled"]()
    head.bias = None
    assert head.bias is None
    assert [name for name, _ in head.named_parameters()] == ["table.weight"]


@pytest.mark.parametrize("name", LAYERS)
def test_copied_and_pickled_layers_keep_their_tables(name):
    layer = LAYERS[name]()
    buffer = io.BytesIO()
    if name != "mach":
        torch.save(layer, buffer)
        pickled = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
        assert torch.equal(pickled.weight, layer.weight)
    copied = copy.deepcopy(layer)
    assert copied.state_dict().keys() == layer.state_dict().keys()
    assert not {*copied.parameters()} & {*layer.parameters()}


def test_a_batch_of_padding_has_gradients_of_zero():
    head = LAYERS["sampled"]()
    hidden = torch.randn(3, 4, requires_grad=True)
    loss = head(hidden, torch.full((3,), head.ignore_index))
    loss.backward()
    assert loss.isnan()  # as torch's loss functions
    for parameter in (hidden, head.weight, head.bias):
        assert parameter.grad.to_dense().count_nonzero() == 0
