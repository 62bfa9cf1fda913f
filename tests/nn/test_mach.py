"""MACH: hashed classes, losses, aggregations, members alone and together, files."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from mach_cases import LABELS, PATHS, bags, encoder, ensemble, hidden_ensemble
from torch import Tensor, nn

import sketchoptim as so
from sketchoptim.nn import MACH, recall

AGGREGATIONS = ["mean", "min", "median", "logits", "harmonic"]


# The hash of classes


def test_two_classes_share_a_bucket_as_often_as_by_chance():
    mach = MACH(nn.Identity, 1, 1_000, 50, members=400)
    buckets = mach.buckets_of(torch.tensor([3, 4, 999]))
    for a, b in ((0, 1), (0, 2), (1, 2)):
        shared = (buckets[:, a] == buckets[:, b]).double().mean().item()
        assert abs(shared - 1 / 50) < 4 * math.sqrt(1 / 50 / 400)


def test_hash_and_weights_of_a_member_do_not_depend_on_other_members():
    together, alone = ensemble(members=4), ensemble(members=[2])
    assert torch.equal(together.buckets_of(LABELS)[2], alone.buckets_of(LABELS)[0])
    for name, value in alone.state_dict().items():
        assert torch.equal(together.state_dict()[name], value)


def test_members_and_seeds_differ():
    mach, other = ensemble(), ensemble(seed=1)
    classes = torch.arange(60)
    rows = [*mach.buckets_of(classes).tolist(), *other.buckets_of(classes).tolist()]
    assert len({tuple(row) for row in rows}) == 6
    weights = [head.weight.tolist() for head in [*mach.heads.values(), *other.heads.values()]]
    assert len({str(weight) for weight in weights}) == 6


def test_building_leaves_the_callers_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    ensemble()
    assert torch.equal(torch.rand(3), expected)


# Losses


@pytest.mark.parametrize("shared", [False, True])
def test_the_loss_is_the_sum_of_the_members_cross_entropies(shared):
    mach = ensemble(shared=shared)
    expected = torch.tensor(0.0)
    for number, buckets in zip("012", mach.buckets_of(LABELS), strict=True):
        body = mach.bodies["shared" if shared else number]
        logits = mach.heads[number](body(*bags()))
        expected = expected + F.cross_entropy(logits, buckets)
    torch.testing.assert_close(mach(bags(), LABELS), expected)


def test_the_loss_of_several_labels_is_a_sum_of_binary_cross_entropies():
    mach = ensemble(multi_label=True)
    labels = torch.tensor([[0, 5], [3, -1], [-1, -1], [7, 7], [59, 58], [30, -1]])
    expected = torch.tensor(0.0)
    for row, number in enumerate("012"):
        marks = torch.zeros(6, 10)
        for example, classes in enumerate(labels):
            for label in classes[classes >= 0]:
                marks[example, mach.buckets_of(label[None])[row]] = 1
        logits = mach.heads[number](mach.bodies[number](*bags()))
        expected += F.binary_cross_entropy_with_logits(logits, marks) * 10
    torch.testing.assert_close(mach(bags(), labels), expected)


@pytest.mark.parametrize("ignored", [-100, 7])
def test_ignored_examples_are_left_out_of_the_loss(ignored):
    mach = ensemble(ignore_index=ignored)
    labels = torch.tensor([0, ignored, 59, ignored, 8, 30])
    kept = labels != ignored
    expected = mach(bags().take(kept.nonzero()[:, 0]), labels[kept])
    torch.testing.assert_close(mach(bags(), labels), expected)
    assert mach(bags(), torch.full((6,), ignored)).isnan()


@pytest.mark.parametrize("multi_label", [False, True])
def test_an_empty_batch_is_what_torch_makes_of_it(multi_label):
    mach = ensemble(multi_label=multi_label)
    labels = torch.zeros((0, 2) if multi_label else 0, dtype=torch.int64)
    assert mach(bags([]), labels).isnan()
    assert mach.top_k(bags([]), 3).ids.shape == (0, 3)


def test_rows_of_several_labels_may_be_filled_up_with_what_is_ignored():
    mach, labels = ensemble(multi_label=True), torch.tensor([[0, 5], [3, -1]])
    expected = mach(bags(PATHS[:2]), labels)
    assert mach(bags(PATHS[:2]), labels.where(labels >= 0, -100)) == expected


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("make", [so.Adam, torch.optim.SparseAdam])
def test_training_learns_the_labels(make, shared):
    mach = ensemble(shared=shared)
    tables = [body.weight for body in mach.bodies.values()]
    rest = [p for p in mach.parameters() if all(p is not table for table in tables)]
    optimizers = [make(tables, lr=0.05), torch.optim.Adam(rest, lr=0.05)]
    for _ in range(60):
        loss = mach(bags(), LABELS)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        assert all(table.grad.is_sparse for table in tables)
        for optimizer in optimizers:
            optimizer.step()
    found = mach.top_k(bags(), 10, aggregation="logits").ids
    assert recall(found, LABELS) == 1.0


def test_several_labels_are_learned_too():
    mach = ensemble(multi_label=True, members=6)
    labels = torch.tensor([[0, 5], [3, -1], [8, 9], [-1, -1], [59, 58], [30, -1]])
    optimizer = so.Adam(mach.parameters(), lr=0.05)
    for _ in range(80):
        optimizer.zero_grad()
        mach(bags(), labels).backward()
        optimizer.step()
    assert recall(mach.top_k(bags(), 6).ids, labels) == 1.0


# Alone and together


def trained(mach: MACH, memory: str, steps: int = 5) -> MACH:
    """After a few steps, each member by an optimizer of its own."""
    optimizers = [
        so.Adam([*body.parameters(), *head.parameters()], lr=0.1, memory=memory)
        for body, head in zip(mach.bodies.values(), mach.heads.values(), strict=True)
    ]
    for _ in range(steps):
        loss = mach(bags(), LABELS)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return mach


@pytest.mark.parametrize("memory", ["exact", "lean-0.1", "paper-v-only"])
def test_members_trained_alone_are_those_trained_together(memory, tmp_path):
    together = trained(ensemble(), memory)
    files = [tmp_path / f"{number}.pt" for number in (2, 0, 1)]
    for number, file in zip((2, 0, 1), files, strict=True):
        trained(ensemble(members=[number]), memory).save(file)
    assembled = MACH.load(*files, body=encoder)
    assert assembled.members == (0, 1, 2)
    for name, value in together.state_dict().items():
        assert torch.equal(assembled.state_dict()[name], value), name
    for expected, found in zip(together.top_k(bags(), 5), assembled.top_k(bags(), 5), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("options", [{}, {"shared": True}, {"multi_label": True}, {"seed": 9}])
def test_an_ensemble_comes_back_from_its_file(options, tmp_path):
    mach = ensemble(**options)
    mach.save(tmp_path / "mach.pt")
    loaded = MACH.load(tmp_path / "mach.pt", body=encoder)
    assert str(loaded) == str(mach)
    assert torch.equal(loaded.words, mach.words)
    for expected, found in zip(mach.top_k(bags(), 5), loaded.top_k(bags(), 5), strict=True):
        assert torch.equal(found, expected)


def test_a_state_dict_of_another_seed_is_refused_and_changes_nothing():
    mach, state = ensemble(seed=5), ensemble(seed=4).state_dict()
    before = {name: value.clone() for name, value in mach.state_dict().items()}
    with pytest.raises(ValueError, match="member 0 must have the hash of seed = 5, got the state"):
        nn.ModuleDict({"output": mach}).load_state_dict(
            {f"output.{name}": value for name, value in state.items()}
        )
    for name, value in mach.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_state_dict_of_the_same_seed_brings_weights_and_predictions():
    mach, loaded = trained(ensemble(), "lean-0.1"), ensemble()
    loaded.load_state_dict(mach.state_dict())
    assert torch.equal(loaded.top_k(bags(), 5).scores, mach.top_k(bags(), 5).scores)


# Ranking


def test_a_state_dict_is_assigned_to_an_ensemble_on_the_meta_device():
    mach, loaded = ensemble(), ensemble().to("meta")
    with pytest.raises(ValueError, match="member 0 must have the hash of seed = 0, got the state"):
        loaded.load_state_dict(ensemble(seed=4).state_dict(), assign=True)
    loaded.load_state_dict(mach.state_dict(), assign=True)
    assert torch.equal(loaded.top_k(bags(), 5).scores, mach.top_k(bags(), 5).scores)


def by_hand(mach: MACH, inputs: Tensor, aggregation: str) -> Tensor:
    """The score of every class, in float64, read off the documentation."""
    logits = inputs.double()
    chances = logits.sigmoid() if mach.multi_label else logits.softmax(-1)
    source = logits if aggregation == "logits" else chances
    rows = torch.stack([source[:, row] for row in mach.buckets_of(torch.arange(mach.classes))])
    if aggregation == "mean":
        if mach.multi_label:
            return rows.mean(0)
        return mach.buckets / (mach.buckets - 1) * (rows.mean(0) - 1 / mach.buckets)
    if aggregation == "median":
        ordered = rows.sort(0).values
        return (ordered[(len(rows) - 1) // 2] + ordered[len(rows) // 2]) / 2
    if aggregation == "harmonic":
        return len(rows) / (1 / rows).sum(0)
    return rows.amin(0) if aggregation == "min" else rows.sum(0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("multi_label", [False, True])
@given(members=st.integers(1, 6), queries=st.integers(1, 40), seed=st.integers(0, 20))
def test_scores_are_those_of_the_definition(aggregation, multi_label, members, queries, seed):
    mach = hidden_ensemble(200, 12, members=members, multi_label=multi_label, seed=seed)
    inputs = torch.randn(queries, 12, generator=torch.Generator().manual_seed(seed))
    expected = by_hand(mach, inputs, aggregation).float()
    found = mach.scores(inputs, torch.arange(200), aggregation=aggregation)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    best = mach.top_k(inputs, 7, aggregation=aggregation)
    torch.testing.assert_close(best.scores, expected.topk(7, dim=1).values, rtol=1e-4, atol=1e-6)
    assert torch.equal(best.scores, found.gather(1, best.ids))


def test_the_mean_is_unbiased_over_the_hashes():
    truth = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3
    truth /= truth.sum()
    mach = MACH(nn.Identity, 8, 40, 8, members=2_000)
    buckets = mach.buckets_of(torch.arange(40))
    chances = torch.zeros(2_000, 8, dtype=torch.float64).scatter_add_(
        1, buckets, truth.expand(2_000, -1)
    )
    estimates = 8 / 7 * (chances.gather(1, buckets) - 1 / 8)
    standard_error = estimates.std(0) / math.sqrt(2_000)
    assert bool(((estimates.mean(0) - truth).abs() < 4.5 * standard_error).all())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_candidates_are_ranked_as_among_all_classes(aggregation):
    mach = hidden_ensemble(300, 20, members=3)
    inputs = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    everything = mach.top_k(inputs, 300, aggregation=aggregation).ids
    chosen = torch.tensor([299, 4, 77, 4, 150])
    found = mach.top_k(inputs, 4, aggregation=aggregation, candidates=chosen).ids
    for all_ids, ids in zip(everything, found, strict=True):
        assert all_ids[torch.isin(all_ids, chosen)].tolist() == ids.tolist()


def test_very_sure_members_still_give_finite_scores():
    mach = hidden_ensemble(50, 5, members=4)
    inputs = torch.eye(5) * 1e6
    for aggregation in AGGREGATIONS:
        assert mach.top_k(inputs, 50, aggregation=aggregation).scores.isfinite().all()


def test_recall_takes_what_top_k_gives():
    mach = ensemble()
    found = mach.top_k(bags(), 5)
    assert recall(found, LABELS) == recall(found.ids, LABELS)


def test_recall_counts_labels_found_and_leaves_out_examples_without_any():
    found = torch.tensor([[1, 2], [3, 4], [5, 6]])
    assert recall(found, torch.tensor([2, 5, 5])) == pytest.approx(2 / 3)
    labels = torch.tensor([[1, 9, -1], [-1, -1, -1], [6, 5, -1]])
    assert recall(found, labels) == pytest.approx(0.75)
    assert math.isnan(recall(found, torch.full((3,), -1)))
    assert recall(found, torch.tensor([2, -100, 6])) == 1.0
