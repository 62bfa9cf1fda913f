"""Texts with labels, one `text<TAB>label` a line, encoded once and mapped into memory."""

import json
from array import array
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from .corpus import Part
from .encoded import atomic_folder, cache_folder, fingerprint, map_file, read_about, write_about
from .text_files import TextFile, text_files


@dataclass(frozen=True)
class Labelled:
    """Texts, one after the other in one tensor of bytes, and the class of each.

    Attributes:
        content: UTF-8, uint8 [bytes].
        ends: where each text ends in it, int64 [texts].
        labels: classes, int32 [texts].
    """

    content: Tensor
    ends: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def text(self, number: int) -> str:
        """One of the texts."""
        start = int(self.ends[number - 1]) if number else 0
        return bytes(self.content[start : int(self.ends[number])].numpy()).decode("utf-8")

    def take(self, rows: Tensor) -> tuple[list[str], Tensor]:
        """Some texts and their classes, int64, in the order of `rows`."""
        return [self.text(int(row)) for row in rows], self.labels[rows].long()


@dataclass(frozen=True)
class LabelledTexts:
    """Labelled texts in three parts; classes are numbered by descending count in training."""

    classes: int
    train: Labelled
    valid: Labelled
    test: Labelled

    def part(self, name: Part) -> Labelled:
        """One of the three."""
        found: Labelled = getattr(self, name)
        return found


def read_labelled(path: str | Path, *, held_out: float = 0.005) -> LabelledTexts:
    """A folder or archive with `train.tsv` and `test.tsv`, also as .gz or .xz.

    The last `held_out` of the training lines are for validation. Held-out texts whose label does
    not occur in training are dropped.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be between 0 and 1, got {held_out}")
    files = {part: labelled_file(path, part) for part in ("train", "test")}
    key = fingerprint((file.path for file in files.values()), kind="labelled", held_out=held_out)
    folder = cache_folder() / key
    if not folder.exists():
        with atomic_folder(folder) as scratch:
            _encode(scratch, files, held_out=held_out)
    about = read_about(folder)
    train, valid, test = (_opened(folder, part) for part in ("train", "valid", "test"))
    return LabelledTexts(about["classes"], train, valid, test)


def _encode(folder: Path, files: dict[str, TextFile], *, held_out: float) -> None:
    lines = sum(1 for _ in files["train"].lines())
    cut = lines - max(1, round(lines * held_out))
    counts: Counter[str] = Counter()
    for number, line in enumerate(files["train"].lines()):
        if number < cut:
            counts[_split(line, number, files["train"])[1]] += 1
    # the label breaks ties, so that numbers do not depend on the order of the lines
    ranked = sorted(counts, key=lambda label: (-counts[label], label))
    numbers = {label: number for number, label in enumerate(ranked)}
    with ExitStack() as stack:
        writers = {
            part: stack.enter_context(closing(_Writer(folder, part)))
            for part in ("train", "valid", "test")
        }
        for part, file in files.items():
            for number, line in enumerate(file.lines()):
                text, label = _split(line, number, file)
                name = "valid" if part == "train" and number >= cut else part
                if label in numbers:
                    writers[name].write(text, numbers[label])
    (folder / "labels.json").write_text(json.dumps(ranked), encoding="utf-8")
    write_about(folder, {"classes": len(ranked)})


class _Writer:
    """The three files of a part."""

    def __init__(self, folder: Path, part: str) -> None:
        self._content = (folder / f"{part}.u8").open("wb")
        self._ends = (folder / f"{part}.i64").open("wb")
        self._labels = (folder / f"{part}.i32").open("wb")
        self._end = 0

    def write(self, text: str, label: int) -> None:
        content = text.encode("utf-8")
        self._end += len(content)
        self._content.write(content)
        array("q", [self._end]).tofile(self._ends)
        array("i", [label]).tofile(self._labels)

    def close(self) -> None:
        for file in (self._content, self._ends, self._labels):
            file.close()


def _opened(folder: Path, part: str) -> Labelled:
    return Labelled(
        map_file(folder / f"{part}.u8", np.uint8),
        map_file(folder / f"{part}.i64", np.int64),
        map_file(folder / f"{part}.i32", np.int32),
    )


def _split(line: str, number: int, file: TextFile) -> tuple[str, str]:
    text, tab, label = line.rstrip("\n").rpartition("\t")
    if not tab:
        raise ValueError(
            f"line {number + 1} of {file.name} must be text<TAB>label, got {line[:80]!r}"
        )
    return text, label


def labelled_file(path: str | Path, part: str) -> TextFile:
    """The file of a part, "train" or "test", in a folder or archive."""
    names = [f"{part}.tsv{ending}" for ending in ("", ".gz", ".xz")]
    for file in text_files(Path(path)):
        if file.name in names:
            return file
    raise FileNotFoundError(f"{path} must hold {' or '.join(names)}, each line text<TAB>label")
