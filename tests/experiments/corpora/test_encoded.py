import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.corpora import encoded
from experiments.corpora.encoded import encode_lines, encode_parts, fingerprint

LINES = st.lists(st.lists(st.sampled_from("abcdef"), max_size=6).map(" ".join), min_size=1)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks so small that these texts have several."""
    monkeypatch.setattr(encoded, "_CHUNK", 4)


def words_of(corpus, part):
    return [corpus.vocabulary.words[rank] for rank in getattr(corpus, part)]


@given(parts=st.tuples(LINES, LINES, LINES))
def test_encoding_is_undone_by_the_words(parts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoded") / "text"
    named = dict(zip(("train", "valid", "test"), parts, strict=True))
    corpus = encode_parts(folder, named, min_count=1, counted=named)
    for part, lines in named.items():
        assert words_of(corpus, part) == [
            word for line in lines for word in (*line.split(), "<eos>")
        ]
    counts = Counter(word for part in named for word in words_of(corpus, part))
    ranked = [counts[word] for word in corpus.vocabulary.words]
    assert ranked == sorted(ranked, reverse=True)


def test_words_that_are_rare_in_the_counted_parts_become_unknown(tmp_path):
    parts = {"train": ["a a b"], "valid": ["b b b c"], "test": ["a"]}
    corpus = encode_parts(tmp_path / "text", parts, min_count=2, counted=["train"])
    assert words_of(corpus, "train") == ["a", "a", "<unk>", "<unk>"]
    assert words_of(corpus, "valid") == ["<unk>"] * 5


def test_one_text_is_cut_between_lines_with_valid_at_the_end(tmp_path):
    lines = [f"word{number} x" for number in range(50)]
    corpus = encode_lines(tmp_path / "text", lines, min_count=1, held_out=0.04)
    assert len(corpus.train) == 3 * 46
    assert words_of(corpus, "test")[1::3] == words_of(corpus, "valid")[1::3] == ["x", "x"]
    assert words_of(corpus, "valid")[::3] == ["<unk>", "<unk>"]  # trained on none of these


def test_the_words_of_the_held_out_lines_are_those_of_the_text(tmp_path):
    lines = [f"{number % 7} x" for number in range(50)]
    corpus = encode_lines(tmp_path / "text", lines, min_count=1, held_out=0.04)
    assert words_of(corpus, "test")[::3] == ["4", "5"]
    assert words_of(corpus, "valid")[::3] == ["6", "0"]


def test_a_text_is_encoded_once(tmp_path):
    folder = tmp_path / "text"
    lines = ["a b"] * 50
    first = encode_lines(folder, lines, min_count=1, held_out=0.1)
    second = encode_lines(folder, iter(()), min_count=1, held_out=0.1)
    assert torch.equal(first.train, second.train)


def test_an_encoding_that_fails_leaves_nothing_behind(tmp_path):
    def lines():
        yield "a"
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        encode_lines(tmp_path / "text", lines(), min_count=1, held_out=0.1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("held_out", [0.0, 0.5])
def test_a_bad_share_to_hold_out_gets_a_clear_error(tmp_path, held_out):
    with pytest.raises(ValueError, match=r"held_out must be between 0 and 0\.5"):
        encode_lines(tmp_path / "text", [], min_count=1, held_out=held_out)


def test_a_text_too_short_to_be_cut_gets_a_clear_error(tmp_path):
    with pytest.raises(ValueError, match=r"too short to hold 0\.02 of its lines out twice"):
        encode_lines(tmp_path / "text", ["a"] * 9, min_count=1, held_out=0.02)


def test_another_file_or_setting_is_another_fingerprint(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a", encoding="utf-8")
    first = fingerprint([path], min_count=1)
    assert fingerprint([path], min_count=1) == first
    assert fingerprint([path], min_count=2) != first
    path.write_text("ab", encoding="utf-8")
    assert fingerprint([path], min_count=1) != first


def test_a_file_replaced_at_equal_size_and_time_is_another_fingerprint(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("old", encoding="utf-8")
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    first = fingerprint([path])
    path.write_text("new", encoding="utf-8")
    os.utime(path, ns=times)
    assert fingerprint([path]) != first


@pytest.mark.parametrize("damage", ["truncated", "other bits", "missing"])
def test_a_damaged_encoding_is_refused(tmp_path, damage):
    folder = tmp_path / "text"
    lines = [f"a{number} b" for number in range(50)]
    encode_lines(folder, lines, min_count=1, held_out=0.1)
    path = folder / "train.i32"
    content = path.read_bytes()
    damaged = content[: len(content) // 2] if damage == "truncated" else content[::-1]
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"train.i32 must have the \d+ bytes .* remove"):
        encode_lines(folder, lines, min_count=1, held_out=0.1)


def test_a_long_text_is_never_in_memory_as_a_whole(tmp_path):
    """20 million words, 80 MB of ids, are encoded and opened in a fraction of that."""
    program = f"""
import numpy, torch
from pathlib import Path
from experiments.corpora.encoded import encode_lines
from experiments.machine import peak_memory_bytes
line = " ".join(str(number % 100) for number in range(19_999))
before = peak_memory_bytes()
corpus = encode_lines(Path({str(tmp_path / "text")!r}), [line] * 1000, min_count=1, held_out=0.01)
print(len(corpus.train), peak_memory_bytes() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words, grown = map(int, done.stdout.split())
    assert words == 980 * 20_000
    assert grown < 40e6
    assert np.dtype(np.int32).itemsize * words > 70e6
