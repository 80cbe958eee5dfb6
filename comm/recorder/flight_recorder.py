"""The flight recorder: each communicator's last operations at this rank, kept in memory and written when it matters.

An entry is one public call: its name, sizes, dtype, wires and transport, when it began and ended, and how. What a call
calls in turn is no entry of its own. Collective calls are numbered; all ranks make the same ones in the same order, so
equal numbers are the same call, and `thinwire inspect` finds the first one at which ranks part. A call that is refused
before anything was sent takes no number, as the other ranks know nothing of it.

While torch's profiler records, a call is a range in it, and what it does in turn are ranges within that.

No tensor is held, and no data. What a call costs is a list of a dozen references and two readings of the clock
(`benchmarks/bench_flight_recorder.py`): text is made when a file is written, which `comm/recorder/flight_files.py`
does.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import monotonic_ns
from types import TracebackType
from typing import Any

from torch.autograd import _profiler_enabled
from torch.autograd.profiler import record_function

from thinwire.comm.recorder.flight_files import describe_folder, write_file
from thinwire.errors import PeerTimeout, ThinwireError
from thinwire.fields import LONGEST_TEXT
from thinwire.flight import DONE, FAILED, FORMAT, INTERRUPTED, POSTED, RING, UNDER_WAY, VERSION

#: An entry's fields. DETAILS are names and values in turn; FAILURE is what ended the call: the error's class, and of a
#: PeerTimeout lane, epoch, phase and the ranks to blame.
NUMBER, NAME, SHAPE, DTYPE, WIRES, TRANSPORT, DETAILS, START, END, STATE, FAILURE, INSIDE = range(12)
Entry = list[Any]

_MASK = RING - 1
_MOST_WRITTEN = 16  # files that one signal writes

_recorders: weakref.WeakSet[FlightRecorder] = weakref.WeakSet()  # of communicators that are not closed
_UNTOLD = (None, None, None, (), None, ())  # what is recorded of a call that says nothing
_NO_RANGE: AbstractContextManager[None] = nullcontext()


class ProfiledRange:
    """A range of torch's profiler that begins now, within which one phase follows another. `with` it, it ends."""

    __slots__ = ("_phase", "_whole")

    def __init__(self, name: str) -> None:
        self._whole, self._phase = _open_range(name), None

    def phase(self, name: str | None) -> None:
        """Ends the phase under way, and begins one; None: begins none."""
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
        self._phase = None if name is None else _open_range(name)

    def close(self) -> None:
        """Ends it, and its last phase."""
        self.phase(None)
        self._whole.__exit__(None, None, None)

    def __enter__(self) -> None:
        return

    def __exit__(self, *exception: object) -> None:
        self.close()


def _open_range(name: str) -> Any:
    return record_function(f"thinwire {name}").__enter__()


