"""All-to-all-v on the direct transport: when a communicator has it, and how rows get onto its channel."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thinwire.comm.communicator import Communicator
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.errors import CapacityError
from thinwire.fused.backend import Backend, select_backend
from thinwire.fused.channel import FLAT_ROW, PIECES, Channel, RecvBuffer, Transfer, channel_layout
from thinwire.fused.counts import Segments, dense_segments, new_rows
from thinwire.fused.device_channel import DeviceChannel
from thinwire.fused.host_channel import HostChannel
from thinwire.fused.transport import Refusal, open_direct, uses_triton
from thinwire.wire import WireFormat

_KEY = "all_to_all_v"


def open_channel(
    comm: Communicator, wire: WireFormat | None = None, piece_bytes: int | None = None, pieces: int = PIECES
) -> Channel | Refusal:
    """The communicator's channel, or why there is none. Made at the first call, which is collective.

    Args:
        wire: what the call at hand wants to send; looked at in the first call only, as are the others.
        piece_bytes, pieces: see `channel_layout`.

    Raises:
        TransportUnavailable: no backend can quantise for this wire, on any transport. Raised before peers are asked.
        ConfigMismatch, PeerTimeout: see `open_direct`.
    """

    def new() -> Channel | Refusal:
        if wire is not None and wire.quantized:
            select_backend(comm.device, wire)
        layout = channel_layout(comm.size, piece_bytes, pieces, comm.device.type == "cuda", comm.integrity != "none")
        settings = {"piece_bytes": layout.SLOT_BYTES, "pieces": layout.SLOTS}
        # By numba's kernels for CPU tensors, by Triton's on CUDA and under Triton's interpreter.
        on_device = uses_triton(comm)

        def make(memory: SymmetricMemory, crowded: bool) -> Channel:
            ends = memory, layout, comm.rank, comm.timeout, comm.voters
            return DeviceChannel(*ends) if on_device else HostChannel(*ends, comm.cpu_share.threads, crowded)

        return open_direct(comm, _KEY, layout.NUM_BYTES, settings, make)

    return comm.attached(_KEY, new)


def send_rows(
    channel: Channel,
    x: torch.Tensor,
    tail: torch.Size,
    sends: Segments,
    recv_buffer: RecvBuffer | None,
    place: Callable[[list[int]], RecvBuffer] | None,
    wire: WireFormat,
    *,
    wait: bool,
) -> Transfer:
    """Begins an all-to-all-v; its arguments have been checked. With `wait` it is over on return.

    Args:
        recv_buffer, place: as a Transfer's; one of them.

    Raises CapacityError for a 1-D tensor in a format with records longer than a piece, which only an alignment makes.
    """
    if x.is_neg() or x.is_conj():
        x = x.resolve_conj().resolve_neg()
    row_format = channel.row_format(tail, x.dtype, wire)
    step = row_format.step
    if row_format.record_bytes:
        # Rows whose records are longer than a piece: made and read here, and sent as the bytes that they are.
        if x.dim() == 1:
            raise CapacityError(
                f"a record of {FLAT_ROW} elements takes {step} bytes in {wire!r}; for 1-D tensors it must fit into a "
                f"piece of the direct transport, {channel.layout.SLOT_BYTES} bytes: pass "
                "transport='staged', or a smaller alignment"
            )
        backend, place_rows = select_backend(x.device, wire, channel.threads), place
        x, sends = _pack(x, sends, wire, step, backend), dense_segments(sends.counts)
        recv_buffer = recv_buffer and _unpacked_into(recv_buffer, wire, step, backend)
        place = place_rows and (lambda counts: _unpacked_into(place_rows(counts), wire, step, backend))

    elif not x.is_contiguous():
        if wire.quantized and x.dim() > 1 and x.numel():
            x = x.flatten(1)
        if x.dim() == 2 and x.stride(1) == 1 and wire.quantized:
            step = x.stride(0) * x.itemsize  # rows may lie apart
        else:
            x = x.contiguous()
    route = channel.route(row_format, step, sends, None if recv_buffer is None else recv_buffer.segments)
    return channel.send(Transfer(channel, route, x, recv_buffer, place), wait=wait)


def _pack(x: torch.Tensor, sends: Segments, wire: WireFormat, record_bytes: int, backend: Backend) -> torch.Tensor:
    """The records of the rows that are sent, side by side."""
    rows = x.flatten(1)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    records = torch.empty(sum(sends.counts), record_bytes, dtype=torch.uint8, device=x.device)
    backend.pack_rows(rows, wire, sends.row_index(0, max(sends.counts), x.device), records)
    return records


def _unpacked_into(placed: RecvBuffer, wire: WireFormat, record_bytes: int, backend: Backend) -> RecvBuffer:
    """Where records go that are unpacked into an output when all are here."""
    counts, out = placed.segments.counts, placed.memory
    received = new_rows(out.new_empty(0, dtype=torch.uint8), sum(counts), (record_bytes,))

    def unpack() -> torch.Tensor:
        index = placed.segments.row_index(0, max(counts), out.device)
        backend.unpack_rows(received, wire, None, index, out.detach().flatten(1))
        return out

    return RecvBuffer(dense_segments(counts), received, unpack)
