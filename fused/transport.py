"""When a communicator takes the direct transport, and why not where it does not: settled alike on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from thinwire.comm.communicator import Communicator
from thinwire.comm.host_collectives import Setting
from thinwire.comm.symmetric import SymmetricMemory, allocate
from thinwire.errors import CapacityError, TransportUnavailable
from thinwire.fused.backend import BACKEND_VARIABLE
from thinwire.triton_kernels.compat import HAS_TRITON
from thinwire.triton_kernels.cpu import HAS_NUMBA
from thinwire.version import VERSION
from thinwire.wire import WIRE_VERSION

__all__ = ["TRANSPORTS", "Refusal", "check_transport", "open_direct", "uses_triton"]

#: What `transport=` accepts.
TRANSPORTS = ("auto", "direct", "staged")

_T = TypeVar("_T")


@dataclass(frozen=True)
class Refusal:
    """Why a communicator does without; the same on every rank."""

    name: str
    reason: str

    def describe(self) -> str:
        """One line for `Communicator.explain`."""
        return f"{self.name}: staged, as {self.reason}"

    def settle(self) -> None:
        """There is nothing under way."""

    def close(self) -> None:
        """There is nothing to let go of."""


def check_transport(transport: str) -> None:
    """Refuses what is no transport.

    Raises:
        TransportUnavailable: naming what is.
    """
    if transport not in TRANSPORTS:
        raise TransportUnavailable(f"transport {transport!r} is not known; accepted: {', '.join(TRANSPORTS)}")


def uses_triton(comm: Communicator) -> bool:
    """Whether this rank's kernels are Triton's. Ranks of either kind may share a group: they write the same bytes."""
    return comm.device.type == "cuda" or os.environ.get(BACKEND_VARIABLE) == "triton"


def open_direct(
    comm: Communicator,
    name: str,
    num_bytes: int,
    settings: Mapping[str, Setting],
    make: Callable[[SymmetricMemory], _T],
) -> _T | Refusal:
    """What an operation needs on the direct transport, or why there is none. Collective.

    Args:
        name: of the operation, for people.
        num_bytes: of each rank's symmetric memory.
        settings: what ranks must agree on, beside the library's version.
        make: takes the memory.

    Raises:
        ConfigMismatch: ranks with other settings, or another version.
        PeerTimeout: a peer did not take part.
    """
    reasons = comm.all_gather_object(_why_not(comm))
    for rank, reason in enumerate(reasons):
        if reason is not None:
            return Refusal(name, f"{reason} on rank {rank}")
    comm.require_same(f"the direct transport of {name}", {**settings, "version": VERSION, "wire": WIRE_VERSION})
    try:
        memory = allocate(comm, num_bytes)
    except (TransportUnavailable, CapacityError) as error:
        return Refusal(name, str(error))
    made = make(memory)
    comm.barrier()  # kernels that one rank still has to compile shall not count as its silence
    return made


def _why_not(comm: Communicator) -> str | None:
    """What keeps this rank from the direct transport."""
    backend = os.environ.get(BACKEND_VARIABLE)
    if comm.device.type == "cuda":
        if backend not in (None, "", "triton"):
            return f"it needs the triton backend on {comm.device} and {BACKEND_VARIABLE}={backend}"
        return None if HAS_TRITON else "triton is not installed"
    if comm.device.type != "cpu":
        return f"it is for the CPU and CUDA, and the communicator's tensors live on {comm.device}"
    if backend == "triton":
        if not HAS_TRITON:
            return "triton is not installed"
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if interpreted else "Triton runs on CPU tensors only under its interpreter, TRITON_INTERPRET=1,"
    if backend not in (None, "", "numba"):
        return f"it needs the numba backend and {BACKEND_VARIABLE}={backend}"
    if not HAS_NUMBA:
        return "numba is not installed"
    return None
