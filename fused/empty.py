"""Tensors in symmetric memory: exact rows are stored straight into them by the ranks that send them, in one copy.

`docs/protocol.md`, "Straight into the output", has the argument, and `thinwire.triton_kernels.cpu.straight` what ranks
tell each other of a call. A rank's mapping keeps its peers' pages, and its own rows' pages are never given to anything
else while the tensor or its communicator is there: a late store of a peer's meets nothing that is not this tensor's.
"""

from __future__ import annotations

import ctypes
import math
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from thinwire.comm import Communicator, Group, communicator_or_default
from thinwire.comm.calls import Attachment
from thinwire.comm.memory.symmetric import SymmetricMemory, allocate
from thinwire.errors import ArgumentError, TransportUnavailable
from thinwire.fused.all_to_all import open_channel
from thinwire.fused.host_channel import HostChannel
from thinwire.fused.operations import on_communicator
from thinwire.fused.transport import uses_triton

_KEY = "empty"
_MOST_NUMBER = 1 << 62  # of regions
_NOT_PLAIN = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


@on_communicator
def empty(*shape: int | Sequence[int], dtype: torch.dtype | None = None, comm: Group | None = None) -> torch.Tensor:
    """A tensor in symmetric memory, zero at first: exact rows that arrive in it are copied once and not twice.

    As the `out` of an exact (`wire="none"`) `all_to_all_v`, `all_gather` or `all_gather_v` on the direct transport with
    known receive counts, it, or a contiguous part of it, gets its rows straight from the peers: all but the first piece
    (`comm.explain()` says how large a piece is). Otherwise it is an ordinary tensor. Each rank decides for its own
    output. Collective; blocks the host.

    The memory is freed at the next call of this function after every rank dropped its last reference;
    `comm.memory_bytes` counts it. `close` gives back the peers' parts; a rank's own part stays as long as its tensor,
    which is an ordinary one from then on. It cannot be resized. `fork` shares it: the parent sees what the child
    writes, and both see what peers store.

    Peers may store into `out` until the call ends. After PeerTimeout, or if `close` cut the call off, a late peer's
    piece may still arrive.

    Args:
        shape: ints of at least 0, or one list or tuple of them; the same on all ranks.
        dtype: the same on all ranks; None means torch's default.
        comm: a communicator, a process group, or a DeviceMesh of one axis; None means the one that `init` made. With
            others the tensor is an ordinary one.

    Returns:
        A contiguous tensor on the CPU.

    Raises:
        ArgumentError: a shape or a dtype that no tensor has; before peers hear of the call.
        ConfigMismatch: on every rank, that ranks passed different ones.
        CapacityError: there is less memory.
        TransportUnavailable: some rank is not a CPU rank that can map its peers' memory, with numba's kernels, and why.
            On CUDA always: there peers store into slots, and kernels copy out of these.
        PeerTimeout: a peer did not take part.

    >>> import thinwire as tw
    >>> with tw.init() as comm:
    ...     out = tw.empty(2, 3, comm=comm)
    ...     tw.all_to_all_v(torch.ones(2, 3), [2], [2], out=out, wire="none", comm=comm) is out
    True
    """
    sizes, dtype = _checked(shape, dtype)
    num_bytes = math.prod(sizes) * dtype.itemsize
    comm = communicator_or_default(comm)
    with comm.call("empty", sizes, dtype):
        comm.require_same("empty", {"shape": str(sizes), "dtype": str(dtype)})
        tensors = comm.attached(_KEY, SymmetricTensors)
        with torch.inference_mode(False):  # the caller's mode may end, and what was made in it cannot be written then
            memory: torch.Tensor = tensors.new(comm, max(1, num_bytes))
            return memory[:num_bytes].view(dtype).view(sizes)


def _checked(shape: tuple[Any, ...], dtype: Any) -> tuple[list[int], torch.dtype]:
    """A shape and a dtype that a tensor can have."""
    given = shape[0] if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
    sizes = [size for size in given if type(size) is int and size >= 0]
    if len(sizes) < len(given):
        raise ArgumentError(f"empty got the shape {shape!r}, expected ints of at least 0")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or dtype in _NOT_PLAIN:
        raise ArgumentError(f"empty got the dtype {dtype!r}, expected a torch.dtype of plain numbers")
    try:
        torch.empty(sizes, dtype=dtype, device="meta")
    except (RuntimeError, TypeError) as error:  # of sizes, strides or bytes that 64 bits do not hold
        raise ArgumentError(f"empty got the shape {shape!r} of {dtype}, which is more than a tensor can be") from error
    return sizes, dtype


