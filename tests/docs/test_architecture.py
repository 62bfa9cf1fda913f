"""docs/architecture.md names files, functions and tests that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
PACKAGE = ROOT / "src" / "sketchoptim"
# `optim/base.py` | `Optimizer.step`, in the table of a step's path
PATH_ROW = re.compile(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)
# `ops/_dispatch.py: find_kernels`, in prose
NAMED = re.compile(r"`([\w/]+\.py): ([\w.]+)`")
FILE = re.compile(r"`([\w/]+\.py)(?:`|: )")
FOLDER = re.compile(r"`([\w/]+)/`")


def definitions(path: Path) -> set[str]:
    """Functions and classes of a file, methods with the name of their class."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (it.name for it in node.body if isinstance(it, ast.FunctionDef))
            found |= {f"{node.name}.{method}" for method in methods}
    return found


def located(name: str) -> Path:
    return ROOT / name if name.startswith("tests/") else PACKAGE / name


@pytest.mark.parametrize(("file", "function"), PATH_ROW.findall(PAGE) + NAMED.findall(PAGE))
def test_a_named_function_is_in_its_file(file, function):
    assert function in definitions(located(file))


@pytest.mark.parametrize("file", sorted({*FILE.findall(PAGE)} - {"CONTRIBUTING.md"}))
def test_a_named_file_is_there(file):
    assert located(file).is_file()


def test_the_page_names_the_path_of_a_step_and_its_tests():
    assert len(PATH_ROW.findall(PAGE)) >= 10
    assert len({name for name in FILE.findall(PAGE) if name.startswith("tests/")}) >= 10


def test_named_folders_are_there():
    assert all((ROOT / name).is_dir() or (PACKAGE / name).is_dir() for name in FOLDER.findall(PAGE))
