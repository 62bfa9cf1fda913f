import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sketchoptim.nn import LogUniformSampler, SampledSoftmax

CPU = torch.device("cpu")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# The sampler


@pytest.mark.parametrize("classes", [1, 2, 10, 33_278, 793_471])
def test_probabilities_add_up_to_one(classes):
    total = LogUniformSampler(classes).probability(torch.arange(classes)).sum().item()
    assert total == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("classes", [1, 2, 10, 33_278, 793_471])
def test_every_id_owns_exactly_the_interval_it_is_corrected_with(classes):
    sampler = LogUniformSampler(classes)
    ids = torch.arange(classes)
    # an ulp of u is worth about `classes` ulps of a boundary between two ids
    slack = 4e-16 * classes
    ends = sampler.probability(ids).cumsum(0)
    starts = torch.cat([torch.zeros(1, dtype=torch.float64), ends[:-1]])
    width = ends - starts
    assert torch.equal(sampler.from_uniform(starts + width * max(slack, 1e-6)), ids)
    assert torch.equal(sampler.from_uniform(ends - width * max(slack, 1e-6)), ids)


def test_extreme_uniform_numbers_stay_in_range():
    sampler = LogUniformSampler(793_471)
    ends = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    assert sampler.from_uniform(ends).tolist() == [0, 793_470]


def test_draws_pass_a_chi_square_over_the_whole_range():
    classes, draws = 2_000, 4_000_000
    sampler = LogUniformSampler(classes)
    uniform = torch.rand(draws, dtype=torch.float64, generator=generator(0))
    observed = sampler.from_uniform(uniform).bincount(minlength=classes).double()
    expected = sampler.probability(torch.arange(classes)) * draws
    assert expected.min() > 50
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    freedom = classes - 1
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)
    assert observed[0].item() == pytest.approx(expected[0].item(), rel=0.01)


def test_ids_are_drawn_as_often_as_their_expected_count_says():
    classes, samples, rounds = 50, 20, 20_000
    sampler = LogUniformSampler(classes)
    source = generator(1)
    seen = torch.zeros(classes, dtype=torch.int64)
    for _ in range(rounds):
        drawn = sampler.draw(samples, generator=source, device=CPU)
        seen[drawn] += 1
    expected = sampler.log_expected_count(torch.arange(classes), samples).exp()
    sd = (expected * (1 - expected) / rounds).sqrt()
    assert ((seen / rounds - expected).abs() < 4.5 * sd).all()


def test_drawn_ids_are_distinct():
    drawn = LogUniformSampler(10).draw(1000, generator=generator(0), device=CPU)
    assert drawn.tolist() == list(range(10))


# The loss


@pytest.fixture
def problem():
    """A head with a bias, hidden vectors and labels, in float64."""
    torch.manual_seed(0)
    head = SampledSoftmax(8, 40, samples=20, bias=True).double()
    with torch.no_grad():
        head.bias.normal_()
    return head, torch.randn(6, 8, dtype=torch.float64), torch.tensor([0, 0, 3, 7, 21, 39])


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


def test_sampled_gradient_approaches_the_full_gradient(problem):
    head, hidden, labels = problem
    full = full_gradient(head, hidden, labels)
    errors = [
        (mean_sampled_gradient(head, hidden, labels, samples=samples, rounds=400) - full).norm()
        for samples in (10, 40, 160, 1600)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3 * full.norm()


def test_drawing_every_class_gives_the_full_loss(problem):
    head, hidden, labels = problem
    head.samples = 100_000
    assert head(hidden, labels).item() == pytest.approx(head.full_loss(hidden, labels).item())


def test_sampled_loss_follows_its_formula(problem):
    head, hidden, labels = problem
    drawn = head.sampler.draw(20, generator=generator(3), device=CPU).tolist()
    logits = hidden @ head.weight.T + head.bias[:, 0]
    p = [math.log((c + 2) / (c + 1)) / math.log(41) for c in range(40)]
    corrected = [
        [o.item() - math.log(1 - (1 - p[c]) ** 20) for c, o in enumerate(row)] for row in logits
    ]
    expected = [
        math.log(sum(math.exp(row[c]) for c in {y, *drawn})) - row[y]
        for row, y in zip(corrected, labels.tolist(), strict=True)
    ]
    losses = head(hidden, labels, reduction="none", generator=generator(3))
    assert losses.tolist() == pytest.approx(expected)


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


def test_gradients_are_sparse_and_touch_labels_and_negatives_only():
    head = SampledSoftmax(4, 10_000, samples=16, bias=True)
    hidden = torch.randn(3, 4, requires_grad=True)
    labels = torch.tensor([5, 9_000, 5])
    head(hidden, labels, generator=generator(0)).backward()
    drawn = head.sampler.draw(16, generator=generator(0), device=CPU).tolist()
    for table in (head.weight, head.bias):
        assert table.grad.is_sparse
        assert set(table.grad.coalesce().indices()[0].tolist()) == {5, 9_000, *drawn}
    assert hidden.grad.shape == (3, 4)


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


def test_weights_can_be_tied_to_an_embedding():
    embedding = nn.Embedding(30, 4, sparse=True)
    head = SampledSoftmax(4, 30, samples=8, weight=embedding.weight)
    assert head.weight is embedding.weight
    ids = torch.tensor([1, 2, 29])
    head(embedding(ids), ids).backward()
    assert embedding.weight.grad.is_sparse


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_tables_give_a_float32_loss(dtype):
    torch.manual_seed(0)
    head = SampledSoftmax(8, 40, samples=20, bias=True).to(dtype)
    hidden, labels = torch.randn(6, 8), torch.arange(6)
    loss = head(hidden.to(dtype), labels, generator=generator(0))
    loss.backward()
    assert loss.dtype == torch.float32
    exact = head.float()(hidden, labels, generator=generator(0))
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)


def test_training_on_samples_lowers_the_full_loss(problem):
    head, hidden, labels = problem
    before = head.full_loss(hidden, labels)
    optimizer = torch.optim.SparseAdam(head.parameters(), lr=0.05)
    for _ in range(50):
        optimizer.zero_grad()
        head(hidden, labels, generator=generator(0)).backward()
        optimizer.step()
    assert head.full_loss(hidden, labels) < before / 2


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (torch.tensor([0, 40]), ValueError, r"lie in \[0, 39\], got values from 0 to 40"),
        (torch.tensor([-1, 3]), ValueError, r"lie in \[0, 39\], got values from -1 to 3"),
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
        ({"weight": nn.Parameter(torch.zeros(3, 4))}, r"shape \(40, 8\), got \(3, 4\)"),
        ({"sampler": LogUniformSampler(39)}, "from 40 classes, got one for 39"),
    ],
)
def test_bad_construction_gets_a_clear_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        SampledSoftmax(**{"dim": 8, "classes": 40, "samples": 20, **arguments})


def test_bad_options_get_a_clear_error(problem):
    head, hidden, labels = problem
    with pytest.raises(ValueError, match="chunk must be >= 1, got 0"):
        head.full_loss(hidden, labels, chunk=0)
    with pytest.raises(ValueError, match="reduction must be 'mean', 'sum' or 'none', got 'max'"):
        head(hidden, labels, reduction="max")
