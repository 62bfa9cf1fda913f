"""The pages of the docs keep their word: their code runs, and prints what they say it prints."""

import importlib.util
from pathlib import Path

import pytest
from markdown_code import blocks, run

# Pages for several processes, which tests/distributed/test_pages.py runs.
ON_RANKS = {"howto/distributed.md", "howto/torchrec.md"}
DOCS = Path(__file__).parents[2] / "docs"
PACKAGES = {
    "howto/accelerate.md": "accelerate",
    "howto/lightning.md": "lightning",
    "howto/trainer.md": "transformers",
}


def pages_with_code() -> list[str]:
    paths = [path for path in sorted(DOCS.rglob("*.md")) if blocks(path.read_text("utf-8"))]
    return [name for path in paths if (name := path.relative_to(DOCS).as_posix()) not in ON_RANKS]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")  # Lightning's advice
@pytest.mark.filterwarnings(r"ignore:.isinstance\(treespec, LeafSpec\):FutureWarning")
@pytest.mark.parametrize("page", pages_with_code())
def test_the_code_of_a_page_runs_and_prints_what_it_says(page, tmp_path, monkeypatch):
    package = PACKAGES.get(page)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{page} needs {package}")
    monkeypatch.chdir(tmp_path)  # where pages save what they save
    run(blocks((DOCS / page).read_text("utf-8")), page)


def test_a_block_that_prints_something_else_fails():
    page = "```python\nx = 1\n```\n\nThen:\n```python\nprint(x)\n```\n```text\n2\n```\n"
    with pytest.raises(AssertionError, match="a page, line 6"):
        run(blocks(page), "a page")
