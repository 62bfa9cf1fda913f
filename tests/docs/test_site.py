"""The site is complete: navigation, API pages and named files match what is there."""

import pkgutil
import re
from collections import Counter
from pathlib import Path

import pytest

import sketchoptim as so

yaml = pytest.importorskip("yaml", reason="mkdocs.yml is read with PyYAML")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MODULES = {"nn"}  # public names that are modules
# What mkdocstrings renders: "::: sketchoptim.optim.Adam".
RENDERED = re.findall(
    r"^::: ([\w.]+)$",
    "".join(path.read_text("utf-8") for path in sorted((DOCS / "api").glob("*.md"))),
    re.MULTILINE,
)
ROOMS = (so, so.optim, so.diagnostics, so.planning, so.nn)
PUBLIC = {name for room in ROOMS for name in room.__all__} - MODULES


def named_pages(entry) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    children = entry.values() if isinstance(entry, dict) else entry
    return [page for child in children for page in named_pages(child)]


def test_the_navigation_names_every_page_once():
    pages = named_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    assert sorted(pages) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_the_search_of_pages_opened_from_disk_fetches_nothing():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    assert "offline" in site["plugins"]
    (script,) = site["extra"]["polyfills"]
    assert (DOCS / script).is_file()
    assert "iframe-worker" in script  # the plugin adds one from the network to any other name


def test_every_public_name_is_on_the_pages_of_the_api_once():
    counts = Counter(path.rpartition(".")[2] for path in RENDERED)
    assert {name: counts[name] for name in PUBLIC} == dict.fromkeys(PUBLIC, 1)


def test_every_name_on_the_pages_of_the_api_exists():
    for path in RENDERED:
        pkgutil.resolve_name(path)  # raises where there is none


def test_every_study_that_a_page_or_the_source_names_exists():
    pages = [ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    pages += (ROOT / "experiments").rglob("*.md")
    text = "".join(path.read_text("utf-8") for path in pages)
    studies = ROOT / "experiments" / "studies"
    modules = {path.stem for path in studies.iterdir() if path.is_dir() or path.suffix == ".py"}
    named = set(re.findall(r"experiments\.studies\.(\w+)", text))
    assert len(named) > 3
    assert named <= modules
    files = {path.name for path in studies.iterdir()}
    assert set(re.findall(r"experiments/studies/(\w+\.\w+)", text)) <= files
    assert "benchmarks/" not in text
