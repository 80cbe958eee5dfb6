"""The file of a trace: JSON that Perfetto and chrome://tracing open, which each rank adds its events to when it ends.

A rank locks the file, cuts off its end, adds its lines and writes the end again. So after each rank the file is whole,
and one that is killed leaves no more than its own events out. Who comes first begins the file, in place of an earlier
run's: what is neither of this run nor younger than it.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from thinwire.comm.recorder.flight_recorder import FlightRecorder, entry_as_json, trace_recorders
from thinwire.comm.recorder.trace_events import MARK, Event, Trace, Track
from thinwire.version import VERSION

_END = b"\n]}\n"
_MOST_HEADER = 4096  # bytes of the first line


def write_track(trace: Trace, track: Track) -> None:
    """Adds a rank's events to the file; those that were added stay there.

    Raises:
        OSError: it cannot be written.
    """
    events = track.take()
    lines = [json.dumps(line) for line in (*_described(trace, track), *map(_line_of(trace, track), events))]
    header = json.dumps(
        {"displayTimeUnit": "ns", "otherData": {"thinwire": VERSION, "run": trace.run, "written": time.time_ns()}}
    )
    first = f'{header[:-1]}, "traceEvents": [\n'.encode()
    assert first.startswith(MARK)
    _append(trace, first, ",\n".join(lines).encode())


def write_recorder(recorder: FlightRecorder) -> None:
    """Adds the events of the rank whose recorder it is, as its communicator is about to close."""
    trace, track = recorder.trace, recorder.track
    if trace is None or track is None:
        return
    try:
        write_track(trace, track)
    except OSError as error:  # whoever closes a communicator has nothing to do with it
        warnings.warn(f"the trace {trace.path} could not be written: {error}", RuntimeWarning, stacklevel=2)


def write_trace(trace: Trace) -> None:
    """Adds the events of all ranks of this process, for which the trace is over.

    Raises:
        OSError: it cannot be written.
    """
    trace_recorders(None)
    trace.name_run("")
    for track in trace.tracks.values():
        write_track(trace, track)


def _append(trace: Trace, first: bytes, lines: bytes) -> None:
    descriptor = os.open(trace.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # given back with the file
        found = file.readline(_MOST_HEADER)
        if found and _is_of_run(found, trace):
            end = file.seek(0, os.SEEK_END) - len(_END)
            file.seek(end)
            if file.read() == _END:
                file.seek(end)
            else:  # the rank before was killed while it wrote: its last line goes
                file.seek(len(found))
                kept = file.read().rpartition(b",\n")[0]
                file.seek(len(found) + len(kept))
            before = b",\n" if file.tell() > len(found) else b""
        else:
            before = first
            file.seek(0)
        file.write(before + lines + _END)
        file.truncate()


def _is_of_run(header: bytes, trace: Trace) -> bool:
    try:
        told = json.loads(header.rstrip() + b"]}")["otherData"]
        # Ranks whose first communicators are those of different groups know the run by different names.
        return bool(told["run"] == trace.run or told["written"] >= trace.began)
    except (ValueError, KeyError, TypeError):
        return False


def _described(trace: Trace, track: Track) -> Iterable[dict[str, Any]]:
    """Metadata: names of the rank and its threads, and what else is to be known of its events."""
    clock, host = trace.clock, platform.node()
    told = {
        "process_name": {"name": f"rank {track.rank}"},
        "process_sort_index": {"sort_index": track.rank},
        "process_labels": {"labels": f"of {track.size}, on {host}, {track.num_dropped} events dropped"},
        "thinwire_rank": {
            "rank": track.rank,
            "ranks": track.size,
            "host": host,
            "pid": os.getpid(),
            "dropped_events": track.num_dropped,
            "clock": clock._asdict(),
        },
    }
    for name, arguments in told.items():
        yield {"ph": "M", "name": name, "pid": track.rank, "tid": 0, "args": arguments}
    for thread, name in track.threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": track.rank, "tid": thread, "args": {"name": name}}


def _line_of(trace: Trace, track: Track) -> Any:
    offset = trace.clock.offset_ns

    def line(event: Event) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if event.entry is not None:
            entry = entry_as_json(event.entry)
            told = {"call": entry.pop("number"), **entry.pop("details")}
            told |= {name: entry[name] for name in ("shape", "dtype", "wires", "transport") if entry[name]}
            if entry["failure"]:
                told |= {name: entry[name] for name in ("failure", "phase", "blamed") if entry[name]}
        if event.traffic is not None:
            told |= asdict(event.traffic)
        return {
            "ph": "X",
            "name": event.name,
            "cat": event.category,
            "pid": track.rank,
            "tid": event.thread,
            "ts": (event.start_ns + offset) / 1000,
            "dur": (event.end_ns - event.start_ns) / 1000,
            "args": told,
        }

    return line
