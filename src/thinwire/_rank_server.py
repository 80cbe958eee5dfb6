"""The fork servers that CPU ranks come from. They have imported torch, and what `testing.preload` was told.

multiprocessing has one fork server a process. Here there is one for each set of values of the variables that triton and
numba read when they are imported, so that a rank starts with them imported, and imported under its own environment.

Ctrl-C goes to all processes of a terminal's foreground job. It is for the program that started the ranks, which ends
them. Servers and ranks begin with it blocked, or they would print tracebacks of their own.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import connection, context, popen_forkserver, reduction, resource_tracker, spawn, util
from multiprocessing.forkserver import ForkServer, read_signed
from multiprocessing.process import BaseProcess
from typing import Any

from thinwire.errors import ThinwireError

#: Packages that read their environment variables, which begin with the package's name, when they are imported.
READ_AT_IMPORT = ("triton", "numba")

_PREFIXES = tuple(f"{package.upper()}_" for package in READ_AT_IMPORT)


@contextlib.contextmanager
def without_ctrl_c() -> Iterator[None]:
    """Processes that this thread starts meanwhile have SIGINT blocked; one that comes here is late by as long."""
    resource_tracker.ensure_running()  # which unblocks it, once it has started the tracker
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def take_ctrl_c_again() -> None:
    """Ends in a rank what `without_ctrl_c` began: for a SIGINT from now on, none from before."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which also forgets one that is pending
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, handler)


class _Server(ForkServer):
    """A fork server that is told an environment. Programs start it through `ServedProcess` only, one at a time."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        super().__init__()
        self.set_forkserver_preload(list(modules))
        self._variables = variables

    def ensure_running(self) -> None:
        """Starts it, again if it has died."""
        # A server inherits the environment, and there is no other way to tell it one. Some versions of Python do not
        # tell it the path either.
        before = dict(os.environ)
        try:
            for name in [name for name in before if name.startswith(_PREFIXES)]:
                del os.environ[name]
            os.environ.update(self._variables, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
            with without_ctrl_c():
                super().ensure_running()
        finally:
            for name in [name for name in os.environ if name not in before]:
                del os.environ[name]
            os.environ.update(before)


_servers: dict[tuple[tuple[str, ...], frozenset[tuple[str, str]]], _Server] = {}


class ServedProcess(context.ForkServerProcess):
    """A process forked from a server that has imported `modules` under what `environ` says to triton and numba."""

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.server = tuple(modules), frozenset(item for item in environ.items() if item[0].startswith(_PREFIXES))

    @property
    def has_server(self) -> bool:
        """Whether there is a server; otherwise `start` waits until one has imported everything."""
        return self.server in _servers

    @staticmethod
    def _Popen(process: BaseProcess) -> Any:
        assert isinstance(process, ServedProcess)
        modules, variables = process.server
        server = _servers.setdefault(process.server, _Server(modules, dict(variables)))
        try:
            return _Popen(process, server)
        except EOFError:
            raise ThinwireError(
                f"the server that ranks are forked from ended while it imported {', '.join(modules)}; it printed why"
            ) from None


class _Popen(popen_forkserver.Popen):
    """As its base class, which knows only the one fork server of multiprocessing."""

    def __init__(self, process: BaseProcess, server: ForkServer) -> None:
        self._server, self._reading = server, threading.Lock()
        super().__init__(process)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit status, once there is one; with another flag, it waits for it."""
        # It can be read once, and whoever starts a process looks at all that there are, in whichever thread.
        if self.returncode is None and connection.wait([self.sentinel], 0 if flag == os.WNOHANG else None):
            with self._reading:
                super().poll()
        return self.returncode

    def _launch(self, process: BaseProcess) -> None:
        sent = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process.name), sent)
            reduction.dump(process, sent)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, write_end = self._server.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        # While this process lives, and holds this end, the child sees that its parent is there.
        parent_end = os.dup(write_end)
        close: Any = util.close_fds  # type: ignore[attr-defined]
        self.finalizer = util.Finalize(self, close, (parent_end, self.sentinel))
        with open(write_end, "wb") as pipe:
            pipe.write(sent.getbuffer())
        self.pid = read_signed(self.sentinel)
