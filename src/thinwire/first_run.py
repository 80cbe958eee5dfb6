"""The first run on a machine compiles kernels: one process compiles what all need, says so, and its peers bear with it.

A rank that compiles is alive, and its peers shall not give it up. How long a kernel takes to compile is nobody's
setting: seconds, or minutes where many processes share few cores. So a wait for peers has a `Deadline`, which asks
before it is over, and begins anew if a process says that it is *at work*: that it compiles a kernel, loads one, or
waits for a process that compiles it. Processes answer on their notice boards (`thinwire.comm.agreement.standby`), from
a thread that runs while another one compiles, on any host; ranks that are threads of this process need not be asked.

- *No wait is endless by that.* To compile or load ends; to wait for another process's turn, too, after
  `_LONGEST_TURN_SECONDS`, so also where that process was stopped. Nobody says that it is at work because it waits for
  a peer.
- *Who is stopped or dead does not answer, and who called something else answers that it is not at work.* Asking takes
  place before the time is up, so these are told when it is, as if nobody were asked. Only while some rank compiles may
  they be told later, by as long as that takes.
- A process still says so for `_LINGER_SECONDS` after a kernel: it may come to the next one just then.
- A wait's own kernel is compiled before its clock starts (`thinwire.fused.pulled.Board.look`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator

_SILENT_SECONDS = 1.0
_REPEAT_SECONDS = 30.0
_LONG_SECONDS = 60.0  # of waiting for a turn: the process that compiles says so itself, perhaps on another terminal
#: Then a process compiles what another one has not finished, as that may be stopped. No kernel takes as long.
_LONGEST_TURN_SECONDS = 1800.0
_LOOK_SECONDS = 0.02
_LINGER_SECONDS = 0.5
_ASK_FROM_SECONDS, _ASK_EVERY_SECONDS = 2.0, 0.25  # before a deadline: a busy host may leave a request unanswered
_LEAST_ASKING_SECONDS = 0.1  # a shorter wait asks nobody

#: Asks the processes of all peers, and gives what one of them says that it does; empty: none is at work.
ask_peers: Callable[[], str] = str

_at_work: dict[int, str] = {}  # by thread
_last_work = -math.inf, ""
_compiling: set[int] = set()  # threads
_locks: set[socket.socket] = set()  # of turns
_told_unkept: list[str] = []
_num_kernels = 0  # that this process has come to, and that nobody had compiled


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Says meanwhile, to peers that ask, that this process is at work: "compiling ..."."""
    global _last_work
    thread = threading.get_ident()
    outer = _at_work.get(thread)
    _at_work[thread] = what
    try:
        yield
    finally:
        _last_work = time.monotonic(), what
        if outer is None:
            _at_work.pop(thread, None)
        else:
            _at_work[thread] = outer


def work_here() -> str:
    """Says what this process compiles or loads, or did a moment ago; empty: nothing."""
    for what in _at_work.copy().values():
        return what
    since, what = _last_work
    return what if time.monotonic() - since < _LINGER_SECONDS else ""


class Deadline:
    """When a wait for peers is over: after `timeout` seconds in which none of them was found at work.

    Args:
        at: of `time.monotonic()`, instead of `timeout` seconds from now.

    Attributes:
        at: when it is, as far as is known.
    """

    def __init__(self, timeout: float, at: float | None = None) -> None:
        self._timeout = timeout
        self._begin(time.monotonic() + timeout if at is None else at)

    def _begin(self, at: float) -> None:
        self.at, window = at, min(self._timeout / 2, _ASK_FROM_SECONDS)
        self._next_look = at - window if self._timeout > _LEAST_ASKING_SECONDS else math.inf

    def look(self) -> bool:
        """Asks the peers, if it is time to, and says if the deadline was put off. To be called every `pause` seconds"""
        began = time.monotonic()
        if began < self._next_look:
            return False
        if not (work_here() or ask_peers()):
            ended = time.monotonic()
            self._next_look = ended + _ASK_EVERY_SECONDS
            if self._next_look + (ended - began) > self.at:  # asking again, of who is stopped, would end too late
                self._next_look = math.inf
            return False
        self._begin(time.monotonic() + self._timeout)
        return True

    @property
    def pause(self) -> float:
        """Seconds until there is something to do: to look, or to give up; 0 when it is over."""
        now = time.monotonic()
        return 0.0 if now >= self.at else max(min(self._next_look, self.at) - now, 1e-3)


