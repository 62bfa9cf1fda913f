"""Docstrings keep their word: examples give what they say; tests named there or in docs/ exist."""

import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch

import experiments
import sketchoptim

ROOTS = [Path(package.__file__).parent for package in (sketchoptim, experiments)]


def modules_with_examples() -> list[str]:
    """By their text, so that finding them imports nothing."""
    names = [
        path.relative_to(root.parent).with_suffix("").as_posix()
        for root in ROOTS
        for path in sorted(root.rglob("*.py"))
        if ">>> " in path.read_text(encoding="utf-8")
    ]
    return [name.replace("/", ".").removesuffix(".__init__") for name in names]


def imported(name: str):
    """The module; where a package that only some modules need is absent, the test is skipped."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith(("sketchoptim", "experiments")):
            raise
        pytest.skip(f"{name} needs {error.name}")


def failures(docstring: doctest.DocTest) -> str:
    """What the examples gave that they should not; nothing if all is well."""
    report: list[str] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        doctest.DocTestRunner().run(docstring, out=report.append)
    return "".join(report)


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_a_module_give_what_they_say(name):
    module = imported(name)
    names = vars(module) | {"torch": torch, "so": sketchoptim}
    found = [d for d in doctest.DocTestFinder().find(module, globs=names) if d.examples]
    assert found
    assert "".join(failures(docstring) for docstring in found) == ""


def test_every_test_that_the_source_or_the_docs_name_exists():
    tests = Path(__file__).parent
    named = {
        match.groups()
        for folder, pattern in (
            *((root, "*.py") for root in ROOTS),
            (tests.parent / "docs", "*.md"),
        )
        for path in folder.rglob(pattern)
        for match in re.finditer(
            r"tests/([\w/]+\.py)(?:::(test_\w+))?", path.read_text(encoding="utf-8")
        )
    }
    assert named
    for file, test in sorted(named, key=str):
        text = (tests / file).read_text(encoding="utf-8")
        assert test is None or f"def {test}(" in text, f"{file}::{test}"
