"""Files that somebody else may have put there: read where they are regular ones of a size, written where no link is."""

from __future__ import annotations

import errno
import os

#: Bytes of a file that is read whole.
MOST_BYTES = 64 << 20


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """What a regular file holds.

    Raises:
        OSError: also where that is more than MOST_BYTES, or it is something else, such as a pipe.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    if os.path.getsize(path) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"longer than {MOST_BYTES} bytes, the most that is read", os.fspath(path))
    with open(path, "rb") as file:
        return file.read()


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
