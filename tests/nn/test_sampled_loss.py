"""The loss over a few drawn classes and its gradients."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from seeds import generator
from torch import nn

from sketchoptim.nn import LogUniformSampler, Negatives, SampledSoftmax, UnigramSampler, _loss_sweep

REPEATS = ["merged", "kept", "redrawn"]


# -- towards the full softmax ----------------------------------------------------------------------


def full_gradient(head, hidden, labels):
    weight = head.weight.detach().clone().requires_grad_()
    F.cross_entropy(hidden @ weight.T + head.bias.detach()[:, 0], labels).backward()
    return weight.grad


def mean_sampled_gradient(head, hidden, labels, *, samples, rounds):
    head.samples = samples
    source = generator(2)
    total = torch.zeros_like(head.weight)
    for _ in range(rounds):
        head.zero_grad()
        head(hidden, labels, generator=source).backward()
        total += head.weight.grad.to_dense()
    return total / rounds


@pytest.mark.parametrize(
    ("repeats", "sizes", "most"),
    [
        ("merged", (10, 40, 160, 1600), 1e-3),
        ("kept", (10, 40, 160, 1600), 2e-2),
        ("redrawn", (5, 10, 20, 40), 1e-2),
    ],
)
def test_sampled_gradient_approaches_the_full_gradient(problem, repeats, sizes, most):
    head, hidden, labels = problem
    head.repeats = repeats
    full = full_gradient(head, hidden, labels)
    errors = [
        (mean_sampled_gradient(head, hidden, labels, samples=samples, rounds=200) - full).norm()
        for samples in sizes
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < most * full.norm()


class Scripted(LogUniformSampler):
    """Draws the given ids."""

    def draw(self, count, *, generator, device):
        return torch.tensor(self.script)


@pytest.mark.parametrize(("repeats", "most"), [("kept", 1e-15), ("merged", 0.02)])
def test_the_true_model_has_an_expected_gradient_of_zero(repeats, most):
    classes, samples = 4, 3
    sampler = Scripted(classes)
    head = SampledSoftmax(1, classes, samples=samples, sampler=sampler, repeats=repeats).double()
    hidden = torch.ones(classes, 1, dtype=torch.float64)
    truth = head.weight.detach()[:, 0].softmax(0)
    probability = sampler.probability(torch.arange(classes))
    # over all draws, and over all labels as often as the model says that they occur
    for script in itertools.product(range(classes), repeat=samples):
        sampler.script = list(script)
        losses = head(hidden, torch.arange(classes), reduction="none")
        (probability[sampler.script].prod() * (truth @ losses)).backward()
    assert head.weight.grad.to_dense().abs().max() <= most * truth.max()


def test_drawing_every_class_gives_the_full_loss(problem):
    head, hidden, labels = problem
    head.samples = 100_000
    assert head(hidden, labels).item() == pytest.approx(head.full_loss(hidden, labels).item())


# -- the formula -----------------------------------------------------------------------------------


def naive_losses(head, hidden, labels, drawn):
    """The formula of the docstring, one number at a time."""
    logits = (hidden @ head.weight.T + (0 if head.bias is None else head.bias[:, 0])).tolist()
    p = head.sampler.probability(torch.arange(head.classes)).tolist()
    times = dict(zip(drawn.ids.tolist(), drawn.counts.tolist(), strict=True))
    losses = []
    for row, y in zip(logits, labels.tolist(), strict=True):
        terms = {}
        for c in {y, *times}:
            m, q = times.get(c, 0), 1 - (1 - p[c]) ** drawn.tries
            if head.repeats == "kept":
                m, q = m + (c == y), drawn.tries * p[c]
            else:
                m = 1
            terms[c] = math.exp(row[c]) * m / q
        losses.append(math.log(sum(terms.values())) - math.log(terms[y]))
    return losses


@pytest.mark.parametrize("repeats", REPEATS)
@pytest.mark.parametrize("distribution", ["log-uniform", "unigram"])
def test_sampled_loss_follows_its_formula(problem, repeats, distribution):
    head, hidden, labels = problem
    head.repeats = repeats
    if distribution == "unigram":
        head.sampler = UnigramSampler(torch.rand(40, generator=generator(4)) + 0.1)
    drawn = Negatives.draw(head.sampler, 20, repeats=repeats, generator=generator(3))
    losses = head(hidden, labels, reduction="none", generator=generator(3))
    assert losses.tolist() == pytest.approx(naive_losses(head, hidden, labels, drawn))


def test_a_draw_of_hits_alone_gives_zero_loss_and_gradient():
    head = SampledSoftmax(4, 1, samples=3)
    loss = head(torch.randn(5, 4), torch.zeros(5, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0.0
    assert head.weight.grad.to_dense().tolist() == [[0.0] * 4]


def test_the_generator_alone_decides_the_negatives(problem):
    head, hidden, labels = problem
    torch.manual_seed(5)
    first = head(hidden, labels, generator=generator(1))
    torch.manual_seed(6)
    assert torch.equal(first, head(hidden, labels, generator=generator(1)))
    assert not torch.equal(first, head(hidden, labels, generator=generator(2)))


def test_an_empty_batch_is_what_torch_makes_of_it():
    head = SampledSoftmax(8, 40, samples=20)
    nothing, none = torch.empty(0, 8), torch.empty(0, dtype=torch.int64)
    assert head(nothing, none).isnan()
    assert head(nothing, none, reduction="sum").item() == 0.0
    assert head(nothing, none, reduction="none").shape == (0,)
    assert head.top_k(nothing, 3).shape == (0, 3)


# -- gradients -------------------------------------------------------------------------------------


def autograd_loss(head, hidden, weight, bias, labels, drawn):
    """The same loss out of torch operations, for merged repeats, with dense gradients."""
    offset = -drawn.log_expected_count(head.sampler.probability(torch.arange(head.classes)))
    logits = hidden @ weight.T + bias[:, 0] + offset
    is_absent = torch.ones(labels.numel(), head.classes, dtype=torch.bool)
    is_absent[:, drawn.ids] = False
    is_absent[torch.arange(labels.numel()), labels] = False
    return F.cross_entropy(logits.masked_fill(is_absent, -math.inf), labels, reduction="none")


@pytest.mark.parametrize("chunk_elements", [1, 50, 1 << 21])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_are_those_of_autograd(problem, reduction, chunk_elements, monkeypatch):
    monkeypatch.setattr(_loss_sweep, "_CHUNK_ELEMENTS", chunk_elements)
    head, hidden, labels = problem
    hidden.requires_grad_()
    upstream = torch.randn(6, dtype=torch.float64, generator=generator(7))
    losses = head(hidden, labels, reduction=reduction, generator=generator(3))
    (losses @ upstream if reduction == "none" else 3 * losses).backward()
    inputs = [t.detach().clone().requires_grad_() for t in (hidden, head.weight, head.bias)]
    drawn = Negatives.draw(head.sampler, 20, repeats="merged", generator=generator(3))
    expected = autograd_loss(head, *inputs, labels, drawn)
    torch.testing.assert_close(
        losses, {"mean": expected.mean(), "sum": expected.sum(), "none": expected}[reduction]
    )
    weights = {"mean": torch.tensor(0.5), "sum": torch.tensor(3.0), "none": upstream}[reduction]
    (expected * weights).sum().backward()
    for ours, other in zip((hidden, head.weight, head.bias), inputs, strict=True):
        torch.testing.assert_close(ours.grad.to_dense(), other.grad)


class Densified(torch.autograd.Function):
    """The tensor itself, whose sparse gradient becomes dense, as gradcheck wants it."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.to_dense()


