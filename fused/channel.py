"""The direct transport of one-way collectives: ranks store into each other's memory, whole messages or in pieces.

What lies where is in `thinwire.triton_kernels.exchange_layout`.

*One call is one epoch.* A rank stores the first `slot_bytes` for every peer into the half of the epoch's parity there,
then the header, whose flag is the epoch: to everyone, also where there are no rows. It then takes in the headers and
first pieces of all peers, and is done with the epoch when it has taken in everything. Only then does it begin the next.
Why two halves are enough: who stores epoch e has seen every peer's header of e - 1, and a peer sends that only when it
has taken in all of e - 2, the last epoch to use this half. This is also why only one call may be outstanding: a rank
that posted e + 1 before it had taken in e would tell its peers that they may overwrite e.

*What is longer goes on through a ring* for each ordered pair. The sender stores piece s of the pair's life into slot
s % slots once the head says that the receiver has taken piece s - slots, then publishes s + 1; the receiver
takes the piece out and publishes that it did. Neither number is ever reset, and both wrap. How many pieces belong to an
epoch is in its header, so the sender may already be storing the next epoch's pieces behind them.

*Nobody waits for one peer alone.* A rank sends and takes in by turns whatever is possible with whomever; only when
nothing was, it looks at the clock. A peer that it misses something from (a header, a piece, or room for a piece) for
longer than the timeout, or while anyone has reported to be stuck, makes it give up as docs/protocol.md says: it reports
to all, waits a grace time for those it misses to act or report too, and blames the others. The channel is
then of no more use.

*Ranks that disagree stay in step.* A receiver that expected another count, dtype, row or wire takes in and drops what
that peer sends in this epoch, as many pieces as the header announces, and raises `CountsError` at the end. Its peers
notice nothing, and all may go on: a lost channel would turn one rank's error into everyone's timeout.

A row of quantised bytes is made in the peer's memory by the quantising kernel and read there by the dequantising one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from thinwire.errors import PeerTimeout, WireFormatError
from thinwire.fused.counts import Segments
from thinwire.triton_kernels.exchange_layout import ExchangeLayout
from thinwire.triton_kernels.signal import REPORT_EPOCH, REPORT_PEERS, REPORT_PHASE
from thinwire.wire import WireFormat

__all__ = [
    "FLAT_ROW",
    "PIECES",
    "RecvBuffer",
    "RowFormat",
    "channel_layout",
    "describe_difference",
    "describe_wire_word",
    "signature_of",
    "timeout_error",
    "unusable_after",
    "wire_word",
]

#: Elements to a row when a 1-D tensor is quantised.
FLAT_ROW = 1024
#: Bytes of a piece and slots of a ring, where the group is not too large for them.
PIECE_BYTES, PIECES = 1 << 18, 4
_MOST_BYTES = 64 << 20  # of one rank's memory
_WIRES = ("none", "int8", "int4", "fp8")
_PHASES = ("headers", "pieces")


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


def timeout_error(report: Any, rank: int, world: int, timeout: float, phases: tuple[str, ...] = _PHASES) -> PeerTimeout:
    """What a report, int32 [REPORT_PEERS + 3 * world], says of a wait that ended."""
    blamed, missing, said = (np.flatnonzero(row).tolist() for row in report[REPORT_PEERS:].reshape(3, world))
    stuck = [peer for peer in said if peer != rank]
    text = f"rank {rank} of {world}, waiting for {_name_ranks(missing)} in call {report[REPORT_EPOCH]}: "
    if blamed:
        text += f"no answer from {_name_ranks(blamed)} within {timeout:g} s: stuck, gone, or not in this call"
    else:
        text += "nobody is silent any more"
    if stuck:
        text += f"; {_name_ranks(stuck)} gave up too"
    return PeerTimeout(text, ranks=blamed, epoch=int(report[REPORT_EPOCH]), phase=phases[report[REPORT_PHASE]])


def unusable_after(failure: PeerTimeout) -> PeerTimeout:
    """What calls get after the one that failed."""
    return PeerTimeout(
        "the direct transport of this communicator cannot be used any more, make a new communicator; earlier: "
        f"{failure}",
        ranks=failure.ranks,
        epoch=failure.epoch,
        phase=failure.phase,
    )


def _describe_rows(signature: list[int]) -> str:
    known = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
    dtypes = {zlib.crc32(str(dtype).encode()): dtype for dtype in known}
    wire = describe_wire_word(signature[1])
    return f"rows of {signature[2]} elements of {dtypes.get(signature[0], 'an unknown dtype')} as {wire}"


def _name_ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
