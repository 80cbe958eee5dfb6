"""What lies where in the memory of legs: of all-to-all-v, and of all-reduce, reduce-scatter and all-gather.

Every rank has one symmetric buffer with the same offsets everywhere::

    stuck   [source]                       a line: a peer gives up, see thinwire.triton_kernels.signal
    headers [half][source]                 a line: flag = leg; pieces, count, and what the source is doing
    halves  [half][source][slot_bytes]     rows of a leg, in the half of its parity

and, in the memory of all-to-all-v, of what does not fit into a half::

    tails   [source]                       a line: flag = pieces that the source has ever put into its ring here
    heads   [destination]                  a line: flag = pieces that the destination has ever taken from its ring there
    rings   [source][slots][slot_bytes]    pieces behind the first

A *line* is 64 bytes that one peer writes. What a peer writes lies at that peer's own place, so no two ranks ever write
the same byte. Legs are counted for the life of the memory. An all-reduce takes two for each chunk, everything else one.
`docs/protocol.md`, "Legs" and "The ring", has the rules.

>>> layout = LegLayout.of(8, slot_bytes=1 << 20, slots=0)
>>> layout.HEADERS, layout.HALVES, layout.NUM_BYTES
(512, 1536, 16778752)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from thinwire.errors import CapacityError
from thinwire.triton_kernels.end import End, new_words
from thinwire.triton_kernels.signal import SIGNAL_LINE_BYTES, SignalLayout
from thinwire.wire import WireFormat

# What a rank can be doing.
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = 0, 1, 2

# Legs of a chunk, in the order in which they are signalled; a report calls them phases.
FIRST_LEG, SECOND_LEG = 0, 1

# How far one launch for a whole chunk came: what is sent is sent; the first leg was taken in, too; or all is done.
SENT, TAKEN, DONE = 1, 2, 3

# int32 words of a header, behind its flag: ring pieces that follow, and from here on int64 numbers: the count of rows,
# and so many that say what the source is doing.
HEADER_PIECES, HEADER_COUNT, HEADER_SIGNATURE = 1, 2, 4
SIGNATURE_WORDS = 4

_ALIGNMENT = 128

#: The largest count of rows that a header is believed; the bytes of so many fit into 64 bits.
MOST_ROWS = 1 << 48


@dataclass(frozen=True)
class LegLayout(SignalLayout):
    """Sizes and byte offsets of a rank's symmetric buffer; kernels get it whole, as one compile-time constant."""

    SLOT_BYTES: int
    SLOTS: int  # of a ring; 0: there are none
    HEADERS: int  # byte offsets from here on
    TAILS: int  # of rings
    HEADS: int  # of rings
    HALVES: int
    RINGS: int
    NUM_BYTES: int
    HEADER_PIECES: int = HEADER_PIECES
    HEADER_COUNT: int = HEADER_COUNT
    HEADER_SIGNATURE: int = HEADER_SIGNATURE
    FIRST_LEG: int = FIRST_LEG
    SECOND_LEG: int = SECOND_LEG

    __hash__ = SignalLayout.__hash__

    @classmethod
    def of(cls, world: int, slot_bytes: int, slots: int) -> LegLayout:
        """The layout, before anything is allocated.

        Args:
            world: ranks.
            slot_bytes: of a source's part of a half, and of a slot of a ring; a multiple of 128.
            slots: of a ring; 0: without rings.

        Raises:
            CapacityError: a number is not accepted.
        """
        if slot_bytes < _ALIGNMENT or slot_bytes % _ALIGNMENT or slots < 0:
            raise CapacityError(
                f"{slots} slots of {slot_bytes} bytes: expected slots of a positive multiple of {_ALIGNMENT} bytes"
            )
        row = world * SIGNAL_LINE_BYTES
        halves = -(-(5 if slots else 3) * row // _ALIGNMENT) * _ALIGNMENT
        rings = halves + 2 * world * slot_bytes
        return cls(
            WORLD=world,
            SLOT_BYTES=slot_bytes,
            SLOTS=slots,
            STUCK=0,
            MOST_AHEAD=max(1, slots),
            HEADERS=row,
            TAILS=3 * row,
            HEADS=4 * row,
            HALVES=halves,
            RINGS=rings,
            NUM_BYTES=rings + world * slots * slot_bytes,
        )

    @staticmethod
    def slot_bytes_within(memory: int, world: int, slots: int, wanted: int) -> int:
        """Bytes of a slot: as many as wanted, or fewer, so that a rank's memory has so many at most."""
        return min(wanted, memory // (world * (2 + slots)) // _ALIGNMENT * _ALIGNMENT)

    def rows_per_slot(self, row_bytes: int) -> int:
        """Quantised rows that a slot holds; 0 where one is longer than a slot."""
        return self.SLOT_BYTES // row_bytes


@dataclass(frozen=True)
class Endpoint(End):
    """One rank's end of the memory of an all-to-all-v or of the collectives.

    Attributes:
        counters: int64 [2, world], pieces ever put into the ring at each peer, and ever taken from each peer's ring.
        table: int64 [6 * world + SIGNATURE_WORDS], what `thinwire.triton_kernels.all_to_all_v.note` wrote: for each
            rank rows to send, the first of them, pieces to send, rows to receive, the first of them, pieces to receive;
            then, where the memory is poisoned, what this rank expected a row to be.
    """

    layout: LegLayout
    counters: torch.Tensor
    table: torch.Tensor

    def arguments(self) -> dict[str, Any]:
        """See `End`."""
        of_legs = {"counters_ptr": self.counters, "table_ptr": self.table, "LEGS": self.layout}
        return super().arguments() | of_legs

    @classmethod
    def of(cls, layout: LegLayout, rank: int, buffer: torch.Tensor, buffer_ptrs: torch.Tensor) -> Endpoint:
        """An end over a symmetric buffer that has not sent anything; all else is allocated on the buffer's device."""
        device, world = buffer_ptrs.device, layout.WORLD
        with torch.inference_mode(False):  # the caller's mode may end, and what was made in it cannot be written then
            return cls(
                layout=layout,
                rank=rank,
                buffer=buffer,
                buffer_ptrs=buffer_ptrs,
                counters=torch.zeros(2 * world, dtype=torch.int64, device=device),
                table=torch.zeros(6 * world + SIGNATURE_WORDS, dtype=torch.int64, device=device),
                **new_words(world, device),
            )


@dataclass(frozen=True, eq=False)
class Job:
    """One call of a collective, as the kernels see it. The same on every rank.

    Attributes:
        op: ALL_REDUCE, REDUCE_SCATTER or ALL_GATHER.
        signature: four int64 that say what the call is, for the peers to compare.
        parts: int64 [2, world] on the device, contiguous: elements of each rank's part, and where it begins in the
            whole tensor.
        most_rows: of any part.
        row: elements of a row.
        wire: the format of the scattered rows.
        gather_wire: the format of the gathered rows.
        dtype: of the tensors.
        rows_per_chunk: rows of a part that one chunk has.
        out_dtype: of a REDUCE_SCATTER's sums, if not dtype.
    """

    op: int
    signature: tuple[int, int, int, int]
    parts: torch.Tensor
    most_rows: int
    row: int
    wire: WireFormat
    gather_wire: WireFormat
    dtype: torch.dtype
    rows_per_chunk: int
    out_dtype: torch.dtype | None = None

    @property
    def num_chunks(self) -> int:
        """Chunks of the call: at least one, as everyone must hear from everyone."""
        return max(1, -(-self.most_rows // self.rows_per_chunk))

    def rows_in_chunk(self, chunk: int) -> int:
        """The most rows that any part has in a chunk."""
        return max(0, min(self.most_rows - chunk * self.rows_per_chunk, self.rows_per_chunk))
