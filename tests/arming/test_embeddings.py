"""Layers whose gradients are deferred compute what they computed, and get the same gradients."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel

import sketchoptim as so

ROWS, DIM = 200, 4


def twins(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A copy of the layer with deferred gradients, and one without."""
    ours, theirs = copy.deepcopy(layer), copy.deepcopy(layer)
    so.defer_gradients(ours)
    return ours, theirs


def check_same(ours: nn.Module, theirs: nn.Module, call) -> None:
    """Both give the same output and the same gradients; ours are deferred where there are rows."""
    outputs = [call(layer) for layer in (ours, theirs)]
    assert torch.equal(*(it.detach() for it in outputs))
    for output in outputs:
        upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(7))
        output.backward(upstream)
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert isinstance(one.grad, so.DeferredGradient), name
        assert one.grad.is_row_sparse is other.grad.is_sparse
        torch.testing.assert_close(one.grad.to_dense(), other.grad.to_dense(), rtol=1e-6, atol=1e-6)


IDS = torch.tensor([[3, 5, 3], [0, 7, 5]])


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("padding_idx", [None, 5])
def test_an_embedding_gets_the_same_gradient(sparse, padding_idx):
    layer = nn.Embedding(ROWS, DIM, sparse=sparse, padding_idx=padding_idx)
    check_same(*twins(layer), lambda it: it(IDS))


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("padding_idx", [None, 5])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize(
    "given",
    [
        (IDS,),
        (IDS.flatten(), torch.tensor([0, 0, 4])),
        (IDS.flatten().int(), torch.tensor([1, 4, 4]).int()),
        (torch.empty(0, dtype=torch.int64), torch.tensor([0, 0])),
    ],
    ids=["matrix", "offsets", "int32", "empty"],
)
def test_bags_get_the_same_gradient(given, mode, padding_idx, sparse):
    layer = nn.EmbeddingBag(ROWS, DIM, mode=mode, sparse=sparse, padding_idx=padding_idx)
    if given[-1].dtype == torch.int32:
        given = (given[0], torch.tensor([0, 4, 4]).int())
    check_same(*twins(layer), lambda it: it(*given))


@pytest.mark.parametrize("is_trained", [True, False])
def test_bags_with_weights_and_a_last_offset_get_the_same_gradients(is_trained):
    layer = nn.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=True, padding_idx=5)
    ids, offsets = IDS.flatten(), torch.tensor([0, 2, 2, 6])
    factors = [torch.linspace(-1, 1, 6).requires_grad_(is_trained) for _ in range(2)]
    each = iter(factors)
    check_same(*twins(layer), lambda it: it(ids, offsets, per_sample_weights=next(each)))
    if is_trained:
        torch.testing.assert_close(factors[0].grad, factors[1].grad)


