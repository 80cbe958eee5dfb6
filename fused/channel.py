"""Calls of the direct all-to-all-v: what travels, where rows go, and calls under way.

`thinwire.fused.device_channel` carries them out with Triton's kernels, `thinwire.fused.pulled_legs` with numba's. One
call is one leg, and only one call may be outstanding.

*Ranks that disagree stay in step*: who expected another count, dtype, row or wire takes in and drops what that peer
sends in this epoch, and raises `CountsError` at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from thinwire.errors import CapacityError
from thinwire.fused.backend import Backend, select_backend
from thinwire.fused.call import RowCall
from thinwire.fused.counts import Segments, dense_segments, new_rows
from thinwire.triton_kernels.leg_layout import LegLayout
from thinwire.wire import WireFormat

#: Elements to a row when a 1-D tensor is quantised.
FLAT_ROW = 1024
#: Slots of a ring, where the group is not too large for them.
PIECES = 4
#: Bytes of a piece, and of all of a rank's memory. On a GPU a step of the ring is four launches, about as long as 4 MiB
#: take to each of 8 peers at 400 GB/s or more: smaller pieces would leave the link idle, and larger ones hardly gain.
_PIECE_BYTES, _MOST_BYTES = 1 << 18, 64 << 20
_GPU_PIECE_BYTES, _GPU_MOST_BYTES = 4 << 20, 256 << 20


def channel_layout(world: int, piece_bytes: int | None = None, pieces: int = PIECES, on_gpu: bool = False) -> LegLayout:
    """The layout of a channel's memory, before anything is allocated. Pieces are of a multiple of 128 bytes.

    >>> channel_layout(8).NUM_BYTES, channel_layout(72).SLOT_BYTES
    (12585472, 155264)
    >>> channel_layout(8, on_gpu=True).SLOT_BYTES, channel_layout(72, on_gpu=True).SLOT_BYTES
    (4194304, 621312)
    """
    if pieces < 1:
        raise CapacityError(f"rings of {pieces} pieces: expected at least 1")
    if piece_bytes is None:
        wanted, memory = (_GPU_PIECE_BYTES, _GPU_MOST_BYTES) if on_gpu else (_PIECE_BYTES, _MOST_BYTES)
        piece_bytes = LegLayout.slot_bytes_within(memory, world, pieces, wanted)
    return LegLayout.of(world, piece_bytes, pieces)


class RecvBuffer(NamedTuple):
    """Where rows go: segments of `memory`, contiguous. `finish` then makes the output; None: `memory` is the output."""

    segments: Segments
    memory: torch.Tensor
    finish: Callable[[], torch.Tensor] | None = None

    def output(self) -> torch.Tensor:
        """The output, once all rows are here."""
        return self.memory if self.finish is None else self.finish()


#: Makes the `RecvBuffer` from the counts, once they are known.
Place = Callable[[list[int]], RecvBuffer]


class Transfer:
    """One call on a channel. `wait()` ends it; the channel's next call does, too, if that comes first.

    Attributes:
        channel: what `complete` ends it: a `DeviceChannel`, or `PulledLegs`.
        route: how its rows go: a `Route`, or a `Leg`.
        x: what is sent, read until the call ends; the elements of a row lie side by side.
        recv_buffer: where the peers' rows go, in the segments of the route; None where it is not known how many come.
        place: makes the recv_buffer from the counts, once they are known; what it raises ends the call on this rank
            alone.
        stream: on CUDA the stream on which the call began.
        packed, taken: on CPU ranks how many pieces this rank has packed and taken.
    """

    # As a call begins; on the class, as setting each would be a good part of making one.
    stream: torch.cuda.Stream | None = None
    packed = taken = 0
    error: BaseException | None = None  # that ended it
    result: torch.Tensor | None = None

    def __init__(
        self,
        channel: Any,
        route: Any,
        x: torch.Tensor,
        recv_buffer: RecvBuffer | None,
        place: Place | None = None,
    ) -> None:
        self.channel, self.route, self.recv_buffer, self.place = channel, route, recv_buffer, place
        self.x: torch.Tensor | None = x

    def wait(self) -> torch.Tensor:
        """The output, filled; on CUDA in the order of the stream on which the call began.

        Raises:
            CountsError: what a peer sent is not what was expected. The channel can still be used; but on CUDA, with the
                receive counts given, it is a later call that raises this, and the channel cannot.
            PeerTimeout: a peer did not answer within the communicator's timeout. The channel cannot be used any more.
                On CUDA a later call raises it.
        """
        if self.result is None and self.error is None:  # else the channel may be gone
            self.channel.complete(self)
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


def outgoing_rows(
    call: RowCall,
    x: torch.Tensor,
    step: int,
    wide: int,
    piece: int,
    recv_buffer: RecvBuffer | None,
    place: Place | None,
) -> tuple[torch.Tensor, int, Segments, RecvBuffer | None, Place | None]:
    """What travels in place of x, the step within it, its parts, and where rows go: see `RowCall` and `Transfer`.

    Copies x where its rows cannot travel as they lie. Of rows whose records are longer than a piece it makes the
    records here, which are then cut like exact rows of bytes.

    Args:
        step: bytes from one of what is counted to the next, side by side.
        wide: bytes of a record if it is longer than a piece, else 0.
        piece: bytes of a piece.

    Raises:
        CapacityError: a 1-D tensor in a format with records longer than a piece, which only an alignment makes.
    """
    sends, wire = call.sends, call.wire
    if x.is_neg() or x.is_conj():
        x = x.resolve_conj().resolve_neg()
    if wide:
        if x.dim() == 1:
            raise CapacityError(
                f"a record of {FLAT_ROW} elements takes {wide} bytes in {wire!r}; for 1-D tensors it must fit into a "
                f"piece of the direct transport, {piece} bytes: pass transport='staged', or a smaller alignment"
            )
        backend, place_rows = select_backend(x.device, wire), place
        x, sends, step = pack_wide_rows(x, sends, wire, wide, backend), dense_segments(sends.counts), wide
        recv_buffer = recv_buffer and unpacked_into(recv_buffer, wire, wide, backend)
        place = place_rows and (lambda counts: unpacked_into(place_rows(counts), wire, wide, backend))
    elif not x.is_contiguous():
        if wire.quantized and x.dim() > 1 and x.numel():
            x = x.flatten(1)
        if x.dim() == 2 and x.stride(1) == 1 and wire.quantized:
            step = x.stride(0) * x.itemsize  # rows may lie apart
        else:
            x = x.contiguous()
    return x, step, sends, recv_buffer, place


def pack_wide_rows(
    x: torch.Tensor, sends: Segments, wire: WireFormat, record_bytes: int, backend: Backend
) -> torch.Tensor:
    """The records of the rows that are sent, side by side."""
    rows = x.flatten(1)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    records = torch.empty(sum(sends.counts), record_bytes, dtype=torch.uint8, device=x.device)
    backend.pack_rows(rows, wire, sends.row_index(0, max(sends.counts), x.device), records)
    return records


def unpacked_into(placed: RecvBuffer, wire: WireFormat, record_bytes: int, backend: Backend) -> RecvBuffer:
    """Where records go that are unpacked into an output when all are here."""
    counts, out = placed.segments.counts, placed.memory
    received = new_rows(out.new_empty(0, dtype=torch.uint8), sum(counts), (record_bytes,))

    def unpack() -> torch.Tensor:
        index = placed.segments.row_index(0, max(counts), out.device)
        backend.unpack_rows(received, wire, None, index, out.detach().flatten(1))
        return out

    return RecvBuffer(dense_segments(counts), received, unpack)
