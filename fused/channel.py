"""The direct all-to-all-v: the forms in which rows travel, calls under way, and what channels of every backend share.

`docs/protocol.md`, "Legs" and "The ring", says why it works, and `thinwire.triton_kernels.leg_layout` what lies where.
One call is one leg, and only one call may be outstanding. A row of quantised bytes is made in the peer's memory by the
quantising kernel and read there by the dequantising one.

*Ranks that disagree stay in step*: who expected another count, dtype, row or wire takes in and drops what that peer
sends in this epoch, and raises `CountsError` at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from thinwire.comm.communicator import Communicator
from thinwire.comm.exchange import Exchange
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.errors import CapacityError, ThinwireError
from thinwire.fused.backend import Backend, select_backend
from thinwire.fused.counts import Segments, dense_segments, new_rows
from thinwire.fused.direct_transport import CLOSED, LegTransport
from thinwire.fused.prepared import in_memory
from thinwire.fused.row_signature import describe_difference
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


@dataclass(frozen=True)
class RowFormat:
    """The form in which rows travel.

    Attributes:
        step: bytes from one of what is counted (a row, or an element of a 1-D tensor) to the next, side by side.
        record_bytes: 0, or, where one record is longer than a piece, its length. Such rows are quantised by the caller,
            and their records travel as exact rows of bytes do, which may be cut anywhere: `step` is then of those.
    """

    step: int
    record_bytes: int = 0


class RecvBuffer(NamedTuple):
    """Where rows go: segments of `memory`, contiguous. `finish` then makes the output; None: `memory` is the output."""

    segments: Segments
    memory: torch.Tensor
    finish: Callable[[], torch.Tensor] | None = None

    def output(self) -> torch.Tensor:
        """The output, once all rows are here."""
        return self.memory if self.finish is None else self.finish()


class Route(NamedTuple):
    """What calls have in common that differ in nothing but their tensors. Made by `Channel.route`.

    Attributes:
        row_format: the channel's own form of these rows.
        step: bytes in x from one of what is counted to the next.
        sends: the parts of x for each rank, within x.
    """

    row_format: Any
    step: int
    sends: Segments


class RowCall(Protocol):
    """What a transport asks of a `PreparedAllToAllV`, whose attributes these are.

    Attributes:
        tail: the shape of a row.
        sends, receives: rows for each rank, within x, and from each, within the output; None where these are not known.
        route: how contiguous rows go, once the direct transport knows: its own affair.
    """

    tail: torch.Size
    sends: Segments
    receives: Segments | None
    wire: WireFormat
    route: Any


class Transfer:
    """One call on a channel. `wait()` ends it; the channel's next call does, too, if that comes first.

    Attributes:
        route: how its rows go.
        x: what is sent, read until the call ends; the elements of a row lie side by side.
        recv_buffer: where the peers' rows go, in the segments of the route; None where it is not known how many come.
        place: makes the recv_buffer from the counts, once they are known; what it raises ends the call on this rank
            alone.
        memory: what keeps the ranks' memory mapped for as long as this call may be in a kernel, once it is closed.
        stream: on CUDA the stream on which the call began.
    """

    # As a call begins; on the class, as setting each would be a good part of making one.
    memory: object = None
    stream: torch.cuda.Stream | None = None
    error: BaseException | None = None  # that ended it
    result: torch.Tensor | None = None

    def __init__(
        self,
        channel: Channel,
        route: Route,
        x: torch.Tensor,
        recv_buffer: RecvBuffer | None,
        place: Callable[[list[int]], RecvBuffer] | None = None,
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
        if self.result is None:
            self.channel.complete(self)
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class Channel(LegTransport):
    """The memory and the state of one communicator's direct all-to-all-v, at one rank; see `LegTransport`."""

    phases = ("headers", "pieces")
    num_programs: int | None = None  # of the last call
    slots = "pieces"
    threads = 1  # for the rows of one call

    def __init__(
        self,
        memory: SymmetricMemory,
        layout: LegLayout,
        rank: int,
        timeout: float,
        voters: Exchange | None = None,
    ) -> None:
        super().__init__("all_to_all_v", memory, layout, rank, timeout, voters)
        self._row_formats: dict[tuple[torch.Size, torch.dtype, WireFormat], RowFormat] = {}
        self.under_way: Transfer | None = None

    def begin(
        self,
        comm: Communicator,
        call: RowCall,
        x: torch.Tensor,
        recv_buffer: RecvBuffer | None,
        place: Callable[[list[int]], RecvBuffer] | None,
        wait: bool,
    ) -> Callable[[], torch.Tensor]:
        """Begins an all-to-all-v, whose arguments have been checked; what it returns ends it, and gives the output.

        Args:
            recv_buffer, place: as a Transfer's; one of them.
            wait: whether it is to be over on return.

        Raises:
            CapacityError: a 1-D tensor in a format with records longer than a piece, which only an alignment makes.
        """
        self.num_programs = comm.num_programs
        if call.route is not None and in_memory(x):
            return self.send(Transfer(self, call.route, x, recv_buffer, place), wait=wait).wait
        tail, sends, wire, plain = call.tail, call.sends, call.wire, in_memory(x)
        if x.is_neg() or x.is_conj():
            x = x.resolve_conj().resolve_neg()
        row_format = self.row_format(tail, x.dtype, wire)
        step = row_format.step
        if row_format.record_bytes:
            # Rows whose records are longer than a piece: made and read here, and sent as the bytes that they are.
            if x.dim() == 1:
                raise CapacityError(
                    f"a record of {FLAT_ROW} elements takes {step} bytes in {wire!r}; for 1-D tensors it must fit into "
                    f"a piece of the direct transport, {self.layout.SLOT_BYTES} bytes: pass transport='staged', or a "
                    "smaller alignment"
                )
            backend, place_rows = select_backend(x.device, wire, self.threads), place
            x, sends = pack_wide_rows(x, sends, wire, step, backend), dense_segments(sends.counts)
            recv_buffer = recv_buffer and unpacked_into(recv_buffer, wire, step, backend)
            place = place_rows and (lambda counts: unpacked_into(place_rows(counts), wire, step, backend))
        elif not x.is_contiguous():
            if wire.quantized and x.dim() > 1 and x.numel():
                x = x.flatten(1)
            if x.dim() == 2 and x.stride(1) == 1 and wire.quantized:
                step = x.stride(0) * x.itemsize  # rows may lie apart
            else:
                x = x.contiguous()
        route = self.route(row_format, step, sends, None if recv_buffer is None else recv_buffer.segments)
        # Not of a call whose counts a check has told: the next one's may be others.
        if plain and not row_format.record_bytes and (recv_buffer is None or recv_buffer.segments is call.receives):
            call.route = route
        return self.send(Transfer(self, route, x, recv_buffer, place), wait=wait).wait

    def row_format(self, tail: torch.Size, dtype: torch.dtype, wire: WireFormat) -> RowFormat:
        """The form of rows of shape `tail` in this wire format; () are the elements of a 1-D tensor.

        On CUDA the first call with a form copies a few words to the device and waits for that.
        """
        key = (tail, dtype, wire)
        row_format = self._row_formats.get(key)
        if row_format is None:
            row_format = self._row_formats[key] = self._new_row_format(*key)
        return row_format

    def _new_row_format(self, tail: torch.Size, dtype: torch.dtype, wire: WireFormat) -> RowFormat:
        raise NotImplementedError

    def route(self, row_format: Any, step: int, sends: Segments, receives: Segments | None) -> Route:
        """How rows of a form go. `receives`: where they go here; None where it is not known how many come."""
        return Route(row_format, step, sends)

    def send(self, transfer: Transfer, *, wait: bool) -> Transfer:
        """Begins a call, and with `wait` ends it right away; what was under way before is ended first.

        Raises:
            PeerTimeout: the channel failed before, or does now.
            CountsError: with `wait`, as `Transfer.wait`; on CUDA also, by what a peer sent, in an earlier call, or
                counts that are not given while a CUDA graph is captured, which could not be asked for.
        """
        if self.under_way is not None:
            self.settle()
        self.require_usable()
        self._begin(transfer, wait)
        return transfer

    def _begin(self, transfer: Transfer, wait: bool) -> None:
        raise NotImplementedError

    def complete(self, transfer: Transfer, todo: int = 0) -> None:
        """Ends a call if that has not happened; what it comes to is for `Transfer.wait` to say.

        An exception from outside, such as a signal handler's, is raised, and ends the communicator.

        Args:
            todo: what of the kernel's work is left to do before.
        """
        if transfer is not self.under_way:
            return
        try:
            if self.closed:
                raise ThinwireError(CLOSED)
            transfer.result = self._drain(transfer, todo)
        except ThinwireError as error:
            transfer.error = error
        finally:
            self.under_way = transfer.x = None

    def _drain(self, transfer: Transfer, todo: int) -> torch.Tensor:
        """What `complete` does; gives the output."""
        raise NotImplementedError

    def differences(self, wrong: np.ndarray, counts: list[int], signature: list[int]) -> str:
        """How the headers of peers that are `wrong` differ from what this rank expected of them."""
        headers = self.headers()
        return "; ".join(
            describe_difference(self.rank, peer, headers[peer], counts[peer], signature)
            for peer in np.flatnonzero(wrong).tolist()
        )

    def settle(self) -> None:
        """Ends the call under way, if there is one; what it comes to is for its own `wait` to say."""
        if self.under_way is not None:
            self.complete(self.under_way)


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