def _why_not(comm: Communicator) -> str | None:
    """What keeps this rank from having such tensors, beside what keeps it from the direct transport."""
    if comm.device.type != "cpu":
        return f"its tensors live on {comm.device}"
    return "its kernels are not numba's, those of CPU ranks" if uses_triton(comm) else None


@dataclass
class _Region:
    """A tensor's memory on all ranks.

    Attributes:
        number: the same on all ranks, and no other's.
        users: the object that the tensor and its views keep; dead when there is none of them on this rank.
    """

    number: int
    memory: SymmetricMemory
    users: weakref.ref[object] = field(repr=False)


class SymmetricTensors(Attachment):
    """The memory of all that `empty` has made on a communicator, at one rank. Collective."""

    def __init__(self) -> None:
        self._channel: HostChannel | None = None
        self._regions: list[_Region] = []

    def new(self, comm: Communicator, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] of a new region, once those are gone that no rank uses any more. Collective.

        Raises:
            TransportUnavailable: see `empty`.
            CapacityError, PeerTimeout: see `allocate`.
        """
        in_use = [region.number for region in self._regions if region.users() is not None]
        own = secrets.randbelow(_MOST_NUMBER) + 1, in_use, _why_not(comm)
        told = comm.all_gather_data(own, (int, [int], str | None))
        needs = "empty needs the direct transport between CPU ranks"
        for rank, (_, _, why) in enumerate(told):
            if why is not None:
                raise TransportUnavailable(f"{needs}; rank {rank}: {why}")
        channel = open_channel(comm)
        if not isinstance(channel, HostChannel):
            raise TransportUnavailable(f"{needs}; {channel.reason}")
        self._channel = channel
        self._keep({number for _, numbers, _ in told for number in numbers})
        memory = allocate(comm, num_bytes)
        # The tensor's own keeper, as the memory itself is kept here: so its end can be seen, that of all views too.
        keeper = (ctypes.c_ubyte * num_bytes).from_address(memory.local.data_ptr())
        keeper.memory = memory.local  # type: ignore[attr-defined]
        self._regions = [*self._regions, _Region(told[0][0], memory, weakref.ref(keeper))]
        self._tell_channel(self._regions)
        return torch.frombuffer(keeper, dtype=torch.uint8)

    def _keep(self, numbers: set[int]) -> None:
        """Lets go of all regions but those of these numbers; the channel's table never has what is not mapped."""
        kept = [region for region in self._regions if region.number in numbers]
        gone = [region for region in self._regions if region.number not in numbers]
        self._tell_channel(kept)
        self._regions = kept
        for region in gone:
            region.memory.close()

    def _tell_channel(self, regions: list[_Region]) -> None:
        if self._channel is not None:
            self._channel.use_regions(
                [(region.number, region.memory.num_bytes, *region.memory.buffer_ptrs.tolist()) for region in regions],
                [region.memory.held() for region in regions],
            )

    @property
    def tensor_bytes(self) -> int:
        """See `Attachment`."""
        return sum(region.memory.memory_bytes for region in self._regions)

    def describe(self) -> str:
        """One line for `Communicator.explain`."""
        size = self.tensor_bytes / 2**20
        first = f"empty: {len(self._regions)} tensors in {size:.1f} MiB of symmetric memory"
        if self._channel is None:
            return first
        return (
            f"{first}; what exact segments have beyond {self._channel.layout.SLOT_BYTES} bytes is stored straight into "
            f"them: {self._channel.straight_segments} segments so far"
        )

    def close(self) -> None:
        """Lets go of all of it; tensors stay readable. Not collective."""
        if self._channel is not None:
            self._channel.close()  # first: of a call under way, the kernel may be storing into them
        regions, self._regions = self._regions, []
        for region in regions:
            region.memory.close()
