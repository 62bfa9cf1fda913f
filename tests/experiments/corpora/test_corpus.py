import pytest
import torch

from experiments.corpora import Corpus, Vocabulary, segment, segments


def test_segments_continue_each_other_and_are_labelled_by_the_next_word():
    pairs = list(segments(torch.arange(21), batch=2, length=4))
    assert [pair[0].tolist() for pair in pairs] == [
        [[0, 1, 2, 3], [10, 11, 12, 13]],
        [[4, 5, 6, 7], [14, 15, 16, 17]],
        [[8, 9], [18, 19]],
    ]
    assert all(torch.equal(labels, words + 1) for words, labels in pairs)


def test_a_segment_is_found_without_those_before_it():
    ids = torch.arange(21, dtype=torch.int32)
    for number, pair in enumerate(segments(ids, batch=2, length=4)):
        found = segment(ids, number, batch=2, length=4)
        assert torch.equal(found[0], pair[0])
        assert found[0].dtype == found[1].dtype == torch.int64


def test_a_text_shorter_than_its_streams_gets_a_clear_error():
    with pytest.raises(ValueError, match="more than batch = 4 words, got 4"):
        next(segments(torch.arange(4), batch=4, length=2))


def test_a_corpus_is_encoded_by_one_vocabulary():
    vocabulary = Vocabulary(("a", "<unk>"))
    corpus = Corpus.from_words(vocabulary, train=["a", "a"], valid=["b"], test=[])
    assert (corpus.train.tolist(), corpus.valid.tolist(), corpus.test.tolist()) == ([0, 0], [1], [])


def test_batches_begin_again_after_a_pass():
    corpus = Corpus(range(30), *(torch.arange(21) for _ in range(3)))
    assert corpus.batches(batch=2, length=4) == 3
    first, again = (corpus.batch(number, batch=2, length=4) for number in (1, 4))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
