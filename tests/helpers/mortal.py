"""Ranks that may die without ending each other, and meet as `thinwire.init` has them meet: rank 0 holds the store."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from thinwire import testing
from thinwire._rank_process import ServedProcess, end_with_parent, take_ctrl_c_again
from thinwire.comm import init

LIMIT = 60.0  # seconds after which whatever is left of a case is killed
TIMEOUT = 2.0  # seconds that ranks wait for each other, where a case says nothing else

_told = Path()
_rank = -1


class Ranks:
    """Processes of one case."""

    def __init__(self, processes: list[ServedProcess], folder: Path) -> None:
        self.processes, self.folder = processes, folder
        self.deadline = time.monotonic() + LIMIT

    def signal(self, number: int, *ranks: int) -> None:
        """Sends it to each of them."""
        for rank in ranks:
            pid = self.processes[rank].pid
            assert pid is not None
            os.kill(pid, number)

    def allow(self, key: str) -> None:
        """Lets ranks go on that wait for this key."""
        (self.folder / key).touch()

    def told(self, ranks: Iterable[int], key: str = "result") -> dict[int, Any]:
        """What each of these ranks has told under a key, or returned. What one has raised is raised here."""
        found: dict[int, Any] = {}
        while missing := [rank for rank in ranks if rank not in found]:
            for rank in missing:
                raised, file = self.folder / f"raised.{rank}", self.folder / f"{key}.{rank}"
                assert not raised.exists(), f"rank {rank}:\n{pickle.loads(raised.read_bytes())}"
                if file.exists():
                    found[rank] = pickle.loads(file.read_bytes())
            assert time.monotonic() < self.deadline, f"ranks {missing} have not told {key!r}"
            time.sleep(0.005)
        return dict(sorted(found.items()))


@contextlib.contextmanager
def ranks(
    folder: Path, size: int, function: Callable[..., Any], *arguments: object, timeout: float = TIMEOUT
) -> Iterator[Ranks]:
    """Starts `function(comm, *arguments)` on so many ranks, and kills what is left of them.

    Args:
        folder: empty, for these ranks alone.
        timeout: seconds after which their waits end.
    """
    modules = [*testing._PRELOAD, *testing._preloaded]
    testing._prepare_server(testing._preloaded, dict(os.environ))
    processes = []
    kept = socket.socket()  # bound to the port for as long as the case lasts, so that no other case is given it
    try:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that rank 0 can listen there
        kept.bind(("127.0.0.1", 0))
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept.getsockname()[1])}
        with testing._without_main():
            for rank in range(size):
                told = (rank, size, folder, environ, timeout, function, arguments)
                process = ServedProcess(modules, os.environ, target=_run, args=told)
                process.start()
                processes.append(process)
        yield Ranks(processes, folder)
    finally:
        kept.close()
        for process in processes:
            process.kill()
            process.join()
            process.close()


def _run(
    rank: int,
    size: int,
    folder: Path,
    environ: dict[str, str],
    timeout: float,
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    global _told, _rank
    _told, _rank = folder, rank
    take_ctrl_c_again()
    threading.Thread(target=end_with_parent, args=(folder,), daemon=True).start()
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    os.environ.update(environ)
    try:
        tell("result", function(init(rank=rank, world_size=size, device="cpu", timeout=timeout), *arguments))
    except BaseException:
        tell("raised", traceback.format_exc())
        raise


def own_folder() -> Path:
    """In a rank: the folder of its case."""
    return _told


def tell(key: str, value: object = None) -> None:
    """In a rank: gives the test something."""
    partial = _told / f"{key}.{_rank}.partial"
    partial.write_bytes(pickle.dumps(value))
    partial.rename(_told / f"{key}.{_rank}")


def wait_for(key: str) -> None:
    """In a rank: until the test allows it to go on."""
    while not (_told / key).exists():
        time.sleep(0.005)


def die() -> None:
    """In a rank: ends it as the kernel does that runs out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)
