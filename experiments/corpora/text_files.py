"""Lines of text, from plain, gzip and xz files and from the members of zip and tar archives."""

import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, cast

_DAMAGED = (
    EOFError,
    gzip.BadGzipFile,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)
_TARS = (".tar", ".tar.gz", ".tgz", ".tar.xz")


@dataclass(frozen=True)
class TextFile:
    """A file of text, or a member of an archive; read line by line, never as a whole."""

    path: Path
    member: str | None = None

    @property
    def name(self) -> str:
        """The last part of the file's or the member's path."""
        return PurePosixPath(self.member).name if self.member is not None else self.path.name

    def lines(self) -> Iterator[str]:
        """The lines, one by one; bytes that are not UTF-8 become U+FFFD."""
        # a line ends in a newline and nowhere else: articles hold other separators
        with (
            _readable(self.path),
            self._opened() as stream,
            io.TextIOWrapper(stream, encoding="utf-8", errors="replace", newline="\n") as lines,
        ):
            yield from lines

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        if self.member is None:
            with _unpacked(self.path) as stream:
                yield stream
        elif _is_tar(self.path):
            with tarfile.open(self.path) as tar:
                member = tar.extractfile(self.member)
                assert member is not None  # only files are listed
                yield member
        else:
            with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as stream:
                yield stream


def text_files(path: Path) -> list[TextFile]:
    """All files below a folder, all members of an archive, or the one file that `path` is."""
    if path.is_dir():
        return [TextFile(file) for file in sorted(path.rglob("*")) if file.is_file()]
    with _readable(path):
        if _is_tar(path):
            with tarfile.open(path) as tar:
                members = [member.name for member in tar.getmembers() if member.isfile()]
        elif path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                members = [info.filename for info in archive.infolist() if not info.is_dir()]
        else:
            return [TextFile(path)]
    return [TextFile(path, member) for member in members]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Names the file in the errors of one that is truncated or damaged."""
    try:
        yield
    except _DAMAGED as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{path} must be a whole file, and it is truncated or damaged ({reason}); get it again"
        ) from error


def all_lines(files: Iterable[TextFile]) -> Iterator[str]:
    """The lines of several files, one file after the other."""
    for file in files:
        yield from file.lines()


def _unpacked(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path))
    if path.suffix == ".xz":
        return lzma.open(path)
    return path.open("rb")


def _is_tar(path: Path) -> bool:
    return path.name.endswith(_TARS)
