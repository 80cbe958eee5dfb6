"""What lies where in the memory of one-way collectives: all-reduce, reduce-scatter and all-gather.

Every rank has one symmetric buffer with the same offsets everywhere::

    stuck     [source]           a line: a peer gives up, see thinwire.triton_kernels.signal
    first     [half][source]     a line: flag = epoch of the first leg; behind it what the source is doing
    second    [source]           a line: flag = epoch of the second leg
    scattered [half][source][slot_bytes]   rows of this rank's part, from the source
    gathered  [half][source][slot_bytes]   rows of the source's part

A *line* is 64 bytes that one peer writes. What a peer writes lies at that peer's own place, so no two ranks ever write
the same byte. A tensor is a flat sequence of elements here. It has one *part* for each rank, a part is cut into *rows*
of one length, of which the last may be short, and rows travel as records of the wire format.

*One chunk is one epoch*: as many rows of each part as a slot holds. Its legs:

| collective | first leg | second leg |
|---|---|---|
| reduce-scatter | `scatter`: each row to the owner of its part; then `reduce`: the owner sums | |
| all-gather | `send_to_all`: own rows to everyone; then `gather_recv` | |
| all-reduce | `scatter`, then `reduce`, which sums and at once spreads the sums | `gather_recv` |

The kernel that sends a leg ends with a flag to every rank, also where it had no rows for it; the kernel that takes it
in begins with a wait for the flags of all ranks. A slot of epoch e lies in the half of e's parity.

*Why two halves are enough.* Who stores epoch e has finished e - 1, so it has seen every peer's first flag of e - 1. A
peer publishes that only when it has finished e - 2, the last epoch that used this half, reads included. A first line is
read in its own epoch only, so it lies in halves too. A second line holds nothing but its flag, a value that never goes
back, so it needs none; who begins an epoch first brings it up to the epoch before, as collectives of one leg leave it
behind, and a flag that is half of all numbers behind looks as if it were ahead.

*Ranks that disagree stay in step.* Behind its first flag a rank says what it is doing, in four numbers. Each rank
compares all ranks' with its own. If not all are equal, every rank finds one that differs from its own, in the same
epoch: all give the call up there, and none is ahead of another.

>>> layout = CollectiveLayout.of(8)
>>> layout.FIRST, layout.SCATTERED, layout.NUM_BYTES
(512, 2048, 33556480)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.errors import CapacityError
from thinwire.triton_kernels.signal import CONTROL_WORDS, MAX_WORLD, REPORT_PEERS, SIGNAL_LINE_BYTES, SignalLayout
from thinwire.wire import WireFormat

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "CONTROL_FIRST_SEEN",
    "CONTROL_FIRST_TAKEN",
    "CONTROL_SECOND_SEEN",
    "CONTROL_SECOND_TAKEN",
    "FIRST_LEG",
    "HEADER_SIGNATURE",
    "REDUCE_SCATTER",
    "SECOND_LEG",
    "SIGNATURE_WORDS",
    "CollectiveLane",
    "CollectiveLayout",
    "Job",
]

# What a rank can be doing.
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = 0, 1, 2

# Legs of an epoch, in the order in which they are signalled; a report calls them phases.
FIRST_LEG, SECOND_LEG = 0, 1

# What a source is doing: int64 numbers, from this int32 word of a first line on.
HEADER_SIGNATURE, SIGNATURE_WORDS = 2, 4

# int32 words of the control block, beside those of `thinwire.triton_kernels.signal` (status, epoch, arrivals):
# the epoch whose flags of a leg this rank has seen, or given up on, and the one for which some program waits. Of a
# kernel of many programs only the first to come waits; the others look here.
CONTROL_FIRST_SEEN, CONTROL_SECOND_SEEN = 5, 6
CONTROL_FIRST_TAKEN, CONTROL_SECOND_TAKEN = 7, 8

_ALIGNMENT = 128
_SLOT_BYTES = 1 << 20
_MOST_BYTES = 64 << 20  # of one rank's memory


@dataclass(frozen=True)
class CollectiveLayout(SignalLayout):
    """Sizes and byte offsets of a rank's symmetric buffer; kernels get it whole, as one compile-time constant."""

    SLOT_BYTES: int
    FIRST: int
    SECOND: int
    SCATTERED: int
    GATHERED: int
    NUM_BYTES: int

    @classmethod
    def of(cls, world: int, slot_bytes: int | None = None) -> CollectiveLayout:
        """The layout, before anything is allocated.

        Args:
            world: ranks, at most 72.
            slot_bytes: of one slot, a multiple of 128; None means 1 MiB, or less in a large group.

        Raises:
            CapacityError: for another number.
        """
        if not 1 <= world <= MAX_WORLD:
            raise CapacityError(f"a group of {world} ranks; the direct collectives take 1 to {MAX_WORLD}")
        if slot_bytes is None:
            slot_bytes = min(_SLOT_BYTES, _MOST_BYTES // (4 * world) // _ALIGNMENT * _ALIGNMENT)
        if slot_bytes < _ALIGNMENT or slot_bytes % _ALIGNMENT:
            raise CapacityError(f"slots of {slot_bytes} bytes; expected a multiple of {_ALIGNMENT}, at least that")
        row = world * SIGNAL_LINE_BYTES
        scattered = -(-4 * row // _ALIGNMENT) * _ALIGNMENT
        gathered = scattered + 2 * world * slot_bytes
        return cls(
            WORLD=world,
            SLOT_BYTES=slot_bytes,
            STUCK=0,
            FIRST=row,
            SECOND=3 * row,
            SCATTERED=scattered,
            GATHERED=gathered,
            NUM_BYTES=gathered + 2 * world * slot_bytes,
        )


@dataclass(frozen=True)
class CollectiveLane:
    """The tensors of the direct collectives at one rank. Owned by whoever made them; kernels only read and write them.

    Attributes:
        layout: of the symmetric buffer.
        rank: this rank.
        buffer: uint8 [NUM_BYTES], this rank's symmetric buffer, zero at first.
        bases: int64 [world], the address of every rank's buffer, this rank's own included, on the device.
        control: int32 [CONTROL_WORDS], zero at first, on the device.
        report: int32 [REPORT_PEERS + 3 * world], zero at first, host memory that the device can write.
    """

    layout: CollectiveLayout
    rank: int
    buffer: torch.Tensor
    buffer_ptrs: torch.Tensor
    control: torch.Tensor
    report: torch.Tensor

    @classmethod
    def of(cls, layout: CollectiveLayout, rank: int, buffer: torch.Tensor, buffer_ptrs: torch.Tensor) -> CollectiveLane:
        """A lane over a symmetric buffer; all else is allocated here, on the buffer's device."""
        device = buffer.device
        words = REPORT_PEERS + 3 * layout.WORLD
        with torch.inference_mode(False):  # the caller's mode may end, and what was made in it cannot be written then
            return cls(
                layout=layout,
                rank=rank,
                buffer=buffer,
                buffer_ptrs=buffer_ptrs,
                control=torch.zeros(CONTROL_WORDS, dtype=torch.int32, device=device),
                report=torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda"),
            )


@dataclass(frozen=True)
class Job:
    """One call of a collective, as the kernels see it. The same on every rank.

    Attributes:
        op: ALL_REDUCE, REDUCE_SCATTER or ALL_GATHER.
        what: four int64 that say what the call is, for the peers to compare.
        parts: int64 [2, world] on the device, contiguous: elements of each rank's part, and where it begins in the
            whole tensor.
        most_rows: of any part.
        row: elements of a row.
        wire: the format of the scattered rows.
        gather_wire: the format of the gathered rows.
        dtype: of the tensors.
        rows_per_chunk: rows of a part that one epoch moves.
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

    @property
    def num_chunks(self) -> int:
        """Epochs of the call: at least one, as everyone must hear from everyone."""
        return max(1, -(-self.most_rows // self.rows_per_chunk))

    def rows_in_chunk(self, chunk: int) -> int:
        """The most rows that any part has in a chunk."""
        return max(0, min(self.most_rows - chunk * self.rows_per_chunk, self.rows_per_chunk))
