"""The channel of the direct all-to-all-v for ranks whose kernels are Triton's: on CUDA, and under its interpreter.

The protocol is that of `thinwire.fused.channel`; `thinwire.triton_kernels.all_to_all_v` says in which steps the kernels
go. Here it is decided what to launch.

*Who looks at the headers.* With the receive counts given, the host knows the number of steps and launches all of them
without ever asking the device; the kernel that waits for the headers compares them. Without, the host waits for the
stream and reads them: that is the one synchronisation. CPU tensors, under the interpreter, are always looked at.

*Ranks that disagree.* Where the host looks, it is as on CPU ranks: it takes in and drops what it did not expect, raises
`CountsError` at the end of the call, and all may go on. Where it does not look, kernels that were launched already
cannot be told to take in something else. So the device poisons the channel, tells all peers that this rank is stuck,
and fills the output with bytes 0xFF. `CountsError` is raised by the next call or by `check`; from then on the channel
is of no more use, and peers that miss this rank later get `PeerTimeout`. Nobody hangs, and nothing is stored past an
output's segments.

*Streams.* A call's kernels run on the stream that was current when it began; the next call's stream waits for it.
While a graph is captured, that order is the caller's affair, as is that all ranks replay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from thinwire.comm.symmetric import SymmetricMemory
from thinwire.errors import CountsError, ThinwireError
from thinwire.fused.channel import (
    FLAT_ROW,
    Channel,
    RecvBuffer,
    RowFormat,
    Transfer,
    describe_difference,
    signature_of,
)
from thinwire.fused.counts import Segments
from thinwire.octets import as_bytes
from thinwire.triton_kernels import all_to_all_v as kernels
from thinwire.triton_kernels.exchange_layout import Endpoint, ExchangeLayout
from thinwire.triton_kernels.record import RecordLayout
from thinwire.triton_kernels.signal import (
    CONTROL_EPOCH,
    CONTROL_STATUS,
    REPORT_EPOCH,
    REPORT_PEERS,
    SIGNAL_LINE_BYTES,
    TIMED_OUT,
)
from thinwire.wire import WireFormat

__all__ = ["DeviceChannel", "DeviceTransfer", "piece_bytes_for"]

#: On a GPU a step of the ring is four launches, about as long as 4 MiB take to each of 8 peers at 400 GB/s or more:
#: smaller pieces would leave the link idle, and larger ones hardly gain.
_PIECE_BYTES = 4 << 20
_MOST_BYTES = 256 << 20  # of one GPU's memory; 8 ranks need 192 MiB
_ALIGNMENT = 128


def piece_bytes_for(device: torch.device, world: int, pieces: int) -> int | None:
    """What `channel_layout` is given where the caller has no wish: None, its own default, unless on CUDA.

    >>> piece_bytes_for(torch.device("cuda"), 8, 4), piece_bytes_for(torch.device("cuda"), 72, 4)
    (4194304, 621312)
    """
    if device.type != "cuda":
        return None
    share = _MOST_BYTES // (world * (2 + pieces))
    return max(_ALIGNMENT, min(_PIECE_BYTES, share // _ALIGNMENT * _ALIGNMENT))


@dataclass(frozen=True)
class DeviceRowFormat(RowFormat):
    """A form of rows, and what the kernels know of it.

    Attributes:
        layout: of a row's record; None for exact rows.
        signature: int64 [4] on the device, what a header says of the rows.
    """

    layout: RecordLayout | None = None
    flat: bool = False
    signature: torch.Tensor | None = None

    @property
    def unit(self) -> int:
        """What one of what is counted adds to a piece: bytes of exact rows, else a row, or an element of one."""
        return self.step if self.layout is None else 1

    def per_piece(self, piece_bytes: int) -> int:
        """Units that a piece holds."""
        if self.layout is None:
            return piece_bytes
        return piece_bytes // self.layout.ROW_BYTES * (self.layout.HIDDEN if self.flat else 1)

    def pieces(self, count: int, piece_bytes: int) -> int:
        """Pieces of so many rows, the one in a half among them even where it is empty."""
        return max(1, -(-count * self.unit // self.per_piece(piece_bytes)))

    def items(self, counts: Sequence[int], number: int, piece_bytes: int) -> int:
        """Rows, or chunks of exact rows, that the largest of the pieces `number` has."""
        per_piece = self.per_piece(piece_bytes)
        units = max(0, min(max(counts) * self.unit - number * per_piece, per_piece))
        per_item = kernels.CHUNK_BYTES if self.layout is None else self.layout.HIDDEN if self.flat else 1
        return -(-units // per_item)


class DeviceTransfer(Transfer):
    """A call of a device's, which is launched step by step."""

    __slots__ = ("form", "over", "sends", "stream", "stride")

    def __init__(
        self,
        channel: DeviceChannel,
        form: DeviceRowFormat,
        x: torch.Tensor,
        stride: int,
        sends: Segments,
        recv_buffer: RecvBuffer | None,
        place: Callable[[list[int]], RecvBuffer],
        stream: torch.cuda.Stream | None,
    ) -> None:
        super().__init__(channel, x, place, recv_buffer)
        self.form, self.stride, self.sends, self.stream = form, stride, sends, stream
        self.over = False  # all steps were launched


