"""A call on a communicator: one at a time, an entry of its flight recorder, and a range of torch's profiler.

Every public operation is wrapped by `Communicator.call`:

    with comm.call("all_gather", x.shape, x.dtype, wire, transport) as call:
        call.takes("direct")
        return comm.deliver(call, finish, x.device, async_op)

An operation begins its call after all checks that this rank alone can fail, and before anything is sent. The call first
finishes pending work of earlier calls, and records itself. An exception from outside in any of this ends the
communicator at this rank.

An entry is one public call: its name, sizes, dtype, wires and transport, when it began and ended, and how. What a call
calls in turn is no entry of its own. Collective calls are numbered; all ranks make the same ones in the same order, so
equal numbers are the same call, and `thinwire inspect` finds the first one at which ranks part. A call that is refused
before anything was sent takes no number, as the other ranks know nothing of it.

While torch's profiler records, a call is a range in it, and its phases are ranges within that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import monotonic_ns
from types import TracebackType
from typing import Any, cast

from torch.autograd import _profiler_enabled
from torch.autograd.profiler import record_function

from thinwire.comm.recorder import DETAILS, END, INSIDE, NAME, STATE, TRANSPORT, Entry, FlightRecorder
from thinwire.comm.tensors import is_int
from thinwire.errors import ArgumentError, ThinwireError
from thinwire.flight import DONE, POSTED, RING, UNDER_WAY

_UNTOLD = (None, None, None, (), None, ())  # what is recorded of a call that says nothing
_NO_RANGE: AbstractContextManager[None] = nullcontext()


class Recorder(FlightRecorder):
    """The calls of a communicator at this rank: which one is under way, in whose turn."""

    current: Entry | None = None  # of the call that is being made, in which others may be made
    end: Callable[[], Callable[[BaseException], None] | None] | None = None  # a weak reference: ends the communicator
    ended: str | None = None  # why no calls are made here any more: in a forked process, or after an interrupt
    _number = 0

    def __init__(self, rank: int, size: int, origin: str, backend: str, timeout: float, writes: bool = True) -> None:
        super().__init__(rank, size, origin, backend, timeout, writes)
        self._turn = threading.RLock()  # of the thread whose calls are made
        self._ranges: list[Any] = []  # of torch's profiler: the call's, and the one of its phase

    def take_turn(self) -> None:
        """Until `end_turn` calls come from this thread alone, which may take several turns within each other.

        Two threads' calls would meet the peers' in any order, so the second one is refused before it has sent anything.

        Raises:
            ThinwireError: another thread's call is under way; or the communicator has ended at this rank.
        """
        if self.ended is not None:
            raise ThinwireError(self.ended)
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
        """Tells a profiler what the call under way does from now on."""
        if self._ranges:
            self._close_ranges(1)
            self._ranges.append(_open_range(name))

    def aside(self, name: str) -> AbstractContextManager[Any]:
        """Shows a profiler what is no call: nobody waits for peers in it."""
        return record_function(f"thinwire {name}") if _profiler_enabled() else _NO_RANGE

    def ended_by(self, error: BaseException) -> None:
        """Ends the communicator, if what ended a call comes from outside, such as a signal handler's exception.

        Peers may have made that call. To make it again would be the next one there, and the ranks would be a call apart
        from then on. May be called again.
        """
        end = None if self.end is None or isinstance(error, ThinwireError) else self.end()
        if end is not None:
            end(error)

    def _close_ranges(self, left: int) -> None:
        while len(self._ranges) > left:
            self._ranges.pop().__exit__(None, None, None)

    def _leave(self, error: BaseException | None) -> None:
        entry, self.current = self.current, None
        self._close_ranges(0)
        if entry is None:
            return
        if error is not None:
            self.failed(entry, error)
        elif entry[STATE] is UNDER_WAY:
            entry[END], entry[INSIDE], entry[STATE] = monotonic_ns(), None, DONE


def _open_range(name: str) -> Any:
    return record_function(f"thinwire {name}").__enter__()


class Call:
    """An operation under way. One within another has no entry: what is said of it is said of the outer one.

    Args:
        recorded: name, shape, dtype, wires, transport, details, as `Communicator.call` takes them.
        numbered: whether all ranks make this call.
    """

    __slots__ = ("_entry", "_numbered", "_outer", "_recorded", "_recorder")

    def __init__(self, recorder: Recorder, recorded: tuple[Any, ...], numbered: bool = True) -> None:
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
            # From here on nothing is called, where an interrupt could leave a number without an entry.
            if self._numbered:
                number = recorder._number = recorder._number + 1
            self._entry = recorder.current = recorder._entries[begun % RING] = [
                number, *recorded, now, 0, UNDER_WAY, None, None,
            ]  # fmt: skip
            recorder.begun = begun + 1
            if _profiler_enabled():
                recorder._ranges.append(_open_range(recorded[0]))
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
        """Gives its Work what ends it, where it returns before it is done."""
        self._entry[STATE] = POSTED
        return PendingCall(self._recorder, self._entry)


class PendingCall:
    """Ends an asynchronous call's entry: its `with` block waits for the call, in a turn of the recorder's."""

    def __init__(self, recorder: Recorder, entry: Entry) -> None:
        self._recorder, self._entry = recorder, entry
        self.take_turn, self.end_turn, self.ended_by = recorder.take_turn, recorder.end_turn, recorder.ended_by
        self._outer: tuple[Entry | None, list[Any]] = None, []

    def __enter__(self) -> None:
        recorder = self._recorder
        ranges = [_open_range(f"wait for {self._entry[NAME]}")] if _profiler_enabled() else []
        # From here on nothing is called, where an interrupt could leave later calls within this one.
        self._outer = recorder.current, recorder._ranges  # another call on the communicator may be what waits
        recorder.current, recorder._ranges = self._entry, ranges
        self._entry[STATE] = UNDER_WAY

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        recorder = self._recorder
        try:
            recorder._leave(error)
        finally:
            recorder.current, recorder._ranges = self._outer
            if error is not None:
                recorder.ended_by(error)

    def end(self, error: BaseException) -> None:
        """The call ended without being waited for."""
        self._recorder.failed(self._entry, error)


def checked_programs(number: object) -> int | None:
    """`num_programs` as it was passed; ArgumentError for what is no number of programs."""
    if number is None or is_int(number, 1):
        return cast(int | None, number)
    raise ArgumentError(f"num_programs is {number!r}, expected an int of at least 1, or None")


class Attachment:
    """An object kept with a communicator: it has a line for `explain`, and an end.

    `settle` finishes pending calls before anything else travels. Otherwise a rank could wait here for a peer that waits
    for the rest of this rank's rows. A pending call's errors surface in its own wait.
    """

    outlives_shrink = False  # whether it moves to what `shrink` makes of the communicator
    under_way: object = None  # a pending call, which `settle` ends

    def describe(self) -> str:
        raise NotImplementedError

    def settle(self) -> None:
        return

    def leave_to_parent(self) -> None:
        """In a process that was just forked: nobody calls it there any more."""
        return

    def close(self) -> None:
        return
