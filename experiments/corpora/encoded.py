"""Text encoded once into files of word ids, which training then maps into memory.

Only the distinct words and a buffer of ids are in memory, however long the text. Words get
provisional ids in their order of appearance; when all are counted, ranks replace these. The folder
appears under its name only when it is complete, and is refused if its files have changed since.
"""

import hashlib
import json
import os
import shutil
import tempfile
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .corpus import Corpus
from .vocabulary import END_OF_LINE, Vocabulary

_FORMAT = 2
_CHUNK = 1 << 20
_Ids = NDArray[np.int32]


@dataclass(frozen=True)
class StoredVocabulary:
    """The words of an encoded text, read from their file on demand."""

    folder: Path
    size: int

    def __len__(self) -> int:
        return self.size

    @cached_property
    def words(self) -> tuple[str, ...]:
        """All words, by descending count."""
        return tuple(json.loads((self.folder / "words.json").read_text(encoding="utf-8")))


def cache_folder() -> Path:
    """Where encoded texts are kept: `$SKETCHOPTIM_CACHE`, else below the user's cache folder."""
    named = os.environ.get("SKETCHOPTIM_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sketchoptim"


def fingerprint(files: Iterable[Path], **settings: object) -> str:
    """A name that changes with the files' places and contents and with the settings."""
    described = [(str(path.resolve()), file_sha256(path)) for path in sorted(set(files))]
    text = json.dumps([_FORMAT, described, settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_sha256(path: Path) -> str:
    """A digest of the content of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_about(folder: Path, about: dict[str, int]) -> None:
    """Writes numbers about an encoded text, with the size and the digest of each of its files."""
    files = {path.name: [path.stat().st_size, file_sha256(path)] for path in folder.iterdir()}
    text = json.dumps({**about, "files": files})
    (folder / "about.json").write_text(text, encoding="utf-8")


def read_about(folder: Path) -> dict[str, int]:
    """What `write_about` wrote, if the files still have their sizes and digests."""
    about: dict[str, Any] = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    for name, (size, digest) in about.pop("files").items():
        path = folder / name
        found = path.stat().st_size if path.exists() else 0
        if found != size or file_sha256(path) != digest:
            raise ValueError(
                f"{path} must have the {size} bytes that were encoded, got {found} bytes, or others"
                f"; remove {folder} to encode the text again"
            )
    return about


def encode_parts(
    folder: Path, parts: Mapping[str, Iterable[str]], *, min_count: int, counted: Iterable[str]
) -> Corpus:
    """The corpus of parts given as lines; encoded into `folder` unless that exists.

    Args:
        folder: For the encoded text.
        parts: Lines of "train", "valid" and "test"; not read when the folder exists.
        min_count: Words seen less often in the counted parts become unknown.
        counted: Names of the parts that the vocabulary is made from.
    """
    if not folder.exists():
        with atomic_folder(folder) as scratch:
            raw = _Raw(scratch)
            places = {name: raw.append(lines) for name, lines in parts.items()}
            raw.finish(places, counted=counted, min_count=min_count)
    return open_encoded(folder)


def encode_lines(folder: Path, lines: Iterable[str], *, min_count: int, held_out: float) -> Corpus:
    """The corpus of one text: its last lines are "valid", as many before them "test".

    Args:
        folder: For the encoded text.
        lines: The text; not read when the folder exists.
        min_count: Words seen less often in the training part become unknown.
        held_out: Share of the lines that "valid" gets, and "test" before it.
    """
    if not 0 < held_out < 0.5:
        raise ValueError(f"held_out must be between 0 and 0.5, got {held_out}")
    if not folder.exists():
        with atomic_folder(folder) as scratch:
            raw = _Raw(scratch)
            whole = raw.append(lines)
            cut = round(raw.lines * held_out)
            if not 0 < cut < raw.lines / 2:
                raise ValueError(f"the text is too short to hold {held_out} of its lines out twice")
            test, valid = (raw.after_line(raw.lines - count) for count in (2 * cut, cut))
            places = {"train": slice(0, test), "test": slice(test, valid)}
            places["valid"] = slice(valid, whole.stop)
            raw.finish(places, counted=["train"], min_count=min_count)
    return open_encoded(folder)


def open_encoded(folder: Path) -> Corpus:
    """The corpus in a folder made by `encode_parts` or `encode_lines`, map_file from its files."""
    about = read_about(folder)
    parts = (map_file(folder / f"{part}.i32", np.int32) for part in ("train", "valid", "test"))
    return Corpus(StoredVocabulary(folder, about["words"]), *parts)


class _Raw:
    """A text under provisional ids, in a file of `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "raw.i32"
        self.file.touch()
        self.lines = 0
        self.ids: defaultdict[str, int] = defaultdict()
        self.ids.default_factory = self.ids.__len__
        self.end_of_line = self.ids[END_OF_LINE]

    def append(self, lines: Iterable[str]) -> slice:
        """Encodes lines, each with an `<eos>` at its end, and returns their place in the file."""
        start = self._words()
        buffer = array("i")
        with self.file.open("ab") as file:
            for line in lines:
                buffer.extend(map(self.ids.__getitem__, line.split()))
                buffer.append(self.end_of_line)
                self.lines += 1
                if len(buffer) >= _CHUNK:
                    buffer.tofile(file)
                    del buffer[:]
            buffer.tofile(file)
        return slice(start, self._words())

    def after_line(self, number: int) -> int:
        """How many words the first `number` lines have, their ends included."""
        seen = 0
        for start, chunk in self._chunks(slice(0, self._words())):
            ends = np.flatnonzero(chunk == self.end_of_line)
            if seen + len(ends) >= number:
                return start + int(ends[number - seen - 1]) + 1
            seen += len(ends)
        raise AssertionError(f"line {number} of {self.lines}")

    def finish(self, parts: dict[str, slice], *, counted: Iterable[str], min_count: int) -> None:
        """Writes the parts as ranks, and deletes the provisional file."""
        counts = np.zeros(len(self.ids), dtype=np.int64)
        for name in counted:
            for _, chunk in self._chunks(parts[name]):
                counts += np.bincount(chunk, minlength=len(counts))
        found = {word: int(count) for word, count in zip(self.ids, counts, strict=True) if count}
        vocabulary = Vocabulary.from_counts(found, min_count=min_count)
        ranks = np.fromiter(map(vocabulary.id, self.ids), dtype=np.int32, count=len(self.ids))
        for name, place in parts.items():
            with (self.folder / f"{name}.i32").open("wb") as file:
                for _, chunk in self._chunks(place):
                    ranks[chunk].tofile(file)
        self.file.unlink()
        (self.folder / "words.json").write_text(json.dumps(vocabulary.words), encoding="utf-8")
        about = {"words": len(vocabulary), "lines": self.lines, "min_count": min_count}
        write_about(self.folder, about)

    def _words(self) -> int:
        return self.file.stat().st_size // array("i").itemsize

    def _chunks(self, place: slice) -> Iterator[tuple[int, _Ids]]:
        for start in range(place.start, place.stop, _CHUNK):
            count = min(_CHUNK, place.stop - start)
            yield start, np.fromfile(self.file, np.int32, count, offset=4 * start)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to; it becomes `folder` on success and is deleted on an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield scratch
        if not folder.exists():  # else another process was faster
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def map_file(path: Path, dtype: type[np.generic]) -> Tensor:
    """A tensor [numbers] over a file, mapped into memory."""
    if not path.stat().st_size:  # nothing to map
        return torch.from_numpy(np.empty(0, dtype=dtype))
    # copy on write, because torch has no tensors that are read only
    return torch.from_numpy(np.memmap(path, dtype=dtype, mode="c"))