class DeviceChannel(Channel):
    """A channel whose kernels are Triton's.

    Args:
        memory, layout, rank, timeout: see `Channel`.
    """

    def __init__(self, memory: SymmetricMemory, layout: ExchangeLayout, rank: int, timeout: float) -> None:
        super().__init__(memory, layout, rank, timeout)
        self.always_looks = not self.on_gpu  # at headers and reports, after each wait
        self._end = Endpoint.of(layout, rank, memory.local, memory.buffer_ptrs)
        # Kernels that find this status do nothing; it is for those that only have to be compiled and loaded.
        self._idle = Endpoint.of(layout, rank, memory.local, memory.buffer_ptrs)
        self._idle.control[CONTROL_STATUS] = TIMED_OUT
        self.report = self._end.report.numpy()
        if self.on_gpu:
            # What was set to zero here is used on whatever stream comes first.
            torch.cuda.current_stream(self.device).synchronize()

    def _new_row_format(self, tail: torch.Size, dtype: torch.dtype, wire: WireFormat) -> DeviceRowFormat:
        """Never forgotten: captured graphs go on reading its words on the device."""
        if self.capturing:
            raise ThinwireError("make a call like this one before a CUDA graph of it is captured")
        elements = math.prod(tail)
        signature = torch.tensor(signature_of(tail, dtype, wire), device=self.device)
        if not wire.quantized or not elements:
            return DeviceRowFormat(elements * dtype.itemsize, (), signature=signature)
        layout = RecordLayout.of(wire, elements if tail else FLAT_ROW, dtype)
        if layout.ROW_BYTES > self.layout.SLOT_BYTES:
            return DeviceRowFormat(layout.ROW_BYTES, (), layout.ROW_BYTES, signature=signature)
        return DeviceRowFormat(elements * dtype.itemsize, (), 0, layout, not tail, signature)

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
    ) -> DeviceTransfer:
        """See `Channel.send`. Without `wait` the first pieces leave now, and all else with `Transfer.wait`."""
        if self._under_way is not None:
            self.complete(self._under_way)
        self.require_usable()
        assert isinstance(row_format, DeviceRowFormat) and row_format.signature is not None
        if recv_buffer is None and self.capturing:
            raise CountsError("recv_counts must be given while a CUDA graph is captured: they cannot be asked for")
        x = x.detach()
        source = as_bytes(x) if row_format.layout is None else x
        stride = x_step if row_format.layout is None else x_step // x.itemsize
        self._prepare(row_format, source, stride)
        transfer = DeviceTransfer(self, row_format, source, stride, sends, recv_buffer, place, self.take_turn())
        nothing = [0] * self.layout.WORLD
        receives = (
            (nothing, nothing) if recv_buffer is None else (recv_buffer.segments.counts, recv_buffer.segments.displs)
        )
        self._note(transfer, *receives)
        self._launch_send(transfer, 0)
        self._under_way = transfer
        if wait:
            self.complete(transfer)
        return transfer

    def complete(self, transfer: Transfer) -> None:
        """See `Channel.complete`."""
        if transfer is not self._under_way:
            return
        assert isinstance(transfer, DeviceTransfer)
        if self.closed:
            transfer.error = ThinwireError("the communicator was closed while this call was under way")
            self._under_way = transfer.x = None
        else:
            try:
                with torch.cuda.stream(transfer.stream):  # no stream: no change
                    transfer.result = self._drain(transfer)
            except BaseException as error:
                transfer.error = error
                if not transfer.over and self.failure is None:
                    # Nobody knows which steps were taken; to go on could put one call's rows into another.
                    self.failure = ThinwireError(f"a call ended half-way, {type(error).__name__}: {error}")
                if not isinstance(error, Exception):
                    raise
            finally:
                self._under_way = transfer.x = None

    def _drain(self, transfer: DeviceTransfer) -> torch.Tensor:
        form, recv_buffer, world = transfer.form, transfer.recv_buffer, self.layout.WORLD
        looks = recv_buffer is None or self.always_looks
        self._wait(form, kernels.HEADERS, 0, check=not looks)
        error: Exception | None = None
        if looks:
            headers = self._headers()
            self.raise_findings()
            counts, pieces = headers[:, 1].tolist(), (headers[:, 0] + 1).tolist()
            expected = counts if recv_buffer is None else recv_buffer.segments.counts
            wrong = self._differences(form, headers, expected)
            if wrong:
                error = CountsError("; ".join(wrong))
            elif recv_buffer is None:
                assert transfer.place is not None
                try:
                    recv_buffer = transfer.place(counts)
                except Exception as problem:
                    error = problem
                else:
                    self._note(transfer, recv_buffer.segments.counts, recv_buffer.segments.displs)
            if error is not None:
                # Takes in what is still to come in this call, and keeps none of it.
                self._note(transfer, [-number for number in pieces], [0] * world)
        else:
            assert recv_buffer is not None
            pieces = [form.pieces(count, self.layout.SLOT_BYTES) for count in recv_buffer.segments.counts]
        self._move(transfer, None if error is not None else recv_buffer, pieces)
        transfer.over = True
        if error is not None:
            raise error
        assert recv_buffer is not None
        return recv_buffer.memory if recv_buffer.finish is None else recv_buffer.finish()

    def _move(self, transfer: DeviceTransfer, recv_buffer: RecvBuffer | None, pieces: list[int]) -> None:
        """All steps from the taking of the first pieces on; without a buffer nothing is kept."""
        form, sends, piece_bytes = transfer.form, transfer.sends, self.layout.SLOT_BYTES
        assert transfer.x is not None
        counts, out, out_stride = [0], transfer.x, 0
        if recv_buffer is not None:
            counts, out, out_stride = recv_buffer.segments.counts, recv_buffer.memory.detach(), form.step
            if form.layout is None:
                out = as_bytes(out)
            else:
                out_stride = form.step // out.itemsize
        most_out = max(form.pieces(count, piece_bytes) for count in sends.counts)
        for number in range(max(most_out, *pieces)):
            if 0 < number < most_out:
                self._wait(form, kernels.ROOM, number)
                self._launch_send(transfer, number)
            if 0 < number < max(pieces):
                self._wait(form, kernels.PIECES, number)
            items = form.items(counts, number, piece_bytes)
            if items or 0 < number < max(pieces):
                kernels.recv(self._end, out, out_stride, form.layout, form.flat, number, items)

    def _launch_send(self, transfer: DeviceTransfer, number: int) -> None:
        form = transfer.form
        assert transfer.x is not None and form.signature is not None
        items = form.items(transfer.sends.counts, number, self.layout.SLOT_BYTES)
        kernels.send(self._end, transfer.x, transfer.stride, form.layout, form.flat, form.signature, number, items)

    def _note(self, transfer: DeviceTransfer, counts: list[int], displs: list[int]) -> None:
        form = transfer.form
        per_piece = form.per_piece(self.layout.SLOT_BYTES)
        kernels.note(self._end, (transfer.sends.counts, transfer.sends.displs), (counts, displs), form.unit, per_piece)

    def _wait(self, form: DeviceRowFormat, reason: int, number: int, check: bool = False) -> None:
        assert form.signature is not None
        kernels.wait(self._end, reason, number, form.signature, check, self.timeout, self.grace)
        if self.always_looks:
            self.raise_findings()

    def _headers(self) -> torch.Tensor:
        """Of every rank's header in the open call: ring pieces, count, and what a row is; int64 [world, 6] on the CPU.

        On CUDA this waits for the current stream.
        """
        half = int(self._end.control[CONTROL_EPOCH]) & 1
        first, size = (
            self.layout.HEADERS + half * self.layout.WORLD * SIGNAL_LINE_BYTES,
            self.layout.WORLD * SIGNAL_LINE_BYTES,
        )
        words = self.memory.local[first : first + size].cpu().view(torch.int64).view(self.layout.WORLD, -1)[:, :6]
        words = words.clone()
        words[:, 0] >>= 32  # behind the flag
        return words

    def _differences(self, form: DeviceRowFormat, headers: torch.Tensor, expected: Sequence[int]) -> list[str]:
        """What is wrong with the headers."""
        assert form.signature is not None
        signature = form.signature.tolist()
        found = []
        for peer, (pieces, count, *sent) in enumerate(headers.tolist()):
            if sent != signature or count != expected[peer]:
                found.append(describe_difference(self.rank, peer, count, expected[peer], sent, signature))
            elif pieces + 1 != form.pieces(count, self.layout.SLOT_BYTES):
                found.append(f"rank {peer} sends {count} rows in {pieces + 1} pieces, not as many as it takes")
        return found

    def _prepare(self, form: DeviceRowFormat, x: torch.Tensor, stride: int) -> None:
        key: tuple[object, ...] = ()  # kernels for exact rows find out themselves how wide they may copy
        if form.layout is not None:
            key = (form.layout, form.flat, stride == 1, stride % 16 == 0, x.data_ptr() % 16 == 0)

        def launch() -> None:
            assert form.signature is not None
            nothing = [0] * self.world
            kernels.note(self._idle, (nothing, nothing), (nothing, nothing), 1, 1)
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

        self.prepare(key, launch)

    def mismatch(self) -> CountsError:
        """What the device found. Nothing has been noted since, and no peer has gone on to this half's next epoch."""
        world = self.layout.WORLD
        table = self._end.table.tolist()
        expected, signature = table[3 * world : 4 * world], table[6 * world :]
        wrong = self.report[REPORT_PEERS : REPORT_PEERS + world].tolist()
        found = [
            describe_difference(self.rank, peer, count, expected[peer], sent, signature)
            for peer, (_, count, *sent) in enumerate(self._headers().tolist())
            if wrong[peer]
        ]
        return CountsError(f"in call {self.report[REPORT_EPOCH]}: {'; '.join(found)}")

    def close(self) -> None:
        """See `DirectTransport.close`."""
        super().close()
        # Endpoints would hold this rank's buffer for as long as the communicator is there.
        self._end = self._idle = replace(self._end, buffer=self._end.buffer.new_empty(0))

    def details(self) -> str:
        """What is worth telling of the memory."""
        return f"{super().details()}, by Triton's kernels"
