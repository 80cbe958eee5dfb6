"""Run a function on several ranks, processes or threads, and get every rank's result or traceback."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from thinwire._rank_process import (
    InheritedFile,
    Launch,
    Payload,
    ServedProcess,
    end_with_parent,
    rank_main,
    without_ctrl_c,
)
from thinwire._rank_thread import require_queues, run_rank_threads
from thinwire.comm.agreement.meeting import INTERFACE_VARIABLE, start_store
from thinwire.comm.hosts import LOOPBACK, interface_of
from thinwire.comm.tensors import is_int, require_seconds
from thinwire.errors import ThinwireError, TransportUnavailable

__all__ = ["RankError", "RanksTimeout", "preload", "run_ranks"]

T = TypeVar("T")

_GRACE = 2.0  # seconds that the others get once a rank has failed, to fail by themselves and say how
_PRELOAD = ["torch", "torch.distributed"]  # never triton or numba: they read their environment when they are imported
_main_lock = threading.Lock()
_preloaded: tuple[str, ...] = ()  # what `preload` was told


class RankError(ThinwireError, RuntimeError):
    """A rank raised or died, or its arguments or result cannot be sent between processes.

    Attributes:
        failures: for each failed rank what happened, with full tracebacks; the rank that failed first comes first.
    """

    def __init__(self, message: str, failures: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.failures = failures or {}


class RanksTimeout(ThinwireError, TimeoutError):
    """Ranks had not finished at the time limit and were killed.

    Attributes:
        ranks: those that had not finished.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


def preload(*modules: str) -> None:
    """From now on, ranks that are CPU processes start with these modules imported; with none, undoes that.

    Ranks are forked from a server that has imported only torch. A server that has imported more saves seconds at each
    start of ranks. It imports the modules at the first `run_ranks`, under this process's environment at that time; the
    time limit begins after that. If ranks get another value of a variable that begins with TRITON_ or NUMBA_, they come
    from a second server, which has imported the modules under that value. The modules must not start threads, as
    threads do not survive a fork.

    Args:
        modules: importable from `sys.path` at the first `run_ranks`; a rank raises if its server could not import them.
    """
    global _preloaded
    _preloaded = modules


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    mode: str = "process",
    device: str = "cpu",
    timeout: float = 60.0,
    env: dict[str, str] | None = None,
) -> list[T]:
    """Runs `fn(comm, *args)` on `world_size` ranks of this host and returns their results.

    As processes, each rank is a new process, and `fn` is sent by name: it must be a function at the top level of an
    importable module or of the running script; one that was typed into a notebook needs threads. Arguments and results
    are sent by value, tensors too. The ranks' output appears at once.

    As threads of this process, ranks need no `torch.distributed`; `fn` may be any callable, and arguments and results
    are the objects themselves. `thinwire.init()` in a rank returns that rank's communicator. On CUDA all ranks, at most
    30, use the current GPU, each with its own stream. If CUDA has not started and they have no values,
    CUDA_DEVICE_MAX_CONNECTIONS and CUDA_MODULE_LOADING are set to 32 and EAGER in this process's environment, so that
    waiting ranks do not keep others from running. A thread cannot be killed: when a rank fails or time is up, all waits
    for peers end with PeerTimeout, and a thread that still does not return is left behind, as a daemon.

    Args:
        fn: called with a `thinwire.comm.Communicator` over all ranks, then `args`.
        world_size: number of ranks.
        mode: "process" or "thread".
        device: "cpu" (processes: Gloo) or "cuda" (processes: NCCL, GPU r for rank r).
        timeout: seconds for everything, including the start of the ranks; then processes are killed. Ranks wait for
            each other for half of it.
        env: environment variables of the ranks, added to this process's; set before `fn`'s module is imported.
            Processes only.

    Returns:
        Each rank's result, in rank order.

    Raises:
        RankError: a rank raised (the message has the whole traceback) or died; the others got 2 s to end. Or `fn`, an
            argument or a result cannot be sent; for `fn` and arguments nothing is started.
        RanksTimeout: time was up; has the ranks that had not finished, and each one's Python stack.
        TransportUnavailable: processes need a GPU each, and there are fewer; threads need one, and there is none, or
            there are more threads than one GPU runs at once.
        ThinwireError: an argument is not accepted, such as `env` for threads.

    >>> import operator
    >>> run_ranks(operator.attrgetter("rank", "size"), 2)
    [(0, 2), (1, 2)]
    >>> run_ranks(lambda comm, word: word * comm.rank, 3, "ab", mode="thread")
    ['', 'ab', 'abab']
    """
    _check_request(world_size, mode, device, timeout, env)
    if mode == "thread":
        results, failures, stacks = run_rank_threads(fn, world_size, args, device, timeout, _GRACE)
        stuck = {rank: ("had not returned", stack) for rank, stack in stacks.items()}
        fate, end = "cannot be killed", "; threads cannot be killed, but their waits for peers were ended"
    else:
        results, failures, stuck = _run_processes(fn, world_size, args, device, timeout, env or {})
        fate, end = "killed", " and were killed"
    if failures:
        raise _rank_error(failures, list(stuck), world_size, fate)
    if stuck:
        raise _timeout_error(stuck, world_size, timeout, end)
    return results


