"""Symmetric memory of processes with GPUs that reach each other, mapped by `torch.distributed._symmetric_memory`."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from thinwire.comm.hosts import VARIABLE
from thinwire.comm.memory.heap import Heap, StillWaiting
from thinwire.comm.resources import require_available
from thinwire.errors import TransportUnavailable

_OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch's variable, for ranks that share a GPU
_ALIGNMENT = 128  # bytes, to which kernels have buffers
_MOST_SECONDS = 30.0  # that torch gets to map memory
_TRIAL_SECONDS = 2.0
_undone: list[str] = []  # why torch did not map memory in this process
_MOST_PATH = 107  # bytes of a socket's path; torch does not look
_lock = threading.Lock()
_given: list[str | None] = []  # what the variable was, for each thread that has set it meanwhile


class _Gpu(NamedTuple):
    """Which GPU a rank uses, and where."""

    host: str
    boot: str
    identity: str
    number: int
    available_bytes: int


class CudaHeap(Heap):
    """Memory of processes with a GPU each, mapped by PyTorch. Not through its pool, which gives nothing back."""

    kind = "cuda"
    fact = (str, str, str, int, int)
    offer = None  # torch tells the peers where

    def inspect(self) -> _Gpu:
        from torch.distributed import _symmetric_memory

        device = self.comm.device
        if _undone:  # ranks would wait for each other in different places
            raise TransportUnavailable(
                f"torch failed to map peers' memory before in the process of rank {self.comm.rank}, and left its part "
                f"undone: {_undone[0]}"
            )
        backend = _symmetric_memory.get_backend(device)
        if backend != "CUDA":
            raise TransportUnavailable(
                f"rank {self.comm.rank} cannot map its peers: torch's symmetric memory on {device} uses the backend "
                f"{backend!r}; 'CUDA' is needed"
            )
        torch.cuda.empty_cache()  # what torch keeps for itself cannot be had for this
        host, boot = os.environ.get(VARIABLE), ""  # ranks that name one host share a fabric, as NVLink between hosts is
        if not host:
            host, boot = platform.node(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        identity = str(torch.cuda.get_device_properties(device).uuid)
        return _Gpu(host, boot, identity, device.index, torch.cuda.mem_get_info(device)[0])

    def create(self, facts: list[Any]) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        gpus = [_Gpu(*fact) for fact in facts]
        own = gpus[self.comm.rank]
        for peer, gpu in enumerate(gpus):
            if peer != self.comm.rank and peer in self.ranks:
                why = _why_out_of_reach(own, gpu)
                if why is not None:
                    raise TransportUnavailable(f"rank {self.comm.rank} cannot map the memory of rank {peer}: {why}")
        why = _why_no_socket()
        if why is not None:
            raise TransportUnavailable(f"rank {self.comm.rank} cannot map its peers' memory: {why}")
        sharing = [gpu.available_bytes for gpu in gpus if gpu.identity == own.identity]
        require_available(len(sharing), self.num_bytes, min(sharing), f"rank {self.comm.rank}'s {self.comm.device}")
        self.local = _SymmetricMemory.empty_strided_p2p((self.num_bytes,), (1,), torch.uint8, self.comm.device)
        self.local.zero_()
        torch.cuda.current_stream(self.comm.device).synchronize()

    def attach(self, offers: list[None]) -> list[int]:
        from torch.distributed import _symmetric_memory

        local = self.local
        assert local is not None
        comm, group = self.comm, self.comm.group
        if len(self.ranks) < comm.size:
            # Only the members make it, for its store: torch would split NCCL's communicator with all ranks.
            everyone = dist.get_process_group_ranks(group)
            members, limit = [everyone[rank] for rank in self.ranks], timedelta(seconds=comm.timeout)
            group = dist.new_group(members, timeout=limit, backend="gloo", use_local_synchronization=True)

        # A rank that cannot map a peer leaves torch, where its peers go on waiting: it waits twice as long for them.
        begun, seconds = time.monotonic(), min(comm.timeout / 2, _MOST_SECONDS)
        try:
            with _without_multicast(), _interrupted_after(seconds), _store_limited(group, seconds):
                handle = _symmetric_memory.rendezvous(local, group)
        except RuntimeError as error:
            _undone.append(str(error))
            if time.monotonic() - begun >= seconds:
                peers = [rank for rank in self.ranks if rank != comm.rank]
                raise StillWaiting(
                    f"rank {comm.rank} waited {seconds:g} s for torch to map the memory of ranks {peers} on "
                    f"{comm.device}, and one of them could not, or stopped meanwhile ({error})"
                ) from error
            if "socket" not in str(error) and " fd: " not in str(error):
                raise
            raise TransportUnavailable(
                f"rank {comm.rank} cannot map its peers' memory: {error}; torch's socket is {_socket()}, and those of "
                "its peers have their process ids there: give all ranks of a host the same folder and process ids"
            ) from error
        self.mappings = [handle]
        buffer_ptrs = [local.data_ptr()] * comm.size
        for peer, base in zip(self.ranks, handle.buffer_ptrs, strict=True):
            buffer_ptrs[peer] = int(base)
            if not base or base % _ALIGNMENT:
                raise TransportUnavailable(
                    f"rank {comm.rank} cannot map the memory of rank {peer}: torch gave the address {base}; a multiple "
                    f"of {_ALIGNMENT} is needed"
                )
        if buffer_ptrs[self.comm.rank] != local.data_ptr():
            raise TransportUnavailable(
                f"torch says that rank {self.comm.rank}'s buffer is at {buffer_ptrs[self.comm.rank]}, but it is at "
                f"{local.data_ptr()}: this version of torch is not supported"
            )
        return buffer_ptrs

    def trials(self, buffer_ptrs: list[int]) -> Sequence[Callable[[], object]]:
        from thinwire.triton_kernels.reach import exchange, find_lost  # here, as loading Triton takes a while

        local, own = self.local, self.ranks.index(self.comm.rank)
        assert local is not None
        pointers = torch.tensor([buffer_ptrs[rank] for rank in self.ranks], dtype=torch.int64, device=local.device)

        def store() -> None:
            exchange(own, local, pointers, _TRIAL_SECONDS)
            if lost := find_lost(own, local, len(pointers)):
                raise TransportUnavailable(
                    f"what ranks {[self.ranks[place] for place in lost]} stored in the memory of rank {self.comm.rank} "
                    f"on {self.comm.device} did not arrive whole in {_TRIAL_SECONDS:g} s, though they have mapped it"
                )

        return lambda: exchange(own, local, pointers, 0), store


@contextlib.contextmanager
def _store_limited(group: dist.ProcessGroup, seconds: float) -> Iterator[None]:
    """Ends torch's waits in the group's store after so many seconds."""
    store = group.get_group_store()
    before: timedelta = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        store.set_timeout(before)


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    """Has torch make no multicast object, which nobody uses, and which is where set-up on NVSwitches fails or hangs.

    torch makes none where ranks may share a GPU. Nor does it then compare the numbers of their GPUs, of which each may
    be cuda:0 to its own rank. It reads the variable in each rendezvous. Threads may be in several at once; the last to
    leave restores it.
    """
    with _lock:
        _given.append(_given[0] if _given else os.environ.get(_OVERLAPPING))
        os.environ[_OVERLAPPING] = "1"
    try:
        yield
    finally:
        with _lock:
            before = _given.pop()
            if before is not None and not _given:
                os.environ[_OVERLAPPING] = before
            elif not _given:
                del os.environ[_OVERLAPPING]


@contextlib.contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Interrupts torch's wait for a peer's socket, which has no limit, so that it raises RuntimeError.

    torch holds the interpreter meanwhile, so no thread could end that wait. An alarm of the system does, in the main
    thread, which alone gets it, and unless somebody else waits for alarms.
    """
    is_main = threading.current_thread() is threading.main_thread()
    has_alarm = signal.getitimer(signal.ITIMER_REAL)[0] > 0  # without a handler, as of who wants the process to end
    if not is_main or has_alarm or signal.getsignal(signal.SIGALRM) != signal.SIG_DFL:
        yield
        return
    try:
        signal.signal(signal.SIGALRM, lambda *_: None)  # to be interrupted is enough
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # and again, if it came just before the wait
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # drops one that is on its way, which would end the process
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _socket() -> str:
    """The path of torch's socket for this process's memory."""
    folders = (os.environ.get(name) for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))
    return f"{next((folder for folder in folders if folder is not None), '/tmp')}/symm_mem-{os.getpid()}"


