"""A process group that behaves as NCCL's does, over Gloo and in the CPU's memory: for what runs only over NCCL.

As NCCL it takes no notice of tags, tells whoever asks whether something is done, and has a watchdog: a thread that ends
the *process* once something has been queued for longer than the group's limit. What a CUDA stream does behind it is
done at once here: `wait` blocks until the data is there.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from thinwire.comm import Communicator, communicator
from thinwire.comm.exchange import PeerExchange

BACKEND = "nccl_stand_in"
#: What a process that its watchdog has ended returns.
ENDED = 86
_LOOK_SECONDS = 0.05
_TAG = 0
_DAYS = timedelta(days=1)


class _Work(dist._Work):
    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work, self._done, self.since = work, threading.Event(), time.monotonic()
        threading.Thread(target=self._end, daemon=True).start()  # Gloo's do not say that they are done before a wait

    def _end(self) -> None:
        self._work.wait(_DAYS)
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        return self._done.wait()


class NcclStandIn(dist.ProcessGroup):
    """See the module. `limit` is the watchdog's."""

    def __init__(self, store: dist.Store, rank: int, size: int, limit: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, _DAYS)
        self.limit, self._name = limit, ""
        self._queued: list[_Work] = []
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            self._queued = [work for work in self._queued if not work.is_completed()]
            for work in self._queued:
                if time.monotonic() - work.since > self.limit.total_seconds():
                    print("the watchdog ends the process", file=sys.stderr, flush=True)
                    os._exit(ENDED)

    def _get_backend(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(options=SimpleNamespace(_timeout=self.limit), supports_coalescing=False)

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        self._name = dist.distributed_c10d._world.pg_names.get(self, self._name)  # asked again once that has gone
        return self._name

    def _queue(self, function: Callable[..., dist.Work], *arguments: object) -> _Work:
        self._queued.append(work := _Work(function(*arguments)))
        return work

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> _Work:
        return self._queue(self._gloo.send, tensors, peer, _TAG)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> _Work:
        return self._queue(self._gloo.recv, tensors, peer, _TAG)


@contextlib.contextmanager
def over_nccl(limit: timedelta, timeout: float | None = None) -> Iterator[Communicator]:
    """In each rank of an initialised world: a communicator of all ranks that believes to be over NCCL.

    Args:
        limit: of the process group, whose watchdog ends the process after it.
        timeout: of the communicator.
    """
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, NcclStandIn, devices=["cpu"])
    init, choose = PeerExchange.__init__, communicator.choose_backend

    def choose_backend(group: dist.ProcessGroup, device: torch.device | str | None) -> tuple[str, torch.device, str]:
        if isinstance(group, NcclStandIn):
            return "nccl", torch.device("cpu"), "as a stand-in"
        return choose(group, device)

    def on_cpu(exchange: PeerExchange, *arguments: Any) -> None:
        init(exchange, *arguments)
        if exchange.backend == "nccl":
            exchange._device_types = ("cpu",)

    stream = SimpleNamespace(synchronize=lambda: None)
    with (
        mock.patch.object(communicator, "choose_backend", choose_backend),
        mock.patch.object(PeerExchange, "__init__", on_cpu),
        mock.patch.object(torch.cuda, "device", lambda index: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "current_stream", lambda of=None: stream),
    ):
        group = dist.new_group(list(range(dist.get_world_size())), timeout=limit, backend=BACKEND)
        with Communicator(group, timeout=timeout) as comm:
            yield comm