def _check_request(world_size: int, mode: str, device: str, timeout: float, env: dict[str, str] | None) -> None:
    if not is_int(world_size, 1):
        raise ThinwireError(f"world_size is {world_size!r}, expected an int of at least 1")
    if not isinstance(mode, str) or mode not in ("process", "thread"):
        raise ThinwireError(f"mode is {mode!r}, expected 'process' or 'thread'")
    if not isinstance(device, str) or device not in ("cpu", "cuda"):
        raise ThinwireError(f"device is {device!r}, expected 'cpu' or 'cuda'")
    require_seconds("timeout", timeout)
    if mode == "thread" and env is not None:
        raise ThinwireError(
            f"env is {env!r}, but threads share this process's environment: expected None, or processes"
        )
    if mode == "thread" and device == "cuda":
        require_queues(world_size)  # before CUDA is asked for anything
    needed = 1 if mode == "thread" else world_size
    if device == "cuda" and torch.cuda.device_count() < needed:
        raise TransportUnavailable(
            f"{world_size} ranks need {'a GPU' if needed == 1 else 'a GPU each'}, but {torch.cuda.device_count()} are "
            "visible"
        )


def _run_processes(
    fn: Callable[..., T], world_size: int, args: tuple[object, ...], device: str, timeout: float, env: dict[str, str]
) -> tuple[list[T], dict[int, str], dict[int, tuple[str, str]]]:
    """Each rank's result, if all have one; what happened on those that failed; state and stack of the unfinished."""
    interface = interface_of(LOOPBACK)  # Gloo would take that of the host's name
    environ = {**({INTERFACE_VARIABLE: interface} if interface else {}), **os.environ, **env}
    payload = _pack(fn, args, environ)
    preloaded = _preloaded if _start_method(device) == "forkserver" else ()
    if preloaded:
        _prepare_server(preloaded, environ)
    deadline = time.monotonic() + timeout
    store = start_store(LOOPBACK, 0)
    # The payload holds the environment, and the environment may hold secrets: its file has no name, so that nothing is
    # left of it when this process is killed.
    with tempfile.TemporaryDirectory(prefix="thinwire-ranks-") as folder, tempfile.TemporaryFile() as shared:
        shared.write(payload)
        shared.flush()
        told = world_size, device, store.port, timeout, deadline, Path(folder), preloaded
        launches = [Launch(rank, *told) for rank in range(world_size)]
        processes: list[BaseProcess] = []
        try:
            _start(launches, environ, shared.fileno(), processes)
            failures, unfinished = _watch(processes, launches, deadline)
        finally:
            _kill(processes)
        stuck = {rank: _where_stuck(launches[rank]) for rank in unfinished}
        results = [] if failures or stuck else [_load_result(launch) for launch in launches]
        return results, failures, stuck


