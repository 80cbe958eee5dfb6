"""The flight recorder: each communicator's last calls at this rank, kept in memory and written when it matters.

No tensor is held, and no data. An entry is a list of a dozen references: text is made when a file is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
import time
import weakref
from pathlib import Path
from time import monotonic_ns
from typing import Any

from thinwire.errors import PeerTimeout
from thinwire.fields import LONGEST_TEXT
from thinwire.files import replace_file
from thinwire.flight import FAILED, FORMAT, INTERRUPTED, RING, VERSION

#: "off", or the folder of the files. Without it that is `thinwire-<user id>` among the temporary files, of mode 0700.
VARIABLE = "THINWIRE_FLIGHT_RECORDER"

_FIELDS = "number name shape dtype wires transport details start_ns end_ns state failure inside".split()
#: An entry's fields. DETAILS are names and values in turn; FAILURE is what ended the call, as fields of the file.
NUMBER, NAME, SHAPE, DTYPE, WIRES, TRANSPORT, DETAILS, START, END, STATE, FAILURE, INSIDE = range(len(_FIELDS))
Entry = list[Any]

_MOST_KEPT = 256  # files in the default folder
_NO_FAILURE = {"failure": None, "lane": None, "epoch": None, "phase": None, "blamed": ()}
_recorders: weakref.WeakSet[FlightRecorder] = weakref.WeakSet()  # of communicators that are not closed


class FlightRecorder:
    """The last operations of one communicator at one rank, for its own thread; others may write it, if it `writes`."""

    communicator = ""  # what all of its ranks know it by, once they have met
    begun = 0  # calls so far, without those within others
    _written: Path | None = None  # by the first PeerTimeout

    def __init__(self, rank: int, size: int, origin: str, backend: str, timeout: float, writes: bool = True) -> None:
        self.writes = writes
        self._described = {"origin": _text(origin), "backend": backend, "rank": rank, "size": size, "timeout": timeout}
        # An entry is put in whole, so a signal handler or another thread finds no half of one; and a Work that ends an
        # entry long gone from here changes no other.
        self._entries: list[Entry | None] = [None] * RING
        if writes:
            _recorders.add(self)

    def failed(self, entry: Entry, error: BaseException) -> None:
        """Notes what ended a call, and writes the file if that is a PeerTimeout."""
        lost = error if isinstance(error, PeerTimeout) else None
        if entry[FAILURE] is None:
            told: dict[str, Any] = {"failure": type(error).__name__}
            if lost is not None:
                told |= {"lane": lost.lane, "epoch": lost.epoch, "phase": lost.phase}
                # It may have come through a call on a communicator of some of the ranks, which numbers them otherwise.
                if lost.__dict__.setdefault("_communicator", self.communicator) == self.communicator:
                    told["blamed"] = lost.ranks
            entry[END], entry[FAILURE] = monotonic_ns(), _NO_FAILURE | told
            entry[STATE] = FAILED if isinstance(error, Exception) else INTERRUPTED
        if lost is not None and self.writes:
            self._tell(lost)

    def _tell(self, error: PeerTimeout) -> None:
        """Writes the file, once: later calls find out what this one did, and would only push it out of the ring."""
        own = f"the last operations of rank {self._described['rank']} of {self._described['size']}"
        try:
            self._written = self._written or self.write(f"{type(error).__name__}: {error}")
            note = f"{own} are in {self._written}; `thinwire inspect` compares the files of all ranks"
        except Exception as problem:
            note = f"{own} could not be written: {type(problem).__name__}: {problem}"
        notes: list[str] = getattr(error, "__notes__", [])
        if note not in notes:
            error.__notes__ = [*notes, note]  # add_note, which Python 3.10 lacks

    def write(self, reason: str) -> Path:
        """Writes the file, in place of what this recorder wrote before, and returns its path.

        Raises:
            OSError: the folder or the file cannot be made; the default folder is somebody else's, or open to others.
        """
        content = {
            "format": FORMAT, "version": VERSION, "communicator": self.communicator, **self._described,
            "host": _text(platform.node()), "pid": os.getpid(), "written": time.time(), "written_ns": monotonic_ns(),
            "reason": _text(reason), "operations": [_as_json(entry) for entry in self.entries()],
        }  # fmt: skip
        place = "rank{rank}-of-{size}".format(**self._described)
        name = f"thinwire-{self.communicator[:8] or 'unmet'}-{place}-pid{os.getpid()}.json"
        return write_file(name, json.dumps(content, separators=(",", ":")).encode())

    def entries(self) -> list[Entry]:
        """The last ones, the newest last, as they are now."""
        entries = [self._entries[place % RING] for place in range(max(0, self.begun - RING), self.begun)]
        return [entry.copy() for entry in entries if entry is not None]

    def describe(self) -> str:
        """One line for `Communicator.explain`."""
        told = f"the last {RING} operations, written to {_folder()} on PeerTimeout"
        return f"flight recorder: {told if self.writes else 'off'}"

    def close(self) -> None:
        """A signal writes it no longer."""
        _recorders.discard(self)


def is_off() -> bool:
    """Whether no file is to be written."""
    return os.environ.get(VARIABLE) == "off"


def write_all(reason: str) -> list[Path]:
    """Writes the files of this process's open communicators; see `FlightRecorder.write`."""
    return [recorder.write(reason) for recorder in list(_recorders) if recorder.begun]


def write_file(name: str, content: bytes) -> Path:
    """Puts a file into the folder, whole, in place of one of that name; see `FlightRecorder.write`."""
    folder, named = _folder(), bool(os.environ.get(VARIABLE))
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=named)
    found = folder.lstat()
    if not named and (found.st_uid != os.geteuid() or found.st_mode & 0o170077 != 0o040000):
        raise PermissionError(
            f"{folder} belongs to user {found.st_uid} and has mode {found.st_mode & 0o777:04o}; expected a folder of "
            f"user {os.geteuid()} with mode 0700, or another one in {VARIABLE}"
        )
    replace_file(folder / name, content)
    with contextlib.suppress(OSError):  # another rank removes the same
        for old in [] if named else sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)[:-_MOST_KEPT]:
            old.unlink()
    return folder / name


def _folder() -> Path:
    return Path(os.environ.get(VARIABLE) or f"{tempfile.gettempdir()}/thinwire-{os.geteuid()}").absolute()


def _as_json(entry: Entry) -> dict[str, Any]:
    wires, details = entry[WIRES], entry[DETAILS]
    return dict(zip(_FIELDS, entry, strict=True)) | (entry[FAILURE] or _NO_FAILURE) | {
        "shape": None if entry[SHAPE] is None else list(map(int, entry[SHAPE])),
        "dtype": None if entry[DTYPE] is None else str(entry[DTYPE]).removeprefix("torch."),
        "wires": list(map(str, wires if isinstance(wires, list | tuple) else (wires,))),
        "details": {
            name: value if type(value) in (int, list, tuple) else _text(str(value))
            for name, value in zip(details[::2], details[1::2], strict=True)
        },
    }  # fmt: skip


def _text(text: str) -> str:
    """Makes text that a reader of the file accepts."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:LONGEST_TEXT])
