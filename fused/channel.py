"""The direct transport of one-way collectives: ranks store into each other's memory, whole messages or in pieces.

Every rank has one symmetric buffer, and a *line* of 64 bytes is a flag with what the flag publishes behind it. What a
rank writes lies at that rank's own place in a peer's memory, so no two ranks ever write the same byte::

    stuck     [source]            a peer gives up: see thinwire.fused.cpu.signal
    headers   [half][source]      flag = epoch; ring pieces that follow, count of rows, what a row is
    sequences [source]            flag = pieces that the source has ever put into its ring here
    consumed  [destination]       flag = pieces that the destination has ever taken from this rank's ring there
    halves    [half][source][piece_bytes]
    ring      [source][pieces][piece_bytes]

*One call is one epoch.* A rank stores the first `piece_bytes` for every peer into the half of the epoch's parity there,
then the header, whose flag is the epoch: to everyone, also where there are no rows. It then takes in the headers and
first pieces of all peers, and is done with the epoch when it has taken in everything. Only then does it begin the next.
Why two halves are enough: who stores epoch e has seen every peer's header of e - 1, and a peer sends that only when it
has taken in all of e - 2, the last epoch to use this half. This is also why only one call may be outstanding: a rank
that posted e + 1 before it had taken in e would tell its peers that they may overwrite e.

*What is longer goes on through a ring* for each ordered pair. The sender stores piece s of the pair's life into slot
s % pieces once the consumed flag says that the receiver has taken piece s - pieces, then publishes s + 1; the receiver
takes the piece out and publishes that it did. Neither number is ever reset, and both wrap. How many pieces belong to an
epoch is in its header, so the sender may already be storing the next epoch's pieces behind them.

*Nobody waits for one peer alone.* A rank sends and takes in by turns whatever is possible with whomever; only when
nothing was, it looks at the clock. A peer that it misses something from (a header, a piece, or room for a piece) for
longer than the timeout, or while anyone has reported to be stuck, makes it give up as `thinwire.fused.cpu.signal` says:
it reports to all, waits a grace time for those it misses to act or report too, and blames the others. The channel is
then of no more use.

*Ranks that disagree stay in step.* A receiver that expected another count, dtype, row or wire takes in and drops what
that peer sends in this epoch, as many pieces as the header announces, and raises `CountsError` at the end. Its peers
notice nothing, and all may go on: a lost channel would turn one rank's error into everyone's timeout.

A row of quantised bytes is made in the peer's memory by the quantising kernel and read there by the dequantising one.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from thinwire.comm.symmetric import SymmetricMemory
from thinwire.errors import CountsError, PeerTimeout, ThinwireError, WireFormatError
from thinwire.fused.counts import Segments
from thinwire.triton_kernels.round_layout import (
    LINE_BYTES,
    MISMATCHED,
    REPORT_EPOCH,
    REPORT_PEERS,
    REPORT_PHASE,
    TIMED_OUT,
)
from thinwire.wire import WireFormat

__all__ = ["FLAT_ROW", "Channel", "ChannelLayout", "Landing", "Parcel", "Transfer"]

#: Elements to a row when a 1-D tensor is quantised.
FLAT_ROW = 1024
#: Bytes of a piece and slots of a ring, where the group is not too large for them.
PIECE_BYTES, PIECES = 1 << 18, 4
_MOST_BYTES = 64 << 20  # of one rank's memory
_ALIGNMENT = 128
_GRACE_NS = 10**9
_WIRES = ("none", "int8", "int4", "fp8")
_RECV_COUNT, _RECV_DISPL = 2, 3  # rows of the kernel's `peers`
_PHASES = ("headers", "pieces")


@dataclass(frozen=True)
class ChannelLayout:
    """Sizes and byte offsets of a rank's symmetric buffer; see the top of this file."""

    WORLD: int
    PIECE_BYTES: int
    PIECES: int
    STUCK: int
    HEADERS: int
    SEQUENCES: int
    CONSUMED: int
    HALVES: int
    RING: int
    NUM_BYTES: int

    @classmethod
    def of(cls, world: int, piece_bytes: int | None = None, pieces: int = PIECES) -> ChannelLayout:
        """The layout, before anything is allocated.

        Args:
            world: ranks.
            piece_bytes: of one piece, a multiple of 128; None means 256 KiB, or less in a large group.
            pieces: slots of a ring.

        >>> layout = ChannelLayout.of(8)
        >>> layout.HEADERS, layout.HALVES, layout.NUM_BYTES
        (512, 2560, 12585472)
        >>> ChannelLayout.of(72).PIECE_BYTES
        155264
        """
        if piece_bytes is None:
            share = _MOST_BYTES // (world * (2 + pieces))
            piece_bytes = min(PIECE_BYTES, share // _ALIGNMENT * _ALIGNMENT)
        if piece_bytes < _ALIGNMENT or piece_bytes % _ALIGNMENT or pieces < 1:
            raise ThinwireError(
                f"{pieces} pieces of {piece_bytes} bytes: expected at least 1, of a multiple of {_ALIGNMENT} bytes"
            )
        row = world * LINE_BYTES
        halves = -(-5 * row // _ALIGNMENT) * _ALIGNMENT
        ring = halves + 2 * world * piece_bytes
        return cls(
            WORLD=world,
            PIECE_BYTES=piece_bytes,
            PIECES=pieces,
            STUCK=0,
            HEADERS=row,
            SEQUENCES=3 * row,
            CONSUMED=4 * row,
            HALVES=halves,
            RING=ring,
            NUM_BYTES=ring + world * pieces * piece_bytes,
        )


@dataclass(frozen=True)
class Parcel:
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


class Landing(NamedTuple):
    """Where rows go: segments of `memory`, contiguous. `finish` then makes the output; None: `memory` is the output."""

    segments: Segments
    memory: torch.Tensor
    finish: Callable[[], torch.Tensor] | None = None


class Transfer:
    """One call on a channel. `wait()` ends it; the channel's next call does, too, if that comes first."""

    __slots__ = ("_channel", "_error", "_landing", "_place", "_result", "_x")

    def __init__(
        self, channel: Channel, x: torch.Tensor, place: Callable[[list[int]], Landing], landing: Landing | None
    ) -> None:
        self._channel = channel
        self._x: torch.Tensor | None = x  # read until the call ends
        self._place = place
        self._landing = landing
        self._error: BaseException | None = None
        self._result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """The output, filled.

        Raises:
            CountsError: what a peer sent is not what was expected. The channel can still be used.
            PeerTimeout: a peer did not answer within the communicator's timeout. The channel cannot be used any more.
        """
        self._channel.complete(self)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class Channel:
    """The memory, the kernel and the state of the direct transport of one communicator, at one rank.

    Args:
        memory: a buffer of `layout.NUM_BYTES` on every rank, zero at first; closed by `close`.
        layout: of each buffer.
        rank: this rank.
        timeout: seconds that a peer may let this rank wait.
    """

    def __init__(self, memory: SymmetricMemory, layout: ChannelLayout, rank: int, timeout: float) -> None:
        from thinwire.fused.cpu import channel as kernels  # here, as loading numba takes a while

        self.layout, self.rank, self.timeout = layout, rank, timeout
        self._kernels, self._kernel, self._post = kernels, kernels.move, kernels.POST
        self._memory = memory
        self._lines = memory.local.numpy()[: layout.HALVES].view(np.int64)
        self._parcels: dict[tuple[torch.Size, torch.dtype, WireFormat], Parcel] = {}
        self._under_way: Transfer | None = None
        self._failure: PeerTimeout | None = None
        self._closed = False
        world, scalars = layout.WORLD, len(kernels.SCALARS)
        self._report = np.zeros(REPORT_PEERS + 3 * world, np.int32)
        words: Any = np.zeros(scalars + len(kernels.PEERS) * world, np.int64)
        self._words = memoryview(words)
        self._call = words[:scalars]
        self._peers = words[scalars:].reshape(-1, world)
        # What a call brings lies in one stretch, and is written at once.
        first = kernels.SCALARS.index("discard")
        self._brought, self._brought_at = struct.Struct(f"{scalars - first + 4 * world}q"), 8 * first
        self._expects_anything = (-1,) * world + (0,) * world
        for name, value in {
            "world": world,
            "rank": rank,
            "half_lines": world * LINE_BYTES,
            "half_bytes": world * layout.PIECE_BYTES,
            "piece_bytes": layout.PIECE_BYTES,
            "pieces": layout.PIECES,
            "timeout": round(timeout * 1e9),
            "grace": _GRACE_NS,
            "report": self._report.ctypes.data,
        }.items():
            self._call[kernels.SCALARS.index(name)] = value
        there, here, peers = memory.bases.numpy(), memory.local.data_ptr(), np.arange(world)
        for name, offset, size in (
            ("stuck", layout.STUCK, LINE_BYTES),
            ("header", layout.HEADERS, LINE_BYTES),
            ("sequence", layout.SEQUENCES, LINE_BYTES),
            ("consumed", layout.CONSUMED, LINE_BYTES),
            ("parity", layout.HALVES, layout.PIECE_BYTES),
            ("ring", layout.RING, layout.PIECES * layout.PIECE_BYTES),
        ):
            self._peers[kernels.PEERS.index(f"{name}_there")] = there + offset + rank * size
            self._peers[kernels.PEERS.index(f"{name}_here")] = here + offset + peers * size
        self._kernel(self._call, self._peers, 0)  # compiles, or loads what was compiled: nobody waits for it later

    def parcel(self, tail: torch.Size, dtype: torch.dtype, wire: WireFormat) -> Parcel:
        """The form of rows of shape `tail` in this wire format; () are the elements of a 1-D tensor."""
        key = (tail, dtype, wire)
        parcel = self._parcels.get(key)
        if parcel is None:
            if len(self._parcels) >= 1024:
                self._parcels.clear()
            parcel = self._parcels[key] = self._new_parcel(*key)
        return parcel

    def _new_parcel(self, tail: torch.Size, dtype: torch.dtype, wire: WireFormat) -> Parcel:
        row_elements = math.prod(tail)
        what = what_of(tail, dtype, wire)
        step = row_elements * dtype.itemsize
        piece_bytes = self.layout.PIECE_BYTES
        if not wire.quantized or not row_elements:
            return Parcel(step, (1, 1, step, piece_bytes, 0, 0, 1, 0, 1, 0, 0, *what))
        from thinwire.fused.cpu.codec import dtype_code, record_layout

        counts_per_row = 1 if tail else FLAT_ROW
        layout = record_layout(wire, row_elements * counts_per_row, dtype)
        record_bytes = layout[-1]
        if record_bytes > piece_bytes:
            return Parcel(record_bytes, (1, 1, record_bytes, piece_bytes, 0, *layout, *what), record_bytes)
        per_piece = piece_bytes // record_bytes
        return Parcel(step, (0, counts_per_row, record_bytes, per_piece, dtype_code(dtype), *layout, *what))

    def send(
        self,
        parcel: Parcel,
        x: torch.Tensor,
        x_step: int,
        sends: Segments,
        landing: Landing | None,
        place: Callable[[list[int]], Landing],
        *,
        wait: bool,
    ) -> Transfer:
        """Begins a call; what was under way before is ended first.

        Args:
            parcel: the rows' form.
            x: what is sent; the elements of a row lie side by side.
            x_step: bytes from one of what is counted to the next.
            sends: the parts of x for each rank, within x.
            landing: where the peers' rows go; None where it is not known how many there are.
            place: makes the landing from the counts, once they are known; what it raises ends the call on this rank
                alone.
            wait: end the call right away.

        Raises:
            PeerTimeout: the channel failed before, or does now.
            CountsError: with `wait`, as `Transfer.wait`.
        """
        if self._under_way is not None:
            self.complete(self._under_way)
        self._require_usable()
        transfer = Transfer(self, x, place, landing)
        address, expected = 0, self._expects_anything
        if landing is not None:
            address = landing.memory.data_ptr()
            expected = (*landing.segments.counts, *landing.segments.displs)
        self._brought.pack_into(
            self._words, self._brought_at,
            0, x.data_ptr(), x_step, address, parcel.step, *parcel.words, *sends.counts, *sends.displs, *expected,
        )  # fmt: skip
        self._under_way = transfer
        if wait:
            self.complete(transfer, self._post)
        else:
            self._kernel(self._call, self._peers, self._post)
        return transfer

    def complete(self, transfer: Transfer, todo: int = 0) -> None:
        """Ends a call if that has not happened; what it comes to is for `Transfer.wait` to say.

        Args:
            todo: what of the kernel's work is left to do before.
        """
        if transfer is not self._under_way:
            return
        if self._closed:
            transfer._error = ThinwireError("the communicator was closed while this call was under way")
        else:
            try:
                transfer._result = self._drain(transfer, todo)
            except Exception as error:
                transfer._error = error
        # Not after KeyboardInterrupt: whoever comes next goes on where it stopped.
        self._under_way = transfer._x = None

    def _drain(self, transfer: Transfer, todo: int) -> torch.Tensor:
        landing = transfer._landing
        if landing is None:
            self._move(todo | self._kernels.HEADERS)
            try:
                landing = transfer._place(self._peers[_RECV_COUNT].tolist())
            except Exception:
                self._drop()
                raise
            self._call[self._kernels.SCALARS.index("out")] = landing.memory.data_ptr()
            self._peers[_RECV_DISPL] = landing.segments.displs
            todo, transfer._landing = 0, landing
        self._move(todo | self._kernels.DRAIN)
        return landing.memory if landing.finish is None else landing.finish()

    def _move(self, todo: int) -> None:
        """Runs the kernel and raises what it found. If peers sent what was not expected, the call is then over."""
        status = self._kernel(self._call, self._peers, todo)
        while status == self._kernels.PAUSED:
            status = self._resume(todo)
        if status == TIMED_OUT:
            self._failure = self._timed_out()  # not the one that is raised: its traceback would hold the tensors
            raise self._timed_out()
        if status == MISMATCHED:
            error = CountsError(self._describe_differences())
            self._drop()
            raise error

    def _drop(self) -> None:
        """Takes in what is still to come in this call, and keeps none of it."""
        self._call[self._kernels.SCALARS.index("discard")] = 1
        status = self._kernel(self._call, self._peers, self._kernels.DRAIN)
        while status == self._kernels.PAUSED:
            status = self._resume(self._kernels.DRAIN)
        if status == TIMED_OUT:
            self._failure = self._timed_out()

    def _resume(self, todo: int) -> int:
        return self._kernel(self._call, self._peers, (todo & ~self._post) | self._kernels.RESUME)

    def _require_usable(self) -> None:
        if self._closed:
            raise ThinwireError("this communicator is closed: call thinwire.init() again, or wrap another group")
        if self._failure is not None:
            raise unusable_after(self._failure)

    def _timed_out(self) -> PeerTimeout:
        return timeout_error(self._report, self.rank, self.layout.WORLD, self.timeout)

    def _describe_differences(self) -> str:
        kernels, world = self._kernels, self.layout.WORLD
        half = int(self._call[kernels.SCALARS.index("epoch")]) & 1
        what = kernels.SCALARS.index("what0")
        expected = self._call[what : what + 4].tolist()
        answers = self._peers[kernels.PEERS.index("answer")]
        found = []
        for peer in np.flatnonzero(answers == kernels.DIFFERS).tolist():
            line = (self.layout.HEADERS + (half * world + peer) * LINE_BYTES) // 8
            count, *sent = self._lines[line + 1 : line + 6].tolist()
            wanted = int(self._peers[_RECV_COUNT, peer])
            found.append(describe_difference(self.rank, peer, count, wanted, sent, expected))
        return "; ".join(found)

    def describe(self) -> str:
        """One line for `Communicator.explain`."""
        layout = self.layout
        return (
            f"all_to_all_v: direct, {layout.NUM_BYTES / 2**20:.1f} MiB of symmetric memory, pieces of "
            f"{layout.PIECE_BYTES} bytes" + (", failed" if self._failure else "")
        )

    def close(self) -> None:
        """Lets go of the memory. Not collective: what peers still write goes into what they have mapped themselves."""
        if not self._closed:
            self._closed = True
            self._lines = self._lines[:0]
            self._memory.close()


# ---------------------------------------------------------------------------------------------------------------------
# What channels of every backend say alike


def what_of(tail: torch.Size, dtype: torch.dtype, wire: WireFormat) -> tuple[int, int, int, int]:
    """What a header says of rows of shape `tail`: four numbers, the same on ranks that send the same."""
    return (
        zlib.crc32(str(dtype).encode()),
        _WIRES.index(wire.name) | wire.group << 4 | wire.alignment << 16,
        math.prod(tail),
        zlib.crc32(repr(tuple(tail)).encode()),
    )


def describe_difference(
    rank: int, peer: int, count: int, expected_count: int, sent: list[int], expected: list[int]
) -> str:
    """How a peer's header, its count and its `what_of`, differs from what this rank expected of it."""
    if sent == expected:
        return f"rank {peer} sends rank {rank} {count} rows, but rank {rank} expects {expected_count} from rank {peer}"
    shape = ", of another shape" if sent[:3] == expected[:3] else ""
    return f"rank {peer} sends {_describe_rows(sent)}, but rank {rank} expects {_describe_rows(expected)}{shape}"


def timeout_error(report: Any, rank: int, world: int, timeout: float) -> PeerTimeout:
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
    return PeerTimeout(text, ranks=blamed, epoch=int(report[REPORT_EPOCH]), phase=_PHASES[report[REPORT_PHASE]])


def unusable_after(failure: PeerTimeout) -> PeerTimeout:
    """What calls get after the one that failed."""
    return PeerTimeout(
        "the direct transport of this communicator cannot be used any more, make a new communicator; earlier: "
        f"{failure}",
        ranks=failure.ranks,
        epoch=failure.epoch,
        phase=failure.phase,
    )


def _describe_rows(what: list[int]) -> str:
    known = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
    dtypes = {zlib.crc32(str(dtype).encode()): dtype for dtype in known}
    try:
        wire = repr(WireFormat(_WIRES[what[1] & 15], what[1] >> 4 & 0xFFF, what[1] >> 16))
    except (IndexError, WireFormatError):
        wire = "an unknown wire format"
    return f"rows of {what[2]} elements of {dtypes.get(what[0], 'an unknown dtype')} as {wire}"


def _name_ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
