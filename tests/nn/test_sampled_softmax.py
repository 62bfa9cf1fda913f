"""The output layer that trains on drawn classes: training, evaluation, memory and errors."""

import math

import pytest
import torch
import torch.nn.functional as F
from seeds import generator
from step_footprint import measured
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import sketchoptim as so
from sketchoptim.nn import LogUniformSampler, LSHSoftmax, SampledSoftmax, _loss_sweep

# -- training --------------------------------------------------------------------------------------


def test_tied_weights_get_gradients_from_both_uses():
    embedding = nn.Embedding(30, 4, sparse=True, dtype=torch.float64)
    head = SampledSoftmax(4, 30, samples=8, weight=embedding.weight)
    assert [name for name, _ in nn.Sequential(embedding, head).named_parameters()] == ["0.weight"]
    words, labels = torch.tensor([1, 2, 29]), torch.tensor([2, 3, 1])
    head(embedding(words), labels, generator=generator(0)).backward()
    tied = embedding.weight.grad.to_dense()
    as_input = embedding(words).detach().requires_grad_()
    embedding.zero_grad()
    head(as_input, labels, generator=generator(0)).backward()
    as_output = embedding.weight.grad.to_dense()
    assert torch.allclose(tied, as_output.index_add(0, words, as_input.grad))


OPTIMIZERS = {
    "SparseAdam": lambda params: torch.optim.SparseAdam(params, lr=0.02),
    "Adam, lean-0.1": lambda params: so.Adam(params, lr=0.02),
    "Adam, exact": lambda params: so.Adam(params, lr=0.02, memory="exact"),
    "Adam, paper-mv": lambda params: so.Adam(params, lr=0.005, memory="paper-mv"),
    "Adagrad, lean-0.1": lambda params: so.Adagrad(params, lr=0.02),
    "SGD, lean-0.1": lambda params: so.SGD(params, lr=0.02),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.filterwarnings("ignore:the sketch of parameter")
def test_optimizers_train_both_tables(name, is_tied):
    torch.manual_seed(0)
    embedding = nn.Embedding(200, 16, sparse=True)
    tied = embedding.weight if is_tied else None
    head = SampledSoftmax(16, 200, samples=50, bias=True, weight=tied)
    model = nn.ModuleDict({"embedding": embedding, "head": head})
    words = torch.randint(200, (64,), generator=generator(1))
    labels = words.roll(1)
    before = head.full_loss(embedding(words), labels)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for seed in range(60):
        optimizer.zero_grad()
        head(embedding(words), labels, generator=generator(seed)).backward()
        assert all(parameter.grad.is_sparse for parameter in model.parameters())
        optimizer.step()
    assert head.full_loss(embedding(words), labels) < before - 0.05


def test_nan_features_give_a_nan_loss_that_our_optimizers_refuse():
    head = SampledSoftmax(8, 40, samples=20)
    hidden = torch.randn(2, 8)
    hidden[1, 3] = math.nan
    losses = head(hidden, torch.tensor([1, 2]), reduction="none")
    assert losses.isnan().tolist() == [False, True]
    losses.sum().backward()
    before = head.weight.detach().clone()
    with pytest.raises(ValueError, match="finite"):
        so.Adam(head.parameters()).step()
    assert torch.equal(head.weight, before)


# -- padding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignored", [-100, 3, 60])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("make", [SampledSoftmax, LSHSoftmax])
def test_ignored_labels_are_left_out_of_losses_means_and_gradients(make, reduction, ignored):
    """As if they were not there; and as `F.cross_entropy` does it, in the exact loss."""
    torch.manual_seed(0)
    options = {"samples": 9} if make is SampledSoftmax else {"bits": 2, "tables": 3}
    head = make(8, 40, bias=True, ignore_index=ignored, **options).double()
    hidden = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[0, ignored, 7], [ignored, 21, 39]])
    kept = labels != ignored

    losses = head(hidden, labels, reduction=reduction, generator=generator(0))
    losses.sum().backward()
    found = [table.grad.to_dense() for table in (head.weight, head.bias)]
    by_hidden, hidden.grad = hidden.grad, None
    head.zero_grad()
    alone = head(hidden[kept], labels[kept], reduction=reduction, generator=generator(0))
    alone.sum().backward()
    torch.testing.assert_close(losses[kept] if reduction == "none" else losses, alone)
    torch.testing.assert_close(by_hidden, hidden.grad)
    for table, gradient in zip((head.weight, head.bias), found, strict=True):
        torch.testing.assert_close(gradient, table.grad.to_dense())

    logits = hidden @ head.weight.T + head.bias[:, 0]
    expected = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=ignored, reduction=reduction
    )
    exact = head.full_loss(hidden, labels, reduction=reduction)
    torch.testing.assert_close(exact.flatten(), expected.detach().flatten())


