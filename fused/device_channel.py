"""The channel of the direct all-to-all-v for ranks whose kernels are Triton's: on CUDA, and under its interpreter.

`docs/protocol.md`, "Legs" and "The ring", says why it works, `thinwire.triton_kernels.leg_layout` what lies where, and
`thinwire.triton_kernels.all_to_all_v` in which steps the kernels go. Here it is decided what to launch.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from thinwire.comm.communicator import Communicator
from thinwire.comm.exchange import Exchange
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.errors import CountsError, ThinwireError
from thinwire.fused.call import in_memory
from thinwire.fused.channel import FLAT_ROW, Place, RecvBuffer, RowCall, Transfer, outgoing_rows
from thinwire.fused.counts import Segments
from thinwire.fused.direct_transport import BEFORE_CAPTURE, CLOSED, LegTransport
from thinwire.fused.row_signature import describe_difference, signature_of
from thinwire.octets import as_bytes
from thinwire.triton_kernels import all_to_all_v as kernels
from thinwire.triton_kernels.leg_layout import MOST_ROWS, LegLayout
from thinwire.triton_kernels.record import RecordLayout
from thinwire.triton_kernels.signal import REPORT_EPOCH, REPORT_PEERS
from thinwire.wire import WireFormat


@dataclass(frozen=True)
class RowFormat:
    """The form in which rows travel, and what the kernels know of it.

    Attributes:
        step: bytes from one of what is counted (a row, or an element of a 1-D tensor) to the next, side by side.
        record_bytes: 0, or, where one record is longer than a piece, its length. Such rows are quantised by the caller,
            and their records travel as exact rows of bytes do, which may be cut anywhere: `step` is then of those.
        signature: int64 [4] on the device, what a header says of the rows.
        layout: of a row's record; None for exact rows.
        flat: whether what is counted are elements of a 1-D tensor.
        unit: what one of what is counted adds to a piece: bytes of exact rows, else a row, or an element of one.
        per_piece: units that a piece holds.
        per_item: units of a row, or of a chunk of exact rows.
    """

    step: int
    record_bytes: int
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


class Route(NamedTuple):
    """What calls have in common that differ in nothing but their tensors.

    Attributes:
        row_format: the form of the rows.
        step: bytes in x from one of what is counted to the next.
        sends: the parts of x for each rank, within x.
    """

    row_format: RowFormat
    step: int
    sends: Segments


class DeviceChannel(LegTransport):
    """The memory and the state of one communicator's direct all-to-all-v, at one rank; see `LegTransport`."""

    phases = ("headers", "pieces")
    slots, remark = "pieces", ", by Triton's kernels"
    num_programs: int | None = None  # of the last call
    under_way: Transfer | None = None

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

    @cached_property
    def always_looks(self) -> bool:
        """Whether it looks at headers and reports after each wait: on a GPU that would wait for the device."""
        return not self.on_gpu

    def begin(
        self,
        comm: Communicator,
        call: RowCall,
        x: torch.Tensor,
        recv_buffer: RecvBuffer | None,
        place: Place | None,
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
        plain, row_format = in_memory(x), self.row_format(call.tail, x.dtype, call.wire)
        step, wide = row_format.step, row_format.record_bytes
        x, step, sends, recv_buffer, place = outgoing_rows(
            call, x, step, wide, self.layout.SLOT_BYTES, recv_buffer, place
        )
        route = Route(row_format, step, sends)
        # Not of a call whose counts a check has told: the next one's may be others.
        if plain and not wide and (recv_buffer is None or recv_buffer.segments is call.receives):
            call.route = route
        return self.send(Transfer(self, route, x, recv_buffer, place), wait=wait).wait

    def row_format(self, tail: torch.Size, dtype: torch.dtype, wire: WireFormat) -> RowFormat:
        """The form of rows of shape `tail` in this wire format; () are the elements of a 1-D tensor.

        On CUDA the first call with a form copies a few words to the device and waits for that. A form is never
        forgotten: captured graphs go on reading its words on the device.
        """
        key = (tail, dtype, wire)
        row_format = self._row_formats.get(key)
        if row_format is None:
            row_format = self._row_formats[key] = self._new_row_format(*key)
        return row_format

    def _new_row_format(self, tail: torch.Size, dtype: torch.dtype, wire: WireFormat) -> RowFormat:
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
        return RowFormat(
            step,
            record_bytes,
            signature=torch.tensor(signature_of(tail, dtype, wire), device=self.device),
            layout=layout,
            flat=layout is not None and not tail,
            unit=unit,
            per_piece=per_piece,
            per_item=per_item,
        )

    def send(self, transfer: Transfer, *, wait: bool) -> Transfer:
        """Begins a call, and with `wait` ends it right away; what was under way before is ended first.

        Without `wait` the first pieces leave now, and all else with `Transfer.wait`.

        Raises:
            PeerTimeout: the channel failed before, or does now.
            CountsError: with `wait`, as `Transfer.wait`; on CUDA also, by what a peer sent, in an earlier call, or
                counts that are not given while a CUDA graph is captured, which could not be asked for.
        """
        self.settle()
        self.require_usable()
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
        return transfer

    def complete(self, transfer: Transfer) -> None:
        """Ends a call if that has not happened; what it comes to is for `Transfer.wait` to say.

        An exception from outside, such as a signal handler's, is raised, and ends the communicator.
        """
        if transfer is not self.under_way:
            return
        try:
            if self.closed:
                raise ThinwireError(CLOSED)
            with torch.cuda.stream(transfer.stream):  # no stream: no change
                transfer.result = self._take_steps(transfer)
        except ThinwireError as error:
            transfer.error = error
        finally:
            self.under_way = transfer.x = transfer.place = None

    def settle(self) -> None:
        """Ends the call under way, if there is one; what it comes to is for its own `wait` to say."""
        if self.under_way is not None:
            self.complete(self.under_way)

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

    def _wait(self, form: RowFormat, reason: int, number: int, check: bool = False) -> None:
        kernels.wait(self._end, reason, number, form.signature, check, self.wait_seconds(), self.grace)
        if self.always_looks:
            self.raise_findings()

    def _compare(self, form: RowFormat, headers: list[list[int]], expected: Sequence[int] | None) -> None:
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

    def _load_kernels(self, form: RowFormat, x: torch.Tensor, stride: int) -> None:
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
        world, table, headers = self.world, self._end.table.tolist(), self.headers()
        counts, signature = table[3 * world : 4 * world], table[6 * world :]
        found = "; ".join(
            describe_difference(self.rank, peer, headers[peer], counts[peer], signature)
            for peer in np.flatnonzero(self.report[REPORT_PEERS : REPORT_PEERS + world]).tolist()
        )
        return CountsError(f"in call {self.report[REPORT_EPOCH]}: {found}")
