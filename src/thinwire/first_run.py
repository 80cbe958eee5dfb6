"""The first run on a machine compiles kernels: it says so, and one process compiles what all need."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Iterator

_SILENT_SECONDS = 1.0
_REPEAT_SECONDS = 4.0
_LONG_SECONDS = 10.0  # of waiting: the process that compiles says so itself, perhaps on another terminal
_LONGEST_TURN_SECONDS = 60.0  # then a process compiles what another one has not finished
_LOOK_SECONDS = 0.02


@contextlib.contextmanager
def turn(kernel: str, cache: str) -> Iterator[None]:
    """Waits until no other process compiles this kernel into this cache, and keeps others waiting during the block.

    The lock is a name among Linux's abstract sockets: it ends with its holder, and leaves no file. Without it, where
    such names are refused or the other process takes too long, work is done twice, and nothing else.
    """
    name = f"\0thinwire {os.getuid()} {zlib.crc32(cache.encode())} {kernel}"
    ends = time.monotonic() + _LONGEST_TURN_SECONDS
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError), said(f"waiting for another process to compile {kernel}", _LONG_SECONDS):
            lock = held.enter_context(socket.socket(socket.AF_UNIX))
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
def said(what: str, pause: float | None = None) -> Iterator[None]:
    """Tells standard error, from a thread of its own, what the block does, if that takes more than `pause` seconds."""
    began, over = time.monotonic(), threading.Event()

    def tell() -> None:
        next_pause = _SILENT_SECONDS if pause is None else pause
        while not over.wait(next_pause):
            with contextlib.suppress(AttributeError, ValueError, OSError):  # there is none, or it is closed
                sys.stderr.write(f"thinwire: {what} ... {time.monotonic() - began:.0f} s\n")
                sys.stderr.flush()
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