@pytest.mark.parametrize("make", [SampledSoftmax, LSHSoftmax])
def test_a_batch_of_padding_alone_is_what_torch_makes_of_it(make):
    head = make(8, 40, **({"samples": 9} if make is SampledSoftmax else {}))
    padding = torch.randn(2, 8), torch.full((2,), -100)
    assert head(*padding).isnan()
    assert head(*padding, reduction="sum").item() == 0.0
    assert head.full_loss(*padding, reduction="none").tolist() == [0.0, 0.0]


# -- evaluation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 39, 40, 41, 8192])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_full_loss_in_chunks_equals_cross_entropy(chunk, has_bias, reduction):
    torch.manual_seed(0)
    head = SampledSoftmax(8, 40, samples=20, bias=has_bias)
    if has_bias:
        nn.init.normal_(head.bias)
    hidden, labels = 30 * torch.randn(2, 3, 8), torch.tensor([[0, 0, 3], [7, 21, 39]])
    logits = hidden @ head.weight.T + (head.bias[:, 0] if has_bias else 0)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
    loss = head.full_loss(hidden, labels, reduction=reduction, chunk=chunk)
    torch.testing.assert_close(loss.flatten(), expected.detach().flatten())
    assert not loss.requires_grad


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 40, 8192])
@pytest.mark.parametrize("k", [1, 3, 40])
def test_top_k_in_chunks_equals_a_sort_of_all_logits(has_bias, chunk, k):
    torch.manual_seed(0)
    head = SampledSoftmax(8, 40, samples=20, bias=has_bias)
    if has_bias:
        nn.init.normal_(head.bias)
    hidden = torch.randn(2, 3, 8)
    logits = hidden @ head.weight.T + (head.bias[:, 0] if has_bias else 0)
    expected = logits.argsort(-1, descending=True)[..., :k]
    assert torch.equal(head.top_k(hidden, k, chunk=chunk), expected)