@pytest.mark.parametrize(("repeats", "reduction"), [("merged", "mean"), ("kept", "none")])
def test_gradients_pass_gradcheck(repeats, reduction):
    torch.manual_seed(0)
    head = SampledSoftmax(3, 12, samples=6, bias=True, repeats=repeats).double()
    hidden, labels = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 0, 5, 11])

    def loss(hidden, weight, bias):
        tables = {
            "table.weight": Densified.apply(weight),
            "bias_table.weight": Densified.apply(bias),
        }
        options = {"reduction": reduction, "generator": generator(0)}
        return torch.func.functional_call(head, tables, (hidden, labels), options)

    inputs = [t.detach().clone().requires_grad_() for t in (hidden, head.weight, head.bias)]
    assert torch.autograd.gradcheck(loss, inputs)


def test_a_second_backward_pass_gives_the_same_again(problem):
    head, hidden, labels = problem
    hidden.requires_grad_()
    loss = head(hidden, labels, generator=generator(0))
    gradients = []
    for _ in range(2):
        head.zero_grad()
        hidden.grad = None
        loss.backward(retain_graph=True)
        gradients.append([head.weight.grad.to_dense(), head.bias.grad.to_dense(), hidden.grad])
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)


def test_differentiating_twice_is_refused(problem):
    head, hidden, labels = problem
    hidden.requires_grad_()
    with pytest.raises(RuntimeError, match="differentiated once, got create_graph=True"):
        torch.autograd.grad(head(hidden, labels), hidden, create_graph=True)