@contextlib.contextmanager
def turn(kernel: str, cache: str | None, what: str) -> Iterator[None]:
    """Waits until no other process compiles this kernel into this cache, and keeps others waiting during the block.

    The lock is a name among Linux's abstract sockets: it ends with its holder, and leaves no file. Without it, where
    there is no cache, such names are refused or the other process was stopped, work is done twice, and nothing else.
    `what` is it for people?
    """
    global _num_kernels
    _num_kernels += threading.get_ident() not in _compiling
    if cache is None:
        yield
        return
    name = f"\0thinwire {os.getuid()} {zlib.crc32(cache.encode())} {kernel}"
    waits = f"waiting for another process to compile {what}"
    ends = time.monotonic() + _LONGEST_TURN_SECONDS
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError), working(waits), said(waits, _LONG_SECONDS):
            lock = held.enter_context(socket.socket(socket.AF_UNIX))
            _locks.add(lock)
            held.callback(_locks.discard, lock)
            while not _taken(lock, name) and time.monotonic() < ends:
                time.sleep(_LOOK_SECONDS)
        yield


def _taken(lock: socket.socket, name: str) -> bool:
    try:
        lock.bind(name)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


@contextlib.contextmanager
def compiling(what: str, why_not_kept: str = "") -> Iterator[None]:
    """Tells users and peers that the block compiles; within another such block of the thread, that one has told.

    Kernels that are not kept are compiled by every rank for itself: one of them tells.
    """
    if why_not_kept:
        tell_unkept(why_not_kept)
    thread = threading.get_ident()
    if thread in _compiling:
        yield
        return
    _compiling.add(thread)
    tells = not why_not_kept or _speaker()[0]
    text = f"compiling {what} (number {_num_kernels} of this run{'' if why_not_kept else ', kept for later ones'})"
    try:
        with working(f"compiling {what}"), said(text) if tells else contextlib.nullcontext():
            yield
    finally:
        _compiling.discard(thread)


def tell_unkept(why: str) -> None:
    """Says once that kernels are not kept, and why: one process does, of those that the same parent started."""
    if not _told_unkept and _speaker()[0]:
        advice = "set NUMBA_CACHE_DIR to a folder with room that can be written"
        _write(f"compiled kernels are not kept, and later runs compile them again, as {why}; {advice}")
    _told_unkept.append(why)


@functools.cache
def _speaker() -> tuple[bool, socket.socket | None]:
    """Whether this process speaks for its parent's others, and a socket, whose name is the right to; the same way."""
    try:
        right = socket.socket(socket.AF_UNIX)
        return _taken(right, f"\0thinwire {os.getuid()} speaks {os.getppid()}"), right
    except OSError:
        return True, None


@contextlib.contextmanager
def said(what: str, pause: float | None = None) -> Iterator[None]:
    """Tells standard error, from a thread of its own, what the block does, if that takes more than `pause` seconds."""
    began, over = time.monotonic(), threading.Event()

    def tell() -> None:
        next_pause = _SILENT_SECONDS if pause is None else pause
        while not over.wait(next_pause):
            _write(f"{what} ... {time.monotonic() - began:.0f} s")
            next_pause = _REPEAT_SECONDS

    teller = threading.Thread(target=tell, name="thinwire compiling", daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can be started: then nothing is said
        teller.start()
    try:
        yield
    finally:
        over.set()
        if teller.ident is not None:
            teller.join()


def _write(text: str) -> None:
    with contextlib.suppress(AttributeError, ValueError, OSError):  # there is no standard error, or it is closed
        sys.stderr.write(f"thinwire: {text}\n")
        sys.stderr.flush()


def _forget_in_child() -> None:
    global _last_work
    _at_work.clear()  # of threads that a fork has not
    _compiling.clear()
    _last_work = -math.inf, ""
    for lock in list(_locks):  # else the turn would last as long as the child
        lock.close()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
