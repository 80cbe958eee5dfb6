"""The half of `thinwire.testing.run_ranks` that ranks see: the servers that they are forked from, and their processes.

A fork server has imported torch, and what `testing.preload` was told. multiprocessing has one in a process. Here there
is one for each set of values of the variables that triton and numba read when they are imported, so that a rank starts
with them imported, and imported under its own environment.

Ctrl-C goes to all processes of a terminal's foreground job. It is for the program that started the ranks, which ends
them. Servers and ranks begin with it blocked, or they would print tracebacks of their own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import mmap
import multiprocessing
import os
import pickle
import runpy
import shutil
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, context, popen_forkserver, reduction, resource_tracker, spawn, util
from multiprocessing.forkserver import ForkServer, read_signed
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import ThinwireError

#: Packages that read their environment variables, which begin with the package's name, when they are imported.
_READ_AT_IMPORT = ("triton", "numba")
_STACK_SECONDS = 0.5  # before the deadline, stuck ranks write down where they are

_PREFIXES = tuple(f"{package.upper()}_" for package in _READ_AT_IMPORT)


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
    """Starts a process from a server of ours; its base class knows only the one of multiprocessing."""

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


@dataclass(frozen=True)
class Launch:
    """What a rank is told at its start, beside a file with the pickled `Payload`. It answers in `folder`:

    - `rank<r>.result`: the pickled result;
    - `rank<r>.failure`: a pickled pair of the time, as `time.monotonic()`, and the traceback;
    - `rank<r>.stack`: Python stacks, written shortly before the deadline or when a fatal signal arrives.
    """

    rank: int
    world_size: int
    device: str
    store_port: int
    timeout: float  # of the whole run
    deadline: float  # of time.monotonic(), which all processes of a host share
    folder: Path
    preloaded: tuple[str, ...]  # modules that the server of this process was to import

    def file(self, kind: str) -> Path:
        """Where this rank leaves its `kind`."""
        return self.folder / f"rank{self.rank}.{kind}"


@dataclass(frozen=True)
class Payload:
    """What the ranks run. `parts`, the pickled function and arguments, are opened after `environ` is in force.

    It travels in a file, as a pipe has room for a few pages: whoever writes more waits for a child, which may be dead.
    """

    environ: dict[str, str]
    main: tuple[str, str] | None  # ("module" or "path", where) of the parent's script, if parts refer to it
    parts: list[bytes]


class InheritedFile:
    """A file descriptor of the parent's; it arrives in the child as an int that is valid there."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Callable[..., int], tuple[object, ...]]:
        return _detach, (reduction.DupFd(self.descriptor),)


def _detach(duplicate: Any) -> int:
    return int(duplicate.detach())


def rank_main(launch: Launch, payload: int, output: int, errors: int) -> None:
    """Runs the payload's function and leaves its result or its failure in the folder. The numbers are open files."""
    os.setsid()  # the parent kills the whole process group, so that nothing that fn started lives on
    take_ctrl_c_again()  # a terminal's no longer comes here
    for descriptor, standard in ((output, 1), (errors, 2)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    threading.Thread(target=end_with_parent, args=(launch.folder,), daemon=True).start()
    try:
        _answer(launch, payload)
    except FileNotFoundError:
        os._exit(1)  # the folder is gone: the parent was interrupted while it started this rank, and reads no answer


def _answer(launch: Launch, payload: int) -> None:
    with launch.file("stack").open("w") as stacks:
        faulthandler.enable(stacks)
        remaining = launch.deadline - min(_STACK_SECONDS, launch.timeout / 4) - time.monotonic()
        faulthandler.dump_traceback_later(max(remaining, 0.01), file=stacks)
        try:
            launch.file("result").write_bytes(_call(launch, payload))
        except BaseException:
            _leave_failure(launch)
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()


def end_with_parent(folder: Path) -> None:
    """Ends this process when the parent is gone, however that came about, and removes the folder in its place."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(folder, ignore_errors=True)  # other ranks do the same
        os._exit(1)


def _leave_failure(launch: Launch) -> None:
    partial = launch.file("failure.partial")
    partial.write_bytes(pickle.dumps((time.monotonic(), traceback.format_exc())))
    partial.rename(launch.file("failure"))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # an orderly end would take the process group apart, which may wait for peers


def _call(launch: Launch, payload_file: int) -> bytes:
    for module in launch.preloaded:
        if module not in sys.modules:  # a fork server says nothing of an ImportError; this rank, where it meets it too
            importlib.import_module(module)
            raise ThinwireError(f"{module} can be imported, but not by the server that ranks are forked from")
    with mmap.mmap(payload_file, 0, access=mmap.ACCESS_READ) as content:  # all ranks' numbers share one file position
        payload: Payload = pickle.loads(content)
    os.close(payload_file)
    _set_environment(payload.environ)
    if payload.main is not None:
        _load_main(*payload.main)
    fn, *args = (pickle.loads(part) for part in payload.parts)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // launch.world_size))

    from thinwire.comm import Communicator  # not at the top: the environment comes first

    with Communicator(device=_join(launch), timeout=launch.timeout / 2) as comm:  # so that ranks tell who is missing
        result = fn(comm, *args)
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise ThinwireError(
            f"rank {launch.rank}'s result, a {type(result).__qualname__}, cannot be sent back: {error}"
        ) from error


def _set_environment(environ: dict[str, str]) -> None:
    for package in _READ_AT_IMPORT:
        changed = [
            name
            for name in {*environ, *os.environ}
            if name.startswith(f"{package.upper()}_") and environ.get(name) != os.environ.get(name)
        ]
        if changed and package in sys.modules:
            raise ThinwireError(
                f"{', '.join(sorted(changed))} would have no effect: {package} was imported before this rank's "
                "environment was set"
            )
    os.environ.clear()
    os.environ.update(environ)


def _load_main(kind: str, source: str) -> None:
    """Runs the parent's script under the name `__mp_main__`, as multiprocessing does, so that its guard holds."""
    run = runpy.run_module if kind == "module" else runpy.run_path
    main = types.ModuleType("__mp_main__")
    main.__dict__.update(run(source, run_name="__mp_main__"))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main


def _join(launch: Launch) -> torch.device:
    limit = timedelta(seconds=max(1.0, launch.deadline - time.monotonic()))
    store = dist.TCPStore("127.0.0.1", launch.store_port, is_master=False, timeout=limit)
    if launch.device == "cuda":
        device, backend = torch.device("cuda", launch.rank), "nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=limit,
        device_id=device if backend == "nccl" else None,
    )
    return device