def test_gradients_are_sparse_and_touch_labels_and_negatives_only():
    head = SampledSoftmax(4, 10_000, samples=16, bias=True)
    hidden = torch.randn(3, 4, requires_grad=True)
    labels = torch.tensor([5, 9_000, 5])
    head(hidden, labels, generator=generator(0)).backward()
    drawn = Negatives.draw(head.sampler, 16, repeats="merged", generator=generator(0))
    for table in (head.weight, head.bias):
        assert table.grad.is_sparse
        touched = sorted({5, 9_000, *drawn.ids.tolist()})
        assert table.grad._indices()[0].tolist() == touched
    assert hidden.grad.shape == (3, 4)


def test_evaluation_makes_no_gradients(problem):
    head, hidden, labels = problem
    with torch.no_grad():
        loss = head(hidden, labels, generator=generator(0))
    assert not loss.requires_grad
    assert loss == head(hidden, labels, generator=generator(0))


def test_features_without_a_gradient_are_allowed(problem):
    head, hidden, labels = problem
    head(hidden, labels).backward()
    assert hidden.grad is None
    assert head.weight.grad is not None


def test_frozen_weights_pass_gradients_on():
    head = SampledSoftmax(8, 40, samples=20)
    head.weight.requires_grad_(False)
    hidden = torch.randn(6, 8, requires_grad=True)
    head(hidden, torch.arange(6)).backward()
    assert head.weight.grad is None
    assert hidden.grad.abs().sum() > 0


# -- precisions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_tables_give_a_float32_loss(dtype):
    torch.manual_seed(0)
    head = SampledSoftmax(8, 40, samples=20, bias=True).to(dtype)
    hidden, labels = torch.randn(6, 8, requires_grad=True), torch.arange(6)
    loss = head(hidden.to(dtype), labels, generator=generator(0))
    loss.backward()
    assert loss.dtype == torch.float32
    assert head.weight.grad.dtype == head.bias.grad.dtype == dtype
    exact = copy.deepcopy(head).float()
    exact.zero_grad()
    other = hidden.detach().clone().requires_grad_()
    expected = exact(other, labels, generator=generator(0))
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=0.02)
    for ours, theirs in ((head.weight, exact.weight), (head.bias, exact.bias), (hidden, other)):
        difference = ours.grad.float().to_dense() - theirs.grad.to_dense()
        assert difference.norm() < 0.02 * theirs.grad.to_dense().norm()


def test_autocast_gives_float32_gradients_from_half_precision_products():
    torch.manual_seed(0)
    head = SampledSoftmax(8, 40, samples=20, bias=True)
    body = nn.Linear(8, 8)
    hidden, labels = torch.randn(6, 8), torch.arange(6)
    exact = head(body(hidden), labels, generator=generator(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = head(body(hidden), labels, generator=generator(0))
    loss.backward()
    assert loss.dtype == head.weight.grad.dtype == body.weight.grad.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)
    assert loss.item() != exact.item()
