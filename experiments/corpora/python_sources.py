"""Python's own source files as a text, which every installation has."""

import re
import sysconfig
from pathlib import Path

from .corpus import Corpus
from .vocabulary import END_OF_FILE, Vocabulary

# identifiers, numbers, a line break with the indentation after it, and runs of punctuation
_SOURCE_WORD = re.compile(r"[^\W\d]\w*|\d[\w.]*|\n\s*|[^\w\s]+")
# tests are left out because many distributions ship the standard library without them
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_HELD_OUT_EVERY = 20


def read_python_sources(folder: str | Path | None = None, *, min_count: int = 2) -> Corpus:
    """The Python files below `folder` (default: this Python's standard library), without tests.

    Of 20 files in the order of their names, one whole file goes to valid and one to test. The
    vocabulary is that of the training files alone.
    """
    parts: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for number, path in enumerate(source_files(folder)):
        part = {0: "valid", 1: "test"}.get(number % _HELD_OUT_EVERY, "train")
        parts[part] += source_words(path)
    vocabulary = Vocabulary.from_words(parts["train"], min_count=min_count)
    return Corpus.from_words(vocabulary, **parts)


def source_files(folder: str | Path | None = None) -> list[Path]:
    """The Python files that `read_python_sources` reads, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib") if folder is None else folder)
    files = sorted(
        path
        for path in root.rglob("*.py")
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts[:-1])
    )
    if len(files) < _HELD_OUT_EVERY:
        raise FileNotFoundError(
            f"{root} must hold at least {_HELD_OUT_EVERY} .py files, found {len(files)}; "
            "name a folder of Python sources"
        )
    return files


def source_words(path: Path) -> list[str]:
    """The words of a source file with its indentation, and `<eof>` at the end."""
    # a few files of the standard library are not UTF-8 on purpose
    text = path.read_text(encoding="utf-8", errors="replace")
    return [*_SOURCE_WORD.findall(text), END_OF_FILE]
