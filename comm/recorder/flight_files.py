"""Where flight recorders leave their files: in a folder that is this user's alone, or the one that is named.

THINWIRE_FLIGHT_RECORDER is "off", or the folder. Without it that is `thinwire-<user id>` among the temporary files, of
mode 0700, where the newest 256 files are kept; in a folder that is named, a process keeps its own newest 16.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

#: "off", or the folder of the files.
VARIABLE = "THINWIRE_FLIGHT_RECORDER"

_PREFIX = "thinwire-"
_MOST_IN_DEFAULT_FOLDER, _MOST_OF_A_PROCESS = 256, 16
_own: dict[Path, None] = {}  # this process's files, the newest last
_own_lock = threading.RLock()  # of a thread that a signal handler may interrupt


def is_off() -> bool:
    """Whether no file is to be written."""
    return os.environ.get(VARIABLE) == "off"


def describe_folder() -> str:
    """Where files go, for people."""
    return str(Path(os.environ[VARIABLE]).absolute() if os.environ.get(VARIABLE) else _default_folder())


def write_file(name: str, content: bytes) -> Path:
    """Puts a file into the folder, whole, in place of one of that name; removes the oldest where there are too many.

    Raises:
        OSError: the folder cannot be made or written to; the default one is somebody else's, or open to others.
    """
    name = _PREFIX + name
    folder, descriptor = _open_folder()
    partial = f"{name}.{secrets.token_hex(4)}.partial"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(partial, flags, 0o600, dir_fd=descriptor), "wb") as file:
            file.write(content)
        os.replace(partial, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
        _remove_oldest(folder, name, descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial, dir_fd=descriptor)
        raise
    finally:
        os.close(descriptor)
    return folder / name


def _default_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"{_PREFIX}{os.geteuid()}"


def _open_folder() -> tuple[Path, int]:
    """The folder and a descriptor of it, so that what was checked is what is written to."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if os.environ.get(VARIABLE):
        folder = Path(os.environ[VARIABLE]).absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder, os.open(folder, flags)
    folder = _default_folder()
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    descriptor = os.open(folder, flags | os.O_NOFOLLOW)
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        os.close(descriptor)
        raise PermissionError(
            f"{folder} belongs to user {found.st_uid} and has mode {found.st_mode & 0o777:04o}; expected user "
            f"{os.geteuid()} and 0700, or another folder in {VARIABLE}"
        )
    return folder, descriptor


def _remove_oldest(folder: Path, name: str, descriptor: int) -> None:
    with _own_lock:
        _own.pop(folder / name, None)
        _own[folder / name] = None
        old = list(_own)[:-_MOST_OF_A_PROCESS]
        for path in old:
            del _own[path]
    for path in old:
        with contextlib.suppress(OSError):
            path.unlink()
    if os.environ.get(VARIABLE):
        return  # one folder may be that of a thousand ranks
    written = []
    for found in os.listdir(descriptor):
        with contextlib.suppress(FileNotFoundError):  # another rank removes the same
            written.append((os.stat(found, dir_fd=descriptor, follow_symlinks=False).st_mtime_ns, found))
    for _, found in sorted(written)[:-_MOST_IN_DEFAULT_FOLDER]:
        if found.startswith(_PREFIX):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(found, dir_fd=descriptor)


class WrittenOnSignal:
    """SIGUSR1 writes the files, for as long as this is attached to a communicator.

    Python runs handlers in the main thread, between its own steps: waits of the direct transport, of threads and of
    Gloo let it, one within NCCL does not before it ends.
    """

    def __init__(self, write_all: Callable[[str], list[Path]]) -> None:
        self._write_all = write_all
        signal.signal(signal.SIGUSR1, self._handle)

    @staticmethod
    def possible() -> bool:
        """Whether this is the main thread, something is recorded, and the signal would end the process."""
        main = threading.current_thread() is threading.main_thread()
        return main and not is_off() and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL

    def _handle(self, number: int, frame: FrameType | None) -> Any:
        # What goes wrong here must not come up in the midst of the caller's own code.
        try:
            told = "\n".join(f"thinwire: flight recorder written to {path}" for path in self._write_all("SIGUSR1"))
        except Exception as error:
            told = f"thinwire: the flight recorder could not be written: {type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            os.write(2, f"{told}\n".encode(errors="replace"))

    def describe(self) -> str:
        """One line for `Communicator.explain`."""
        return "SIGUSR1: writes the flight recorder"

    def close(self) -> None:
        """Lets the signal end the process again, unless somebody else has taken it since."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGUSR1) == self._handle:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
