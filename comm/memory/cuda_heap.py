"""Symmetric memory of processes with GPUs that reach each other, mapped by `torch.distributed._symmetric_memory`."""

from __future__ import annotations

import os
import platform
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from thinwire.comm.hosts import VARIABLE
from thinwire.comm.memory.heap import Heap
from thinwire.comm.resources.available import require_available
from thinwire.errors import TransportUnavailable

_OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch's variable, for ranks that share a GPU


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

    def read_fact(self, fact: list[Any]) -> _Gpu:
        gpu = _Gpu(*fact)
        if gpu.number < 0 or gpu.available_bytes < 0:
            raise ValueError(f"cuda:{gpu.number}, {gpu.available_bytes} bytes available")
        return gpu

    def create(self, facts: list[_Gpu]) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        own = facts[self.comm.rank]
        for peer, gpu in enumerate(facts):
            if peer != self.comm.rank and peer in self.ranks:
                why = _why_out_of_reach(own, gpu)
                if why is not None:
                    raise TransportUnavailable(f"rank {self.comm.rank} cannot map the memory of rank {peer}: {why}")
        sharing = [gpu.available_bytes for gpu in facts if gpu.identity == own.identity]
        require_available(len(sharing), self.num_bytes, min(sharing), f"rank {self.comm.rank}'s {self.comm.device}")
        self.local = _SymmetricMemory.empty_strided_p2p((self.num_bytes,), (1,), torch.uint8, self.comm.device)
        self.local.zero_()
        torch.cuda.current_stream(self.comm.device).synchronize()

    def attach(self, offers: list[None]) -> list[int]:
        from torch.distributed import _symmetric_memory

        assert self.local is not None
        comm, group = self.comm, self.comm.group
        if len(self.ranks) < comm.size:
            # Only the members make it, for its store: torch would split NCCL's communicator with all ranks.
            everyone = dist.get_process_group_ranks(group)
            members, limit = [everyone[rank] for rank in self.ranks], timedelta(seconds=comm.timeout)
            group = dist.new_group(members, timeout=limit, backend="gloo", use_local_synchronization=True)
        handle = _symmetric_memory.rendezvous(self.local, group)
        self.mappings = [handle]
        buffer_ptrs = [self.local.data_ptr()] * comm.size
        for peer, base in zip(self.ranks, handle.buffer_ptrs, strict=True):
            buffer_ptrs[peer] = int(base)
            if not base:
                raise TransportUnavailable(
                    f"rank {comm.rank} cannot map the memory of rank {peer}: torch gave no address"
                )
        if buffer_ptrs[self.comm.rank] != self.local.data_ptr():
            raise TransportUnavailable(
                f"torch says that rank {self.comm.rank}'s buffer is at {buffer_ptrs[self.comm.rank]}, but it is at "
                f"{self.local.data_ptr()}: this version of torch is not supported"
            )
        return buffer_ptrs


def _why_out_of_reach(own: _Gpu, peer: _Gpu) -> str | None:
    """Why one GPU's kernels cannot store to another's memory; None if nothing is known against it."""
    if (own.host, own.boot) != (peer.host, peer.boot):
        return f"their GPUs are in different hosts, {own.host!r} and {peer.host!r}"
    if own.number == peer.number and os.environ.get(_OVERLAPPING) != "1":
        same = "share one GPU" if own.identity == peer.identity else "have different GPUs with the same number"
        return f"they {same}, cuda:{own.number}; for that, torch needs {_OVERLAPPING}=1, and a gloo group"
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    if own.identity != peer.identity and peer.identity in visible:
        if not torch.cuda.can_device_access_peer(own.number, visible[peer.identity]):
            return f"cuda:{own.number} has no peer-to-peer access to cuda:{visible[peer.identity]}"
    return None
