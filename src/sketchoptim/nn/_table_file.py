"""The file of a table: created with holes, mapped into memory, and told apart from others.

The table's file has no header, so a small one beside it, with `.id` after the name, has what tells
it from others of the same size: a random identity, the shape and the dtype, and the inode of the
file that it was written for.
"""

import errno
import json
import mmap
import os
import secrets
import stat
import sys
import weakref
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .._files import replace_file, sync_folder
from .._validation import check_keys
from .._warning import warn

Shape = tuple[int, int, str]
"""Rows, dim and dtype of a table."""


@dataclass(frozen=True)
class Identity:
    """The identity of a table's file."""

    id: str
    rows: int
    dim: int
    dtype: str
    inode: int


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path, or a TypeError for what is no path."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be a str or a Path, got {type(path).__name__}")
    return Path(path).absolute()


def create(path: Path, nbytes: int, shape: Shape, *, reserve: bool) -> bool:
    """Creates a file of zeros and its identity if there is none; returns whether it did.

    It gets its name when it is complete. The name it has before also keeps a second process out.
    """
    if path.exists():
        return False
    if nbytes > sys.maxsize:  # the offset of a byte is an int64
        rows, dim, _ = shape
        raise ValueError(
            f"the file of {rows} rows of {dim} columns must have fewer than 2^63 bytes, got "
            f"{nbytes}; use fewer rows, a smaller dim, or feature hashing"
        )
    if path.is_symlink():
        raise FileNotFoundError(
            errno.ENOENT,
            f"{path} is a symbolic link to a file that is missing; mount or restore that file, or "
            "remove the link to start a new table here",
            str(path.readlink()),
        )
    partial = path.with_name(path.name + ".partial")
    try:
        file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError as error:
        raise FileExistsError(
            errno.EEXIST,
            f"{path} is being created by another process, or creating it was interrupted; wait, "
            "or delete this file",
            str(partial),
        ) from error
    is_first = False
    try:
        if path.exists():  # since the check above, another process has created it
            return False
        if identity_path(path).exists():
            raise FileNotFoundError(
                errno.ENOENT,
                f"the table of {identity_path(path)} is missing; restore it from a copy, or delete "
                "that file too, to start a new table here",
                str(path),
            )
        os.truncate(file, nbytes)
        if reserve:
            _reserve(file, path, nbytes)
        os.fsync(file)
        _write_identity(path, Identity(_new_id(), *shape, os.fstat(file).st_ino))
        partial.rename(path)
        is_first = True
    finally:
        os.close(file)
        if not is_first:
            partial.unlink()
    sync_folder(path.parent)  # the new name is to survive a crash too
    return True


def identity_path(path: Path) -> Path:
    """The small file with the identity of a table's file; of the target of a symbolic link."""
    path = path.resolve()
    return path.with_name(path.name + ".id")


def identify(path: Path, shape: Shape, *, copied: bool) -> str:
    """The identity of the table in a file, which is a new one if the file has none yet.

    Raises:
        ValueError: The file is not the one that the identity was written for.
    """
    inode = path.stat().st_ino
    found = _read_identity(path)
    if found is None:
        with_right = WriteLock.of(path)  # two processes must not give it two identities
        found = _read_identity(path) or Identity(_new_id(), *shape, inode)
        _write_identity(path, found)
        del with_right
    beside = identity_path(path).name
    for key, value in zip(("rows", "dim", "dtype"), shape, strict=True):
        if getattr(found, key) != value:
            raise ValueError(
                f"{key} of {path} must be {getattr(found, key)!r} as in {beside}, got {value!r}; "
                "construct FileEmbedding with it, or give another path"
            )
    if found.inode != inode:
        if not copied:
            raise ValueError(
                f"{path} is not the file that {beside} was written for: it was replaced, copied or "
                "moved here; restore the right file, or, if it has the weights of this table, open "
                "it once with copied=True"
            )
        _write_identity(path, replace(found, inode=inode))
    return found.id


