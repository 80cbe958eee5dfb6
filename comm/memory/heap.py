"""How symmetric memory is made, in steps: allocations that threads share, and files in memory that processes map."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import platform
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from thinwire.comm.communicator import Communicator
from thinwire.comm.resources import available_bytes, require_available
from thinwire.errors import CapacityError, ThinwireError, TransportUnavailable

_TOKEN_BYTES = 32
_SHORT_OF_MEMORY = (errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class StillWaiting(TransportUnavailable):
    """A rank waited for others, one of which may know more of why."""


class Heap:
    """One kind of memory: here that of ranks that are threads of one process, or of one rank alone.

    All ranks take each step before any of them takes the next.

    Attributes:
        ranks: those that map each other's buffers; of the others this one's own address stands in the table.
        local: the own buffer, once `create` has run.
        mappings: what keeps the peers' buffers at their addresses.
        fact, offer: the shapes of what `inspect` and `create` return, see `thinwire.fields`.
    """

    kind = "threads"
    fact: Any = int
    offer: Any = int

    def __init__(self, comm: Communicator, num_bytes: int, ranks: Sequence[int]) -> None:
        self.comm, self.num_bytes, self.ranks = comm, num_bytes, ranks
        self.local: torch.Tensor | None = None
        self.mappings: list[Any] = []

    @staticmethod
    def held_bytes(num_bytes: int) -> int:
        """Bytes that a rank holds for a buffer of `num_bytes`."""
        return num_bytes

    def inspect(self) -> Any:
        """Gives what all ranks must know of this one before anything is allocated."""
        if self.comm.device.type != "cuda":
            return available_bytes()
        torch.cuda.empty_cache()  # what torch keeps for itself cannot be had for this
        return torch.cuda.mem_get_info(self.comm.device)[0]

    def create(self, facts: list[Any]) -> Any:
        """Allocates the own buffer, zeroed, if all ranks' facts allow it; returns what peers need to find it."""
        require_available(len(self.ranks), self.num_bytes, self._least(facts), str(self.comm.device))
        try:
            self.local = torch.zeros(self.num_bytes, dtype=torch.uint8, device=self.comm.device)
        except RuntimeError as error:  # what both allocators raise; CUDA's is of a class derived from it
            raise CapacityError(
                f"rank {self.comm.rank} cannot allocate {self.num_bytes} bytes on {self.comm.device} ({error}); "
                f"{self.inspect()} bytes are available to it"
            ) from error
        if self.comm.device.type == "cuda":
            torch.cuda.current_stream(self.comm.device).synchronize()
        return self.local.data_ptr()

    def attach(self, offers: list[Any]) -> list[int]:
        """Maps the peers' buffers and returns the addresses of all."""
        # A peer that closes first must not take its memory away from this rank's kernels.
        self.mappings = self.comm.share_objects(self.local) if self.comm.in_process else []
        return [offers[rank if rank in self.ranks else self.comm.rank] for rank in range(self.comm.size)]

    def trials(self, buffer_ptrs: list[int]) -> Sequence[Callable[[], object]]:
        """Steps that show whether what is mapped can be used; TransportUnavailable where it cannot."""
        return ()

    def _least(self, available: Sequence[int]) -> int:
        return min(available[rank] for rank in self.ranks)

    def finish(self) -> None:
        """Gives back what only the steps needed."""


class _Host(NamedTuple):
    """Identifies a host, and the set of process numbers that is valid there."""

    name: str
    boot: str
    processes: int
    available_bytes: int


class _Segment(NamedTuple):
    """Where peers find a rank's memory, and what must be in it."""

    process: int
    descriptor: int
    token: str  # hexadecimal


