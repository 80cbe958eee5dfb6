"""What a trace collects: each rank's calls and their phases, in memory, until `trace_file.py` writes them.

A call's event is made where its entry in the flight recorder is, so both agree on what a call is. Phases follow one
another within a call: one begins where the one before ends, so events of a thread lie within each other or apart.
Without a trace a call looks at one attribute, and a phase costs a call that does nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple

import torch

from thinwire.comm.recorder.flight_files import VARIABLE as RECORDER_VARIABLE
from thinwire.comm.recorder.flight_files import is_off
from thinwire.errors import ArgumentError, ThinwireError

#: Events that a rank keeps; the oldest go first, and the file says how many went.
MOST_EVENTS = 1 << 16
#: The environment's variable: the file to which every rank's events are written.
VARIABLE = "THINWIRE_TRACE"
#: What a file begins with.
MARK = b'{"displayTimeUnit": "ns", "otherData": {"thinwire": '


@dataclass(frozen=True)
class Traffic:
    """What a call, or a leg of a round, sends from this rank to other ranks; rows that stay are not counted.

    Attributes:
        rows: records sent.
        logical_bytes: what the rows hold in their own dtype.
        wire_bytes: what is sent instead: records, and on a round's dispatch leg expert ids and router weights too.
    """

    rows: int
    logical_bytes: int
    wire_bytes: int


class Clock(NamedTuple):
    """How this rank's monotonic clock is read as that of the trace.

    Attributes:
        offset_ns: what is added to it.
        uncertainty_ns: by how much the sum may be wrong, either way.
        source: how that is known.
    """

    offset_ns: int = 0
    uncertainty_ns: int = 0
    source: str = "the host's monotonic clock, which all ranks read"


class Event:
    """A call, or a phase of one.

    Attributes:
        entry: the call's in the flight recorder; None for phases.
        thread: the number that the system knows the thread by.
    """

    __slots__ = ("category", "end_ns", "entry", "name", "start_ns", "thread", "traffic")

    def __init__(self, name: str, category: str, start_ns: int, thread: int, entry: list[Any] | None = None) -> None:
        self.name, self.category, self.start_ns, self.end_ns = name, category, start_ns, start_ns
        self.thread, self.entry = thread, entry
        self.traffic: Traffic | None = None


class Track:
    """One rank's events. Threads add to it and another may take them out."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.threads: dict[int, str] = {}
        self.num_added = self.num_taken = 0
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._uses_nvtx = torch.cuda.is_available()

    def open(self, name: str, category: str = "call", entry: list[Any] | None = None) -> Span:
        """An event that begins now."""
        thread = threading.get_native_id()
        if thread not in self.threads:
            self.threads[thread] = threading.current_thread().name
        if self._uses_nvtx:
            torch.cuda.nvtx.range_push(f"thinwire {name}")
        return Span(self, Event(name, category, monotonic_ns(), thread, entry))

    def add(self, event: Event) -> None:
        """An event that ends now."""
        event.end_ns = monotonic_ns()
        self.leave()
        self._events.append(event)
        self.num_added += 1

    def leave(self) -> None:
        """Ends what is shown of an event in NVIDIA's profilers."""
        if self._uses_nvtx:
            torch.cuda.nvtx.range_pop()

    def take(self) -> list[Event]:
        """All events, which are no longer kept."""
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._events.popleft())
        self.num_taken += len(taken)
        return taken

    @property
    def num_dropped(self) -> int:
        """Events that had to go."""
        return self.num_added - self.num_taken - len(self._events)


class Span:
    """An event that has begun, within which one phase after the other begins. `with` it, it ends."""

    __slots__ = ("_phase", "_track", "event")

    def __init__(self, track: Track, event: Event) -> None:
        self._track, self.event = track, event
        self._phase: Event | None = None

    def phase(self, name: str) -> None:
        """Begins a phase, and ends the one before."""
        self._end_phase()
        self._phase = self._track.open(name, "phase").event

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._track.add(self._phase)
            self._phase = None

    def close(self) -> Event:
        """Ends it, and its last phase."""
        self._end_phase()
        self._track.add(self.event)
        return self.event

    def __enter__(self) -> None:
        return

    def __exit__(self, *exception: object) -> None:
        self.close()


