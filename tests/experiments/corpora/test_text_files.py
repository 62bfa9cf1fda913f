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


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in ("text.txt", "text.tar")])
@pytest.mark.parametrize("is_truncated", [True, False])
def test_an_archive_that_is_truncated_or_damaged_is_named(tmp_path, name, is_truncated):
    path = tmp_path / name
    WRITERS[name](path)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : None if is_truncated else middle + 8] = b"" if is_truncated else b"\xff" * 8
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} must be a whole file.* get it again"):
        list(all_lines(text_files(path)))


def test_a_folder_gives_its_files_in_the_order_of_their_names(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(f"{name}\n", encoding="utf-8")
    assert list(all_lines(text_files(tmp_path))) == ["a.txt\n", "b.txt\n"]


def test_bytes_that_are_not_utf8_do_not_stop_the_reading(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"a \xff b\n")
    assert list(all_lines(text_files(path))) == ["a \ufffd b\n"]
