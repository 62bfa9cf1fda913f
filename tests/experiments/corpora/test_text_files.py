import gzip
import io
import lzma
import tarfile
import zipfile

import pytest

from experiments.corpora.text_files import all_lines, text_files

TEXT = "a b\u2028c\n\n last"


def zipped(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("folder/plain.txt", TEXT)


def tarred(path):
    content = TEXT.encode()
    member = tarfile.TarInfo("folder/plain.txt")
    member.size = len(content)
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        tar.addfile(member, io.BytesIO(content))


WRITERS = {
    "text.txt": lambda path: path.write_text(TEXT, encoding="utf-8"),
    "text.gz": lambda path: path.write_bytes(gzip.compress(TEXT.encode())),
    "text.xz": lambda path: path.write_bytes(lzma.compress(TEXT.encode())),
    "text.zip": zipped,
    "text.tar": tarred,
    "text.tar.gz": tarred,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_lines(tmp_path, name):
    WRITERS[name](tmp_path / name)
    found = text_files(tmp_path / name)
    assert list(all_lines(found)) == ["a b\u2028c\n", "\n", " last"]
    assert len(found) == 1


def test_a_folder_gives_its_files_in_the_order_of_their_names(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(f"{name}\n", encoding="utf-8")
    assert list(all_lines(text_files(tmp_path))) == ["a.txt\n", "b.txt\n"]


def test_bytes_that_are_not_utf8_do_not_stop_the_reading(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"a \xff b\n")
    assert list(all_lines(text_files(path))) == ["a \ufffd b\n"]
