"""Text as tensors of word ids: files -> words -> vocabulary by count -> ids."""

import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"
END_OF_FILE = "<eof>"

_WIKITEXT_NAMES = ("{split}.txt", "wiki.{split}.tokens")
# identifiers, numbers, a line break with the indentation after it, and runs of punctuation
_SOURCE_WORD = re.compile(r"[^\W\d]\w*|\d[\w.]*|\n\s*|[^\w\s]+")
# tests are left out because many distributions ship the standard library without them
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_HELD_OUT_EVERY = 20


@dataclass(frozen=True)
class Vocabulary:
    """Words by falling count, so that an id is a rank, as the log-uniform sampler expects.

    Example:
        >>> vocabulary = Vocabulary.from_words("b a b c b a".split(), min_count=2)
        >>> vocabulary.words
        ('b', 'a', '<unk>')
        >>> vocabulary.encode(["a", "c", "never seen"])
        tensor([1, 2, 2])
    """

    words: tuple[str, ...]
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ids = {word: rank for rank, word in enumerate(self.words)}
        if len(ids) != len(self.words):
            raise ValueError("words must be distinct, got repeated ones")
        if UNKNOWN not in ids:
            raise ValueError(f"words must contain {UNKNOWN!r}, which stands for all others")
        object.__setattr__(self, "_ids", ids)

    @classmethod
    def from_words(cls, words: Iterable[str], *, min_count: int = 1) -> "Vocabulary":
        """The vocabulary of all words seen `min_count` times; rarer ones count as unknown."""
        if min_count < 1:
            raise ValueError(f"min_count must be >= 1, got {min_count}")
        counts = Counter(words)
        kept = Counter({word: n for word, n in counts.items() if n >= min_count})
        kept[UNKNOWN] += counts.total() - kept.total()
        # the word breaks ties, so that ids do not depend on the order of the text
        return cls(tuple(sorted(kept, key=lambda word: (-kept[word], word))))

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, words: Sequence[str]) -> Tensor:
        """The words' ids, int64 [len(words)]."""
        unknown = self._ids[UNKNOWN]
        ids = (self._ids.get(word, unknown) for word in words)
        return torch.from_numpy(np.fromiter(ids, dtype=np.int64, count=len(words)))


@dataclass(frozen=True)
class Corpus:
    """A text in three parts, each a tensor of word ids, int64 [words]."""

    vocabulary: Vocabulary
    train: Tensor
    valid: Tensor
    test: Tensor

    @classmethod
    def encoded(
        cls,
        vocabulary: Vocabulary,
        *,
        train: Sequence[str],
        valid: Sequence[str],
        test: Sequence[str],
    ) -> "Corpus":
        """The corpus of three lists of words."""
        return cls(vocabulary, *(vocabulary.encode(words) for words in (train, valid, test)))


def line_words(path: Path) -> list[str]:
    """The white-space separated words of a text file, each line closed by `<eos>`."""
    with path.open(encoding="utf-8") as lines:
        return [word for line in lines for word in (*line.split(), END_OF_LINE)]


def read_wikitext(folder: str | Path) -> Corpus:
    """WikiText from a folder with train, valid and test as `train.txt` or `wiki.train.tokens`.

    Rare words are `<unk>` in the published files, so the vocabulary takes every word of the three.
    """
    train, valid, test = (
        line_words(_wikitext_file(Path(folder), split)) for split in ("train", "valid", "test")
    )
    vocabulary = Vocabulary.from_words([*train, *valid, *test])
    return Corpus.encoded(vocabulary, train=train, valid=valid, test=test)


def read_python_sources(folder: str | Path | None = None, *, min_count: int = 2) -> Corpus:
    """The Python files below `folder` (default: this Python's standard library), without tests.

    Of 20 files in the order of their names, one goes to valid and one to test, whole, so that
    nothing held out was seen in training. The vocabulary is made from the training files alone.
    """
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
    parts: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for number, path in enumerate(files):
        part = {0: "valid", 1: "test"}.get(number % _HELD_OUT_EVERY, "train")
        parts[part] += source_words(path)
    vocabulary = Vocabulary.from_words(parts["train"], min_count=min_count)
    return Corpus.encoded(vocabulary, **parts)


def source_words(path: Path) -> list[str]:
    """The words of a source file, indentation included, closed by `<eof>`."""
    # a few files of the standard library are not UTF-8 on purpose
    text = path.read_text(encoding="utf-8", errors="replace")
    return [*_SOURCE_WORD.findall(text), END_OF_FILE]


def segments(ids: Tensor, *, batch: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs (words, next words), each [batch, <= length]: `batch` parallel passes over a text.

    The text is cut into `batch` equal streams; a pair continues where the one before it ended, so
    a recurrent state can be carried over.
    """
    stream_length = (ids.numel() - 1) // batch
    if stream_length < 1:
        raise ValueError(f"the text must have more than batch = {batch} words, got {ids.numel()}")
    words = ids[: batch * stream_length].view(batch, stream_length)
    nexts = ids[1 : batch * stream_length + 1].view(batch, stream_length)
    for start in range(0, stream_length, length):
        yield words[:, start : start + length], nexts[:, start : start + length]


def _wikitext_file(folder: Path, split: str) -> Path:
    names = [name.format(split=split) for name in _WIKITEXT_NAMES]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(
        f"{folder} must hold {' or '.join(names)}; name the folder into which WikiText was unpacked"
    )
