"""A tiny recipe's setting and text; encoded texts go to a folder of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_recipe import RECIPE, write_recipe

from experiments.recipes import Setting, parse_recipe


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKETCHOPTIM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `tiny.toml` and its `text.txt`."""
    folder = tmp_path_factory.mktemp("tiny")
    write_recipe(folder)
    return folder


@pytest.fixture
def setting(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """The small size of the tiny recipe, whose data is found."""
    monkeypatch.setenv("SKETCHOPTIM_DATA", str(tiny))
    return parse_recipe("tiny", RECIPE).sizes["small"]
