"""The data of a recipe: where it is looked for, how it is read, and how to get it."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from .corpora import (
    Corpus,
    LabelledTexts,
    NoisyViews,
    draw_text,
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
    "wikitext", "lm1b", "text", "counts", "python", "vectors", "token-vectors", "labelled"
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which data, and in what form.

    Args:
        kind: "wikitext" and "lm1b" as published, "text" any text, "counts" a text drawn from word
            counts, "python" Python's own sources; "vectors" noisy views of the vectors in a file,
            "token-vectors" of those in the package wordllama; "labelled" texts with classes.
        path: Below the data folder, which is `$SKETCHOPTIM_DATA`, else `../shared/data`.
        get: Where to get it, for the error that says it is missing.
        min_count: Words seen less often become unknown; "text" and "lm1b" only.
        held_out: Share of the lines for validation, and in "text" for testing.
        words: How many are drawn; "counts" only.
        noise: Of a view, in lengths of its vector; "vectors" and "token-vectors" only.
    """

    kind: DataKind
    path: str = ""
    get: str = ""
    min_count: int = 1
    held_out: float = 0.02
    words: int = 1_000_000
    noise: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(DataKind):
            raise ValueError(f"kind must be one of {list(get_args(DataKind))}, got {self.kind!r}")
        for name in ("min_count", "words"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")

    def views(self, path: Path | None = None) -> NoisyViews:
        """The views of the vectors at `path`, by default where `find_data` finds them."""
        if self.kind == "token-vectors":
            return NoisyViews(token_vectors(), self.noise)
        return NoisyViews(read_vectors(find_data(self, path)), self.noise)

    def labelled(self, path: Path | None = None) -> LabelledTexts:
        """The labelled texts at `path`, by default where `find_data` finds them."""
        return read_labelled(find_data(self, path), held_out=self.held_out)

    def read(self, path: Path | None = None) -> Corpus:
        """The text at `path`, by default where `find_data` finds it."""
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
        """A name for the data, wherever it is: a digest of all files of its folder, or of its file.

        Hashed are each file's content and its name below the folder that all are in, as names
        say what is train and what is test; a single file may have any name.
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
    """The file or folder with the data; where there is none, the error says how to get it."""
    folder = Path(os.environ.get("SKETCHOPTIM_DATA", "../shared/data"))
    found = folder / settings.path if path is None else path
    if not found.exists():
        remedy = f"{settings.get}; " if settings.get else ""
        raise FileNotFoundError(
            f"no data at {found}: {remedy}then name it with --data, or put it at "
            f"{settings.path!r} below a folder named by SKETCHOPTIM_DATA"
        )
    return found
