"""Where shapes come from: models, optimizers, files and lists."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from experiments.full_softmax import FullSoftmax
from sketchoptim.nn import SampledSoftmax
from sketchoptim.nn._feature_hashing import BagEncoder
from sketchoptim.planning._frequencies import RowFrequencies
from sketchoptim.planning._shapes import parameter_shapes

TOML = """
[[tables]]
name = "words"
shape = [30, 4]
dtype = "bfloat16"
counts = "counts.npy"
ids_per_step = 77

[[tables]]
name = "items"
shape = [20, 2, 3]
zipf = 0.5

[[dense]]
name = "body"
shape = [8]
"""


@pytest.fixture
def folder(tmp_path):
    np.save(tmp_path / "counts.npy", np.arange(30))
    return tmp_path


def written(folder, text, name="shapes.toml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_toml_file_lists_tables_and_dense_parameters(folder):
    words, items, body = parameter_shapes(written(folder, TOML))
    assert (words.name, words.shape, words.dtype) == ("words", (30, 4), torch.bfloat16)
    assert words.is_table
    assert words.frequencies == RowFrequencies.of_counts(np.arange(30))
    assert words.ids_per_step == 77
    assert items.shape == (20, 2, 3)
    assert items.frequencies == RowFrequencies.zipf(20, exponent=0.5)
    assert (body.name, body.is_table) == ("body", False)


def test_a_json_file_is_read_as_a_toml_file(folder):
    listed = {"tables": [{"name": "words", "shape": [30, 4]}], "dense": []}
    found = parameter_shapes(str(written(folder, json.dumps(listed), "shapes.json")))
    assert found == parameter_shapes([("words", [30, 4])])


def test_layers_with_sparse_gradients_are_tables():
    model = nn.ModuleDict(
        {
            "sparse": nn.Embedding(9, 2, sparse=True),
            "bag": nn.EmbeddingBag(9, 2, sparse=True),
            "dense": nn.Embedding(9, 2),
            "softmax": SampledSoftmax(2, 9, samples=3, bias=True),
            "features": BagEncoder(9, 2),
            "linear": nn.Linear(2, 2),
            "full": FullSoftmax(2, 9, bias=True),
        }
    )
    tables = {shape.name for shape in parameter_shapes(model) if shape.is_table}
    assert tables == {
        "sparse.weight",
        "bag.weight",
        "softmax.table.weight",
        "softmax.bias_table.weight",
        "features.table.weight",
    }


def test_in_a_list_vectors_are_not_tables():
    shapes = parameter_shapes([("table", (9, 2)), ("bias", (9,)), ("scalar", ())])
    assert [shape.is_table for shape in shapes] == [True, False, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[tables]\n", "shapes.toml is not TOML"),
        ("[[layers]]\nname = 'a'\n", r'under "tables" and "dense", got \[\'layers\'\]'),
        ("tables = 3\n", "shapes.toml: tables must be a list, got 3"),
        ("tables = [3]\n", r"shapes.toml: tables\[0\] must be a table, got 3"),
        ("[[tables]]\nname = 'a'\n", r"shapes.toml: tables\[0\].shape is missing"),
        ("[[tables]]\nname = 3\nshape = [2]\n", r"tables\[0\].name must be a string, got 3"),
        ("[[dense]]\nname = 'a'\nshape = 2\n", r"dense\[0\].shape must be a list, got 2"),
        ("[[tables]]\nname = 'a'\nshape = [2]\nrows = 2\n", "rows is not known; allowed are name,"),
        ("[[tables]]\nname = 'a'\nshape = [2]\ndtype = 'int8'\n", "dtype must be one of"),
        ("[[tables]]\nname = 'a'\nshape = [2]\ndtype = ['x']\n", "dtype must be one of"),
        ("[[tables]]\nname = 'a'\nshape = [2]\nzipf = 'x'\n", "zipf must be a number, got 'x'"),
        ("[[tables]]\nname = 'a'\nshape = []\nzipf = 1\n", "the table 'a' must have rows"),
        ("[[tables]]\nname = 'a'\nshape = [0, 3]\n", "the table 'a' must have rows"),
        ("[[tables]]\nname = 'a'\nshape = [2.5, 3]\n", "must be a whole number, got 2.5"),
        ("", "there must be at least one parameter"),
    ],
)
def test_a_bad_file_is_refused(folder, text, message):
    with pytest.raises(ValueError, match=message):
        parameter_shapes(written(folder, text))


def test_a_file_of_another_kind_is_refused(folder):
    with pytest.raises(ValueError, match=r"must be .toml or .json, got shapes.yaml"):
        parameter_shapes(written(folder, "", "shapes.yaml"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.toml"):
        parameter_shapes(tmp_path / "none.toml")


@pytest.mark.parametrize("pairs", [[(3, 4)], ["ab"], [("a", (2, 2), 5)]])
def test_anything_else_is_refused(pairs):
    with pytest.raises(TypeError, match="shapes must be a model, an optimizer, a file, or pairs"):
        parameter_shapes(pairs)


def test_names_must_be_distinct():
    with pytest.raises(ValueError, match="names must be distinct"):
        parameter_shapes([("a", (2, 2)), ("a", (3, 2))])


def test_the_tables_of_an_optimizer_without_gradients_must_be_named():
    optimizer = torch.optim.Adam(nn.Embedding(9, 2, sparse=True).named_parameters())
    with pytest.raises(ValueError, match="must have gradients, by which tables are known"):
        parameter_shapes(optimizer)
    assert [shape.is_table for shape in parameter_shapes(optimizer, ["weight"])] == [True]
