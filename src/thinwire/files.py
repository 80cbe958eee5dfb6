"""Files in folders where somebody else may have put a link: it is not followed."""

from __future__ import annotations

import errno
import os


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
    """Writes a file by way of one beside it: a process that is killed leaves old content or new, whole."""
    beside = f"{os.fspath(path)}.part"
    write_file(beside, content)
    os.replace(beside, path)
