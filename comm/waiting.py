"""Waits of Gloo's that a signal can interrupt."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class Waiting:
    """A call that waits, made once, in a thread of its own or in this one; it can be gone on with after an exception.

    While Gloo waits, it holds the thread, and Python runs signal handlers in the main thread only. Gloo's receives can
    be neither polled nor waited for in short turns, and a wait that was begun takes what it waits for, so whoever comes
    back after an interrupt must come back to that same one.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._future: Future[Any] = Future()
        self._begun = False

    def run(self) -> None:
        """Makes the call, unless that was done before."""
        if self._begun:
            return
        self._begun = True
        try:
            self._future.set_result(self._call())
        except BaseException as error:
            self._future.set_exception(error)

    def result(self, waiter: Waiter) -> Any:
        """What the call gives or raises, and what a signal handler raises meanwhile."""
        if threading.current_thread() is threading.main_thread():
            waiter.put(self)  # again, if an exception may have come before the last time
        else:
            self.run()
        return self._future.result()


class Waiter:
    """One thread that makes calls in the order in which they come. A daemon: it keeps no process from ending."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Waiting | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def put(self, waiting: Waiting) -> None:
        """Has a call made, if it was not."""
        if self._process != os.getpid():  # a fork has no threads but the one that forked
            self._process, self._thread, self._queue = os.getpid(), None, SimpleQueue()
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="thinwire waiter", daemon=True)
            thread.start()  # before it is remembered: one that could not be started serves nobody
            self._thread = thread
        self._queue.put(waiting)

    def close(self) -> None:
        """Ends the thread once it has done what it was given."""
        if self._thread is not None:
            self._queue.put(None)

    def _work(self) -> None:
        while (waiting := self._queue.get()) is not None:
            waiting.run()
            del waiting  # it holds the caller's tensors
