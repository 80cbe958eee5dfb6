"""Symmetric memory of processes on one host: a file in memory each, mapped by all."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import platform
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from thinwire.comm.communicator import Communicator
from thinwire.comm.memory.heap import Heap
from thinwire.comm.resources.available import available_bytes, require_available
from thinwire.errors import CapacityError, ThinwireError, TransportUnavailable

_TOKEN_BYTES = 32
_TOKEN = re.compile(f"[0-9a-f]{{{2 * _TOKEN_BYTES}}}")
_SHORT_OF_MEMORY = (errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class _Host(NamedTuple):
    """What tells one host, and one set of process numbers, from another."""

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

    def read_fact(self, fact: list[Any]) -> _Host:
        host = _Host(*fact)
        if host.processes < 0 or host.available_bytes < 0:
            raise ValueError(f"pid namespace {host.processes}, {host.available_bytes} bytes available")
        return host

    def create(self, facts: list[_Host]) -> _Segment:
        self._require_one_host(facts)
        available = self._least([host.available_bytes for host in facts])
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

    def read_offer(self, offer: list[Any]) -> _Segment:
        segment = _Segment(*offer)
        if segment.process < 1 or segment.descriptor < 0 or not _TOKEN.fullmatch(segment.token):
            raise ValueError(
                f"file {segment.descriptor} of process {segment.process}, with a token of {len(segment.token)} "
                f"characters; expected numbers of at least 0 and 1, and {2 * _TOKEN_BYTES} of hexadecimal"
            )
        return segment

    def attach(self, offers: list[_Segment]) -> list[int]:
        assert self.local is not None
        buffer_ptrs = []
        for peer, segment in enumerate(offers):
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
