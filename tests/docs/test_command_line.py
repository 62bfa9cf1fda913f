"""The page on the command line: its files are whole, and it names every key and command."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs typer")
from typer.testing import CliRunner

from experiments.classifier import ClassifierSettings
from experiments.commands import build_app
from experiments.data import DataSettings
from experiments.methods import Method
from experiments.models import ModelSettings
from experiments.recipes import Recipe, Setting, SweepSettings
from experiments.recommender import RecommenderSettings
from experiments.settings import TrainSettings
from experiments.text_classifier import TextClassifierSettings
from experiments.transformer import TransformerSettings
from sketchoptim import _cli

PAGE = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text("utf-8")
RECIPE, SHAPES = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
# what a recipe does not say: commands do, or its other tables
GIVEN = {
    Recipe: {"name", "sizes", "contestants"},
    TrainSettings: {"method", "seed", "device"},
    Method: {"name"},
}


def invoke(app, *words: object):
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


@pytest.mark.parametrize("method", ["exact", "lean", "wide"])
def test_the_recipe_trains_each_of_its_methods(method, tmp_path, monkeypatch):
    monkeypatch.setenv("SKETCHOPTIM_CACHE", str(tmp_path / "cache"))
    words = torch.randint(50, (400, 8), generator=torch.Generator().manual_seed(0))
    lines = [" ".join(f"word{word}" for word in line) for line in words.tolist()]
    (tmp_path / "corpus.txt").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("128", "8"), encoding="utf-8")
    monkeypatch.setenv("SKETCHOPTIM_DATA", str(tmp_path))
    options = ("--small", "--method", method, "--steps", 2, "--output", tmp_path / "run")
    result = invoke(build_app(), "train", tmp_path / "recipe.toml", *options)
    assert result.exit_code == 0, result.output
    assert "test perplexity" in result.output


def test_the_file_of_shapes_is_planned(tmp_path):
    (tmp_path / "shapes.toml").write_text(SHAPES, encoding="utf-8")
    result = invoke(_cli.build_app(), "plan", tmp_path / "shapes.toml", "--budget", "200MB")
    assert result.exit_code == 0, result.output
    assert "softmax.weight" in result.output


@pytest.mark.parametrize(
    "kind",
    [
        Recipe,
        Setting,
        DataSettings,
        ModelSettings,
        ClassifierSettings,
        TextClassifierSettings,
        RecommenderSettings,
        TransformerSettings,
        TrainSettings,
        SweepSettings,
        Method,
    ],
)
def test_every_key_of_a_recipe_is_on_the_page(kind):
    keys = {field.name for field in dataclasses.fields(kind)} - GIVEN.get(kind, set())
    assert {key for key in keys if f"`{key}`" not in PAGE} == set()


def test_every_command_is_on_the_page():
    names = {
        (program, command.name or command.callback.__name__)
        for program, app in (("sketchoptim", _cli.build_app()), ("experiments", build_app()))
        for command in (*app.registered_commands, *app.registered_groups)
    }
    rows = re.findall(r"^\| `(sketchoptim|experiments) (\w+)", PAGE, re.MULTILINE)
    assert names == set(rows)