class Trace:
    """What one process collects for a file.

    Attributes:
        run: what the processes of one run call it.
        began: in nanoseconds since 1970.
        tracks: by what tells ranks that are threads of this process apart.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.run, self.began = path, "", time.time_ns()
        self.clock, self._ranks_of_clock = Clock(), 0
        self.tracks: dict[int | None, Track] = {}
        self.holders = 0  # blocks, of one rank or several, that end it together

    def track(self, key: int | None, rank: int, size: int) -> Track:
        """That of a rank; `key` is its number among those of this process, or None if there is but one."""
        return self.tracks.setdefault(key, Track(rank, size))

    def set_clock(self, clock: Clock, num_ranks: int) -> None:
        """Takes what so many ranks have found out together, unless it is known of more."""
        if num_ranks >= self._ranks_of_clock:
            self.clock, self._ranks_of_clock = clock, num_ranks

    def name_run(self, name: str) -> None:
        """The first communicator of a process says it, which all ranks know by one name."""
        self.run = self.run or name or secrets.token_hex(8)


class _Process:
    """The trace of this process: one at a time, as one file holds what happened in all of it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.trace: Trace | None = None


_process = _Process()


def current_trace() -> Trace | None:
    """The one under way; begins that which the environment asks for, if it has not begun.

    Raises:
        ThinwireError: THINWIRE_TRACE names what cannot be written, or is set where nothing is recorded.
    """
    if _process.trace is None and os.environ.get(VARIABLE):
        with _process.lock:
            if _process.trace is None:
                _process.trace = _new_trace(Path(os.environ[VARIABLE]), f"{VARIABLE} in the environment")
    return _process.trace


def begin_trace(path: str | os.PathLike[str]) -> Trace:
    """The one under way if it is for this file, else a new one; as many `end_trace` end it.

    Raises:
        ArgumentError: no path; another file's trace is under way.
        ThinwireError: the file cannot be written, or nothing is recorded.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ArgumentError(f"path of a trace is {path!r}, expected the name of a file")
    wanted = Path(os.fsdecode(path))
    current_trace()
    with _process.lock:
        trace = _process.trace
        if trace is None:
            trace = _process.trace = _new_trace(wanted, "path of a trace")
        elif trace.path != wanted.absolute():
            raise ArgumentError(
                f"path of a trace is {os.fspath(wanted)!r}, but one to {str(trace.path)!r} is under way: end that first"
            )
        trace.holders += 1
        return trace


def end_trace(trace: Trace) -> bool:
    """Whether it is over with that: nobody else in this process holds it, nor the environment."""
    with _process.lock:
        trace.holders -= 1
        if trace.holders or os.environ.get(VARIABLE):
            return False
        _process.trace = None
        return True


def _new_trace(path: Path, what: str) -> Trace:
    if is_off():
        raise ThinwireError(
            f"{what} is {str(path)!r}, and {RECORDER_VARIABLE} is off: a trace shows the flight recorder's entries; "
            "unset one of them"
        )
    try:
        with path.open("ab+") as file:
            file.seek(0)
            beginning = file.read(len(MARK))
    except (OSError, ValueError) as error:  # ValueError: of a path with a zero byte
        reason = getattr(error, "strerror", None) or error
        raise ThinwireError(f"{what} is {str(path)!r}, which cannot be written: {reason}") from None
    if not path.is_file():
        raise ThinwireError(f"{what} is {str(path)!r}, which is no regular file")
    if beginning and beginning != MARK:
        raise ThinwireError(f"{what} is {str(path)!r}, which is not a trace of thinwire's")
    return Trace(path.absolute())
