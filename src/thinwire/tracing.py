"""`tw.trace`: what the ranks did when, in a file for Perfetto. See docs/tracing.md."""

from __future__ import annotations

import os
from types import TracebackType

from thinwire.comm.launch.bootstrap import Group, find_communicator
from thinwire.comm.recorder.flight_recorder import trace_recorders
from thinwire.comm.recorder.trace_events import Trace, begin_trace, end_trace
from thinwire.comm.recorder.trace_file import write_trace


class trace:
    """Traces the calls on all communicators of this process while the block lasts. On every rank.

    Each rank adds its events to the file at the end of its block, also of one that an exception ends. All ranks begin
    as many traces to a file; further ones, to another file, are for any rank to begin. Ranks that are threads pass the
    same file, and the last one writes: their blocks overlap. Where the ranks are on several hosts, the beginning is
    collective: they compare their clocks. THINWIRE_TRACE=FILE traces a whole run, and takes the place of blocks.

    Args:
        path: the file; an earlier trace's is written over.
        comm: whose ranks compare their clocks: a communicator, a process group, or a DeviceMesh of one axis; None means
            the one that `init` made, if there is one.

    Raises:
        ArgumentError: no path, or another file's trace is under way.
        ThinwireError: the file cannot be written, or holds something else; THINWIRE_FLIGHT_RECORDER is off.
        OSError: at the end, the file cannot be written any more.

    >>> import json, tempfile, torch, thinwire as tw
    >>> with tempfile.NamedTemporaryFile() as file, tw.init() as comm:
    ...     with tw.trace(file.name):
    ...         y = tw.all_reduce(torch.ones(8), wire="none")
    ...     [event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "call"]
    ['all_reduce']
    """

    def __init__(self, path: str | os.PathLike[str], *, comm: Group | None = None) -> None:
        self._path, self._comm = path, comm
        self._begun: list[Trace] = []  # one for each block under way: ranks that are threads may share this object

    def __enter__(self) -> trace:
        begun = begin_trace(self._path)
        self._begun.append(begun)
        try:
            trace_recorders(begun)
            comm = find_communicator(self._comm)
            if comm is not None:
                comm.join_trace(begun)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        begun = self._begun.pop()
        if end_trace(begun):
            write_trace(begun)
