import pytest

from experiments.corpora import Vocabulary


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
