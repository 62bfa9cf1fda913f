"""The output layer that trains on classes found by SimHash: losses, recall, rebuilds, files."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from seeds import generator
from torch import nn

import sketchoptim as so
from sketchoptim.nn import LSHSoftmax
from sketchoptim.nn._row_pairs import pair_logits


def head_of(**options):
    torch.manual_seed(0)
    sizes = {"bits": 3, "tables": 4, "budget": 40, "negatives": 0, "bias": True}
    head = LSHSoftmax(8, 40, **{**sizes, **options}).double()
    if head.bias is not None:
        nn.init.normal_(head.bias)
    return head


@pytest.fixture
def batch():
    """Hidden vectors and labels, in float64."""
    hidden = torch.randn(6, 8, dtype=torch.float64, generator=generator(1))
    return hidden, torch.tensor([0, 0, 3, 7, 21, 39])


def active_classes(head, hidden, labels):
    """Candidates and label of each example, as sets."""
    found = head.candidates(hidden)
    return [
        {*found.ids[found.query == i].tolist(), label} for i, label in enumerate(labels.tolist())
    ]


# The loss


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_is_the_cross_entropy_over_active_classes(batch, bias, reduction):
    head, (hidden, labels) = head_of(bias=bias), batch
    head.rebuild_every = ()
    logits = (hidden @ head.weight.T + (head.bias[:, 0] if bias else 0)).tolist()
    expected = torch.tensor(
        [
            math.log(sum(math.exp(row[c]) for c in active)) - row[label]
            for row, active, label in zip(
                logits, active_classes(head, hidden, labels), labels.tolist(), strict=True
            )
        ],
        dtype=torch.float64,
    )
    wanted = {"mean": expected.mean(), "sum": expected.sum(), "none": expected}[reduction]
    torch.testing.assert_close(head(hidden, labels, reduction=reduction).detach(), wanted)


def test_gradients_are_those_of_autograd(batch):
    head, (hidden, labels) = head_of(), batch
    hidden.requires_grad_()
    (3 * head(hidden, labels)).backward()
    other, weight, bias = (
        t.detach().clone().requires_grad_() for t in (hidden, head.weight, head.bias)
    )
    is_absent = torch.ones(6, 40, dtype=torch.bool)
    for row, active in zip(is_absent, active_classes(head, hidden, labels), strict=True):
        row[list(active)] = False
    logits = (other @ weight.T + bias[:, 0]).masked_fill(is_absent, -math.inf)
    (3 * F.cross_entropy(logits, labels)).backward()
    for ours, theirs in ((hidden, other), (head.weight, weight), (head.bias, bias)):
        torch.testing.assert_close(ours.grad.to_dense(), theirs.grad)


@pytest.mark.parametrize(
    ("bits", "tables", "budget"),
    [(1, 2, 40), (3, 12, 20)],  # the second one's buckets are small, but all together exceed it
)
def test_corrected_denominators_are_unbiased(batch, bits, tables, budget):
    hidden, labels = batch
    sizes = {"bits": bits, "tables": tables, "budget": budget, "rebuild_every": 1}
    head = head_of(corrected=True, **sizes)
    logits = hidden @ head.weight.T + head.bias[:, 0]
    label_logits = logits.gather(1, labels[:, None])[:, 0]
    rounds = 800
    # the loss is log Z - o(y), so this is an estimate of Z
    estimates = torch.stack(
        [
            (head(hidden, labels, reduction="none", generator=generator(seed)) + label_logits)
            .exp()
            .detach()
            for seed in range(rounds)
        ]
    )
    error = (estimates.mean(0) - logits.exp().sum(1)).abs()
    assert (error < 4.5 * estimates.std(0) / math.sqrt(rounds)).all()
    assert (estimates.std(0) > 0).all()


def test_more_tables_approach_the_full_loss(batch):
    hidden, labels = batch
    errors = []
    for tables in (1, 8, 64):
        head = head_of(bits=1, tables=tables, corrected=True)
        errors.append((head(hidden, labels) - head.full_loss(hidden, labels)).abs().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-8


def test_random_negatives_join_the_active_classes(batch):
    hidden, labels = batch
    head = head_of(bits=20, tables=1, negatives=2_000)
    torch.testing.assert_close(
        head(hidden, labels, generator=generator(0)).detach(), head.full_loss(hidden, labels)
    )


def test_an_example_that_finds_nothing_has_no_loss_and_no_gradient(batch):
    hidden, labels = batch
    head = head_of(bits=24, tables=1, bias=False)
    loss = head(hidden, labels)
    assert head.candidates(hidden).ids.numel() == 0
    loss.backward()
    assert loss.item() == 0.0
    assert head.weight.grad.to_dense().count_nonzero() == 0


def test_gradients_are_sparse_and_touch_active_rows_only(batch):
    head, (hidden, labels) = head_of(budget=3), batch
    head(hidden, labels, generator=generator(0)).backward()
    found = head.candidates(hidden, generator=generator(0))
    touched = sorted({*found.ids.tolist(), *labels.tolist()})
    for table in (head.weight, head.bias):
        assert table.grad.is_sparse
        assert table.grad._indices()[0].tolist() == touched


def test_pair_logits_pass_gradcheck():
    hidden, rows = torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    token, at = torch.tensor([0, 0, 0, 2, 2]), torch.tensor([4, 1, 1, 0, 4])
    inputs = (hidden.requires_grad_(), rows.requires_grad_())
    assert torch.autograd.gradcheck(lambda h, r: pair_logits(h, r, token, at), inputs)


def test_differentiating_twice_is_refused(batch):
    head, (hidden, labels) = head_of(), batch
    with pytest.raises(RuntimeError, match="LSHSoftmax can be differentiated once"):
        torch.autograd.grad(head(hidden, labels), head.weight, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_tables_give_a_float32_loss(batch, dtype):
    hidden, labels = batch
    head = head_of(bits=1, tables=30).to(dtype)
    loss = head(hidden.to(dtype), labels)
    loss.backward()
    assert loss.dtype == torch.float32
    assert head.weight.grad.dtype == head.bias.grad.dtype == dtype
    assert loss.item() == pytest.approx(head_of().full_loss(hidden, labels).item(), rel=0.02)


def test_autocast_gives_float32_gradients(batch):
    hidden, labels = batch
    head, body = head_of().float(), nn.Linear(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = head(body(hidden.float()), labels)
    loss.backward()
    assert loss.dtype == head.weight.grad.dtype == body.weight.grad.dtype == torch.float32


# Recall


def test_recall_is_the_share_of_the_largest_logits_that_are_found(batch):
    head, (hidden, _) = head_of(), batch
    logits = hidden @ head.weight.T + head.bias[:, 0]
    found = head.candidates(hidden)
    expected = [
        len({*logits[i].topk(5).indices.tolist()} & {*found.ids[found.query == i].tolist()})
        for i in range(6)
    ]
    assert 0 < sum(expected) < 30
    assert head.recall(hidden, 5, chunk=7) == pytest.approx(sum(expected) / 30)


def test_hashing_finds_large_logits_more_often_than_chance():
    torch.manual_seed(0)
    head = LSHSoftmax(32, 5_000, bits=8, tables=16, budget=500)
    hidden = head.weight.detach()[:100] + 0.02 * torch.randn(100, 32)
    share = head.candidates(hidden).ids.numel() / (100 * 5_000)
    assert head.recall(hidden, 1) > 0.95
    assert head.recall(hidden, 10) > 3 * share


# Rebuilding


@pytest.mark.parametrize(
    ("rebuild_every", "expected"),
    [(3, [0, 3, 6]), ((2, 5), [0, 2, 5]), (lambda step: step in (1, 4), [0, 1, 4])],
)
def test_tables_are_rebuilt_when_due(batch, rebuild_every, expected):
    head, (hidden, labels) = head_of(rebuild_every=rebuild_every), batch
    rebuilt = []
    for step in range(8):
        before = head.builds
        head(hidden, labels)
        if head.builds > before:
            rebuilt.append(step)
    assert rebuilt == expected


def test_evaluation_takes_no_steps(batch):
    head, (hidden, labels) = head_of(rebuild_every=1), batch
    head.eval()
    head(hidden, labels)
    head.train()
    with torch.no_grad():
        head(hidden, labels)
    assert head.steps == 0
    assert head.builds == 1


def test_tables_keep_the_weights_they_were_built_from_until_rebuilt(batch):
    head, (hidden, _) = head_of(), batch
    before = head.candidates(hidden)
    with torch.no_grad():
        head.weight.neg_()
    assert torch.equal(head.candidates(hidden).ids, before.ids)
    head.rebuild_()
    assert not torch.equal(head.candidates(hidden).ids, before.ids)


# Copies and checkpoints


def test_a_loaded_layer_goes_on_with_schedule_and_tables_of_the_saved(batch):
    head, (hidden, labels) = head_of(rebuild_every=2), batch
    head(hidden, labels)
    with torch.no_grad():
        head.weight.neg_()  # so that tables made anew would find other classes
    buffer = io.BytesIO()
    torch.save(head.state_dict(), buffer)
    other = head_of(rebuild_every=2, seed=1)  # has no say in tables that are there
    other.candidates(hidden)
    other.load_state_dict(torch.load(io.BytesIO(buffer.getvalue())))
    assert torch.equal(other(hidden, labels), head(hidden, labels))
    assert (other.steps, other.builds) == (head.steps, head.builds) == (2, 1)


def test_tables_are_made_anew_where_a_checkpoint_has_none_that_fit(batch):
    head, (hidden, _) = head_of(), batch
    untrained = head.state_dict()
    head.candidates(hidden)
    assert head.builds == 1
    other = head_of(bits=4)
    other.load_state_dict(head.state_dict())
    other.candidates(hidden)
    assert other.builds == 2
    head.load_state_dict(untrained)
    assert head.builds == 0
    head.candidates(hidden)
    assert head.builds == 1


def test_tables_of_a_layer_without_a_bias_do_not_fit_one_with_a_bias(batch):
    head, (hidden, labels) = head_of(bias=False), batch
    head.candidates(hidden)
    other = head_of(bias=True)
    other.load_state_dict(head.state_dict(), strict=False)
    assert other(hidden, labels).isfinite()
    assert other.builds == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda h: pickle.loads(pickle.dumps(h))])
def test_a_copy_goes_on_alike_and_apart(batch, copied):
    head, (hidden, labels) = head_of(), batch
    expected = head(hidden, labels)
    other = copied(head)
    with torch.no_grad():
        head.weight.zero_()
    head.rebuild_()
    assert torch.equal(other(hidden, labels), expected)


# Optimizers


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, so.Adam])
@pytest.mark.parametrize("corrected", [False, True])
def test_training_lowers_the_full_loss(optimizer, corrected):
    torch.manual_seed(0)
    embedding = nn.Embedding(200, 16, sparse=True)
    sizes = {"bits": 3, "tables": 6, "negatives": 20, "rebuild_every": 10}
    head = LSHSoftmax(16, 200, corrected=corrected, weight=embedding.weight, **sizes)
    words = torch.randint(200, (64,), generator=generator(1))
    labels = words.roll(1)
    before = head.full_loss(embedding(words), labels)
    step = optimizer(list(head.parameters()), lr=0.02)
    for seed in range(40):
        step.zero_grad()
        head(embedding(words), labels, generator=generator(seed)).backward()
        step.step()
    assert head.full_loss(embedding(words), labels) < before - 0.05


# Defaults


@pytest.mark.parametrize(
    ("classes", "bits"),
    [(1, 1), (8, 1), (31, 1), (32, 2), (2_000, 7), (2_047, 7), (2_048, 8), (20_000, 11)],
)
def test_default_bits_leave_eight_classes_or_more_in_a_bucket(classes, bits):
    assert LSHSoftmax(1, classes).bits == bits
    assert classes < 16 or 8 <= classes / 2**bits < 16


def test_by_default_every_example_has_a_gradient():
    torch.manual_seed(0)
    head = LSHSoftmax(8, 2_000, budget=1)
    losses = head(torch.randn(50, 8), torch.arange(50), reduction="none", generator=generator(0))
    assert (losses > 0).all()


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 0}, r"bits must be in \[1, 24\], got 0"),
        ({"bits": "auto"}, "bits must be an int, got 'auto'; a table has"),
        ({"bits": 25}, r"bits must be .*, got 25; a table has 2.bits buckets"),
        ({"tables": 0}, "tables must be >= 1, got 0"),
        ({"budget": 0}, "budget must be >= 1, got 0"),
        ({"negatives": -1}, "negatives must be >= 0, got -1"),
        ({"rebuild_every": 0}, "rebuild_every must be >= 1, got 0"),
        ({"seed": 2**32}, r"seed must be in \[0, 4294967295\], got 4294967296"),
        ({"seed": -1}, "seed must be in"),
        ({"rebuild_every": 2.5}, "rebuild_every must be an int, got 2.5"),
        ({"corrected": "yes"}, "corrected must be True or False, got 'yes'"),
        ({"weight": nn.Parameter(torch.zeros(3, 4))}, r"shape \(40, 8\), got \(3, 4\)"),
    ],
)
def test_bad_construction_gets_a_clear_error(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        LSHSoftmax(8, 40, **arguments)


def test_the_largest_seed_builds_tables():
    head = LSHSoftmax(8, 40, bits=2, seed=2**32 - 1)
    head.rebuild_()
    assert head.builds == 1


def test_bad_labels_get_a_clear_error_before_a_step_is_counted(batch):
    head, (hidden, labels) = head_of(), batch
    with pytest.raises(ValueError, match=r"lie in \[0, 39\], got .* construct LSHSoftmax with"):
        head(hidden, labels + 1)
    assert head.steps == 0


def test_nan_features_give_a_nan_loss_for_their_example_alone(batch):
    head, (hidden, labels) = head_of(corrected=True), batch
    hidden[2, 0] = math.nan
    losses = head(hidden, labels, reduction="none")
    assert losses.isnan().tolist() == [False, False, True, False, False, False]


def test_an_empty_batch_is_what_torch_makes_of_it():
    head = head_of()
    nothing = torch.empty(0, 8, dtype=torch.float64), torch.empty(0, dtype=torch.int64)
    assert head(*nothing).isnan()
    assert head(*nothing, reduction="sum").item() == 0.0
