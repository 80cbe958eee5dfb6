"""The thread mode of `thinwire.testing.run_ranks`: ranks that are threads of this process."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from thinwire.comm import Communicator
from thinwire.comm.launch.bootstrap import rank_thread
from thinwire.comm.threads import ThreadWorld
from thinwire.errors import PeerTimeout, TransportUnavailable
from thinwire.log import LOGGER

_LAST_SECONDS = 1.0  # that ranks get to end once their waits were ended

# What CUDA reads when it starts: how many hardware queues it has for a process's streams, 1 to 32; and whether kernels
# are loaded when they are first used.
_QUEUES, _LOADING = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"
_QUEUES_IF_UNSET, _MOST_QUEUES = 8, 32


def set_queues() -> dict[str, str]:
    """Where CUDA has not started and these have no values, sets what ranks that are threads need; gives what it set.

    `torch.cuda.is_available` starts the driver, as does `device_count` where there is no NVML: this has to come first.
    """
    wanted = {} if torch.cuda.is_initialized() else {_QUEUES: str(_MOST_QUEUES), _LOADING: "EAGER"}
    missing = {variable: value for variable, value in wanted.items() if variable not in os.environ}
    os.environ.update(missing)
    return missing


def require_queues(ranks: int) -> None:
    """Refuses more ranks than a GPU runs side by side; before CUDA has started, makes that as many as there may be.

    Each rank needs a hardware queue of its own, and the caller two. Streams that share one get to run in the order in
    which they were given work, so a kernel that waits for a peer would keep that peer's kernels from starting. Loading
    a kernel may have to wait for the device, and thus for such a kernel: they are all loaded when CUDA starts.

    Raises:
        TransportUnavailable: more ranks than queues.
    """
    for variable, value in set_queues().items():
        LOGGER.info("%s=%s, as ranks are threads of one GPU", variable, value)
    given = os.environ.get(_QUEUES, "")
    queues = min(int(given) if given.isdecimal() else _QUEUES_IF_UNSET, _MOST_QUEUES)
    if ranks + 2 > queues:
        raise TransportUnavailable(
            f"{ranks} ranks that are threads of one GPU need {ranks + 2} hardware queues, and CUDA has {queues} in "
            f"this process: at most {_MOST_QUEUES - 2} ranks, with {_QUEUES}={_MOST_QUEUES} set before CUDA starts"
        )


def run_rank_threads(
    fn: Callable[..., Any], world_size: int, args: Sequence[object], device: str, timeout: float, grace: float
) -> tuple[list[Any], dict[int, str], dict[int, str]]:
    """Runs `fn(comm, *args)` in a thread for each rank, for so many seconds, and fewer once a rank has failed.

    Returns:
        Each rank's result; tracebacks of the ranks that raised, the first one first; where the ranks were that had
        neither returned nor raised when time was up.
    """
    starter = threading.current_thread()
    # Ranks may start ranks of their own. When the outer ones are given up, so are these.
    world = ThreadWorld(world_size, within=starter.world if isinstance(starter, _RankThread) else None)
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    comms = Communicator.of_threads(world, device=device, timeout=timeout / 2)
    threads = [_RankThread(comm, world, functools.partial(fn, comm, *args), ended) for comm in comms]
    limit = time.monotonic() + timeout
    running = set(range(world_size))
    failed: list[int] = []
    try:
        for thread in threads:
            thread.start()
        while running:
            try:
                rank = ended.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                break
            running.discard(rank)
            if threads[rank].failure:
                failed.append(rank)
                limit = min(limit, time.monotonic() + grace)
        stacks = {rank: _stack_of(threads[rank]) for rank in sorted(running)}
        failed.sort(key=lambda rank: threads[rank].raised)
        return [thread.result for thread in threads], {rank: threads[rank].failure for rank in failed}, stacks
    finally:
        # Threads cannot be killed, but what they wait for can be ended.
        world.fail("run_ranks gave up, as a rank had failed or time was up")
        last = time.monotonic() + _LAST_SECONDS
        for thread in threads:
            if thread.is_alive():
                thread.join(max(0.0, last - time.monotonic()))


class _RankThread(threading.Thread):
    """One rank. A daemon: one that never returns does not keep the process from ending."""

    def __init__(
        self, comm: Communicator, world: ThreadWorld, call: Callable[[], Any], ended: queue.SimpleQueue[int]
    ) -> None:
        super().__init__(name=f"rank {comm.rank}", daemon=True)
        self.world = world
        self.result: Any = None
        self.failure, self.raised = "", math.inf  # the traceback, and when its call raised
        self._comm, self._calls, self._ended = comm, [call], ended
        # What the caller's stream was given may be what makes the arguments.
        on_cuda = comm.device.type == "cuda"
        self._callers_stream = torch.cuda.current_stream(comm.device) if on_cuda else None

    def run(self) -> None:
        """Leaves a result or a failure, and says that it has ended."""
        call = self._calls.pop()  # what the arguments hold is not held for longer than the call
        try:
            with self._comm, rank_thread(self._comm), self._stream_of_its_own():
                try:
                    self.result = call()
                except BaseException as error:
                    self.raised = time.monotonic()  # before peers fail because of it
                    self._tell_peers(error)
                    raise
        except BaseException:
            self.failure = traceback.format_exc()
        finally:
            self._ended.put(self._comm.rank)

    @contextlib.contextmanager
    def _stream_of_its_own(self) -> Iterator[None]:
        if self._callers_stream is None:
            yield
            return
        device = self._comm.device
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            stream = torch.cuda.current_stream()
            stream.wait_stream(self._callers_stream)
            yield
            stream.synchronize()  # results are for other streams; and what went wrong shows up here

    def _tell_peers(self, error: BaseException) -> None:
        first_line = str(error).partition("\n")[0]
        reason = f"rank {self._comm.rank} raised {type(error).__name__}: {first_line}"
        to_blame = error.ranks if isinstance(error, PeerTimeout) and error.ranks else None
        self.world.leave(self._comm.rank, reason, to_blame=to_blame)


def _stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame))