class FlightRecorder:
    """The last operations of one communicator at one rank; used by the communicator's own thread, read by any.

    Args:
        writes: whether it is ever written to a file.

    Attributes:
        communicator: what all of its ranks know it by, once they have met.
        begun: calls so far, without those within others.
        end: ends the communicator, once it is made and as long as there is one.
    """

    communicator = ""
    begun = 0
    end: Callable[[], Callable[[BaseException], None] | None] | None = None  # a weak reference
    _range: ProfiledRange | None = None  # of the call that is being made

    def __init__(self, rank: int, size: int, origin: str, backend: str, timeout: float, writes: bool = True) -> None:
        self.writes = writes
        self._described: dict[str, Any] = {"backend": backend, "rank": rank, "size": size, "timeout": timeout}
        self._origin = origin
        # An entry is put in whole, so a signal handler or another thread finds no half of one; and a Work that ends an
        # entry long gone from here changes no other.
        self._entries: list[Entry | None] = [None] * RING
        self._number = 0
        self._new: Entry = []
        self.current: Entry | None = None  # of the call that is being made, in which others may be made
        self._turn = threading.RLock()  # of the thread whose calls are made
        self._written: Path | None = None  # by the first PeerTimeout
        if writes:
            _recorders.add(self)

    def take_turn(self) -> None:
        """Until `end_turn` calls come from this thread alone, which may take several turns within each other.

        Two threads' calls would meet the peers' in any order, so the second one is refused before it has sent anything.

        Raises:
            ThinwireError: another thread's call is under way.
        """
        if not self._turn.acquire(blocking=False):
            entry = self.current
            name = "a call" if entry is None else entry[NAME]
            raise ThinwireError(
                f"another thread is in {name} on this communicator, and its calls must come from one thread at a time: "
                "wait for that one, or give each thread a communicator of its own, by split(groups=[[0, 1, ...]])"
            )

    def end_turn(self) -> None:
        """The thread's calls are over, or its inner ones."""
        self._turn.release()

    def begin(self, *recorded: Any, numbered: bool = True) -> Call:
        """A call that begins with `with`: its name, and as much as there is of what `Call` takes."""
        return Call(self, (*recorded, *_UNTOLD[len(recorded) :]), numbered)

    def phase(self, name: str) -> None:
        """What the call under way does from now on, for a profiler."""
        if self._range is not None:
            self._range.phase(name)

    def aside(self, name: str) -> AbstractContextManager[None]:
        """Shows a profiler what is no call: nobody waits for peers in it."""
        return ProfiledRange(name) if _profiler_enabled() else _NO_RANGE

    def ended_by(self, error: BaseException) -> None:
        """Ends the communicator, if what ended a call comes from outside: peers may have made that call.

        To make it again would be the next call there, and the ranks would be a call apart from then on.
        """
        end = None if self.end is None or isinstance(error, ThinwireError) else self.end()
        if end is not None:
            end(error)

    def _leave(self, error: BaseException | None) -> None:
        entry, self.current = self.current, None
        if self._range is not None:
            self._range.close()
            self._range = None
        if entry is None:
            return
        if error is not None:
            self.failed(entry, error)
        elif entry[STATE] is UNDER_WAY:
            entry[END] = monotonic_ns()
            entry[STATE] = DONE

    def failed(self, entry: Entry, error: BaseException) -> None:
        """Notes what ended a call."""
        if entry[FAILURE] is None:
            entry[END], entry[FAILURE] = monotonic_ns(), self._failure_of(error)
            entry[STATE] = FAILED if isinstance(error, Exception) else INTERRUPTED
        if isinstance(error, PeerTimeout) and self.writes:
            self._tell(error)

    def _failure_of(self, error: BaseException) -> tuple[str, int | None, int | None, str | None, tuple[int, ...]]:
        if not isinstance(error, PeerTimeout):
            return type(error).__name__, None, None, None, ()
        # It may have come through a call on a communicator of some of the ranks, which numbers them otherwise.
        own = error.__dict__.setdefault("_communicator", self.communicator) == self.communicator
        return type(error).__name__, error.lane, error.epoch, error.phase, error.ranks if own else ()

    def _tell(self, error: PeerTimeout) -> None:
        """Writes the file, once: later calls find out what this one did, and would only push it out of the ring."""
        own = f"the last operations of rank {self._described['rank']} of {self._described['size']}"
        try:
            if self._written is None:
                self._written = self.write(f"{type(error).__name__}: {error}")
            note = f"{own} are in {self._written}; `thinwire inspect` compares the files of all ranks"
        except Exception as problem:
            note = f"{own} could not be written: {type(problem).__name__}: {problem}"
        notes: list[str] = getattr(error, "__notes__", [])
        if note not in notes:
            error.__notes__ = [*notes, note]  # add_note, which Python 3.10 lacks

    def write(self, reason: str) -> Path:
        """Writes the file, in place of what this recorder wrote before, and returns its path.

        Raises:
            OSError: the folder or the file cannot be made.
        """
        held = self._described
        name = f"{self.communicator[:8] or 'unmet'}-rank{held['rank']}-of-{held['size']}-pid{os.getpid()}"
        content = {
            "format": FORMAT,
            "version": VERSION,
            "communicator": self.communicator,
            **held,
            "origin": _text(self._origin),
            "host": _text(platform.node()),
            "pid": os.getpid(),
            "written": time.time(),
            "written_ns": monotonic_ns(),
            "reason": _text(reason),
            "operations": [entry_as_json(entry) for entry in self._snapshot()],
        }
        return write_file(f"{name}.json", json.dumps(content, separators=(",", ":")).encode())

    def _snapshot(self) -> list[Entry]:
        first = max(0, self.begun - RING)
        entries = [self._entries[place & _MASK] for place in range(first, self.begun)]
        return [entry.copy() for entry in entries if entry is not None]

    def describe(self) -> str:
        """One line for `Communicator.explain`."""
        if not self.writes:
            return "flight recorder: off"
        return f"flight recorder: the last {RING} operations, written to {describe_folder()} on PeerTimeout"

    def close(self) -> None:
        """A signal writes it no longer."""
        _recorders.discard(self)


