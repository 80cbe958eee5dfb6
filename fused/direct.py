"""All-to-all-v on the direct transport: when a communicator has it, and how rows get onto its channel."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thinwire.comm.communicator import Communicator
from thinwire.comm.host_collectives import Setting
from thinwire.comm.symmetric import SymmetricMemory
from thinwire.errors import CapacityError
from thinwire.fused.backend import select_backend
from thinwire.fused.channel import FLAT_ROW, PIECES, Channel, RecvBuffer, RowFormat, Transfer, channel_layout
from thinwire.fused.counts import Segments, dense_segments
from thinwire.fused.device_channel import DeviceChannel, piece_bytes_for
from thinwire.fused.host_channel import HostChannel
from thinwire.fused.transport import Refusal, open_direct, uses_triton
from thinwire.wire import WireFormat

__all__ = ["move_plainly", "open_channel", "send_rows"]

_KEY = "all_to_all_v"

#: The output's segments and the output.
Placed = tuple[Segments, torch.Tensor]


def open_channel(
    comm: Communicator, wire: WireFormat | None = None, piece_bytes: int | None = None, pieces: int = PIECES
) -> Channel | Refusal:
    """The communicator's channel, or why there is none. Made at the first call, which is collective.

    Args:
        comm: closes the channel when it is closed.
        wire: what the call at hand wants to send; looked at in the first call only, as are the others.
        piece_bytes, pieces: see `channel_layout`; on CUDA None means 4 MiB, or less in a large group.

    Raises:
        TransportUnavailable: no backend can quantise for this wire, on any transport. Raised before peers are asked.
        ConfigMismatch: ranks that asked for different layouts, or run different versions.
        PeerTimeout: a peer did not take part.
    """
    return comm.attached(_KEY, lambda: _new_channel(comm, wire, piece_bytes, pieces))


def _new_channel(
    comm: Communicator, wire: WireFormat | None, piece_bytes: int | None, pieces: int
) -> Channel | Refusal:
    if wire is not None and wire.quantized:
        select_backend(comm.device, wire)
    if piece_bytes is None:
        piece_bytes = piece_bytes_for(comm.device, comm.size, pieces)
    layout = channel_layout(comm.size, piece_bytes, pieces)
    settings: dict[str, Setting] = {"piece_bytes": layout.SLOT_BYTES, "pieces": layout.SLOTS}

    def make(memory: SymmetricMemory) -> Channel:
        # By numba's kernels for CPU tensors, by Triton's on CUDA and under Triton's interpreter.
        kind = DeviceChannel if uses_triton(comm) else HostChannel
        return kind(memory, layout, comm.rank, comm.timeout)

    return open_direct(comm, _KEY, layout.NUM_BYTES, settings, make)


def move_plainly(
    comm: Communicator, x: object, send_counts: object, recv_counts: object, out: object, wire: WireFormat
) -> torch.Tensor | None:
    """The output of a call that needs no more than `HostChannel.send_plainly`, where the communicator has one.

    None: nothing was done. The arguments need not have been checked.
    """
    channel = comm.attached(_KEY)
    return channel.send_plainly(x, send_counts, recv_counts, out, wire) if type(channel) is HostChannel else None


def send_rows(
    channel: Channel,
    x: torch.Tensor,
    tail: torch.Size,
    sends: Segments,
    placed: Placed | None,
    place: Callable[[list[int]], Placed],
    wire: WireFormat,
    *,
    wait: bool,
) -> Transfer:
    """Begins an all-to-all-v; its arguments have been checked. With `wait` it is over on return.

    Args:
        x: [rows, ...].
        tail: the shape of a row.
        sends: what of x goes to each rank.
        placed: what is to be received, and into what; None if that is to be learnt from the peers.
        place: makes `placed` from the counts, once they are known.
        wire: the format in transit.

    Raises:
        CapacityError: a 1-D tensor in a format with records longer than a piece, which only an alignment can make.
        CountsError, PeerTimeout: see `Channel.send` and `Transfer.wait`.
    """
    if x.is_neg() or x.is_conj():
        x = x.resolve_conj().resolve_neg()
    row_format = channel.row_format(tail, x.dtype, wire)
    if row_format.record_bytes:
        return _send_long_records(channel, row_format, x, sends, placed, place, wire, wait=wait)
    step = row_format.step
    if not x.is_contiguous():
        if wire.quantized and x.dim() > 1 and x.numel():
            x = x.flatten(1)
        if x.dim() == 2 and x.stride(1) == 1 and wire.quantized:
            step = x.stride(0) * x.itemsize  # rows may lie apart
        else:
            x = x.contiguous()

    recv_buffer = None if placed is None else RecvBuffer(*placed)
    return channel.send(row_format, x, step, sends, recv_buffer, lambda counts: RecvBuffer(*place(counts)), wait=wait)


def _send_long_records(
    channel: Channel,
    row_format: RowFormat,
    x: torch.Tensor,
    sends: Segments,
    placed: Placed | None,
    place: Callable[[list[int]], Placed],
    wire: WireFormat,
    *,
    wait: bool,
) -> Transfer:
    """Rows whose records are longer than a piece: made and read here, and sent as the bytes that they are."""
    if x.dim() == 1:
        raise CapacityError(
            f"a record of {FLAT_ROW} elements takes {row_format.record_bytes} bytes in {wire!r}; for 1-D tensors it "
            f"must fit into a piece of the direct transport, {channel.layout.SLOT_BYTES} bytes: pass "
            "transport='staged', or a smaller alignment"
        )
    backend = select_backend(x.device, wire)
    rows = x.flatten(1)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    records = torch.empty(sum(sends.counts), row_format.record_bytes, dtype=torch.uint8, device=x.device)
    backend.pack_rows(rows, wire, sends.row_index(0, max(sends.counts), x.device), records)

    def land(receives: Segments, out: torch.Tensor) -> RecvBuffer:
        received = torch.empty(sum(receives.counts), row_format.record_bytes, dtype=torch.uint8, device=x.device)

        def unpack() -> torch.Tensor:
            index = receives.row_index(0, max(receives.counts), x.device)
            backend.unpack_rows(received, wire, None, index, out.detach().flatten(1))
            return out

        return RecvBuffer(dense_segments(receives.counts), received, unpack)

    recv_buffer = None if placed is None else land(*placed)
    dense_sends = dense_segments(sends.counts)
    return channel.send(
        row_format, records, row_format.step, dense_sends, recv_buffer, lambda n: land(*place(n)), wait=wait
    )
