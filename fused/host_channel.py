"""The channel of the direct all-to-all-v for CPU ranks: memory, numba's kernel, and the state of calls.

The protocol is that of `thinwire.fused.channel`, the kernel is in `thinwire.triton_kernels.cpu.all_to_all_v`.
"""

from __future__ import annotations

import math
import sys
import time
from array import array
from typing import Any

import numpy as np
import torch

from thinwire.comm.exchange import Exchange
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.errors import CountsError, ThinwireError
from thinwire.first_run import Deadline
from thinwire.fused.channel import FLAT_ROW, Channel, Route, RowFormat, Transfer
from thinwire.fused.counts import Segments
from thinwire.fused.direct_transport import CLOSED
from thinwire.fused.row_signature import signature_of
from thinwire.triton_kernels.leg_layout import LegLayout
from thinwire.triton_kernels.signal import (
    LEFT_FLAG,
    MISMATCHED,
    RUNNING,
    SIGNAL_FLAG,
    SIGNAL_LINE_BYTES,
    TIMED_OUT,
)
from thinwire.wire import WireFormat

_MOST_KEPT = 1024  # forms of rows
_COPIED_FOR_ONE = 4  # bytes of exact rows that are as much work as one that is quantised: memory limits copies first
_RECV_COUNT, _RECV_DISPL = 2, 3  # rows of the kernel's `peers`


