import pytest
import torch

from sketchoptim.experiments.data import (
    Corpus,
    Vocabulary,
    line_words,
    read_python_sources,
    read_wikitext,
    segments,
)


def test_ids_are_ranks_by_falling_count():
    vocabulary = Vocabulary.from_words(["c", "b", "b", "a", "a", "<unk>", "<unk>", "<unk>"])
    assert vocabulary.words == ("<unk>", "a", "b", "c")
    assert len(vocabulary) == 4


def test_rare_and_unseen_words_become_unknown():
    vocabulary = Vocabulary.from_words(["b", "a", "b", "c", "b", "a", "d", "e"], min_count=2)
    assert vocabulary.words == ("<unk>", "b", "a")
    assert vocabulary.encode(["a", "c", "z", "b"]).tolist() == [2, 0, 0, 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a", "a", "<unk>"), "words must be distinct"),
        (("a", "b"), "words must contain '<unk>'"),
    ],
)
def test_a_bad_vocabulary_gets_a_clear_error(words, message):
    with pytest.raises(ValueError, match=message):
        Vocabulary(words)


def test_a_bad_min_count_gets_a_clear_error():
    with pytest.raises(ValueError, match="min_count must be >= 1, got 0"):
        Vocabulary.from_words(["a"], min_count=0)


def test_every_line_ends_in_one_end_of_line_word(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a  b\n\n c \n", encoding="utf-8")
    assert line_words(path) == ["a", "b", "<eos>", "<eos>", "c", "<eos>"]


@pytest.mark.parametrize("name", ["{}.txt", "wiki.{}.tokens"])
def test_wikitext_is_read_under_both_of_its_names(tmp_path, name):
    for split, text in {"train": "a b a\n", "valid": "b\n", "test": "c\n"}.items():
        (tmp_path / name.format(split)).write_text(text, encoding="utf-8")
    corpus = read_wikitext(tmp_path)
    assert corpus.vocabulary.words == ("<eos>", "a", "b", "c", "<unk>")
    assert corpus.train.tolist() == [1, 2, 1, 0]
    assert corpus.test.tolist() == [3, 0]


def test_absent_wikitext_is_reported_with_the_names_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must hold train\.txt or wiki\.train\.tokens"):
        read_wikitext(tmp_path)


def test_python_sources_split_by_file_and_skip_tests(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "skipped.py").write_text("skipped skipped\n", encoding="utf-8")
    for number in range(20):
        (tmp_path / f"file{number:02}.py").write_text(f"x = {number}\n  y()\n", encoding="utf-8")
    corpus = read_python_sources(tmp_path)

    def words(ids: torch.Tensor) -> list[str]:
        return [corpus.vocabulary.words[i] for i in ids]

    assert words(corpus.valid) == ["x", "=", "<unk>", "\n  ", "y", "()", "\n", "<eof>"]
    assert len(words(corpus.train)) == 18 * 8
    assert len(words(corpus.test)) == 8
    assert "skipped" not in corpus.vocabulary.words


def test_a_folder_without_enough_sources_gets_a_clear_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"at least 20 \.py files, found 0"):
        read_python_sources(tmp_path)


def test_segments_continue_each_other_and_are_labelled_by_the_next_word():
    pairs = list(segments(torch.arange(21), batch=2, length=4))
    assert [pair[0].tolist() for pair in pairs] == [
        [[0, 1, 2, 3], [10, 11, 12, 13]],
        [[4, 5, 6, 7], [14, 15, 16, 17]],
        [[8, 9], [18, 19]],
    ]
    assert all(torch.equal(labels, words + 1) for words, labels in pairs)


def test_a_text_shorter_than_its_streams_gets_a_clear_error():
    with pytest.raises(ValueError, match="more than batch = 4 words, got 4"):
        next(segments(torch.arange(4), batch=4, length=2))


def test_a_corpus_is_encoded_by_one_vocabulary():
    vocabulary = Vocabulary(("a", "<unk>"))
    corpus = Corpus.encoded(vocabulary, train=["a", "a"], valid=["b"], test=[])
    assert (corpus.train.tolist(), corpus.valid.tolist(), corpus.test.tolist()) == ([0, 0], [1], [])
