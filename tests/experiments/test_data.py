import re

import numpy as np
import pytest

from experiments.data import DataSettings, find_data


@pytest.mark.parametrize(
    ("settings", "file", "words"),
    [
        ({"kind": "text", "path": "text.txt", "held_out": 0.1}, "text.txt", 3),
        ({"kind": "counts", "path": "counts.npy", "words": 100}, "counts.npy", 7),
    ],
)
def test_data_is_read_below_the_data_folder(tmp_path, monkeypatch, settings, file, words):
    (tmp_path / "text.txt").write_text("a\n" * 40, encoding="utf-8")
    np.save(tmp_path / "counts.npy", np.ones(7, dtype=np.int32))
    monkeypatch.setenv("SKETCHOPTIM_DATA", str(tmp_path))
    corpus = DataSettings(**settings).read()
    assert len(corpus.vocabulary) == words
    assert len(DataSettings(**settings).read(tmp_path / file).train) == len(corpus.train)


def test_missing_data_is_reported_with_the_way_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SKETCHOPTIM_DATA", str(tmp_path))
    settings = DataSettings(kind="wikitext", path="wikitext-2", get="download it from there")
    message = f"no data at {tmp_path / 'wikitext-2'}: download it from there; then name it with"
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        find_data(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "html"}, r"kind must be one of \['wikitext', .*\], got 'html'"),
        ({"kind": "text", "min_count": 0}, "min_count must be >= 1, got 0"),
        ({"kind": "counts", "words": 0}, "words must be >= 1, got 0"),
    ],
)
def test_bad_data_settings_get_a_clear_error(settings, message):
    with pytest.raises(ValueError, match=message):
        DataSettings(**settings)


def test_the_digest_of_a_folder_follows_names_and_contents_and_not_the_place(tmp_path):
    def digest(place, **texts):
        (tmp_path / place).mkdir()
        for name, text in texts.items():
            (tmp_path / place / f"{name}.txt").write_text(text, encoding="utf-8")
        return DataSettings(kind="text").sha256(tmp_path / place)

    first = digest("one", a="x", b="y")
    assert digest("two", a="x", b="y") == first
    others = [digest("three", a="x", c="y"), digest("four", a="x", b="z"), digest("five")]
    assert len({first, *others}) == 4
