"""Waits of torch's that a signal can interrupt, or time; and what Gloo says when they fail."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from thinwire.first_run import Deadline

_T = TypeVar("_T")
_EXPIRE_AGAIN_SECONDS = 1.0
_MOST_EXPIRIES = 5


#: Seconds between two looks at whether peers that are waited for have ended.
LOOK_SECONDS = 1.0


def call_within(seconds: float, call: Callable[[], _T], look: Callable[[], None] = lambda: None) -> _T:
    """Makes a call in a thread of its own, and gives what it returns or raises, if it ends in time.

    A store's client waits for a server that is stopped, or is none, without a look at its own limit, in the constructor
    and in `get`; so do Gloo's first connections. So it has a thread of its own, which is left behind then, and ends
    with that server.

    Args:
        look: is called each second, and may raise.

    Raises:
        TimeoutError: it did not.
    """
    outcome: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put((call(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, name="thinwire store", daemon=True).start()
    end = time.monotonic() + seconds
    while True:
        try:
            result, error = outcome.get(timeout=max(0.0, min(LOOK_SECONDS, end - time.monotonic())))
            break
        except Empty:
            if time.monotonic() >= end:
                raise TimeoutError(f"no answer within {seconds:g} s") from None
        look()
    if error is not None:
        raise error
    value: _T = result
    return value


class Waiting:
    """A call that waits, made in a thread of its own.

    While Gloo waits, it holds the thread, and Python runs signal handlers in the main thread only. Gloo's receives can
    be neither polled nor waited for in short turns.

    Args:
        expire: is called at the deadline, and ends the call.

    Attributes:
        done: whether the call has returned or raised.
    """

    def __init__(self, call: Callable[[], Any], deadline: Deadline, expire: Callable[[], None]) -> None:
        self._call, self._deadline, self._expire = call, deadline, expire
        # Held until the call is over. A Future would do, for ten times the time that this takes.
        self._under_way = threading.Lock()
        self._under_way.acquire()
        self.done = self._left = False
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Makes the call."""
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
        finally:
            self.done = True
            self._under_way.release()

    def result(self, waiter: Waiter) -> Any:
        """Gives what the call returns or raises, or raises what a signal handler does meanwhile.

        None if it has not ended some seconds after the deadline, as its thread is left behind, or after `end_later`.
        """
        waiter.put(self)
        deadline, expiries = self._deadline, 0
        while not (self.done or self._left):
            if not (pause := deadline.pause):
                if expiries == _MOST_EXPIRIES:
                    self.done = True
                    break
                self._expire()
                expiries += 1
            if not self._under_way.acquire(timeout=pause or _EXPIRE_AGAIN_SECONDS):
                deadline.look()
        if self._error is not None:
            raise self._error
        return self._result

    def end_later(self, expire: Callable[[], None]) -> None:
        """Ends the wait for the call, if an exception has not, and at the deadline the call."""
        self._left = True

        def end() -> None:
            if not self.done:
                expire()

        timer = threading.Timer(max(self._deadline.at - time.monotonic(), 0.0), end)
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # no thread can be started any more, as the process ends
            timer.start()


class Waiter:
    """One thread that makes calls in the order in which they come. A daemon: it keeps no process from ending.

    It ends with this object, once it has done what it was given.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Waiting | None] | None = None  # of a thread that runs
        self._end: weakref.finalize[..., Waiter] | None = None

    def put(self, waiting: Waiting) -> None:
        """Has a call made."""
        if self._queue is None:
            # The thread knows the queue, and not this object, which would never be dropped then.
            queue: SimpleQueue[Waiting | None] = SimpleQueue()
            self._end = weakref.finalize(self, queue.put, None)
            self._end.atexit = False
            threading.Thread(target=_work, args=(queue,), name="thinwire waiter", daemon=True).start()
            self._queue = queue  # not before: a thread that could not be started serves nobody
        self._queue.put(waiting)

    def close(self) -> None:
        """Ends the thread once it has done what it was given."""
        if self._end is not None:
            self._end()


def _work(queue: SimpleQueue[Waiting | None]) -> None:
    while (waiting := queue.get()) is not None:
        waiting.run()
        del waiting  # it holds the caller's tensors


def is_timeout(error: RuntimeError) -> bool:
    """Whether Gloo says that time was up."""
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()


def first_line(error: RuntimeError) -> str:
    """Gives Gloo's message without place and advice."""
    # It begins with the place in its source, in brackets, and goes on with advice.
    text = str(error).strip().partition("\n")[0]
    return text.rpartition("] ")[2].partition(". ")[0] if text.startswith("[") else text
