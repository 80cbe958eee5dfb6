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

import torch

from thinwire.comm import Communicator, Group, communicator_or_default
from thinwire.comm.host_collectives import Attachment
from thinwire.comm.symmetric import SymmetricMemory, allocate
from thinwire.compiler import opaque
from thinwire.errors import ArgumentError, TransportUnavailable
from thinwire.fused.direct import open_channel
from thinwire.fused.host_channel import HostChannel
from thinwire.fused.transport import Refusal

_KEY = "empty"
_MOST_NUMBER = 1 << 62
_NOT_PLAIN = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


@opaque
def empty(*shape: int | Sequence[int], dtype: torch.dtype | None = None, comm: Group | None = None) -> torch.Tensor:
    """A tensor in symmetric memory, zero at first: exact rows that arrive in it are copied once and not twice.

    Peers store straight into it, or into a contiguous part of it, where it is the `out` of an exact (`wire="none"`)
    `all_to_all_v`, `all_gather` or `all_gather_v` on the direct transport with known receive counts: all of a rank's
    rows but the first piece (`comm.explain()` says how large a piece is). In all else it is a tensor like any other.
    Each rank decides for its own output. Collective; blocks the host.

    Its memory is held on all ranks until the first call of this function after no rank has it, or a part of it, any
    more, or until the communicator is closed; it stays readable for as long as it is there. A peer that was late when a
    call ended with PeerTimeout may still store into what was that call's `out`.

    Args:
        shape: ints of at least 0, or one sequence of them; the same on all ranks.
        dtype: the same on all ranks; None means torch's default.
        comm: a communicator, a process group, or a DeviceMesh of one axis; None means the one that `init` made. It
            has no use on others.

    Returns:
        A contiguous tensor on the CPU.

    Raises:
        ArgumentError: a shape or a dtype that no tensor has.
        ConfigMismatch: ranks passed different ones.
        CapacityError: there is less memory.
        TransportUnavailable: ranks are not CPU ranks that can map each other's memory, with numba's kernels; and why.
        PeerTimeout: a peer did not take part.

    >>> import thinwire as tw
    >>> with tw.init() as comm:
    ...     out = tw.empty(2, 3, comm=comm)
    ...     tw.all_to_all_v(torch.ones(2, 3), [2], [2], out=out, wire="none", comm=comm) is out
    True
    """
    given = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    sizes = [size for size in given if type(size) is int and size >= 0]
    if len(sizes) < len(given):
        raise ArgumentError(f"empty got the shape {shape!r}, expected ints of at least 0")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or dtype in _NOT_PLAIN:
        raise ArgumentError(f"empty got the dtype {dtype!r}, expected a torch.dtype of plain numbers")
    num_bytes = math.prod(sizes) * dtype.itemsize
    if num_bytes >= _MOST_NUMBER:
        raise ArgumentError(f"empty got the shape {shape!r} of {dtype}, {num_bytes} bytes; expected less than 2**62")
    comm = communicator_or_default(comm)
    with comm._settled_recorder().begin("empty", sizes, dtype):
        comm.require_same("empty", {"shape": str(sizes), "dtype": str(dtype)})
        tensors = comm.attached(_KEY, lambda: SymmetricTensors(comm))
        with torch.inference_mode(False):  # the caller's mode may end, and what was made in it cannot be written then
            memory: torch.Tensor = tensors.new(comm, max(1, num_bytes))
            return memory[:num_bytes].view(dtype).view(sizes)


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

    def __init__(self, comm: Communicator) -> None:
        channel = open_channel(comm)
        reason = None if isinstance(channel, HostChannel) else "its kernels are not numba's, those of CPU ranks"
        if isinstance(channel, Refusal):
            reason = channel.reason
        for rank, why in enumerate(comm.all_gather_data(reason, str | None)):
            if why is not None:
                raise TransportUnavailable(f"empty needs the direct transport between CPU ranks; rank {rank}: {why}")
        assert isinstance(channel, HostChannel)
        self._channel, self._checksums = channel, comm.integrity != "none"
        self._regions: list[_Region] = []

    def new(self, comm: Communicator, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] of a new region, once those are gone that no rank uses any more. Collective.

        Raises:
            CapacityError, TransportUnavailable, PeerTimeout: see `allocate`.
        """
        unused = [region.number for region in self._regions if region.users() is None]
        told = comm.all_gather_data((secrets.randbelow(_MOST_NUMBER - 1) + 1, unused), (int, [int]))
        gone = set.intersection(*(set(numbers) for _, numbers in told))
        closing = [region.memory for region in self._regions if region.number in gone]
        self._regions = [region for region in self._regions if region.number not in gone]
        self._tell_channel()  # before their addresses are others'
        for memory in closing:
            memory.close()
        memory = allocate(comm, num_bytes)
        # The tensor's own keeper, as the memory itself is kept here: so its end can be seen, that of all views too.
        keeper = (ctypes.c_ubyte * num_bytes).from_address(memory.local.data_ptr())
        keeper.memory = memory.local  # type: ignore[attr-defined]
        self._regions.append(_Region(told[0][0], memory, weakref.ref(keeper)))
        self._tell_channel()
        return torch.frombuffer(keeper, dtype=torch.uint8)

    def _tell_channel(self) -> None:
        self._channel.use_regions(
            [(region.number, region.memory.num_bytes, *region.memory.buffer_ptrs.tolist()) for region in self._regions]
        )

    @property
    def memory_bytes(self) -> int:
        """That this rank holds."""
        return sum(region.memory.memory_bytes for region in self._regions)

    def describe(self) -> str:
        """One line for `Communicator.explain`."""
        size = self.memory_bytes / 2**20
        first = f"empty: {len(self._regions)} tensors in {size:.1f} MiB of symmetric memory"
        if self._checksums:
            return f"{first}; rows are copied into them from pieces, which checksums are of"
        return (
            f"{first}; what exact segments have beyond {self._channel.layout.SLOT_BYTES} bytes is stored straight into "
            f"them: {self._channel.straight_segments} segments so far"
        )

    def close(self) -> None:
        """Lets go of all of it; tensors stay readable. Not collective."""
        for region in self._regions:
            region.memory.close()
        self._regions = []
