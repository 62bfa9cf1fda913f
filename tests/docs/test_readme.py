"""README keeps its word: each block of code runs by itself, its numbers and links hold."""

import re
from pathlib import Path

import pytest
import torch
from markdown_code import blocks, run
from torch import nn

from experiments.studies import table_shares

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = blocks(README)


@pytest.mark.parametrize("block", BLOCKS, ids=[f"line {block.line}" for block in BLOCKS])
def test_a_block_runs_by_itself_and_prints_what_it_says(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run([block], "README.md")


def test_the_shares_of_tables_are_those_of_the_published_configurations(capsys):
    pytest.importorskip("transformers", reason="the study builds models of transformers")
    table_shares.main([])
    table = capsys.readouterr().out
    assert table in (ROOT / "docs" / "is_it_for_me.md").read_text("utf-8")


# Sizes that the authors of the models give, in millions.
@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("DLRM on Criteo Kaggle", 541),
        ("XLM-RoBERTa base", 278),
        ("Gemma 3 270M", 268),
        ("GPT-2 small", 124),
        ("Qwen2.5 0.5B", 494),
        ("BERT base", 110),
        ("Llama 3.2 1B", 1_236),
        ("Llama 3.1 8B", 8_030),
        ("Llama 3.1 70B", 70_554),
    ],
)
def test_a_model_of_the_table_has_its_published_size(name, millions):
    pytest.importorskip("transformers", reason="the study builds models of transformers")
    with torch.device("meta"):
        model = dict(table_shares.builders())[name]()
    assert round(sum(it.numel() for it in model.parameters()) / 1e6) == millions


def test_lean_keeps_half_a_gigabyte_for_a_billion_rows():
    page = (ROOT / "docs" / "is_it_for_me.md").read_text("utf-8")
    assert "| state of 10^9 rows | 4 GB | 8 GB | 0.5 GB |" in page
    table = nn.Parameter(torch.empty(10**9, 1, device="meta"))
    assert table_shares.lean_bytes("table", table) == pytest.approx(0.5e9, rel=1e-6)


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(((?!https:)[^)]+)\)", README))))
def test_a_link_leads_somewhere(link):
    path, _, anchor = link.partition("#")
    assert not path or (ROOT / path).exists()
    if anchor:
        page = (ROOT / path).read_text("utf-8") if path else README
        assert anchor in {anchor_of(it) for it in re.findall(r"^#+ (.*)$", page, re.MULTILINE)}


def anchor_of(heading: str) -> str:
    """The anchor that a heading has on the site, and where README is shown."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
