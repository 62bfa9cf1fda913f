"""MACH: hashed classes, losses, aggregations, members alone and in company, files, bad input."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sketchoptim as so
from sketchoptim.nn import MACH, BagEncoder, FeatureHashing, recall

AGGREGATIONS = ["mean", "min", "median", "logits", "harmonic"]
PATHS = ["usr/bin/ls", "etc/passwd", "usr/lib/libc.so", "", "usr/share/doc", "bin/sh"]
LABELS = torch.tensor([0, 3, 59, 7, 7, 30])


def encoder() -> nn.Module:
    return BagEncoder(200, 8)


def bags(texts=PATHS):
    return FeatureHashing(features=200)(texts)


def ensemble(**options) -> MACH:
    return MACH(encoder, 8, 60, 10, **{"members": 3, **options})


def hidden_ensemble(classes: int, buckets: int, **options) -> MACH:
    """An ensemble over hidden vectors as they come, as wide as the buckets."""
    mach = MACH(nn.Identity, buckets, classes, buckets, **options)
    for head in mach.heads.values():
        nn.init.eye_(head.weight)
        nn.init.zeros_(head.bias)
    return mach


# The hash of classes


def test_two_classes_share_a_bucket_as_often_as_by_chance():
    mach = MACH(nn.Identity, 1, 1_000, 50, members=400)
    buckets = mach.buckets_of(torch.tensor([3, 4, 999]))
    for a, b in ((0, 1), (0, 2), (1, 2)):
        shared = (buckets[:, a] == buckets[:, b]).double().mean().item()
        assert abs(shared - 1 / 50) < 4 * math.sqrt(1 / 50 / 400)


def test_a_members_hash_and_weights_do_not_depend_on_its_company():
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


# Alone and in company


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


@pytest.mark.parametrize("memory", ["exact", "lean", "paper-v-only"])
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
    mach, loaded = trained(ensemble(), "lean"), ensemble()
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


# Bad input


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dim": 0}, "dim must be >= 1, got 0"),
        ({"classes": 1}, r"classes must be in \[2, 4294967296\], got 1"),
        ({"classes": 2**32 + 1}, "classes must be"),
        ({"buckets": 61}, r"buckets must be in \[2, 60\], got 61; more buckets than"),
        ({"buckets": 1}, "buckets must be"),
        ({"members": 0}, "members must be >= 1, got 0"),
        ({"members": []}, r"members must be distinct numbers, at least one, got \[\]"),
        ({"members": [1, 1]}, "members must be distinct"),
        ({"members": [-1]}, "a number in members must be >= 0, got -1"),
    ],
)
def test_bad_sizes_are_refused(options, error):
    sizes = {"dim": 8, "classes": 60, "buckets": 10} | options
    with pytest.raises(ValueError, match=error):
        MACH(encoder, **sizes)


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("wrong", [-2, 60])
def test_a_label_outside_the_classes_is_refused(wrong, multi_label):
    labels = torch.tensor([0, 1, wrong, 3, 4, 5])
    mach = ensemble(multi_label=multi_label)
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 59\], got values from"):
        mach(bags(), labels[:, None] if multi_label else labels)


def test_filling_is_for_several_labels_only():
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 59\], got values from -1"):
        ensemble()(bags(), torch.full((6,), -1))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dim": 8.0}, "dim must be an int, got 8.0"),
        ({"classes": True}, "classes must be an int, got True"),
        ({"buckets": "10"}, "buckets must be an int, got '10'"),
        ({"members": 2.0}, "members must be an int, got 2.0"),
        ({"members": [0.5]}, "a number in members must be an int, got 0.5"),
        ({"shared": 1}, "shared must be True or False, got 1"),
        ({"multi_label": None}, "multi_label must be True or False, got None"),
        ({"ignore_index": 0.5}, "ignore_index must be an int, got 0.5"),
        ({"seed": "0"}, "seed must be an int, got '0'"),
        ({"body": lambda: torch.relu}, "body must return an nn.Module, got builtin_function.*pass"),
    ],
)
def test_settings_of_another_type_are_refused(options, error):
    with pytest.raises(TypeError, match=error):
        MACH(**{"body": encoder, "dim": 8, "classes": 60, "buckets": 10} | options)


@pytest.mark.parametrize(
    ("labels", "options", "error"),
    [
        (LABELS.tolist(), {}, r"labels must be a tensor, got \[0, 3, .*; use torch.as_tensor\(\)"),
        (LABELS.int(), {}, r"labels must be int64, got torch.int32; call labels.long\(\)"),
        (LABELS.float(), {}, "labels must be int64, got torch.float32; call"),
        (LABELS[:, None], {}, r"labels must be \[batch\] .*, got shape \[6, 1\]; reshape them, or"),
        (torch.tensor(3), {}, r"labels must be \[batch\] with multi_label=False, got shape \[\]"),
        (LABELS, {"multi_label": True}, r"labels must be \[batch, most\] with multi_label=True"),
        (LABELS[:4], {}, "labels must be as many as the inputs, got 4 for 6; pass one label"),
    ],
)
def test_labels_of_another_form_are_refused(labels, options, error):
    with pytest.raises((ValueError, TypeError), match=error):
        ensemble(**options)(bags(), labels)


@pytest.mark.parametrize(
    ("classes", "error"),
    [
        ([1, 2], r"must be a tensor, got \[1, 2\]; use torch.as_tensor\(\)"),
        (torch.tensor([1.0]), r"must be int64, got torch.float32; call \w+.long\(\)"),
        (torch.tensor([[1, 2]]), r"must have shape \[n\], got \[1, 2\]; call \w+.flatten\(\)"),
        (torch.tensor(1), r"must have shape \[n\], got \[\]"),
        (torch.tensor([60]), r"must lie in \[0, 59\], got values from 60 to 60"),
    ],
)
def test_classes_of_another_form_are_refused(classes, error):
    mach = ensemble()
    with pytest.raises((ValueError, TypeError), match=f"candidates {error}"):
        mach.top_k(bags(), 1, candidates=classes)
    with pytest.raises((ValueError, TypeError), match=f"classes {error}"):
        mach.scores(bags(), classes)


@pytest.mark.parametrize("classes", [torch.tensor([0.5]), [1], torch.tensor([-1])], ids=str)
def test_buckets_of_what_is_no_class_are_refused(classes):
    with pytest.raises((ValueError, TypeError), match="classes must "):
        ensemble().buckets_of(classes)


INPUTS = {
    "whole numbers": (
        torch.zeros(2, 10).long(),
        TypeError,
        r"a body must return torch.float32 as the heads have it, got torch.int64; convert the inp",
    ),
    "float64": (
        torch.zeros(2, 10).double(),
        TypeError,
        "got torch.float64; convert the inputs",
    ),
    "one dimension": (
        torch.zeros(10),
        ValueError,
        r"a body must return hidden vectors \[batch, 10\], got \[10\]; check the shape",
    ),
    "three dimensions": (torch.zeros(2, 3, 10), ValueError, r"got \[2, 3, 10\]; check the shape"),
    "another size": (torch.zeros(2, 9), ValueError, r"\[batch, 10\], got \[2, 9\]; .*dim of the"),
    "a list": ([0.0] * 10, TypeError, "a body must return a tensor .*, got list; wrap it"),
}


@pytest.mark.parametrize(("inputs", "error", "message"), INPUTS.values(), ids=INPUTS)
def test_inputs_of_another_dtype_or_shape_are_refused(inputs, error, message):
    mach = hidden_ensemble(60, 10)
    for call in (lambda: mach(inputs, torch.tensor([1, 2])), lambda: mach.top_k(inputs, 3)):
        with pytest.raises(error, match=message):
            call()


def test_autocast_converts_hidden_vectors_of_another_dtype():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = hidden_ensemble(60, 10)(torch.zeros(2, 10).bfloat16(), torch.tensor([1, 2]))
    assert loss.isfinite()


def test_no_candidates_are_refused():
    with pytest.raises(ValueError, match="candidates must be at least one class, got none"):
        ensemble().top_k(bags(), 1, candidates=torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize(("k", "error"), [(0, ValueError), (61, ValueError), (2.0, TypeError)])
def test_a_number_of_classes_that_there_are_not_is_refused(k, error):
    with pytest.raises(error, match=f"k must be .*, got {k}"):
        ensemble().top_k(bags(), k)


def test_more_classes_than_there_are_candidates_are_refused():
    with pytest.raises(ValueError, match=r"k must be in \[1, 2\]"):
        ensemble().top_k(bags(), 3, candidates=torch.tensor([1, 2, 2]))


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match=r"aggregation must be one of \['mean', 'min'"):
        ensemble().top_k(bags(), 3, aggregation="max")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_features_that_are_not_finite_are_refused(aggregation, wrong):
    inputs = torch.zeros(2, 5)
    inputs[1, 3] = wrong
    with pytest.raises(ValueError, match="scores must be finite, got NaN or inf"):
        hidden_ensemble(50, 5).top_k(inputs, 3, aggregation=aggregation)


def test_a_body_of_another_width_is_refused():
    with pytest.raises(
        ValueError, match=r"hidden vectors \[batch, 8\], got \[6, 9\]; .* with dim of the body"
    ):
        MACH(lambda: BagEncoder(200, 9), 8, 60, 10)(bags(), LABELS)


def test_files_of_two_ensembles_are_refused(tmp_path):
    ensemble(members=[0]).save(tmp_path / "0.pt")
    ensemble(members=[1], seed=1).save(tmp_path / "1.pt")
    with pytest.raises(ValueError, match="files must be of one ensemble"):
        MACH.load(tmp_path / "0.pt", tmp_path / "1.pt", body=encoder)
    with pytest.raises(ValueError, match="members must be distinct"):
        MACH.load(tmp_path / "0.pt", tmp_path / "0.pt", body=encoder)
    with pytest.raises(ValueError, match="paths must be at least one file"):
        MACH.load(body=encoder)


def test_a_shared_body_is_in_one_file(tmp_path):
    for number in (0, 1):
        ensemble(members=[number], shared=True).save(tmp_path / f"{number}.pt")
    with pytest.raises(ValueError, match="one shared body is in one file"):
        MACH.load(tmp_path / "0.pt", tmp_path / "1.pt", body=encoder)


def test_recall_of_other_shapes_is_refused():
    with pytest.raises(ValueError, match=r"found must be \[batch, k\]"):
        recall(torch.zeros(3, 2), torch.zeros(4))
