"""Which transport an operation takes, alike on all ranks.

*Direct*: kernels store into the peers' memory, or on CPU ranks read it, where every rank can map every peer's.
*Staged*: through the process group. *Two levels*: the one within each host, the other between hosts. `choose` decides
for every operation, and gives an object that carries it out; a `Staged` remembers why it is one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch

from thinwire.comm.call import Attachment
from thinwire.comm.communicator import Communicator
from thinwire.comm.host_collectives import Setting
from thinwire.comm.hosts import describe
from thinwire.comm.memory.symmetric import SymmetricMemory, allocate
from thinwire.errors import CapacityError, ThinwireError, TransportUnavailable
from thinwire.fields import MOST_TEXT
from thinwire.fused.backend import select_backend
from thinwire.fused.direct_transport import DirectTransport
from thinwire.triton_kernels.compat import HAS_TRITON
from thinwire.triton_kernels.cpu import BACKEND_VARIABLE, HAS_NUMBA, JIT_DISABLED
from thinwire.triton_kernels.launch import settle_cache_keys
from thinwire.wire import WireFormat

#: What `transport=` accepts.
TRANSPORTS = ("auto", "direct", "two_level", "staged")


class Transport(Protocol):
    """What carries out an operation's calls; operations add to it what they ask of theirs.

    Attributes:
        name: "direct", "staged" or "two_level".
        reason: why it is not direct; the same on every rank.
        lack: what the direct one lacks, where it is neither by a setting nor by design that it is not there: memory is
            a CapacityError, a package or a way to the peers' memory a TransportUnavailable.
    """

    name: str
    reason: str
    lack: type[ThinwireError] | None

    def describe(self) -> str: ...


_T = TypeVar("_T", bound=Transport)
_S = TypeVar("_S", bound=Transport)
_Staged = TypeVar("_Staged", bound="Staged")


class Staged(Attachment):
    """An operation's calls through the process group; a Transport."""

    name = "staged"

    @classmethod
    def instead_of(cls: type[_Staged], operation: str, missing: Staged) -> _Staged:
        """For an operation, in place of what it would share with others; the first of these tells that it lacks."""
        lack, missing.lack = missing.lack, None
        return cls(operation, missing.reason, lack)

    def __init__(self, operation: str, reason: str, lack: type[ThinwireError] | None = None) -> None:
        self.operation, self.reason, self.lack = operation, reason, lack

    def describe(self) -> str:
        """One line for `Communicator.explain`."""
        return f"{self.operation}: staged, as {self.reason}"


def check_transport(transport: str) -> None:
    """Raises TransportUnavailable for what is no transport, naming what is."""
    if not isinstance(transport, str) or transport not in TRANSPORTS:
        raise TransportUnavailable(f"transport {transport!r} is not known; accepted: {', '.join(TRANSPORTS)}")


def choose(
    name: str,
    transport: str,
    comm: Communicator,
    wires: Sequence[WireFormat],
    open_: Callable[[], _T],
    staged: Callable[[str, str], _T],
    no_memory: type[ThinwireError] = TransportUnavailable,
) -> _T:
    """What carries out an operation's calls.

    Args:
        wires: formats whose rows the staged transport needs a backend for.
        open_: gives the direct one or that of two levels, or the staged one if neither is available; collective in its
            first call.
        staged: gives the staged one, of the operation's name and the reason.
        no_memory: what is raised where the direct one was asked for, and only its memory is not available; else
            TransportUnavailable, as where there is neither.
    """
    check_transport(transport)
    unproven = None if transport == "staged" else why_not_by_default(comm)
    if unproven is not None and transport == "auto":
        found = staged(name, unproven)
        if isinstance(found, Staged):
            told: Staged = found
            comm.attached(f"{name}, by default", lambda: told)  # for `explain`
    else:
        if unproven is not None:
            warnings.warn(f"{name}: {unproven}", RuntimeWarning, 2)
        found = staged(name, "as asked for") if transport == "staged" else open_()
    if found.name == "direct" and transport != "two_level":
        return found
    if transport not in ("auto", found.name):
        kind = no_memory if found.lack is CapacityError else TransportUnavailable
        why, what = found.reason, "the direct transport"
        if transport == "two_level":
            why, what = why_not_two_levels(comm) or why, "two levels"
        raise kind(f"{name} cannot take {what}: {why}")
    if found.lack is not None:
        warnings.warn(f"{name} takes the staged transport, which is slower: {found.reason}", RuntimeWarning, 2)
        found.lack = None  # it is said once
    for wire in wires:
        select_backend(comm.device, wire)
    try:
        comm.check_exchange()
    except TransportUnavailable as error:
        if transport == "staged":
            raise
        raise TransportUnavailable(f"no transport is available: direct: {found.reason}; staged: {error}") from error
    return found


