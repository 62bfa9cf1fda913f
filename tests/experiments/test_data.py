import numpy as np
import pytest

from experiments.data import DataSettings, find_data

WIKITEXT2 = DataSettings(kind="wikitext", path="wikitext-2", get="download it from there")


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


@pytest.mark.parametrize(
    ("folder", "problem"),
    [(None, "SKETCHOPTIM_DATA is not set; "), ("nowhere", "no data at nowhere/wikitext-2; ")],
)
def test_missing_data_is_reported_with_the_option_the_content_and_the_source(
    monkeypatch, folder, problem
):
    monkeypatch.delenv("SKETCHOPTIM_DATA", raising=False)
    if folder is not None:
        monkeypatch.setenv("SKETCHOPTIM_DATA", folder)
    with pytest.raises(FileNotFoundError) as raised:
        find_data(WIKITEXT2)
    message = str(raised.value)
    assert message.startswith(problem)
    assert "name the data with --data, or set SKETCHOPTIM_DATA to a folder" in message
    assert "'wikitext-2' in it (wiki.train.tokens" in message
    assert message.endswith("to get it: download it from there")


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