# --- what is sent -----------------------------------------------------------------------------------------------------


def _pack(fn: Callable[..., object], args: tuple[object, ...], environ: dict[str, str]) -> bytes:
    _require_importable(fn)
    parts = [_dumps(fn, "the function"), *(_dumps(arg, f"argument {i}") for i, arg in enumerate(args))]
    # Re-running the parent's script is needed only for what is defined in it, and slow where that is a test runner.
    main = _main_source() if any(b"__main__" in part for part in parts) else None
    return pickle.dumps(Payload(environ, main, parts))


def _dumps(value: object, what: str) -> bytes:
    try:
        # Plain pickle copies tensors by value. multiprocessing's pickler would move them to shared memory.
        return pickle.dumps(value)
    except Exception as error:
        raise RankError(f"{what}, a {type(value).__qualname__}, cannot be sent to the ranks: {error}") from error


def _require_importable(fn: Callable[..., object]) -> None:
    while isinstance(fn, functools.partial):
        fn = fn.func
    named: Any = fn if hasattr(fn, "__qualname__") else type(fn)
    module, name = str(named.__module__), str(named.__qualname__)
    hint = 'pass mode="thread", or define it with def in a module or script file: ranks that are processes import it'
    if "<lambda>" in name or "<locals>" in name:
        raise RankError(f"{module}.{name} is no function of a module or script; {hint}")
    if module == "__main__":
        if _main_source() is None:
            raise RankError(f"{name} was typed in, or read from standard input or -c; {hint}")
    elif not _can_be_found(module):
        raise RankError(f"{module}.{name}: the ranks cannot find a module {module!r} on sys.path; {hint}")