def _new_id() -> str:
    return secrets.token_hex(16)


def _read_identity(path: Path) -> Identity | None:
    beside = identity_path(path)
    try:
        content = json.loads(beside.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        content = None
    remedy = "restore it from a copy, or delete it to give the table a new identity"
    check_keys(f"the content of {beside}", content, required=Identity.__match_args__, remedy=remedy)
    return Identity(**content)


def _write_identity(path: Path, identity: Identity) -> None:
    text = json.dumps(asdict(identity)) + "\n"
    replace_file(identity_path(path), lambda file: file.write(text.encode()))


class WriteLock:
    """The right of this process to write to a table's file, held until the object is freed.

    Every table of one file in one process shares one. It is advisory: it keeps out other writers
    that request it, and no reader.
    """

    def __init__(self, path: Path) -> None:
        self.process = os.getpid()  # a forked process inherits the lock, but not the right
        self._file = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self._file)
        if sys.platform == "win32":
            return
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                f"{path} is being trained by another process, and two would overwrite each "
                "other's rows; end that process, train a copy of the file, or read this one "
                "under torch.no_grad()",
                str(path),
            ) from error
        except OSError as error:  # a network file system without locks
            warn(
                f"{path} cannot be locked ({error.strerror}); make sure that no other process "
                "trains it"
            )

    @classmethod
    def of(cls, path: Path) -> "WriteLock":
        """The lock of a file, taken now unless this process holds it.

        Raises:
            BlockingIOError: Another process holds it.
        """
        status = path.stat()
        key = (os.getpid(), status.st_dev, status.st_ino)
        lock = _HELD.get(key)
        if lock is None:
            lock = _HELD[key] = cls(path)
        return lock


_HELD: "weakref.WeakValueDictionary[tuple[int, int, int], WriteLock]" = (
    weakref.WeakValueDictionary()
)
"""The locks of this process, by process, device and inode."""


def map_file(path: Path, nbytes: int, *, reserve: bool) -> mmap.mmap:
    """The whole file in memory, shared with everyone who maps it."""
    is_read_only = not stat.S_IMODE(path.stat().st_mode) & 0o222
    try:
        if is_read_only:  # root may write to such a file; its owner did not want that
            raise PermissionError
        file = os.open(path, os.O_RDWR)
    except OSError as error:
        if not isinstance(error, PermissionError) and error.errno != errno.EROFS:
            raise
        raise PermissionError(
            errno.EACCES,
            "the file of a FileEmbedding must be writable, since training writes to it; change "
            "its permissions, or copy it",
            str(path),
        ) from error
    try:
        found = os.fstat(file).st_size
        if found != nbytes:
            raise ValueError(
                f"{path} must have {nbytes} bytes for these rows, dim and dtype, got {found}; "
                "construct FileEmbedding with the sizes that the file was created with, or give "
                "another path"
            )
        if reserve:
            _reserve(file, path, nbytes)
        mapping = mmap.mmap(file, nbytes)
    finally:
        os.close(file)
    if hasattr(mmap, "MADV_RANDOM"):  # a page of neighbours is not read ahead for every row
        mapping.madvise(mmap.MADV_RANDOM)
    return mapping


def _reserve(file: int, path: Path, nbytes: int) -> None:
    if not hasattr(os, "posix_fallocate"):
        raise ValueError(
            "reserve must be False on a system without posix_fallocate, got True; "
            "make sure that the disk has the space"
        )
    disk = os.fstatvfs(file)
    missing = nbytes - os.fstat(file).st_blocks * 512
    try:
        if missing > disk.f_bavail * disk.f_frsize:  # else the disk would be full for a while
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(
            errno.ENOSPC,
            f"the disk must have space for the {nbytes} bytes of the table; free some, use fewer "
            "rows or a smaller dtype, or reserve=False if only some of the rows will be trained",
            str(path),
        ) from error
