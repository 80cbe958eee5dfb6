"""All-to-all-v on the direct transport: when a communicator has it, and the channel of its backend."""

from __future__ import annotations

from thinwire.comm.communicator import Communicator
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.fused.backend import select_backend
from thinwire.fused.channel import PIECES, Channel, channel_layout
from thinwire.fused.device_channel import DeviceChannel
from thinwire.fused.host_channel import HostChannel
from thinwire.fused.staged_all_to_all import StagedRows
from thinwire.fused.transport import open_direct, uses_triton
from thinwire.wire import WireFormat

_KEY = "all_to_all_v"


def open_channel(
    comm: Communicator, wire: WireFormat | None = None, piece_bytes: int | None = None, pieces: int = PIECES
) -> Channel | StagedRows:
    """The communicator's channel, or what does without. Made at the first call, which is collective.

    Args:
        wire: what the call at hand wants to send; looked at in the first call only, as are the others.
        piece_bytes, pieces: see `channel_layout`.

    Raises:
        TransportUnavailable: no backend can quantise for this wire, on any transport. Raised before peers are asked.
        ConfigMismatch, PeerTimeout: see `open_direct`.
    """

    def new() -> Channel | StagedRows:
        if wire is not None and wire.quantized:
            select_backend(comm.device, wire)
        layout = channel_layout(comm.size, piece_bytes, pieces, comm.device.type == "cuda")
        settings = {"piece_bytes": layout.SLOT_BYTES, "pieces": layout.SLOTS}
        # By numba's kernels for CPU tensors, by Triton's on CUDA and under Triton's interpreter.
        on_device = uses_triton(comm)

        def make(memory: SymmetricMemory, crowded: bool) -> Channel:
            ends = memory, layout, comm.rank, comm.timeout, comm.voters
            return DeviceChannel(*ends) if on_device else HostChannel(*ends, comm.cpu_share.threads, crowded)

        return open_direct(comm, _KEY, layout.NUM_BYTES, settings, make, StagedRows)

    return comm.attached(_KEY, new)
