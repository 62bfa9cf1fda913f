"""Output heads whose logits are deferred until something else than a cross entropy reads them."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sketchoptim as so

WORDS, DIM = 1003, 8


class LanguageModel(nn.Module):
    """An embedding, a hidden layer and a head."""

    def __init__(self, *, is_tied: bool = False, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.hidden = nn.Embedding(WORDS, DIM), nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, WORDS, bias=bias)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.hidden(self.embedding(words)).tanh())


GENERATOR = torch.Generator().manual_seed(1)
WORDS_IN = torch.randint(WORDS, (3, 7), generator=GENERATOR)
LABELS = torch.randint(WORDS, (3, 7), generator=GENERATOR)
LABELS[0, 2] = -100


def twins(**options: bool) -> tuple[LanguageModel, LanguageModel]:
    """A model whose head is deferred, and one whose head is not."""
    ours, theirs = LanguageModel(**options), LanguageModel(**options)
    so.defer_gradients(ours)
    return ours, theirs


def check_same(ours: nn.Module, theirs: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> None:
    """Both give the same loss and the same gradients."""
    losses = [loss_of(model) for model in (ours, theirs)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        error = (plain(one.grad) - plain(other.grad)).abs().max()
        assert error <= 1e-5 * plain(other.grad).abs().max()


def plain(gradient: Tensor) -> Tensor:
    is_dense = type(gradient) is Tensor and not gradient.is_sparse
    return gradient if is_dense else gradient.to_dense()


SHIFTED = LABELS[..., 1:]
FUSED = {
    "view": lambda it: F.cross_entropy(it.view(-1, WORDS), LABELS.view(-1)),
    "float and flatten": lambda it: F.cross_entropy(it.flatten(0, 1).float(), LABELS.flatten()),
    "shift": lambda it: nn.CrossEntropyLoss()(
        it[..., :-1, :].contiguous().view(-1, WORDS), SHIFTED.reshape(-1)
    ),
    "shift without an ellipsis": lambda it: F.cross_entropy(
        it[:, :-1].reshape(-1, WORDS), SHIFTED.reshape(-1)
    ),
    "classes second": lambda it: F.cross_entropy(it.transpose(1, 2), LABELS),
    "each token": lambda it: (
        F.cross_entropy(it.view(-1, WORDS), LABELS.view(-1), reduction="none").square().sum()
    ),
    "mask": lambda it: F.cross_entropy(it[LABELS >= 0], LABELS[LABELS >= 0], reduction="sum"),
    "softcap": lambda it: F.cross_entropy(
        (torch.tanh(it / 3.0) * 3.0).view(-1, WORDS), LABELS.view(-1)
    ),
    "tanh": lambda it: F.cross_entropy(
        (torch.tanh(it / 3.0) * 4.0).view(-1, WORDS), LABELS.view(-1)
    ),
    "temperature": lambda it: F.cross_entropy((it / 0.7).view(-1, WORDS), LABELS.view(-1)),
    "fixed bias": lambda it: F.cross_entropy(
        (it + torch.linspace(-1, 1, WORDS)).view(-1, WORDS), LABELS.view(-1)
    ),
    "smoothing": lambda it: F.cross_entropy(
        it.view(-1, WORDS), LABELS.view(-1), label_smoothing=0.1
    ),
}


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("loss_of", FUSED.values(), ids=FUSED)
def test_a_cross_entropy_computes_no_logits(loss_of, is_tied):
    ours, theirs = twins(is_tied=is_tied)
    check_same(ours, theirs, lambda model: loss_of(model(WORDS_IN)))
    assert not ours.head.weight.grad.exists
    assert type(ours.head.bias.grad) is Tensor


COMPUTED = {
    "log_softmax": lambda it: -F.log_softmax(it, -1)[LABELS >= 0].sum(),
    "slice of classes": lambda it: F.cross_entropy(
        it[..., :900].flatten(0, 1), LABELS.flatten() % 900
    ),
    "class weights": lambda it: F.cross_entropy(
        it.flatten(0, 1), LABELS.flatten(), weight=torch.linspace(0, 1, WORDS)
    ),
    "another loss too": lambda it: (
        F.cross_entropy(it.flatten(0, 1), LABELS.flatten())
        + torch.logsumexp(it, -1).square().mean()
    ),
    "a clone": lambda it: it.clone().div_(2).square().mean(),
}


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("loss_of", COMPUTED.values(), ids=COMPUTED)
def test_any_other_reader_gets_the_logits_with_one_warning(loss_of, is_tied):
    ours, theirs = twins(is_tied=is_tied)
    with pytest.warns(UserWarning, match=r"aten\..* reads deferred logits of shape"):
        check_same(ours, theirs, lambda model: loss_of(model(WORDS_IN)))


def test_a_metric_of_the_logits_does_not_change_the_gradient():
    ours, theirs = twins()

    def loss_of(model: nn.Module) -> Tensor:
        logits = model(WORDS_IN)
        assert (logits.argmax(-1) == LABELS).float().mean() <= 1
        return F.cross_entropy(logits.flatten(0, 1), LABELS.flatten())

    with pytest.warns(UserWarning, match=r"aten\.argmax"):
        check_same(ours, theirs, loss_of)
    assert not ours.head.weight.grad.exists


class Squares(torch.autograd.Function):
    """A loss that torch's dispatcher alone sees."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits.clone())
        return logits.square().sum()

    @staticmethod
    def backward(ctx, upstream):
        return 2 * ctx.saved_tensors[0] * upstream


