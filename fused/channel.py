"""The direct all-to-all-v: the forms in which rows travel, calls under way, and what channels of every backend share.

`docs/protocol.md`, "The exchange" and "The ring", says why it works, and `thinwire.triton_kernels.exchange_layout` what
lies where. One call is one epoch, and only one call may be outstanding. A row of quantised bytes is made in the peer's
memory by the quantising kernel and read there by the dequantising one.

*Ranks that disagree stay in step.* A receiver that expected another count, dtype, row or wire takes in and drops what
that peer sends in this epoch, as many pieces as the header announces, and raises `CountsError` at the end. Its peers
notice nothing, and all may go on: a lost channel would turn one rank's error into everyone's timeout.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from thinwire.comm.symmetric import SymmetricMemory
from thinwire.errors import WireFormatError
from thinwire.fused.counts import Segments
from thinwire.fused.transport import DirectTransport
from thinwire.triton_kernels.exchange_layout import ExchangeLayout
from thinwire.wire import WireFormat

__all__ = [
    "FLAT_ROW",
    "PIECES",
    "Channel",
    "RecvBuffer",
    "RowFormat",
    "Transfer",
    "channel_layout",
    "describe_difference",
    "describe_wire_word",
    "signature_of",
    "wire_word",
]

#: Elements to a row when a 1-D tensor is quantised.
FLAT_ROW = 1024
#: Bytes of a piece and slots of a ring, where the group is not too large for them.
PIECE_BYTES, PIECES = 1 << 18, 4
_MOST_BYTES = 64 << 20  # of one rank's memory
_WIRES = ("none", "int8", "int4", "fp8")


def channel_layout(world: int, piece_bytes: int | None = None, pieces: int = PIECES) -> ExchangeLayout:
    """The layout of a channel's memory, before anything is allocated.

    Args:
        world: ranks.
        piece_bytes: of one piece, a multiple of 128; None means 256 KiB, or less in a large group.
        pieces: slots of a ring.

    >>> channel_layout(8).NUM_BYTES, channel_layout(72).SLOT_BYTES
    (12585472, 155264)
    """
    if piece_bytes is None:
        piece_bytes = ExchangeLayout.slot_bytes_within(_MOST_BYTES, world, pieces, PIECE_BYTES)
    return ExchangeLayout.of(world, piece_bytes, pieces)


@dataclass(frozen=True)
class RowFormat:
    """The form in which rows travel.

    Attributes:
        step: bytes from one of what is counted (a row, or an element of a 1-D tensor) to the next, side by side.
        words: what the kernel is told of it.
        record_bytes: 0, or, where one record is longer than a piece, its length. Such rows are quantised by the caller,
            and their records travel as exact rows of bytes do, which may be cut anywhere: `step` is then of those.
    """

    step: int
    words: tuple[int, ...]
    record_bytes: int = 0


class RecvBuffer(NamedTuple):
    """Where rows go: segments of `memory`, contiguous. `finish` then makes the output; None: `memory` is the output."""

    segments: Segments
    memory: torch.Tensor
    finish: Callable[[], torch.Tensor] | None = None


class Transfer:
    """One call on a channel. `wait()` ends it; the channel's next call does, too, if that comes first.

    Args:
        channel: that carries it out.
        x: read until the call ends.
        place: makes the buffer from the counts, once they are known.
        recv_buffer: where the peers' rows go; None where it is not known how many there are.
    """

    __slots__ = ("channel", "error", "place", "recv_buffer", "result", "x")

    def __init__(
        self,
        channel: Channel,
        x: torch.Tensor,
        place: Callable[[list[int]], RecvBuffer] | None,
        recv_buffer: RecvBuffer | None,
    ) -> None:
        self.channel, self.place, self.recv_buffer = channel, place, recv_buffer
        self.x: torch.Tensor | None = x
        self.error: BaseException | None = None
        self.result: torch.Tensor | None = None

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


class Channel(DirectTransport):
    """The memory and the state of one communicator's direct all-to-all-v, at one rank.

    Args:
        memory, rank, timeout: see `DirectTransport`.
        layout: of each buffer.
    """

    phases = ("headers", "pieces")

    def __init__(self, memory: SymmetricMemory, layout: ExchangeLayout, rank: int, timeout: float) -> None:
        super().__init__("all_to_all_v", memory, rank, timeout)
        self.layout = layout
        self._row_formats: dict[tuple[torch.Size, torch.dtype, WireFormat], RowFormat] = {}
        self._under_way: Transfer | None = None

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

    def send(
        self,
        row_format: RowFormat,
        x: torch.Tensor,
        x_step: int,
        sends: Segments,
        recv_buffer: RecvBuffer | None,
        place: Callable[[list[int]], RecvBuffer],
        *,
        wait: bool,
    ) -> Transfer:
        """Begins a call; what was under way before is ended first.

        Args:
            row_format: the rows' form.
            x: what is sent; the elements of a row lie side by side.
            x_step: bytes from one of what is counted to the next.
            sends: the parts of x for each rank, within x.
            recv_buffer: where the peers' rows go; None where it is not known how many there are.
            place: makes the recv_buffer from the counts, once they are known; what it raises ends the call on this rank
                alone.
            wait: end the call right away.

        Raises:
            PeerTimeout: the channel failed before, or does now.
            CountsError: with `wait`, as `Transfer.wait`; on CUDA also, by what a peer sent, in an earlier call, or
                counts that are not given while a CUDA graph is captured, which could not be asked for.
        """
        raise NotImplementedError

    def complete(self, transfer: Transfer) -> None:
        """Ends a call if that has not happened; what it comes to is for `Transfer.wait` to say."""
        raise NotImplementedError

    def settle(self) -> None:
        """Ends the call under way, if there is one; what it comes to is for its own `wait` to say."""
        if self._under_way is not None:
            self.complete(self._under_way)

    def details(self) -> str:
        """What is worth telling of the memory."""
        return f"pieces of {self.layout.SLOT_BYTES} bytes"


# ---------------------------------------------------------------------------------------------------------------------
# What channels of every backend say alike


def signature_of(tail: torch.Size, dtype: torch.dtype, wire: WireFormat) -> tuple[int, int, int, int]:
    """What a header says of rows of shape `tail`: four numbers, the same on ranks that send the same."""
    return (
        zlib.crc32(str(dtype).encode()),
        wire_word(wire),
        math.prod(tail),
        zlib.crc32(repr(tuple(tail)).encode()),
    )


def wire_word(wire: WireFormat) -> int:
    """A wire format as one number, for peers to compare."""
    return _WIRES.index(wire.name) | wire.group << 4 | wire.alignment << 16


def describe_wire_word(word: int) -> str:
    """The format that a number stands for, for people; any number."""
    try:
        return repr(WireFormat(_WIRES[word & 15], word >> 4 & 0xFFF, word >> 16))
    except (IndexError, WireFormatError):
        return "an unknown wire format"


def describe_difference(
    rank: int, peer: int, count: int, expected_count: int, sent: list[int], expected: list[int]
) -> str:
    """How a peer's header, its count and its `signature_of`, differs from what this rank expected of it."""
    if sent == expected:
        return f"rank {peer} sends rank {rank} {count} rows, but rank {rank} expects {expected_count} from rank {peer}"
    shape = ", of another shape" if sent[:3] == expected[:3] else ""
    return f"rank {peer} sends {_describe_rows(sent)}, but rank {rank} expects {_describe_rows(expected)}{shape}"


def _describe_rows(signature: list[int]) -> str:
    known = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
    dtypes = {zlib.crc32(str(dtype).encode()): dtype for dtype in known}
    wire = describe_wire_word(signature[1])
    return f"rows of {signature[2]} elements of {dtypes.get(signature[0], 'an unknown dtype')} as {wire}"
