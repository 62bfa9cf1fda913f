"""The site is whole: pages and navigation agree, and every public name has its place."""

import re
from pathlib import Path

import pytest

import sketchoptim as so
from sketchoptim import diagnostics, optim

yaml = pytest.importorskip("yaml", reason="mkdocs.yml is read with PyYAML")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
API = {
    "optim": optim.__all__,
    "storage": ["Exact", "Memory", "RankOne", "RowWise", "Sketched", "TopSingular"],
    "sketch": ["CountMinSketch", "CountSketch"],
    "diagnostics": diagnostics.__all__,
    "nn": so.nn.__all__,
}


def named_pages(entry) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    children = entry.values() if isinstance(entry, dict) else entry
    return [page for child in children for page in named_pages(child)]


def test_the_navigation_names_every_page_once():
    pages = named_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    assert sorted(pages) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("module", API)
def test_every_public_name_is_on_the_page_of_its_module(module):
    page = (DOCS / "api" / f"{module}.md").read_text("utf-8")
    named = re.findall(rf"^::: sketchoptim\.{module}\.(\w+)$", page, re.MULTILINE)
    assert sorted(named) == sorted(API[module])


def test_the_pages_of_the_api_have_all_public_names():
    assert {*so.__all__} - {"nn", "theory"} <= {name for names in API.values() for name in names}


def test_every_test_that_a_page_names_exists():
    named = re.findall(
        r"tests/([\w/]+\.py)(?:::(test_\w+))?",
        "".join(path.read_text("utf-8") for path in DOCS.rglob("*.md")),
    )
    assert named
    for file, test in named:
        assert f"def {test}" in (ROOT / "tests" / file).read_text("utf-8"), f"{file}::{test}"


def test_every_study_that_a_page_or_the_source_names_exists():
    pages = [ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    pages += (ROOT / "experiments").rglob("*.md")
    text = "".join(path.read_text("utf-8") for path in pages)
    named = {f"{name}.py" for name in re.findall(r"experiments\.studies\.(\w+)", text)}
    named |= set(re.findall(r"experiments/studies/(\w+\.\w+)", text))
    assert named - {path.name for path in (ROOT / "experiments" / "studies").iterdir()} == set()
    assert len(named) > 3
    assert "benchmarks/" not in text
