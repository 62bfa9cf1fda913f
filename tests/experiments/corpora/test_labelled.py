import lzma

import pytest
import torch

from experiments.corpora import read_labelled

TRAIN = "a/b\tx\nc d\ty\ne\ty\nfü\tx\ng\ty\nh\tz\n"
TEST = "i\tx\nj\tnever seen\n\ty\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.tsv.xz").write_bytes(lzma.compress(TRAIN.encode()))
    (tmp_path / "test.tsv").write_text(TEST, encoding="utf-8")
    return tmp_path


def test_texts_come_back_with_classes_numbered_by_falling_count(folder):
    found = read_labelled(folder, held_out=0.3)
    texts, labels = found.train.take(torch.arange(len(found.train)))
    assert texts == ["a/b", "c d", "e", "fü"]
    assert labels.tolist() == [0, 1, 1, 0]
    assert labels.dtype == torch.int64
    assert found.classes == 2


def test_the_last_lines_are_held_out_unless_their_label_is_new(folder):
    found = read_labelled(folder, held_out=0.3)
    assert found.valid.take(torch.tensor([0])) == (["g"], torch.tensor([1]))
    assert len(found.valid) == 1


def test_test_texts_of_labels_never_trained_on_are_left_out(folder):
    found = read_labelled(folder, held_out=0.3)
    texts, labels = found.part("test").take(torch.tensor([1, 0]))
    assert texts == ["", "i"]
    assert labels.tolist() == [1, 0]


def test_a_line_without_a_label_is_named(folder):
    (folder / "test.tsv").write_text("i\tx\nno tab here\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 2 of test\.tsv must be text<TAB>label, got 'no"):
        read_labelled(folder)


def test_missing_files_are_reported_with_the_names_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must hold train\.tsv or train\.tsv\.gz or"):
        read_labelled(tmp_path)