class HostChannel(Channel):
    """A channel of CPU ranks, with numba's kernel."""

    def __init__(
        self,
        memory: SymmetricMemory,
        layout: LegLayout,
        rank: int,
        timeout: float,
        voters: Exchange | None = None,
        threads: int = 1,
        crowded: bool = False,
    ) -> None:
        """As `Channel`.

        Args:
            threads: for the rows of one large call.
            crowded: ranks outnumber cores, and who waits keeps the awaited one from its core.
        """
        from thinwire.triton_kernels.cpu import all_to_all_v as kernels  # here, as loading numba takes a while
        from thinwire.triton_kernels.cpu.signal import LOOK_NS, SPINS, lines_of
        from thinwire.triton_kernels.cpu.team import BYTES_PER_THREAD, threads_for

        super().__init__(memory, layout, rank, timeout, voters)
        self.threads, self._threads_for = threads, threads_for
        self._shared_bytes = 2 * BYTES_PER_THREAD if threads > 1 else sys.maxsize
        self._look_ns, self._lines_of = LOOK_NS, lines_of
        self._kernels, self._kernel, self._post = kernels, kernels.move, kernels.POST
        world, scalars = layout.WORLD, len(kernels.SCALARS)
        words: Any = np.zeros(scalars + len(kernels.PEERS) * world, np.int64)
        self._words, self._address = memoryview(words).cast("B").cast("q"), words.ctypes.data
        self._call = words[:scalars]
        self._peers = words[scalars:].reshape(-1, world)
        # What a call brings lies in one stretch, and is written at once.
        first = kernels.SCALARS.index("discard")
        self._x_word, self._out_word, self._exact_word = map(kernels.SCALARS.index, ("x", "out", "exact"))
        self._brought = slice(first, scalars + 4 * world)
        self._regions: Any = None  # which the kernel has the address of
        self._region_memory: list[object] = []
        self._post_and_drain = kernels.POST | kernels.DRAIN
        for name, value in {
            "world": world,
            "rank": rank,
            "half_lines": world * SIGNAL_LINE_BYTES,
            "half_bytes": world * layout.SLOT_BYTES,
            "slot_bytes": layout.SLOT_BYTES,
            "slots": layout.SLOTS,
            "timeout": min(round(timeout * 1e9), 2**62),
            "grace": round(self.grace * 1e9),
            "buffer_ptrs": memory.buffer_ptrs.data_ptr(),
            "stuck": layout.STUCK,
            "report": self.report.ctypes.data,
            "looks": 1 if crowded else SPINS,
        }.items():
            self._call[kernels.SCALARS.index(name)] = value
        there, here, peers = memory.buffer_ptrs.numpy(), memory.local.data_ptr(), np.arange(world)
        for name, offset, size in (
            ("header", layout.HEADERS, SIGNAL_LINE_BYTES),
            ("tail", layout.TAILS, SIGNAL_LINE_BYTES),
            ("head", layout.HEADS, SIGNAL_LINE_BYTES),
            ("parity", layout.HALVES, layout.SLOT_BYTES),
            ("ring", layout.RINGS, layout.SLOTS * layout.SLOT_BYTES),
        ):
            self._peers[kernels.PEERS.index(f"{name}_there")] = there + offset + rank * size
            self._peers[kernels.PEERS.index(f"{name}_here")] = here + offset + peers * size
        self._peers[kernels.PEERS.index("answer")] = kernels.AGREES  # before the first call there is none to end
        self._kernel(self._address, 0)  # compiles, or loads what was compiled: nobody waits for it later
        if threads > 1:
            kernels.move_in_team(1, self._call, self._peers, 0)

    def use_regions(self, regions: list[tuple[int, ...]], memory: list[object]) -> None:
        """From now on exact rows are stored straight into outputs that lie in one of these, and in peers' outputs.

        Not while a call is under way. After an exception from outside, at whatever line, the kernel has these, or none.

        Args:
            regions: the number of each, the same on all ranks and never 0; its bytes; where each rank's begins here.
            memory: what keeps them mapped.
        """
        # One row at least: the kernel goes by its address, and must go on telling peers once there are none.
        table = np.zeros((max(1, len(regions)), self._kernels.REGION_PTRS + self.world), np.int64)
        table[: len(regions)] = np.array(regions).reshape(len(regions), table.shape[1])
        at, count = (self._kernels.SCALARS.index(name) for name in ("regions", "num_regions"))
        self._call[count] = 0  # first: no address may be there with another table's length, or of one that is gone
        self._regions, self._region_memory = table, memory
        self._call[at] = table.ctypes.data
        self._call[count] = len(regions)

    @property
    def straight_segments(self) -> int:
        """Segments that peers have stored straight into outputs of this rank."""
        return int(self._peers[self._kernels.PEERS.index("straight")].sum())

    def _new_row_format(self, tail: torch.Size, dtype: torch.dtype, wire: WireFormat) -> RowFormat:
        row_elements = math.prod(tail)
        if len(self._row_formats) >= _MOST_KEPT:
            self._row_formats.clear()
        signature = signature_of(tail, dtype, wire)
        step = row_elements * dtype.itemsize
        piece_bytes = self.layout.SLOT_BYTES
        if not wire.quantized or not row_elements:
            return RowFormat(step, 0, (1, 1, step, piece_bytes, 0, 0, 1, 0, 1, 0, 0, *signature))
        from thinwire.triton_kernels.cpu.codec import dtype_code, record_layout

        counts_per_row = 1 if tail else FLAT_ROW
        layout = record_layout(wire, row_elements * counts_per_row, dtype)
        record_bytes = layout[-1]
        if record_bytes > piece_bytes:
            return RowFormat(record_bytes, record_bytes, (1, 1, record_bytes, piece_bytes, 0, *layout, *signature))
        per_piece, code = self.layout.rows_per_slot(record_bytes), dtype_code(dtype)
        return RowFormat(step, 0, (0, counts_per_row, record_bytes, per_piece, code, *layout, *signature))

    def route(self, row_format: RowFormat, step: int, sends: Segments, receives: Segments | None) -> Route:
        """See `Channel.route`."""
        expected = (*receives.counts, *receives.displs) if receives else (-1,) * self.world + (0,) * self.world
        words = array("q", (0, 0, step, 0, row_format.step, *row_format.words, *sends.counts, *sends.displs, *expected))
        return Route(row_format, step, sends, memoryview(words))

    def _begin(self, transfer: Transfer, wait: bool) -> None:
        words, recv_buffer = self._words, transfer.recv_buffer
        assert transfer.x is not None and transfer.route.words is not None
        words[self._brought] = transfer.route.words
        words[self._x_word] = transfer.x.data_ptr()
        if recv_buffer is not None:
            words[self._out_word] = recv_buffer.memory.data_ptr()
        self.under_way = transfer
        if not wait:
            self._kernel(self._address, self._post)
        elif recv_buffer is None:
            self.complete(transfer, self._post)
        elif self._launch(self._post_and_drain, _num_bytes(transfer.x, recv_buffer.memory)) != RUNNING:
            self.complete(transfer, self._kernels.RESUME)  # it says again what it said, or goes on after a pause
        else:
            self.under_way = transfer.x = None  # the usual case, without the detour
            transfer.result = recv_buffer.memory if recv_buffer.finish is None else recv_buffer.finish()

    def _drain(self, transfer: Transfer, todo: int) -> torch.Tensor:
        recv_buffer = transfer.recv_buffer
        if recv_buffer is None and transfer.error is None:
            assert transfer.place is not None
            self._move(todo | self._kernels.HEADERS)
            if transfer is not self.under_way:
                return transfer.wait()
            try:
                recv_buffer = transfer.place(self._peers[_RECV_COUNT].tolist())
            except Exception as error:
                transfer.error = error  # for whoever goes on with what follows
            else:
                self._call[self._kernels.SCALARS.index("out")] = recv_buffer.memory.data_ptr()
                self._peers[_RECV_DISPL] = recv_buffer.segments.displs
                todo, transfer.recv_buffer = 0, recv_buffer
        if recv_buffer is None:
            assert transfer.error is not None
            self._drop()
            raise transfer.error
        x = transfer.x
        if x is None:  # a signal handler's call has ended this one
            return transfer.wait()
        self._move(todo | self._kernels.DRAIN, _num_bytes(x, recv_buffer.memory))
        return recv_buffer.output()

    def _move(self, todo: int, num_bytes: int = 0) -> None:
        """Runs the kernel and raises what it found. If peers sent what was not expected, the call is then over."""
        status = self._run(todo, num_bytes)
        if status == self._kernels.LEFT:
            raise ThinwireError(CLOSED)
        if status == TIMED_OUT:
            self.raise_findings()
        if status == MISMATCHED:
            signature = self._kernels.SCALARS.index("signature0")
            wrong = self._peers[self._kernels.PEERS.index("answer")] == self._kernels.DIFFERS
            counts, expected = self._peers[_RECV_COUNT].tolist(), self._call[signature : signature + 4].tolist()
            error = CountsError(self.differences(wrong, counts, expected))
            self._drop()
            raise error

    def _drop(self) -> None:
        """Takes in what is still to come in this call, and keeps none of it."""
        self._call[self._kernels.SCALARS.index("discard")] = 1
        if self._run(self._kernels.DRAIN) == TIMED_OUT:
            self.failure = self.timed_out(self.report)

    def _run(self, todo: int, num_bytes: int = 0) -> int:
        transfer, next_look = self.under_way, time.monotonic_ns() + self._look_ns
        status, limits = self._launch(todo, num_bytes), self._peers[self._kernels.PEERS.index("limit")]
        deadline: Deadline | None = None
        while status == self._kernels.PAUSED:
            if transfer is not self.under_way:
                return RUNNING  # a signal handler's call has ended this one
            if (now := time.monotonic_ns()) > next_look:
                next_look = now + self._look_ns
                self._note_ended()
            at = limits[limits > 0].min(initial=2**62) / 1e9  # when the first of the peers' clocks runs out
            if deadline is None or deadline.at != at:
                deadline = Deadline(self.timeout, at)
            todo = (todo & ~self._post) | self._kernels.RESUME
            if deadline.look():
                todo &= ~self._kernels.RESUME  # they begin anew
            status = self._launch(todo, num_bytes)
        return status

    def _note_ended(self) -> None:
        """Notes in this rank's memory, in the place of peers that it misses and that have ended, that they left."""
        missed = np.flatnonzero(self._peers[self._kernels.PEERS.index("limit")]).tolist()
        for peer in self.find_ended(missed):
            self._lines_of(self._end, self.layout.STUCK)[peer, SIGNAL_FLAG] = LEFT_FLAG

    def _launch(self, todo: int, num_bytes: int) -> int:
        """What the kernel returns. It runs in as many threads as so many bytes of rows are worth."""
        if num_bytes >= self._shared_bytes:
            work = num_bytes // _COPIED_FOR_ONE if self._words[self._exact_word] else num_bytes
            threads = self._threads_for(work, 1, self.threads)
            if threads > 1:
                self._words[self._kernels.STARTING] = todo & self._post
                return self._kernels.move_in_team(threads, self._call, self._peers, todo)
        status: int = self._kernel(self._address, todo)
        return status

    def open_epoch(self) -> int:
        """The number of the call under way."""
        return int(self._call[self._kernels.SCALARS.index("epoch")])

    def leave_to_parent(self) -> None:
        super().leave_to_parent()
        self._call[self._kernels.STATUS] = self._kernels.LEFT

    def close(self) -> None:
        """See `DirectTransport.close`. A call under way ends at the peers, too, unless they need nothing more for it.

        What a peer was storing into its output at that moment may still arrive: at most a piece. The call may be in the
        kernel just now, in another thread, or below a signal handler: it ends with ThinwireError.
        """
        if not self.closed:
            self._kernel(self._address, self._kernels.LEAVE)  # a call that is about to reach the kernel finds it, too
            transfer = self.under_way
            if transfer is not None:  # for the kernel, until it has seen that it is over
                transfer.memory = self.memory.held(), self._regions, self._region_memory
            self._region_memory = []
        super().close()


def _num_bytes(x: torch.Tensor, out: torch.Tensor) -> int:
    """Of the larger one."""
    num_bytes = x.nbytes
    return num_bytes if num_bytes > out.nbytes else out.nbytes