class Call:
    """An operation under way. One within another has no entry: what is said of it is said of the outer one.

    Args:
        recorded: name, shape, dtype, wires, transport, details, as `Calls.call` takes them.
        numbered: whether all ranks make this call.
    """

    __slots__ = ("_entry", "_numbered", "_outer", "_recorded", "_recorder")

    def __init__(self, recorder: FlightRecorder, recorded: tuple[Any, ...], numbered: bool = True) -> None:
        self._recorder, self._recorded, self._numbered = recorder, recorded, numbered

    def __enter__(self) -> Call:
        recorder, recorded = self._recorder, self._recorded
        recorder.take_turn()
        self._outer = recorder.current
        if self._outer is not None:
            self._entry: Entry = self._outer
            self._entry[INSIDE] = recorded[0]
            return self
        try:
            begun, number, now = recorder.begun, None, monotonic_ns()
            if (
                self._numbered
            ):  # from here on nothing is called, where an interrupt could leave a number without an entry
                number = recorder._number = recorder._number + 1
            self._entry = recorder.current = recorder._new = recorder._entries[begun & _MASK] = [
                number, *recorded, now, 0, UNDER_WAY, None, None,
            ]  # fmt: skip
            recorder.begun = begun + 1
            if _profiler_enabled():
                recorder._range = ProfiledRange(recorded[0])
        except BaseException as error:  # from outside, which may come at the end, too
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        recorder = self._recorder
        try:
            if recorder.current is self._outer or recorder.current is None:
                return
            try:
                recorder._leave(error)
            finally:
                if error is not None:
                    recorder.ended_by(error)
        finally:
            recorder.end_turn()

    def takes(self, transport: str) -> None:
        """Which way it goes, where what was asked for left that open."""
        self._entry[TRANSPORT] = transport

    def tell(self, *details: Any) -> None:
        """Names and values in turn, where they are known only now."""
        self._entry[DETAILS] = details

    def failed(self, error: BaseException) -> None:
        """Notes what ended it, if that is not raised within it."""
        self._recorder.failed(self._entry, error)

    def posted(self) -> PendingCall:
        """What ends it, where it returns before it is done; for its Work."""
        self._entry[STATE] = POSTED
        return PendingCall(self._recorder, self._entry)


class PendingCall:
    """What ends an asynchronous call's entry: `with` it the call is waited for, in a turn of the recorder's."""

    def __init__(self, recorder: FlightRecorder, entry: Entry) -> None:
        self._recorder, self._entry = recorder, entry
        self.take_turn, self.end_turn = recorder.take_turn, recorder.end_turn
        self._outer: Entry | None = None
        self._outer_range: ProfiledRange | None = None

    def __enter__(self) -> None:
        # Another call on the communicator may be what waits.
        recorder = self._recorder
        inner = ProfiledRange(f"wait for {self._entry[NAME]}") if _profiler_enabled() else None
        # From here on nothing is called, where an interrupt could leave later calls within this one.
        self._outer_range, recorder._range = recorder._range, inner
        self._outer, recorder.current = recorder.current, self._entry
        self._entry[STATE] = UNDER_WAY
        self._entry[FAILURE] = None  # of a wait that was interrupted, and is gone on with

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recorder._leave(error)  # who waits again goes on with this call
        self._recorder.current, self._recorder._range = self._outer, self._outer_range

    def end(self, error: BaseException) -> None:
        """The call ended without being waited for."""
        self._recorder.failed(self._entry, error)


def write_all(reason: str) -> list[Path]:
    """Writes the files of this process's open communicators, of those that were used last.

    Raises:
        OSError: the folder or a file cannot be made.
    """
    used = [recorder for recorder in list(_recorders) if recorder.begun]
    used.sort(key=lambda recorder: recorder._new[START], reverse=True)
    return [recorder.write(reason) for recorder in used[:_MOST_WRITTEN]]


def entry_as_json(entry: Entry) -> dict[str, Any]:
    """An entry as a file has it."""
    number, name, shape, dtype, wires, transport, details, start, end, state, failure, inside = entry
    error, lane, epoch, phase, blamed = failure or (None, None, None, None, ())
    formats = wires if isinstance(wires, list | tuple) else (wires,)
    return {
        "number": number,
        "name": name,
        "shape": None if shape is None else list(map(int, shape)),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "wires": list(map(str, formats)),
        "transport": transport,
        "details": {key: _detail(value) for key, value in zip(details[::2], details[1::2], strict=True)},
        "start_ns": start,
        "end_ns": end,
        "state": state,
        "failure": error,
        "lane": lane,
        "epoch": epoch,
        "phase": phase,
        "blamed": list(blamed),
        "inside": None if state is DONE else inside,
    }


def _detail(value: object) -> object:
    if isinstance(value, tuple | list):
        return list(value)
    return value if type(value) is int else _text(str(value))


def _text(text: str) -> str:
    """What a reader takes for text."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:LONGEST_TEXT])
