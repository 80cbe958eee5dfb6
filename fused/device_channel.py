"""The channel of the direct all-to-all-v for ranks whose kernels are Triton's: on CUDA, and under its interpreter.

The protocol is that of `thinwire.fused.channel`; `thinwire.triton_kernels.all_to_all_v` says in which steps the kernels
go. Here it is decided what to launch.

*Who looks at the headers.* With the receive counts given, the host knows the number of steps and launches all of them
without ever asking the device; the kernel that waits for the headers compares them. Without, the host waits for the
stream and reads them: that is the one synchronisation. CPU tensors, under the interpreter, are always looked at.

*Ranks that disagree.* Where the host looks, it is as on CPU ranks. Where it does not, the device poisons the channel,
`CountsError` is raised by the next call or by `check`, and the channel is of no more use: `docs/protocol.md`, "Ranks
that disagree".

*Streams.* A call's kernels run on the stream that was current when it began; the next call's stream waits for it.
While a graph is captured, that order is the caller's affair, as is that all ranks replay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from thinwire.errors import CountsError, ThinwireError
from thinwire.fused.channel import FLAT_ROW, Channel, RecvBuffer, RowFormat, Transfer
from thinwire.fused.counts import Segments
from thinwire.fused.direct_transport import BEFORE_CAPTURE
from thinwire.fused.row_signature import describe_difference, signature_of
from thinwire.octets import as_bytes
from thinwire.triton_kernels import all_to_all_v as kernels
from thinwire.triton_kernels.leg_layout import MOST_ROWS
from thinwire.triton_kernels.record import RecordLayout
from thinwire.triton_kernels.signal import REPORT_EPOCH, REPORT_PEERS
from thinwire.wire import WireFormat


@dataclass(frozen=True, kw_only=True)
class DeviceRowFormat(RowFormat):
    """A form of rows, and what the kernels know of it.

    Attributes:
        signature: int64 [4] on the device, what a header says of the rows.
        layout: of a row's record; None for exact rows.
        flat: whether what is counted are elements of a 1-D tensor.
        unit: what one of what is counted adds to a piece: bytes of exact rows, else a row, or an element of one.
        per_piece: units that a piece holds.
        per_item: units of a row, or of a chunk of exact rows.
    """

    signature: torch.Tensor
    layout: RecordLayout | None
    flat: bool
    unit: int
    per_piece: int
    per_item: int

    def pieces(self, count: int) -> int:
        """Pieces of so many rows, the one in a half among them even where it is empty."""
        return max(1, -(-count * self.unit // self.per_piece))

    def items(self, counts: Sequence[int], number: int) -> int:
        """Rows, or chunks of exact rows, that the largest of the pieces `number` has."""
        units = max(0, min(max(counts) * self.unit - number * self.per_piece, self.per_piece))
        return -(-units // self.per_item)


class DeviceChannel(Channel):
    """A channel whose kernels are Triton's."""

    remark = ", by Triton's kernels"

    @cached_property
    def always_looks(self) -> bool:
        """Whether it looks at headers and reports after each wait: on a GPU that would wait for the device."""
        return not self.on_gpu

    def _new_row_format(self, tail: torch.Size, dtype: torch.dtype, wire: WireFormat) -> DeviceRowFormat:
        """Never forgotten: captured graphs go on reading its words on the device."""
        if self.capturing:
            raise ThinwireError(BEFORE_CAPTURE)
        elements, piece_bytes = math.prod(tail), self.layout.SLOT_BYTES
        step, record_bytes, layout = elements * dtype.itemsize, 0, None
        if wire.quantized and elements:
            layout = RecordLayout.of(wire, elements if tail else FLAT_ROW, dtype)
            if layout.ROW_BYTES > piece_bytes:
                step, record_bytes, layout = layout.ROW_BYTES, layout.ROW_BYTES, None
        unit, per_piece, per_item = step, piece_bytes, kernels.CHUNK_BYTES
        if layout is not None:
            per_item = 1 if tail else layout.HIDDEN
            unit, per_piece = 1, self.layout.rows_per_slot(layout.ROW_BYTES) * per_item
        return DeviceRowFormat(
            step,
            record_bytes,
            signature=torch.tensor(signature_of(tail, dtype, wire), device=self.device),
            layout=layout,
            flat=layout is not None and not tail,
            unit=unit,
            per_piece=per_piece,
            per_item=per_item,
        )

    def _begin(self, transfer: Transfer, wait: bool) -> None:
        """Without `wait` the first pieces leave now, and all else with `Transfer.wait`."""
        form, x, recv_buffer = transfer.route.row_format, transfer.x, transfer.recv_buffer
        if recv_buffer is None and self.capturing:
            raise CountsError("recv_counts must be given while a CUDA graph is captured: they cannot be asked for")
        assert x is not None
        transfer.x = as_bytes(x.detach()) if form.layout is None else x.detach()  # as the kernels want it
        self._load_kernels(form, transfer.x, transfer.route.step // transfer.x.itemsize)
        transfer.stream = self.take_turn()
        self._note(transfer, self._nothing if recv_buffer is None else recv_buffer.segments)
        self._launch_send(transfer, 0)
        self.under_way = transfer
        if wait:
            self.complete(transfer)

    def _drain(self, transfer: Transfer, todo: int) -> torch.Tensor:
        with torch.cuda.stream(transfer.stream):  # no stream: no change
            return self._take_steps(transfer)

    def _take_steps(self, transfer: Transfer) -> torch.Tensor:
        form, recv_buffer = transfer.route.row_format, transfer.recv_buffer
        looks = recv_buffer is None or self.always_looks
        self._wait(form, kernels.HEADERS, 0, check=not looks)
        error: Exception | None = None
        if looks:
            headers = self.headers()
            self.raise_findings()
            counts, pieces = [line[1] for line in headers], [max(line[0], 0) + 1 for line in headers]
            try:
                self._compare(form, headers, None if recv_buffer is None else recv_buffer.segments.counts)
                if recv_buffer is None:
                    assert transfer.place is not None
                    recv_buffer = transfer.place(counts)
                    self._note(transfer, recv_buffer.segments)
            except Exception as problem:
                error, recv_buffer = problem, None
                # Takes in what is still to come in this call, and keeps none of it.
                self._note(transfer, Segments([-number for number in pieces], self._nothing.displs))
        else:
            assert recv_buffer is not None
            pieces = [form.pieces(count) for count in recv_buffer.segments.counts]
        self._move(transfer, recv_buffer, pieces, looks)
        if error is not None:
            raise error
        assert recv_buffer is not None
        return recv_buffer.output()

    def _move(self, transfer: Transfer, recv_buffer: RecvBuffer | None, pieces: list[int], looks: bool) -> None:
        """All steps from the taking of the first pieces on; without a buffer nothing is kept."""
        form, sends = transfer.route.row_format, transfer.route.sends
        assert transfer.x is not None
        counts, out, out_stride = [0], transfer.x, 0
        if recv_buffer is not None:
            counts, out, out_stride = recv_buffer.segments.counts, recv_buffer.memory.detach(), form.step
            if form.layout is None:
                out = as_bytes(out)
            else:
                out_stride = form.step // out.itemsize
        most_out = max(form.pieces(count) for count in sends.counts)
        for number in range(max(most_out, *pieces)):
            if 0 < number < most_out:
                self._wait(form, kernels.ROOM, number)
                self._launch_send(transfer, number)
            if 0 < number < max(pieces):
                self._wait(form, kernels.PIECES, number)
            if looks:
                self.raise_findings()  # how many steps there are is what peers say: it may take them for ever
            items = form.items(counts, number)
            if items or 0 < number < max(pieces):
                kernels.recv(self._end, out, out_stride, form.layout, form.flat, number, items, self.num_programs)
                if self.always_looks:
                    self.raise_findings()

    def _launch_send(self, transfer: Transfer, number: int) -> None:
        form, x = transfer.route.row_format, transfer.x
        assert x is not None
        items, stride = form.items(transfer.route.sends.counts, number), transfer.route.step // x.itemsize
        programs = self.num_programs
        kernels.send(self._end, x, stride, form.layout, form.flat, form.signature, number, items, programs)

    @property
    def _nothing(self) -> Segments:
        return Segments([0] * self.world, [0] * self.world)

    def _note(self, transfer: Transfer, receives: Segments) -> None:
        form = transfer.route.row_format
        kernels.note(self._end, transfer.route.sends, receives, form.unit, form.per_piece)

    def _wait(self, form: DeviceRowFormat, reason: int, number: int, check: bool = False) -> None:
        kernels.wait(self._end, reason, number, form.signature, check, self.wait_seconds(), self.grace)
        if self.always_looks:
            self.raise_findings()

    def _compare(self, form: DeviceRowFormat, headers: list[list[int]], expected: Sequence[int] | None) -> None:
        """Raises what is wrong with the headers; None: any count is expected."""
        signature = form.signature.tolist()
        found = []
        for peer, header in enumerate(headers):
            pieces, count, *sent = header
            wanted = None if expected is None else expected[peer]
            believable = 0 <= count <= MOST_ROWS and pieces + 1 == form.pieces(count)
            if sent != signature or not believable or wanted not in (None, count):
                found.append(describe_difference(self.rank, peer, header, wanted, signature))
        if found:
            raise CountsError("; ".join(found))

    def _load_kernels(self, form: DeviceRowFormat, x: torch.Tensor, stride: int) -> None:
        key: tuple[object, ...] = ()  # kernels for exact rows find out themselves how wide they may copy
        if form.layout is not None:
            key = (form.layout, form.flat, stride == 1, stride % 16 == 0, x.data_ptr() % 16 == 0)

        def launch() -> None:
            kernels.note(self._idle, self._nothing, self._nothing, 1, 1)
            # The output may begin anywhere; nothing is written to this one.
            outs = (x.new_empty(16), x.new_empty(16)[1:])
            for number in (0, 1):
                kernels.send(self._idle, x, stride, form.layout, form.flat, form.signature, number, 0)
                for out in outs:
                    out_stride = stride if form.layout is None else form.layout.HIDDEN
                    kernels.recv(self._idle, out, 1 if form.flat else out_stride, form.layout, form.flat, number, 0)
            for reason in (kernels.HEADERS, kernels.ROOM, kernels.PIECES):
                for check in (True, False):
                    kernels.wait(self._idle, reason, 0, form.signature, check, self.timeout, self.grace)

        self.load_kernels(key, launch)

    def mismatch(self) -> CountsError:
        """What the device found. Nothing has been noted since, and no peer has gone on to this half's next leg."""
        world, table = self.world, self._end.table.tolist()
        wrong = self.report[REPORT_PEERS : REPORT_PEERS + world]
        found = self.differences(wrong, table[3 * world : 4 * world], table[6 * world :])
        return CountsError(f"in call {self.report[REPORT_EPOCH]}: {found}")
