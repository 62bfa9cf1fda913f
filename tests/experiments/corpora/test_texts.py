import io
import tarfile
import zipfile

import numpy as np
import pytest
import torch

from experiments.corpora import (
    draw_text,
    read_lm1b,
    read_python_sources,
    read_text,
    read_wikitext,
)

WIKITEXT = {"train": "a b a\n", "valid": "b\n", "test": "c\n"}
LM1B = {
    "training-monolingual.tokenized.shuffled/news.en-00001-of-00100": "a a a b\n",
    "training-monolingual.tokenized.shuffled/news.en-00002-of-00100": "b b\nc\n",
    "heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050": "a c\n",
    "heldout-monolingual.tokenized.shuffled/news.en.heldout-00001-of-00050": "b\n",
    "heldout-monolingual.tokenized.shuffled/news.en.heldout-00002-of-00050": "not used\n",
}


def words_of(corpus, ids: torch.Tensor) -> list[str]:
    return [corpus.vocabulary.words[i] for i in ids]


@pytest.mark.parametrize("name", ["{}.txt", "wiki.{}.tokens", "wiki.{}.raw"])
@pytest.mark.parametrize("is_archive", [False, True])
def test_wikitext_is_read_under_all_of_its_names(tmp_path, name, is_archive):
    for split, text in WIKITEXT.items():
        (tmp_path / name.format(split)).write_text(text, encoding="utf-8")
    path = tmp_path
    if is_archive:
        path = tmp_path / "wikitext-2-v1.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for split in WIKITEXT:
                file = name.format(split)
                archive.write(tmp_path / file, f"wikitext-2/{file}")
    corpus = read_wikitext(path)
    assert corpus.vocabulary.words == ("<eos>", "a", "b", "c", "<unk>")
    assert corpus.train.tolist() == [1, 2, 1, 0]
    assert corpus.test.tolist() == [3, 0]


def test_absent_wikitext_is_reported_with_the_names_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must hold train\.txt or wiki\.train\.tokens"):
        read_wikitext(tmp_path)


@pytest.mark.parametrize("is_archive", [False, True])
def test_lm1b_is_read_from_its_archive_and_from_its_folder(tmp_path, is_archive):
    path = tmp_path / "1-billion-word-language-modeling-benchmark-r13output"
    if is_archive:
        path = path.with_suffix(".tar.gz")
        with tarfile.open(path, "w:gz") as tar:
            for name, text in LM1B.items():
                member = tarfile.TarInfo(f"r13output/{name}")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text.encode()))
    else:
        for name, text in LM1B.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(text, encoding="utf-8")
    corpus = read_lm1b(path)
    train = ["a", "a", "a", "b", "<eos>", "b", "b", "<eos>", "<unk>", "<eos>"]
    assert words_of(corpus, corpus.train) == train
    assert words_of(corpus, corpus.test) == ["a", "<unk>", "<eos>"]
    assert words_of(corpus, corpus.valid) == ["b", "<eos>"]


def test_absent_lm1b_is_reported_with_the_names_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must hold files like news\.en-00001-of-00100"):
        read_lm1b(tmp_path)


def test_any_text_is_read_and_cut(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a b\n" * 100, encoding="utf-8")
    corpus = read_text(path)
    sizes = [part.numel() for part in (corpus.train, corpus.valid, corpus.test)]
    assert sizes == [96 * 3, 2 * 3, 2 * 3]


def test_drawn_words_come_as_often_as_their_counts_say(tmp_path):
    counts = np.array([6, 3, 1, 0], dtype=np.int32)
    np.save(tmp_path / "counts.npy", counts)
    corpus = draw_text(tmp_path / "counts.npy", words=10_000)
    assert len(corpus.vocabulary) == 4
    drawn = torch.bincount(corpus.train, minlength=4) / 10_000
    # 5 standard deviations of a share of 10,000 draws are below 0.025
    assert torch.allclose(drawn, torch.tensor([0.6, 0.3, 0.1, 0.0]), atol=0.025)
    assert not torch.equal(corpus.valid[:1000], corpus.test[:1000])


def test_python_sources_split_by_file_and_skip_tests(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "skipped.py").write_text("skipped skipped\n", encoding="utf-8")
    for number in range(20):
        (tmp_path / f"file{number:02}.py").write_text(f"x = {number}\n  y()\n", encoding="utf-8")
    corpus = read_python_sources(tmp_path)
    assert words_of(corpus, corpus.valid) == ["x", "=", "<unk>", "\n  ", "y", "()", "\n", "<eof>"]
    assert len(corpus.train) == 18 * 8
    assert len(corpus.test) == 8
    assert "skipped" not in corpus.vocabulary.words


def test_a_folder_without_enough_sources_gets_a_clear_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"at least 20 \.py files, found 0"):
        read_python_sources(tmp_path)
