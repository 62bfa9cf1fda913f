"""Every test that a page names is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_tests_exist(page):
    missing = [
        f"{file}::{name}"
        for file, name in NAMED.findall(page.read_text("utf-8"))
        if not (ROOT / file).is_file()
        or (name and f"def {name}(" not in (ROOT / file).read_text("utf-8"))
    ]
    assert missing == []


def test_each_guarantee_names_its_test():
    text = (ROOT / "docs" / "guarantees.md").read_text("utf-8")
    sections = {it.partition("\n")[0]: it for it in text.split("\n## ")[1:]}
    assert len(sections) == 8
    assert [title for title, it in sections.items() if not NAMED.search(it)] == []