def why_not_two_levels(comm: Communicator) -> str | None:
    """Why no operation of a communicator can take two levels; None: those can that are built for them."""
    if len(comm.hosts) == 1:
        return "its ranks are on one host"
    if len(comm.hosts) == comm.size:
        return "every host has one rank"
    return None


def why_not_by_default(comm: Communicator) -> str | None:
    """What keeps "auto" from trying the direct transport, which can be asked for all the same."""
    if comm.device.type == "cuda" and torch.version.hip:
        return "the direct transport is not proven on AMD GPUs, and is taken by transport='direct' alone"
    return None


def uses_triton(comm: Communicator) -> bool:
    """Whether this rank's kernels are Triton's, which store into peers' memory. Numba's read there.

    Ranks of both kinds cannot share a direct transport, and are told.
    """
    return comm.device.type == "cuda" or os.environ.get(BACKEND_VARIABLE) == "triton"


def open_direct(
    comm: Communicator,
    name: str,
    num_bytes: int,
    settings: Mapping[str, Setting],
    make: Callable[[SymmetricMemory, bool], _T],
    staged: Callable[[str, str, type[ThinwireError] | None], _S],
    generation: int = 0,
    ranks: Sequence[int] | None = None,
) -> _T | _S:
    """An operation's direct transport, or the staged one, which knows why. Collective; the logger is told which.

    Args:
        num_bytes: of each rank's symmetric memory.
        settings: what ranks must agree on.
        make: takes the memory, and whether there are more ranks than cores that some of them may run on; not
            collective. What it raises on one rank keeps the others from going on.
        staged: gives the staged one, of the operation's name, the reason, and what is lacking, see `Transport`.
        ranks: those that store into each other's memory, where it is not all: this rank's host's.

    Raises:
        ConfigMismatch: ranks with other settings.
        PeerTimeout: a peer did not take part.
        TransportUnavailable: `make` failed on a rank; where that was with an error of thinwire's, it raises that one.
    """

    def refusal(reason: str, lack: type[ThinwireError] | None = None) -> _S:
        found = staged(name, reason, lack)
        comm.log(f"{name}: staged, as {reason}")
        return found

    if ranks is None and len(comm.hosts) > 1:
        return refusal(f"its ranks are on several hosts: {describe(comm.hosts)}")
    told = comm.all_gather_data((_why_not(comm), _own_cores()), (str | None, [int]))
    for rank, (reason, _) in enumerate(told):
        if reason is not None:
            return refusal(f"{reason} on rank {rank}", TransportUnavailable if "not installed" in reason else None)
    comm.require_same(f"the direct transport of {name}", settings)
    try:
        memory = allocate(comm, num_bytes, generation, ranks)
    except (TransportUnavailable, CapacityError) as error:
        return refusal(str(error), type(error))
    problem: Exception | None = None
    calls: dict[int, int] = {}
    try:
        made = make(memory, comm.size > len({core for _, cores in told for core in cores}))
        described = made.describe()
        if isinstance(made, DirectTransport):
            calls = made.calls
    except Exception as error:
        problem = error
    # All wait here for kernels that one rank still has to compile: they shall not count as its silence.
    failure = None if problem is None else f"{type(problem).__name__}: {problem}"[:MOST_TEXT]
    if comm.in_process:
        failures, peers_calls = zip(*comm.share_objects((failure, calls)), strict=True)
    else:
        failures, peers_calls = tuple(comm.all_gather_data(failure, str | None)), ()
    for rank, text in enumerate(failures):
        if text is not None:
            memory.close()
            if isinstance(problem, ThinwireError):
                raise problem
            raise TransportUnavailable(f"{name}: rank {rank} could not use its memory: {text}") from problem
    if isinstance(made, DirectTransport):
        made.peers_calls = peers_calls
    # Once all ranks know that they have it, nothing may fail: so it was described before.
    comm.log(described if described.startswith(f"{name}: ") else f"{name}: {described}")
    return made


def _own_cores() -> list[int]:
    """The cores that this rank may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _why_not(comm: Communicator) -> str | None:
    """What keeps this rank from the direct transport."""
    backend, on_gpu, triton = os.environ.get(BACKEND_VARIABLE), comm.device.type == "cuda", uses_triton(comm)
    if comm.device.type not in ("cpu", "cuda"):
        return f"it is for the CPU and CUDA, and the communicator's tensors live on {comm.device}"
    kernels = "triton" if triton else "numba"
    if backend not in (None, "", kernels):
        where = f" on {comm.device}" if on_gpu else ""
        return f"it needs the {kernels} backend{where} and {BACKEND_VARIABLE}={backend}"
    if not (HAS_TRITON if triton else HAS_NUMBA):
        return "NUMBA_DISABLE_JIT is set" if JIT_DISABLED and not triton else f"{kernels} is not installed"
    if triton and not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton runs on CPU tensors only under its interpreter, TRITON_INTERPRET=1,"
    if triton:
        settle_cache_keys()
    return None
