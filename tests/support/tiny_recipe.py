"""A recipe for a tiny language model, and a text for it."""

from pathlib import Path

RECIPE = """
title = "A small text"
reference = "none"
[data]
kind = "text"
path = "text.txt"
held_out = 0.1
[small]
about = "tiny"
test_words = 200
log_every = 1
[small.model]
dim = 8
hidden = 8
layers = 2
samples = 5
dropout = 0.2
[small.train]
table_lr = 0.05
steps = 12
batch = 4
length = 5
evaluate_every = 4
evaluate_words = 100
[methods.sgd]
optimizer = "sgd"
[methods.lean]
"""


def write_text(path: Path) -> None:
    """Writes 200 lines of 9 words, which repeat enough to be learnt."""
    lines = (" ".join(str(i * i % 37) for i in range(n, n + 9)) + "\n" for n in range(200))
    path.write_text("".join(lines), encoding="utf-8")


def write_recipe(folder: Path, text: str = RECIPE) -> None:
    """Writes `tiny.toml` and the `text.txt` that it names."""
    write_text(folder / "text.txt")
    (folder / "tiny.toml").write_text(text, encoding="utf-8")