FLOATS = [torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("hidden_dtype", FLOATS)
@pytest.mark.parametrize("weight_dtype", FLOATS)
def test_evaluation_takes_hidden_vectors_of_another_dtype_as_training_does(
    problem, hidden_dtype, weight_dtype
):
    head, hidden, labels = problem
    head, hidden = head.to(weight_dtype), hidden.to(hidden_dtype)
    head(hidden, labels).backward()
    exact = hidden.double() @ head.weight.double().T + head.bias.double()[:, 0]
    loss = head.full_loss(hidden, labels)
    assert loss.item() == pytest.approx(F.cross_entropy(exact, labels).item(), rel=1e-2)
    assert torch.equal(head.top_k(hidden, 1)[:, 0], exact.argmax(-1))


# -- memory ----------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Remembers the elements of the largest new tensor that any operation made."""

    def __init__(self, head: SampledSoftmax) -> None:
        super().__init__()
        self.tables = {p.untyped_storage().data_ptr() for p in head.parameters()}
        self.elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            is_dense = isinstance(tensor, torch.Tensor) and not tensor.is_sparse
            if is_dense and tensor.untyped_storage().data_ptr() not in self.tables:
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("method", ["full_loss", "top_k"])
def test_evaluation_makes_no_matrix_above_one_chunk(method):
    head = SampledSoftmax(4, 5_000, samples=20, bias=True)
    hidden, labels = torch.randn(30, 4), torch.arange(30)
    with LargestTensor(head) as largest:
        if method == "full_loss":
            head.full_loss(hidden, labels, chunk=64)
        else:
            head.top_k(hidden, 5, chunk=64)
    assert largest.elements == 30 * 64


def test_training_makes_no_matrix_of_all_tokens_and_negatives(monkeypatch):
    monkeypatch.setattr(_loss_sweep, "_CHUNK_ELEMENTS", 5_000)
    head = SampledSoftmax(4, 5_000, samples=300, bias=True)
    hidden, labels = torch.randn(400, 4, requires_grad=True), torch.arange(400)
    with LargestTensor(head) as largest:
        head(hidden, labels).backward()
    assert largest.elements <= 5_000


def test_making_a_layer_takes_no_second_copy_of_its_table():
    dim, classes = 64, 10_000
    taken = measured(lambda: SampledSoftmax(dim, classes, samples=8)).allocated_bytes
    table_bytes = 4 * dim * classes
    assert table_bytes <= taken < 1.5 * table_bytes


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (torch.tensor([0, 40]), ValueError, r"lie in \[0, 39\], got values from 0 to 40"),
        (
            torch.tensor([-1, 3]),
            ValueError,
            r"lie in \[0, 39\], got values from -1 to 3; .* ignore_index=-1 if that is padding",
        ),
        (torch.tensor([-100, 40]), ValueError, r"got values from 40 to 40; .* classes > 40"),
        ([0, 1], TypeError, r"labels must be a tensor, got \[0, 1\]; use torch.as_tensor"),
        (torch.tensor([0.0, 1.0]), TypeError, r"labels must be int64, got torch.float32"),
        (torch.tensor([0, 1, 2]), ValueError, r"hidden must have the shape of labels plus \(8,\)"),
    ],
)
@pytest.mark.parametrize("method", ["forward", "full_loss"])
def test_bad_labels_get_a_clear_error(labels, error, message, method):
    head = SampledSoftmax(8, 40, samples=20)
    with pytest.raises(error, match=message):
        getattr(head, method)(torch.randn(2, 8), labels)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 0}, "dim must be >= 1, got 0"),
        ({"classes": 0}, "classes must be >= 1, got 0"),
        ({"samples": 0}, "samples must be >= 1, got 0"),
        ({"samples": 2.5}, "samples must be an int, got 2.5"),
        ({"ignore_index": None}, "ignore_index must be an int, got None"),
        ({"weight": nn.Parameter(torch.zeros(3, 4))}, r"shape \(40, 8\), got \(3, 4\)"),
        ({"sampler": LogUniformSampler(39)}, "from 40 classes, got one of 39"),
        ({"repeats": "unique"}, "repeats must be one of .*, got 'unique'"),
        ({"samples": 41, "repeats": "redrawn"}, "samples must be <= classes = 40"),
    ],
)
def test_bad_construction_gets_a_clear_error(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        SampledSoftmax(**{"dim": 8, "classes": 40, "samples": 20, **arguments})


@pytest.mark.parametrize("make", [SampledSoftmax, LSHSoftmax])
def test_a_weight_that_would_not_be_trained_is_refused(make):
    embedding = nn.Embedding(100, 8, sparse=True)
    options = {"samples": 4} if make is SampledSoftmax else {}
    with pytest.raises(TypeError, match=r"weight must be an nn.Parameter, got Tensor.*pass embed"):
        make(8, 100, weight=embedding.weight.data, **options)


def test_bad_options_get_a_clear_error(problem):
    head, hidden, labels = problem
    with pytest.raises(ValueError, match="chunk must be >= 1, got 0"):
        head.full_loss(hidden, labels, chunk=0)
    with pytest.raises(ValueError, match=r"k must be in \[1, 40\], got 41"):
        head.top_k(hidden, 41)
    with pytest.raises(ValueError, match="hidden must not be NaN"):
        head.top_k(hidden * math.nan, 1)
    with pytest.raises(TypeError, match=r"hidden must be floating point, got torch.int64; call"):
        head.top_k(hidden.long(), 1)
    with pytest.raises(ValueError, match=r"hidden must have shape \(..., 8\), got \(6, 4\)"):
        head.top_k(hidden[:, :4], 1)
    with pytest.raises(ValueError, match=r"reduction must be one of .*, got 'max'"):
        head(hidden, labels, reduction="max")
