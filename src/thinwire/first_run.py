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
_LONGEST_TURN_SECONDS = 120.0  # then a process compiles what another one has not finished
_LOOK_SECONDS = 0.02


@contextlib.contextmanager
def turn(kernel: str, cache: str) -> Iterator[None]:
    """Waits until no other process compiles this kernel into this cache, and keeps others waiting during the block.

    The lock is a name among Linux's abstract sockets: it ends with its holder, and leaves no file.
    """
    name = f"\0thinwire {os.getuid()} {zlib.crc32(cache.encode())} {kernel}"
    ends = time.monotonic() + _LONGEST_TURN_SECONDS
    with socket.socket(socket.AF_UNIX) as lock:
        while time.monotonic() < ends:
            try:
                lock.bind(name)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            time.sleep(_LOOK_SECONDS)
        yield


@contextlib.contextmanager
def said(kernel: str) -> Iterator[None]:
    """Tells standard error, from a thread of its own, that the block compiles a kernel, where this takes a second."""
    began, over = time.monotonic(), threading.Event()

    def tell() -> None:
        pause = _SILENT_SECONDS
        while not over.wait(pause):
            seconds = time.monotonic() - began
            sys.stderr.write(f"thinwire: compiling {kernel}, once for this machine ... {seconds:.0f} s\n")
            sys.stderr.flush()
            pause = _REPEAT_SECONDS

    teller = threading.Thread(target=tell, name="thinwire compiling", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