def _can_be_found(module: str) -> bool:
    """Whether an import would find it from scratch; `importlib.util.find_spec` trusts what is imported already."""
    path: Sequence[str] | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        specs = (finder.find_spec(name, path) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


def _main_source() -> tuple[str, str] | None:
    """How the ranks can load the parent's script: as a module or from a path; None where there is no such thing."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return "module", spec.name
    path = getattr(main, "__file__", None)
    return None if path is None or not os.path.isfile(path) else ("path", os.path.abspath(path))


# --- start, watch, end ------------------------------------------------------------------------------------------------


def _start(launches: list[Launch], environ: dict[str, str], payload: int, processes: list[BaseProcess]) -> None:
    preloaded = launches[0].preloaded
    if _start_method(launches[0].device) == "forkserver":
        # Without triton and numba, one server is right for every value of their variables: ranks import them.
        read = environ if preloaded else {}
        make: Callable[..., BaseProcess] = functools.partial(ServedProcess, [*_PRELOAD, *preloaded], read)
    else:
        make = multiprocessing.get_context("spawn").Process
    # The fork server keeps the standard files that it was started with; ranks print where this process prints now.
    files = InheritedFile(payload), InheritedFile(1), InheritedFile(2)
    with _without_main():
        for launch in launches:
            process = make(target=rank_main, args=(launch, *files), name=f"rank {launch.rank}")
            with contextlib.nullcontext() if isinstance(process, ServedProcess) else without_ctrl_c():
                process.start()
            processes.append(process)


def _start_method(device: str) -> str:
    """A fork server starts a rank in milliseconds, as it has imported torch; CUDA does not survive a fork."""
    forks = device == "cpu" and "forkserver" in multiprocessing.get_all_start_methods()
    return "forkserver" if forks else "spawn"


def _prepare_server(preloaded: tuple[str, ...], environ: dict[str, str]) -> None:
    with _without_main():
        first = ServedProcess([*_PRELOAD, *preloaded], environ, target=int)
        if not first.has_server:
            first.start()
            first.join()
            first.close()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keeps multiprocessing from running the parent's script in the child, which it does before env could be set."""
    with _main_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _watch(processes: list[BaseProcess], launches: list[Launch], deadline: float) -> tuple[dict[int, str], list[int]]:
    """Waits until all ranks ended, or the deadline, or the end of the grace after a failure.

    Returns:
        What happened on the ranks that failed, the first one first, and the ranks that run on.
    """
    running = dict(enumerate(processes))
    failures: dict[int, tuple[float, str]] = {}
    limit = deadline
    while running:
        sentinels = [process.sentinel for process in running.values()]
        ready = multiprocessing.connection.wait(sentinels, max(0.0, limit - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank, process in running.items() if process.sentinel in ready]:
            process = running.pop(rank)
            process.join()
            failure = _read_failure(launches[rank]) or _read_death(launches[rank], process)
            if failure is not None:
                failures[rank] = failure
                limit = min(limit, time.monotonic() + _GRACE)
    for rank in running:
        failure = _read_failure(launches[rank])
        if failure is not None:  # it has raised, and was only about to end
            failures[rank] = failure
    in_order = sorted(failures, key=lambda rank: failures[rank][0])
    return {rank: failures[rank][1] for rank in in_order}, [rank for rank in running if rank not in failures]


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive() and process.pid is not None:
            # A rank leads a process group of what it started, unless it has not come that far yet.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
    for process in processes:
        process.join()
        process.close()


def _read_failure(launch: Launch) -> tuple[float, str] | None:
    """When a rank raised and its traceback, or None."""
    file = launch.file("failure")
    if not file.exists():
        return None
    when, text = pickle.loads(file.read_bytes())
    return float(when), str(text)


def _read_death(launch: Launch, process: BaseProcess) -> tuple[float, str] | None:
    """How a rank ended that did not raise, or None if it ended well."""
    returned = launch.file("result").exists()
    code = process.exitcode or 0
    if code == 0 and returned:
        return None
    names = {known.value: known.name for known in signal.Signals}
    how = f"killed by {names.get(-code, f'signal {-code}')}" if code < 0 else f"ended with exit code {code}"
    text = f"{how}, {'after' if returned else 'before'} fn had returned\n{_read_stack(launch)}"
    return time.monotonic(), text.rstrip("\n")


def _read_stack(launch: Launch) -> str:
    file = launch.file("stack")
    blocks = file.read_text(errors="replace").strip().split("\n\n") if file.exists() else []
    return "\n\n".join(block for block in blocks if end_with_parent.__name__ not in block)


# --- what is reported -------------------------------------------------------------------------------------------------


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _rank_error(failures: dict[int, str], unfinished: list[int], world_size: int, fate: str) -> RankError:
    ranks = list(failures)
    lines = [f"{_name_ranks(ranks)} of {world_size} failed" + (f", rank {ranks[0]} first" if len(ranks) > 1 else "")]
    for rank, text in failures.items():
        lines += ["", f"--- rank {rank} ---", text.rstrip()]
    if unfinished:
        lines += ["", f"--- {_name_ranks(unfinished)}: not finished {_GRACE:g} s later, and {fate} ---"]
    return RankError("\n".join(lines), failures)


def _timeout_error(stuck: dict[int, tuple[str, str]], world_size: int, timeout: float, fate: str) -> RanksTimeout:
    """`stuck` has each unfinished rank's state and stack."""
    lines = [f"{_name_ranks(list(stuck))} of {world_size} had not finished after {timeout:g} s{fate}"]
    for rank, (state, stack) in stuck.items():
        lines += ["", f"--- rank {rank}: {state} ---", stack.rstrip() or "(no stack was recorded)"]
    return RanksTimeout("\n".join(lines), list(stuck))


def _where_stuck(launch: Launch) -> tuple[str, str]:
    state = "had not returned" if launch.file("stack").exists() else "the process was still starting"
    if launch.file("result").exists():
        state = "fn had returned, but the process did not end"
    return state, _read_stack(launch)


def _load_result(launch: Launch) -> Any:
    try:
        return pickle.loads(launch.file("result").read_bytes())
    except Exception as error:
        raise RankError(f"rank {launch.rank}'s result cannot be read here: {type(error).__name__}: {error}") from error
