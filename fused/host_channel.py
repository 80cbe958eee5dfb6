"""The channel of the direct all-to-all-v for CPU ranks: memory, numba's kernel, and the state of calls.

The protocol is that of `thinwire.fused.channel`, the kernel is in `thinwire.triton_kernels.cpu.all_to_all_v`.

A small call takes microseconds, and most of them are Python's. So the plainest calls have a short way, `send_plainly`:
it looks at little, has the kernel look at the counts, and leaves whatever is not plain, or wrong, to the thorough way.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import torch

from thinwire.comm.exchange import Exchange
from thinwire.comm.flight_recorder import FlightRecorder
from thinwire.comm.symmetric import SymmetricMemory
from thinwire.errors import CountsError
from thinwire.fused.channel import FLAT_ROW, Channel, RecvBuffer, RowFormat, Transfer, signature_of, traffic_of
from thinwire.fused.counts import Segments
from thinwire.triton_kernels.checksum_seed import SUM_BYTES
from thinwire.triton_kernels.exchange_layout import CHECKED_BYTES, ExchangeLayout
from thinwire.triton_kernels.signal import CORRUPTED, MISMATCHED, RUNNING, SIGNAL_LINE_BYTES, TIMED_OUT
from thinwire.wire import WireFormat

_INTS = {int}
_STRIDED = torch.strided
_MOST_FORMATS = 1024  # that are remembered
_MOST_ROWS = 1 << 40  # of a new output; more is nonsense, but torch has other words for what fits 64 bits and what not
_PLACED_BY_THE_KERNEL = Segments([], [])
_RECV_COUNT, _RECV_DISPL = 2, 3  # rows of the kernel's `peers`


class HostChannel(Channel):
    """A channel of CPU ranks, with numba's kernel."""

    def __init__(
        self,
        memory: SymmetricMemory,
        layout: ExchangeLayout,
        rank: int,
        timeout: float,
        voters: Exchange | None = None,
    ) -> None:
        from thinwire.triton_kernels.cpu import all_to_all_v as kernels  # here, as loading numba takes a while

        super().__init__(memory, layout, rank, timeout, voters)
        self._kernels, self._kernel, self._post = kernels, kernels.move, kernels.POST
        world, scalars = layout.WORLD, len(kernels.SCALARS)
        words: Any = np.zeros(scalars + len(kernels.PEERS) * world, np.int64)
        self._words = memoryview(words)
        self._call = words[:scalars]
        self._peers = words[scalars:].reshape(-1, world)
        # What a call brings lies in one stretch, and is written at once.
        first = kernels.SCALARS.index("discard")
        self._brought, self._brought_at = struct.Struct(f"{scalars - first + 4 * world}q"), 8 * first
        self._expects_anything = (-1,) * world + (0,) * world
        self._zeros = (0,) * world
        self._spare: Transfer | None = None  # of `send_plainly`
        self._regions: Any = None  # which the kernel has the address of
        self._plainly = kernels.CHECK | kernels.POST | kernels.DRAIN
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
            "halves": layout.HALVES,
            "sums": layout.SUMS,
            "slot_sum_bytes": layout.SLOT_ROWS * SUM_BYTES,
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
        self._kernel(self._call, self._peers, 0)  # compiles, or loads what was compiled: nobody waits for it later

    def use_regions(self, regions: list[tuple[int, ...]]) -> None:
        """From now on exact rows are stored straight into outputs that lie in one of these, and in peers' outputs.

        Not while a call is under way.

        Args:
            regions: the number of each, the same on all ranks and never 0; its bytes; where each rank's begins here.
        """
        # One row at least: the kernel goes by its address, and must go on telling peers once there are none.
        table = np.zeros((max(1, len(regions)), self._kernels.REGION_PTRS + self.world), np.int64)
        table[: len(regions)] = np.array(regions).reshape(len(regions), table.shape[1])
        self._regions = table
        self._call[self._kernels.SCALARS.index("regions")] = table.ctypes.data
        self._call[self._kernels.SCALARS.index("num_regions")] = len(regions)

    @property
    def straight_segments(self) -> int:
        """Segments that peers have stored straight into outputs of this rank."""
        return int(self._peers[self._kernels.PEERS.index("straight")].sum())

    def _new_row_format(self, tail: torch.Size, dtype: torch.dtype, wire: WireFormat) -> RowFormat:
        row_elements = math.prod(tail)
        if len(self._row_formats) >= _MOST_FORMATS:
            self._row_formats.clear()
        signature = signature_of(tail, dtype, wire)
        step = row_elements * dtype.itemsize
        piece_bytes = self.layout.SLOT_BYTES
        turn = CHECKED_BYTES if self.layout.SUMS else piece_bytes
        if not wire.quantized or not row_elements:
            return RowFormat(step, 0, (1, 1, step, piece_bytes, turn, 0, 0, 1, 0, 1, 0, 0, *signature))
        from thinwire.triton_kernels.cpu.codec import dtype_code, record_layout

        counts_per_row = 1 if tail else FLAT_ROW
        layout = record_layout(wire, row_elements * counts_per_row, dtype)
        record_bytes = layout[-1]
        if record_bytes > piece_bytes:
            return RowFormat(
                record_bytes, record_bytes, (1, 1, record_bytes, piece_bytes, turn, 0, *layout, *signature)
            )
        per_piece, code = self.layout.rows_per_slot(record_bytes), dtype_code(dtype)
        turn = 1 if self.layout.SUMS else per_piece
        return RowFormat(step, 0, (0, counts_per_row, record_bytes, per_piece, turn, code, *layout, *signature))

    def _begin(self, transfer: Transfer, wait: bool) -> None:
        row_format, sends, recv_buffer = transfer.row_format, transfer.sends, transfer.recv_buffer
        assert transfer.x is not None
        address, expected = 0, self._expects_anything
        if recv_buffer is not None:
            address = recv_buffer.memory.data_ptr()
            expected = (*recv_buffer.segments.counts, *recv_buffer.segments.displs)
        self._brought.pack_into(
            self._words, self._brought_at,
            0, transfer.x.data_ptr(), transfer.step, address, row_format.step, 0, 0, *row_format.words,
            *sends.counts, *sends.displs, *expected,
        )  # fmt: skip
        self._under_way = transfer
        if not wait:
            self._kernel(self._call, self._peers, self._post)
        elif recv_buffer is None:
            self.complete(transfer, self._post)
        elif self._kernel(self._call, self._peers, self._post | self._kernels.DRAIN) != RUNNING:
            self.complete(transfer, self._kernels.RESUME)  # it says again what it said, or goes on after a pause
        else:
            self._under_way = transfer.x = None  # the usual case, without the detour
            transfer.result = recv_buffer.output()

    def send_plainly(
        self,
        x: object,
        send_counts: object,
        recv_counts: object,
        out: object,
        wire: WireFormat,
        recorder: FlightRecorder,
    ) -> torch.Tensor | None:
        """One whole call, whose arguments have not been checked; raises as `Transfer.wait`.

        It takes contiguous tensors, lists of ints, and rows of a form that was sent before.

        Returns:
            The output, filled: `out`, or a new tensor if that is None. None: not done, and not begun either.
        """
        if type(x) is not torch.Tensor or not x.is_cpu or x.layout is not _STRIDED or x.requires_grad:
            return None
        if x.is_neg() or not x.is_contiguous():
            return None
        shape, dtype = x.shape, x.dtype
        tail = shape[1:]
        row_format = self._row_formats.get((tail, dtype, wire))
        if row_format is None or row_format.record_bytes or dtype.is_complex or not shape:
            return None
        if (
            type(send_counts) is not list
            or type(recv_counts) is not list
            or not len(send_counts) == len(recv_counts) == self.layout.WORLD
            or {*map(type, send_counts), *map(type, recv_counts)} != _INTS
            or self._under_way is not None
            or self.failure is not None
            or self.closed
        ):
            return None
        if out is None:
            rows = sum(recv_counts)
            if not 0 <= rows <= _MOST_ROWS:
                return None
            try:
                out = x.new_empty((rows, *tail))
            except RuntimeError:  # no memory
                return None
        elif type(out) is not torch.Tensor or not out.is_cpu or out.layout is not _STRIDED:
            return None
        elif out.is_neg() or not out.is_contiguous():
            return None
        elif out.dtype != dtype or out.dim() != len(shape) or out.shape[1:] != tail:
            return None
        try:
            self._brought.pack_into(
                self._words, self._brought_at,
                0, x.data_ptr(), row_format.step, out.data_ptr(), row_format.step, shape[0], out.size(0),
                *row_format.words, *send_counts, *self._zeros, *recv_counts, *self._zeros,
            )  # fmt: skip
        except struct.error:  # a number of more than 64 bits
            return None
        details = ("send_counts", send_counts[:], "recv_counts", recv_counts[:])  # the caller may change its lists
        call = recorder.begin("all_to_all_v", shape, dtype, wire, "direct", details)
        with call:
            # Whatever interrupts this, the next call finds what there is to end. One that ended as it should serves the
            # next call too; it is nobody else's.
            transfer, self._spare = self._spare, None
            recv_buffer = RecvBuffer(_PLACED_BY_THE_KERNEL, out)
            if transfer is None:
                transfer = Transfer(self, row_format, x, row_format.step, _PLACED_BY_THE_KERNEL, recv_buffer)
            else:
                transfer.row_format, transfer.x = row_format, x
                transfer.step, transfer.recv_buffer = row_format.step, recv_buffer
            self._under_way = transfer
            if recorder.track is not None:
                recorder.sent(traffic_of(x, send_counts, self.rank, wire))
            status = self._kernel(self._call, self._peers, self._plainly)
            if status == RUNNING:
                self._under_way = transfer.x = transfer.recv_buffer = None  # it shall hold no tensors
                self._spare = transfer
                return out
            if status == self._kernels.REFUSED:
                self._under_way = None
                call.withdraw()
                return None
            self.complete(transfer, self._kernels.RESUME)  # it says again what it said, or goes on after a pause
            return transfer.wait()

    def _drain(self, transfer: Transfer, todo: int) -> torch.Tensor:
        recv_buffer = transfer.recv_buffer
        if recv_buffer is None and transfer.error is None:
            assert transfer.place is not None
            self._move(todo | self._kernels.HEADERS)
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
        self._move(todo | self._kernels.DRAIN)
        return recv_buffer.output()

    def _move(self, todo: int) -> None:
        """Runs the kernel and raises what it found. If peers sent what was not expected, the call is then over."""
        status = self._run(todo)
        if status in (TIMED_OUT, CORRUPTED):
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
            self.failure = self.timed_out()

    def _run(self, todo: int) -> int:
        status: int = self._kernel(self._call, self._peers, todo)
        while status == self._kernels.PAUSED:
            status = self._kernel(self._call, self._peers, (todo & ~self._post) | self._kernels.RESUME)
        return status

    def open_epoch(self) -> int:
        """The number of the call under way."""
        return int(self._call[self._kernels.SCALARS.index("epoch")])
