"""`tw.trace`: what the ranks did and when, in a file for Perfetto. See docs/tracing.md."""

from __future__ import annotations

import os
from types import TracebackType

from thinwire.comm.launch.bootstrap import Group, find_communicator
from thinwire.comm.recorder.flight_recorder import trace_recorders
from thinwire.comm.recorder.trace_events import Trace, begin_trace, end_trace
from thinwire.comm.recorder.trace_file import write_trace


class trace:
    """Traces the calls on all communicators of this process during the block. Use it on every rank.

    Each rank adds its events to the file at the end of its block, even if an exception ends it. All ranks must begin
    the same number of traces to a file; a trace of one rank alone goes to another file. Ranks that are threads pass the
    same file with overlapping blocks, and the last one writes it. If the ranks are on several hosts, the beginning is
    collective, as they compare their clocks. THINWIRE_TRACE=FILE traces a whole run without a block.

    Args:
        path: the file; an earlier trace there is overwritten.
        comm: the ranks that compare their clocks: a communicator, a process group, or a DeviceMesh of one axis. None
            means the communicator that `init` made, if there is one.

    Raises:
        ArgumentError: `path` is no path, or a trace to another file is under way.
        ThinwireError: the file cannot be written, or is not a trace; or THINWIRE_FLIGHT_RECORDER is off.
        OSError: the file can no longer be written at the end of the block.

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
