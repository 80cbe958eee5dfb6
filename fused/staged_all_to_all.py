"""The staged all-to-all-v: `none` straight out of the input and into the output, quantised rows as records."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from thinwire.comm import Communicator
from thinwire.fused.backend import select_backend
from thinwire.fused.channel import FLAT_ROW, RecvBuffer, RowCall
from thinwire.fused.counts import Segments, dense_segments
from thinwire.fused.staged import StagedExchange
from thinwire.fused.transport import Staged
from thinwire.octets import as_bytes
from thinwire.wire import WireFormat


class StagedRows(Staged):
    """All-to-all-v through the process group."""

    def begin(
        self,
        comm: Communicator,
        call: RowCall,
        x: torch.Tensor,
        recv_buffer: RecvBuffer | None,
        place: Callable[[list[int]], RecvBuffer] | None,
        wait: bool,
    ) -> Callable[[], torch.Tensor]:
        """See `DeviceChannel.begin`. It returns before the peers' rows are here, whatever `wait` is."""
        if recv_buffer is None:
            assert place is not None
            recv_buffer = place(comm.exchange_counts(call.sends.counts))
        if not math.prod(call.tail):
            return recv_buffer.output
        with torch.no_grad():
            if call.wire.quantized:
                return _post_quantized(x.resolve_neg(), call.sends, recv_buffer, call.wire, comm)
            return _post_exact(x, call.sends, recv_buffer, comm)


def _post_exact(x: torch.Tensor, sends: Segments, placed: RecvBuffer, comm: Communicator) -> Callable[[], torch.Tensor]:
    """Rows travel as the bytes they are, straight out of x and into the output."""
    sent = sends.cut(x.resolve_conj().resolve_neg().contiguous())
    received = placed.segments.cut(placed.memory)

    def byte_views(views: list[torch.Tensor]) -> list[torch.Tensor | None]:
        return [as_bytes(rows) if len(rows) and peer != comm.rank else None for peer, rows in enumerate(views)]

    received[comm.rank].copy_(sent[comm.rank])
    work = comm.post(byte_views(sent), byte_views(received), f"all_to_all_v {x.dtype} {list(x.shape[1:])}")

    def finish() -> torch.Tensor:
        work.wait()
        return placed.memory

    return finish


def _post_quantized(
    x: torch.Tensor, sends: Segments, placed: RecvBuffer, wire: WireFormat, comm: Communicator
) -> Callable[[], torch.Tensor]:
    """Rows travel as records; each segment of a 1-D tensor as rows of FLAT_ROW elements, the last padded with zeros."""
    flat, out, row_sends, row_receives = x.dim() == 1, placed.memory, sends, placed.segments
    if flat:
        row_sends, row_receives = (
            dense_segments([-(-count // FLAT_ROW) for count in segments.counts])
            for segments in (sends, placed.segments)
        )
        rows, row_out = x.new_zeros((row_sends.rows, FLAT_ROW)), x.new_empty((row_receives.rows, FLAT_ROW))
        for part, first in zip(sends.cut(x), row_sends.displs, strict=True):
            rows[first:].view(-1)[: len(part)] = part
    else:
        rows, row_out = (tensor.reshape(len(tensor), math.prod(x.shape[1:])) for tensor in (x, out))
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
    backend = select_backend(x.device, wire, comm.cpu_share.threads)

    def pack(start: int, stop: int, records: torch.Tensor) -> None:
        picked, row_index = row_sends.pick(rows, start, stop)
        backend.pack_rows(picked, wire, row_index, records)

    row_bytes, label = wire.row_bytes(rows.shape[1], x.dtype), f"all_to_all_v {wire!r} {x.dtype} {list(x.shape[1:])}"
    sizes = sends.counts, placed.segments.counts
    exchange = StagedExchange.post(comm, row_sends.counts, row_receives.counts, row_bytes, pack, label, sizes=sizes)
    slots = dense_segments(row_receives.counts)

    def finish() -> torch.Tensor:
        for start, stop in exchange.arrivals():
            records, record_index = slots.pick(exchange.received, start, stop)
            picked, row_index = row_receives.pick(row_out, start, stop)
            backend.unpack_rows(records, wire, record_index, row_index, picked)
        if flat:
            for part, first in zip(placed.segments.cut(out), row_receives.displs, strict=True):
                part.copy_(row_out[first:].view(-1)[: len(part)])
        return out

    return finish
