"""The file of a table: created with holes, and mapped into memory."""

import errno
import mmap
import os
import stat
from pathlib import Path


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path, or a TypeError for what is no path."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be a str or a Path, got {type(path).__name__}")
    return Path(path).absolute()


def create(path: Path, nbytes: int, *, reserve: bool) -> bool:
    """Creates a file of zeros where there is none; returns whether it did.

    It gets its name when it is complete. The name it has before also keeps a second process out.
    """
    if path.exists():
        return False
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
        try:
            os.truncate(file, nbytes)
            if reserve:
                _reserve(file, path, nbytes)
            os.fsync(file)
        finally:
            os.close(file)
        if not path.exists():  # since the check above, another process may have created it
            partial.rename(path)
            is_first = True
    finally:
        if not is_first:
            partial.unlink()
    if hasattr(os, "O_DIRECTORY"):  # the new name is to survive a crash too
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return is_first


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
