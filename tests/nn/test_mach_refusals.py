"""What MACH refuses: sizes, labels, classes, inputs and files, with the remedy."""

import math

import pytest
import torch
from mach_cases import LABELS, bags, encoder, ensemble, hidden_ensemble

from sketchoptim.nn import MACH, BagEncoder, recall

AGGREGATIONS = ["mean", "min", "median", "logits", "harmonic"]


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