class ScaledEmbedding(nn.Embedding):
    """As Gemma's."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


class OwnEmbedding(nn.Embedding):
    """It looks up its rows itself."""

    def forward(self, input: Tensor) -> Tensor:
        return self.weight[input]


def test_a_subclass_is_armed_if_it_calls_the_forward_of_its_base():
    check_same(*twins(ScaledEmbedding(ROWS, DIM)), lambda it: it(IDS))


def test_layers_of_this_package_get_the_same_gradients():
    hidden, labels = torch.randn(6, DIM), torch.tensor([3, 5, 3, 0, 7, 5])
    offsets = torch.tensor([0, 2])
    generator = torch.Generator()
    calls = {
        so.nn.SampledSoftmax(DIM, ROWS, samples=8, bias=True): lambda it: it(
            hidden, labels, generator=generator.manual_seed(1)
        ),
        so.nn.LSHSoftmax(DIM, ROWS, bias=True): lambda it: it(
            hidden, labels, generator=generator.manual_seed(1)
        ),
    }
    for layer, call in calls.items():
        check_same(*twins(layer), call)
    encoder = so.nn.BagEncoder(ROWS, DIM)
    ours, theirs = twins(encoder)
    for it in (ours, theirs):
        it(labels, offsets).square().sum().backward()
    assert isinstance(ours.weight.grad, so.DeferredGradient)
    assert torch.equal(ours.weight.grad.to_dense(), theirs.weight.grad.to_dense())


def test_tables_in_one_layer_are_armed_together():
    bags = so.nn.EmbeddingBags({"user": (ROWS, DIM), "item": (50, 2)})
    assert so.defer_gradients(bags).armed == {"": "EmbeddingBags, 2 tables, sparse gradient"}
    copy.deepcopy(bags)({"user": IDS, "item": IDS}).sum().backward()
    so.materialize_gradients(bags)
    assert type(bags) is so.nn.EmbeddingBags


def saved_and_loaded(layer: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda it: pickle.loads(pickle.dumps(it)),
        saved_and_loaded,
        lambda it: AveragedModel(it).module,
    ],
    ids=["deepcopy", "pickle", "torch.save", "average"],
)
def test_a_copy_is_armed_and_trains_its_own_weight(copied):
    ours, _ = twins(nn.Sequential(ScaledEmbedding(ROWS, DIM), nn.Embedding(ROWS, DIM)))
    other = copied(ours)
    other[0](IDS).sum().backward()
    assert isinstance(other[0].weight.grad, so.DeferredGradient)
    assert ours[0].weight.grad is None
    assert type(other[1]) is type(ours[1])


def test_the_undo_gives_back_layers_and_plain_gradients():
    model = nn.Sequential(nn.Embedding(ROWS, DIM, sparse=True), nn.Embedding(ROWS, DIM))
    ours, theirs = twins(model)
    for it in (ours, theirs):
        for layer in it:
            layer(IDS).square().sum().backward()
    so.materialize_gradients(ours)
    assert [type(it) for it in ours] == [nn.Embedding, nn.Embedding]
    for one, other in zip(ours, theirs, strict=True):
        assert one.weight.grad.layout == other.weight.grad.layout
        assert torch.equal(one.weight.grad.to_dense(), other.weight.grad.to_dense())
        one(IDS).sum().backward()
        assert type(one.weight.grad) is Tensor


def parametrized() -> nn.Embedding:
    layer = nn.Embedding(ROWS, DIM)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


LEFT_ALONE = {
    "max_norm modifies": lambda: nn.Embedding(ROWS, DIM, max_norm=1.0),
    "scale_grad_by_freq divides": lambda: nn.Embedding(ROWS, DIM, scale_grad_by_freq=True),
    "mode='max' is neither": lambda: nn.EmbeddingBag(ROWS, DIM, mode="max"),
    "weight is frozen": lambda: nn.Embedding(ROWS, DIM).requires_grad_(False),
    "parametrization": parametrized,
    "forward.. does not call that of Embedding": lambda: OwnEmbedding(ROWS, DIM),
}


@pytest.mark.parametrize("reason", LEFT_ALONE)
def test_what_cannot_be_deferred_is_left_alone_with_the_reason(reason):
    model = nn.ModuleDict({"bad": LEFT_ALONE[reason](), "good": nn.Embedding(ROWS, DIM)})
    kind = type(model["bad"])
    deferral = so.defer_gradients(model)
    assert type(model["bad"]) is kind
    assert list(deferral.armed) == ["good"]
    assert list(deferral.left_alone) == ["bad"]
    with pytest.warns(UserWarning, match=f"found no layer.*{reason}"):
        so.defer_gradients(nn.ModuleDict({"bad": model["bad"]}))


def test_the_result_prints_what_was_done():
    model = nn.ModuleDict(
        {
            "table": nn.Embedding(2000, DIM, sparse=True),
            "normed": nn.Embedding(ROWS, DIM, max_norm=1.0),
        }
    )
    expected = (
        "1 layer with deferred gradients\n"
        "  table  Embedding, 2,000 x 4, sparse gradient\n"
        "1 left alone\n"
        "  normed  max_norm modifies the weight in the forward pass"
    )
    assert repr(so.defer_gradients(model)) == expected
    assert repr(so.defer_gradients(model)) == expected  # it is armed already


def test_a_second_derivative_is_refused():
    layer, _ = twins(nn.Embedding(ROWS, DIM))
    with pytest.raises(RuntimeError, match="differentiated once, got create_graph=True"):
        torch.autograd.grad(layer(IDS).square().sum(), layer.weight, create_graph=True)


def test_ids_that_change_before_the_backward_pass_are_refused():
    layer, _ = twins(nn.Embedding(ROWS, DIM))
    ids = IDS.clone()
    rows = layer(ids)
    ids.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rows.sum().backward()


def test_ids_out_of_range_are_refused_as_before():
    layer, _ = twins(nn.Embedding(ROWS, DIM))
    with pytest.raises(IndexError, match="out of range"):
        layer(torch.tensor([ROWS]))


def test_without_gradients_it_is_the_layer_that_it_was():
    layer, theirs = twins(nn.Embedding(ROWS, DIM))
    with torch.no_grad():
        assert not layer(IDS).requires_grad
    layer.weight.requires_grad_(False)
    assert torch.equal(layer(IDS), theirs(IDS))


def test_a_compiled_model_gets_the_same_gradients():
    model = nn.Sequential(nn.Embedding(ROWS, DIM), nn.Linear(DIM, 3), nn.Tanh())
    ours, theirs = twins(model)
    compiled = torch.compile(ours, backend="aot_eager")
    for _ in range(2):
        compiled(IDS).square().sum().backward()
        theirs(IDS).square().sum().backward()
    assert isinstance(ours[0].weight.grad, so.DeferredGradient)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(torch.Tensor(one.grad.to_dense()), other.grad)
