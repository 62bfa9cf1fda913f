"""Texts in their published formats, each as an encoded corpus.

A path is a folder, a file or the archive as it was downloaded; `encoded` has the cache.
"""

import re
from pathlib import Path

import numpy as np
import torch

from .arrays import load_array
from .corpus import Corpus
from .encoded import cache_folder, encode_lines, encode_parts, fingerprint
from .text_files import TextFile, all_lines, text_files

_PARTS = ("train", "valid", "test")
_WIKITEXT_NAMES = ("{part}.txt", "wiki.{part}.tokens", "wiki.{part}.raw")
_LM1B_TRAIN = re.compile(r"news\.en-\d{5}-of-\d{5}")
_LM1B_HELD_OUT = re.compile(r"news\.en\.heldout-(\d{5})-of-\d{5}")


def read_wikitext(path: str | Path) -> Corpus:
    """WikiText-2 or -103: a folder or zip with `wiki.train.tokens` or `train.txt`, and so on.

    Rare words are `<unk>` in the published files, so the vocabulary takes every word of the three.
    """
    found = text_files(Path(path))
    files = {part: [_wikitext_file(Path(path), found, part)] for part in _PARTS}
    return _encoded(files, kind="wikitext", min_count=1, counted=_PARTS)


def read_lm1b(path: str | Path, *, min_count: int = 3) -> Corpus:
    """The One Billion Word Benchmark: its tar.gz, or a folder into which that was unpacked.

    Held-out file 0 is the test text, as in the literature, file 1 the validation text. The
    vocabulary is that of the training files.
    """
    files: dict[str, list[TextFile]] = {part: [] for part in _PARTS}
    for file in sorted(text_files(Path(path)), key=lambda file: file.name):
        held_out = _LM1B_HELD_OUT.fullmatch(file.name)
        if _LM1B_TRAIN.fullmatch(file.name):
            files["train"].append(file)
        elif held_out and int(held_out[1]) < 2:
            files["test" if int(held_out[1]) == 0 else "valid"].append(file)
    for part, names in (
        ("train", "news.en-00001-of-00100"),
        ("valid", "news.en.heldout-00001-of-00050"),
        ("test", "news.en.heldout-00000-of-00050"),
    ):
        if not files[part]:
            raise FileNotFoundError(
                f"{path} must hold files like {names}; name the One Billion Word archive or the "
                "folder into which it was unpacked"
            )
    return _encoded(files, kind="lm1b", min_count=min_count, counted=["train"])


def read_text(path: str | Path, *, min_count: int = 1, held_out: float = 0.02) -> Corpus:
    """Any text, plain, gz or xz, or all files of a folder or archive; words are split at blanks.

    The last `held_out` of its lines are the validation text, as many before them the test text.
    """
    files = text_files(Path(path))
    key = fingerprint(
        (file.path for file in files), kind="text", min_count=min_count, held_out=held_out
    )
    return encode_lines(
        cache_folder() / key, all_lines(files), min_count=min_count, held_out=held_out
    )


def draw_text(
    counts: str | Path, *, words: int, held_out_words: int = 20_000, seed: int = 0
) -> Corpus:
    """Random words by the counts in a .npy file, most frequent first: ids are ranks.

    The text touches rows as often as the real one, but has no meaning: it is for measuring memory
    and speed, not quality.
    """
    ends = np.cumsum(load_array(counts).astype(np.int64))
    generator = np.random.default_rng(seed)

    def draw(size: int) -> torch.Tensor:
        draws = generator.integers(0, ends[-1], size)
        return torch.from_numpy(np.searchsorted(ends, draws, side="right").astype(np.int32))

    return Corpus(range(len(ends)), draw(words), draw(held_out_words), draw(held_out_words))


def _wikitext_file(path: Path, files: list[TextFile], part: str) -> TextFile:
    names = [name.format(part=part) for name in _WIKITEXT_NAMES]
    for file in files:
        if file.name in names:
            return file
    raise FileNotFoundError(
        f"{path} must hold {' or '.join(names)}; name the WikiText archive or the folder into "
        "which it was unpacked"
    )


def _encoded(
    files: dict[str, list[TextFile]],
    *,
    kind: str,
    min_count: int,
    counted: tuple[str, ...] | list[str],
) -> Corpus:
    paths = (file.path for group in files.values() for file in group)
    key = fingerprint(paths, kind=kind, min_count=min_count)
    lines = {part: all_lines(group) for part, group in files.items()}
    return encode_parts(cache_folder() / key, lines, min_count=min_count, counted=counted)
