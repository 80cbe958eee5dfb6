"""Files that somebody else may have put there: read where they are regular ones of a size, written where no link is."""

from __future__ import annotations

import errno
import os
import stat

#: Bytes of a file that is read whole.
MOST_BYTES = 64 << 20


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file. Of a pipe, no writer is waited for.

    Raises:
        OSError: also where it is something else.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return descriptor


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """What a regular file holds.

    Raises:
        OSError: also where that is more than MOST_BYTES.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"longer than {MOST_BYTES} bytes, the most that is read", os.fspath(path))
        return file.read(size)


def open_to_write(path: str | os.PathLike[str], flags: int = 0) -> int:
    """A descriptor of a file, which is made if need be. No link is followed: in a shared folder others may put one.

    Raises:
        OSError: also where it is a link.
    """
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "a symbolic link, which is not followed: name its target", os.fspath(path)) from None


def write_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file, in place of what it held; see `open_to_write`."""
    with os.fdopen(open_to_write(path, os.O_TRUNC), "wb") as file:
        file.write(content)


def replace_file(path: str | os.PathLike[str], content: bytes) -> None:
    """As `write_file`, by way of a file beside it: a process that is killed leaves old content or new, whole."""
    beside = f"{os.fspath(path)}.part"
    write_file(beside, content)
    os.replace(beside, path)