class PosixHeap(Heap):
    """Memory of processes on one host: a `memfd` each, mapped by all.

    It has no name: peers open it as `/proc/<process>/fd/<descriptor>`, and what a killed process held, the kernel
    frees. Behind the buffer lies a page with a random token. A peer that opened something else, because the process
    number means another process there, finds no such token.
    """

    kind = "posix"
    fact = (str, str, int, int)
    offer = (int, int, str)

    def __init__(self, comm: Communicator, num_bytes: int, ranks: Sequence[int]) -> None:
        super().__init__(comm, num_bytes, ranks)
        self.rank = comm.rank
        self.segment_bytes = self.held_bytes(num_bytes)
        self.token_at = self.segment_bytes - mmap.PAGESIZE
        self.descriptor: int | None = None

    @staticmethod
    def held_bytes(num_bytes: int) -> int:
        """Whole pages, and the token's."""
        return (-(-num_bytes // mmap.PAGESIZE) + 1) * mmap.PAGESIZE

    def inspect(self) -> _Host:
        failed = f"rank {self.rank} cannot share memory with its peers"
        if not hasattr(os, "memfd_create"):
            raise TransportUnavailable(f"{failed}: {platform.system()} lacks memfd_create, which Linux has")
        if not os.path.isdir("/proc/self/fd"):
            raise TransportUnavailable(f"{failed}: there is no /proc/<process>/fd, as /proc is not mounted")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return _Host(platform.node(), boot, os.stat("/proc/self/ns/pid").st_ino, available_bytes())

    def create(self, facts: list[Any]) -> _Segment:
        hosts = [_Host(*fact) for fact in facts]
        self._require_one_host(hosts)
        available = self._least([host.available_bytes for host in hosts])
        require_available(len(self.ranks), self.num_bytes, available, "this host")
        try:
            self.descriptor = os.memfd_create("thinwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(self.descriptor, 0o600)
            # All pages now: memory that ran out later would be a SIGBUS at some store.
            os.posix_fallocate(self.descriptor, 0, self.segment_bytes)
            # Its size is final, so nobody can take pages away under a mapping.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _seals())
            own = mmap.mmap(self.descriptor, self.segment_bytes)
        except OSError as error:
            raise self._described(error, "set aside") from error
        token = secrets.token_bytes(_TOKEN_BYTES)
        own[self.token_at : self.token_at + _TOKEN_BYTES] = token
        self.local = torch.frombuffer(own, dtype=torch.uint8, count=self.num_bytes)  # keeps the mapping
        return _Segment(os.getpid(), self.descriptor, token.hex())

    def attach(self, offers: list[Any]) -> list[int]:
        assert self.local is not None
        buffer_ptrs = []
        for peer, segment in enumerate(_Segment(*offer) for offer in offers):
            if peer == self.rank or peer not in self.ranks:
                buffer_ptrs.append(self.local.data_ptr())
            else:
                self.mappings.append(self._map(peer, segment))
                buffer_ptrs.append(torch.frombuffer(self.mappings[-1], dtype=torch.uint8, count=1).data_ptr())
        return buffer_ptrs

    def finish(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _require_one_host(self, facts: list[_Host]) -> None:
        least = self.ranks[0]
        first = facts[least]
        for rank in self.ranks:
            host, failed = facts[rank], f"rank {rank} cannot map the memory of rank {least}"
            if (host.name, host.boot) != (first.name, first.boot):
                raise TransportUnavailable(
                    f"{failed}: it runs on host {host.name!r} (boot {host.boot}), rank {least} on {first.name!r} "
                    f"(boot {first.boot})"
                )
            if host.processes != first.processes:
                raise TransportUnavailable(
                    f"{failed}: they are in different pid namespaces of host {host.name!r}; run a host's ranks in one "
                    "container, or give their containers a common pid namespace"
                )

    def _map(self, peer: int, segment: _Segment) -> mmap.mmap:
        failed = f"rank {self.rank} cannot map the memory of rank {peer}"
        try:
            # It may turn out to be no such file: a terminal shall not become this process's, nor a device keep it.
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
            descriptor = os.open(f"/proc/{segment.process}/fd/{segment.descriptor}", flags)
        except OSError as error:
            raise TransportUnavailable(
                f"{failed}: opening file {segment.descriptor} of process {segment.process} gave {error.strerror!r}; "
                "both must run as the same user and see each other under /proc"
            ) from error
        try:
            # The size comes first, and that nobody can change it: to look for the token in a file that is shorter, or
            # is cut short meanwhile, would be a SIGBUS.
            if os.fstat(descriptor).st_size == self.segment_bytes and _is_sealed(descriptor):
                mapping = mmap.mmap(descriptor, self.segment_bytes)
                if mapping[self.token_at : self.token_at + _TOKEN_BYTES] == bytes.fromhex(segment.token):
                    return mapping
                mapping.close()
        except OSError as error:
            raise self._described(error, f"map rank {peer}'s") from error
        finally:
            os.close(descriptor)
        raise TransportUnavailable(f"{failed}: process {segment.process} here is not rank {peer}'s process")

    def _described(self, error: OSError, action: str) -> ThinwireError:
        text = f"rank {self.rank} cannot {action} {self.num_bytes} bytes of shared memory: {error.strerror}"
        if error.errno in _SHORT_OF_MEMORY:
            return CapacityError(f"{text}; {available_bytes()} bytes are available to it")
        return TransportUnavailable(text)


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # looked up late: only Linux has them


def _is_sealed(descriptor: int) -> bool:
    """Whether an open file's size is final."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() == _seals()
    except OSError as error:
        if error.errno == errno.EINVAL:  # a file that cannot be sealed
            return False
        raise