def _why_no_socket() -> str | None:
    """Why torch cannot make it; None if nothing is known. In torch, peers would wait for a rank that cannot."""
    path = _socket()
    if len(os.fsencode(path)) > _MOST_PATH:
        return f"torch's socket {path} has more than {_MOST_PATH} bytes: name a shorter folder in TMPDIR"
    if os.path.lexists(path):
        return f"torch's socket {path} exists, of a killed process: remove it, or name another folder in TMPDIR"
    if not os.access(os.path.dirname(path), os.W_OK | os.X_OK):
        return f"torch cannot make its socket {path}: name a folder in TMPDIR to which it may write"
    return None


def _why_out_of_reach(own: _Gpu, peer: _Gpu) -> str | None:
    """Why one GPU's kernels cannot store to another's memory; None if nothing is known against it."""
    if (own.host, own.boot) != (peer.host, peer.boot):
        return f"their GPUs are in different hosts, {own.host!r} and {peer.host!r}"
    if own.identity == peer.identity and os.environ.get(_OVERLAPPING) != "1":
        return f"they share one GPU, cuda:{own.number}; that needs {_OVERLAPPING}=1, and a gloo group"
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    if own.identity != peer.identity and peer.identity in visible:
        if not torch.cuda.can_device_access_peer(own.number, visible[peer.identity]):
            return f"cuda:{own.number} has no peer-to-peer access to cuda:{visible[peer.identity]}"
    return None
