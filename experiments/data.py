"""The data of a recipe: where it is searched, how it is read, and how to get it."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor

from .corpora import (
    Corpus,
    Interactions,
    LabelledTexts,
    LabelledVectors,
    NoisyViews,
    draw_text,
    read_interactions,
    read_labelled,
    read_lm1b,
    read_python_sources,
    read_text,
    read_vectors,
    read_wikitext,
    source_files,
    token_vectors,
    token_vectors_file,
)

DataKind = Literal[
    "wikitext", "lm1b", "text", "counts", "python", "vectors", "token-vectors", "labelled",
    "interactions",
]  # fmt: skip

DATA_VARIABLE = "SKETCHOPTIM_DATA"
_EXPECTED: dict[DataKind, str] = {
    "wikitext": "wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, or the zip of them",
    "lm1b": "the One Billion Word tar.gz, or the files unpacked from it",
    "text": "a text file, plain, .gz or .xz, or a folder or archive of such files",
    "counts": "a .npy file of word counts, most frequent first",
    "vectors": "a .npy file of vectors, or an .npz file of embeddings and classes",
    "labelled": "train.tsv and test.tsv, plain, .gz or .xz, with lines text<TAB>label",
    "interactions": "train.txt, valid.txt and test.txt, with a user and its items in each line",
}


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which data, and in what form.

    Args:
        kind: "wikitext" and "lm1b" as published, "text" any text, "counts" a random text by word
            counts, "python" Python's own sources; "vectors" noisy views of the vectors in a file,
            "token-vectors" of those in the package wordllama; "labelled" texts with classes.
        path: Below the data folder, `$SKETCHOPTIM_DATA`.
        get: Where to get it, for the error if it is missing.
        min_count: Words seen less often become unknown; "text" and "lm1b" only.
        held_out: Share of the lines for validation, and in "text" for testing too.
        words: Length of the random text; "counts" only.
        noise: Of a view, over the norm of its vector; "vectors" and "token-vectors" only.
        train_on_valid: The validation pairs are for training too, so that quality is measured on
            test pairs alone; "interactions" only.
    """

    kind: DataKind
    path: str = ""
    get: str = ""
    min_count: int = 1
    held_out: float = 0.02
    words: int = 1_000_000
    noise: float = 1.0
    train_on_valid: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(DataKind):
            raise ValueError(f"kind must be one of {list(get_args(DataKind))}, got {self.kind!r}")
        for name in ("min_count", "words"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")

    def views(self, path: Path | None = None) -> NoisyViews | LabelledVectors:
        """The vectors at `path`, or views of them, else those that `find_data` finds."""
        if self.kind == "token-vectors":
            return NoisyViews(token_vectors(), self.noise)
        found = read_vectors(find_data(self, path))
        return NoisyViews(found, self.noise) if isinstance(found, Tensor) else found

    def labelled(self, path: Path | None = None) -> LabelledTexts:
        """The labelled texts at `path`, else those that `find_data` finds."""
        return read_labelled(find_data(self, path), held_out=self.held_out)

    def interactions(self, path: Path | None = None) -> Interactions:
        """The pairs of users and items at `path`, else those that `find_data` finds."""
        found = read_interactions(find_data(self, path))
        return found.with_valid_in_train() if self.train_on_valid else found

    def read(self, path: Path | None = None) -> Corpus:
        """The text at `path`, else the one that `find_data` finds."""
        if self.kind == "python":
            return read_python_sources(path)
        found = find_data(self, path)
        if self.kind == "wikitext":
            return read_wikitext(found)
        if self.kind == "lm1b":
            return read_lm1b(found, min_count=self.min_count)
        if self.kind == "counts":
            return draw_text(found, words=self.words)
        return read_text(found, min_count=self.min_count, held_out=self.held_out)

    def sha256(self, path: Path | None = None) -> str:
        """A digest of the file, or of all files of the folder; it does not depend on the place.

        The content of each file is hashed, and its path below the folder, since names tell train
        from test; a single file may have any name.
        """
        files = self._files(path)
        folder = os.path.commonpath(files or [Path()])
        whole = hashlib.sha256()
        for file in files:
            name = os.fsencode(file.relative_to(folder).as_posix())
            with file.open("rb") as stream:
                whole.update(name + b"\0" + hashlib.file_digest(stream, "sha256").digest())
        return whole.hexdigest()

    def _files(self, path: Path | None) -> list[Path]:
        if self.kind == "python":
            return source_files(path)
        if self.kind == "token-vectors":
            return [token_vectors_file()]
        found = find_data(self, path)
        if found.is_dir():
            return sorted(file for file in found.rglob("*") if file.is_file())
        return [found]


def find_data(settings: DataSettings, path: Path | None = None) -> Path:
    """The data at `path`, else below the data folder; the error has what to put there."""
    return find_file(
        settings.path, path, expected=_EXPECTED.get(settings.kind, settings.kind), get=settings.get
    )


def find_file(
    name: str, path: Path | None = None, *, expected: str, get: str = "", option: str = "--data"
) -> Path:
    """The file or folder at `path`, else `name` below `$SKETCHOPTIM_DATA`.

    Args:
        name: Its path below the data folder.
        path: Its own path, where `option` gave one.
        expected: What it holds, for the error.
        get: How to get it, for the error.
        option: The option that names it, for the error.

    Raises:
        FileNotFoundError: There is none.
    """
    found = path or data_file(name)
    if found is not None and found.exists():
        return found
    problem = f"{DATA_VARIABLE} is not set" if found is None else f"no data at {found}"
    remedy = f"; to get it: {get}" if get else ""
    raise FileNotFoundError(
        f"{problem}; name the data with {option}, or set {DATA_VARIABLE} to a folder that has "
        f"{name!r} in it ({expected}){remedy}"
    )


def data_file(name: str) -> Path | None:
    """Where `name` would be below the data folder; None where no such folder is set."""
    folder = os.environ.get(DATA_VARIABLE)
    return Path(folder) / name if folder else None