def test_a_loss_in_an_autograd_function_gets_the_logits():
    ours, theirs = twins()
    with pytest.warns(UserWarning, match="reads deferred logits"):
        check_same(ours, theirs, lambda model: Squares.apply(model(WORDS_IN)))


def test_logits_have_the_shape_and_the_type_of_plain_ones():
    ours, theirs = twins()
    one, other = ours(WORDS_IN), theirs(WORDS_IN)
    assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    assert (one.requires_grad, len(one), one.dim()) == (True, 3, 3)
    assert repr(one) == "DeferredLogits([3, 7, 1003], torch.float32)"
    with torch.no_grad():
        assert type(ours(WORDS_IN)) is Tensor


@pytest.mark.parametrize(
    "modify",
    [
        lambda it: it.div_(2),
        lambda it: it.__setitem__((0, 0), 0.0),
        lambda it: it.masked_fill_(torch.ones(WORDS).bool(), 0.0),
    ],
    ids=["div_", "setitem", "masked_fill_"],
)
def test_logits_cannot_be_modified_in_place(modify):
    ours, _ = twins()
    with pytest.raises(NotImplementedError, match=r"in place on deferred logits; use .*clone"):
        modify(ours(WORDS_IN))


@pytest.mark.filterwarnings("ignore:aten.select.int reads deferred logits")
def test_logits_that_were_modified_by_a_view_are_refused():
    ours, _ = twins()
    logits = ours(WORDS_IN)
    with torch.no_grad():
        logits.select(-1, 3).fill_(0.0)
    with pytest.raises(NotImplementedError, match="in place on deferred logits"):
        logits.view(-1, WORDS)


@pytest.mark.parametrize("read", [torch.exp, lambda it: it.view(-1, WORDS)])
def test_logits_of_a_weight_that_has_changed_are_refused(read):
    ours, _ = twins()
    logits = ours(WORDS_IN)
    with torch.no_grad():
        ours.head.weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"use the logits before optimizer\.step"):
        read(logits)


def test_a_weight_that_changed_since_the_backward_pass_refuses_the_step():
    ours, _ = twins()
    optimizer = so.AdamW(so.param_groups(ours), lr=0.1)
    F.cross_entropy(ours(WORDS_IN).flatten(0, 1), LABELS.flatten()).backward()
    with torch.no_grad():
        ours.head.weight.mul_(1.0)
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(RuntimeError, match="the weight behind a deferred gradient"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    assert not optimizer.state


def test_the_undo_drops_gradients_that_a_step_has_used():
    ours, _ = twins()
    optimizer = so.AdamW(so.param_groups(ours), lr=0.1)
    F.cross_entropy(ours(WORDS_IN).flatten(0, 1), LABELS.flatten()).backward()
    optimizer.step()
    so.materialize_gradients(ours)
    assert ours.head.weight.grad is None
    assert type(ours.head) is nn.Linear
    assert type(ours.hidden.weight.grad) is Tensor


@pytest.mark.parametrize("outside", [True, False])
def test_autocast_decides_the_products_where_the_head_is(outside):
    ours, theirs = twins()
    losses = []
    for model in (ours, theirs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(WORDS_IN)
            loss = F.cross_entropy(logits.flatten(0, 1), LABELS.flatten())
        if outside:
            loss = F.cross_entropy(logits.float().flatten(0, 1), LABELS.flatten())
        assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
        loss.backward()
        losses.append(loss)
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)
    one, other = plain(ours.head.weight.grad), theirs.head.weight.grad
    assert (one - other).norm() < 0.02 * other.norm()


# Tracing looks at tensors between two graphs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_computes_the_same():
    ours, theirs = twins(is_tied=True)
    compiled = torch.compile(ours, backend="aot_eager")
    for _ in range(2):
        check_same(
            ours,
            theirs,
            lambda model: F.cross_entropy(
                (compiled if model is ours else model)(WORDS_IN).flatten(0, 1), LABELS.flatten()
            ),
        )


def test_heads_are_found_by_their_size_their_weight_or_their_name():
    model = nn.ModuleDict(
        {
            "words": nn.Embedding(1000, 4),
            "tied": nn.Linear(4, 1000, bias=False),
            "untied": nn.Linear(4, 1000),
            "hidden": nn.Linear(4, 1001),
            "small": nn.Linear(4, 10),
            "named": nn.Linear(4, 20),
        }
    )
    model["tied"].weight = model["words"].weight
    assert list(so.defer_gradients(model, heads=["named"]).armed) == [
        "words",
        "tied",
        "untied",
        "named",
    ]
    with pytest.raises(ValueError, match=r"heads must be names of nn.Linear .* got \['words'\]"):
        so.defer_gradients(model, heads="words")


def test_mach_gets_the_same_gradients():
    hashing = so.nn.FeatureHashing(features=300)
    mach = so.nn.MACH(lambda: so.nn.BagEncoder(300, DIM), DIM, 5000, 100, members=2)
    bags, labels = hashing(["usr/bin/env", "etc/passwd", "etc/hosts"]), torch.tensor([17, 4999, 3])
    ours, theirs = copy.deepcopy(mach), mach
    assert len(so.defer_gradients(ours).armed) == 4
    check_same(ours, theirs, lambda model: model(bags, labels))
    assert isinstance(ours.heads["0"].weight.grad, so.DeferredGradient)
    several = so.nn.MACH(lambda: nn.Linear(4, 4), 4, 50, 20, members=1, multi_label=True)
    with pytest.warns(UserWarning, match="found no layer"):
        so.defer_gradients(several)
