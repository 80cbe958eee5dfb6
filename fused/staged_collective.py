"""Staged all-reduce, reduce-scatter, all-gather and all-to-all-v: through the process group, piece by piece.

Rows travel as records; in an all-to-all-v exact ones straight out of the input and into the output. Every rank packs
and posts all pieces of the first leg before it waits for one of them, so packing, transfer and summing overlap, and no
rank can wait for one that waits for it. The result has the bits of the direct transport.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch

from thinwire.comm.communicator import Communicator
from thinwire.fused.backend import select_backend
from thinwire.fused.call import CollectiveCall, RowCall, flat
from thinwire.fused.channel import FLAT_ROW, RecvBuffer
from thinwire.fused.counts import Segments, dense_segments
from thinwire.fused.partition import split_parts
from thinwire.fused.staged import StagedExchange
from thinwire.fused.transport import Staged
from thinwire.octets import as_bytes
from thinwire.triton_kernels.leg_layout import ALL_GATHER, REDUCE_SCATTER
from thinwire.wire import WireFormat


class StagedCollectives(Staged):
    """Collectives through the process group."""

    def begin(
        self, comm: Communicator, call: CollectiveCall, x: torch.Tensor, out: torch.Tensor
    ) -> Callable[[], object] | None:
        """Begins a call, whose arguments were checked; what it returns ends the call. None: it is over."""
        if not out.numel():
            return None
        with torch.no_grad():
            begin = _begin_exactly if call.exactly else _begin
            return begin(comm, call, flat(x.detach()), out.detach().view(-1))


def _begin(comm: Communicator, call: CollectiveCall, x: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
    own: torch.Tensor | ScatterLeg = x
    if call.op != ALL_GATHER:
        own = ScatterLeg(comm, x, call.parts, call.row, call.wires[0], call.described)
        if call.op == REDUCE_SCATTER:
            return functools.partial(own.sum_into, out)
    # Here and not in wait(): what a call sends, it sends in the order of the calls, wherever ranks wait.
    gather = GatherLeg(comm, call.parts, call.row, call.wires[-1], call.dtype, own, call.described)
    return functools.partial(gather.recv_into, out)


def _begin_exactly(comm: Communicator, call: CollectiveCall, x: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
    """Begins a reduction that is torch.distributed's affair."""
    if call.op == REDUCE_SCATTER:
        # x may be overwritten where out is a part of it, so the shares are copied.
        shares = list(x.clone().view(comm.size, -1).unbind())
        return comm.reduce_scatter(out, shares, call.reduction, async_op=True).wait
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    return comm.all_reduce(out, call.reduction, async_op=True).wait


class _Rows:
    """Rows of `row` elements of 1-D parts of a tensor, of which the last may be short, and their records."""

    def __init__(self, device: torch.device, threads: int, row: int, wire: WireFormat, dtype: torch.dtype) -> None:
        self.row, self.wire, self.dtype = row, wire, dtype
        self.backend = select_backend(device, wire, threads)
        self.record_bytes = wire.row_bytes(row, dtype)

    def counts(self, parts: Segments) -> list[int]:
        """Rows of each part."""
        return [-(-count // self.row) for count in parts.counts]

    def _split(self, part: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Whole rows of those from `start` to before `stop`, and the elements of a short last one, if there is one."""
        piece = part[start * self.row : min(stop * self.row, part.numel())]
        whole = piece.numel() // self.row * self.row
        return piece[:whole].view(-1, self.row), piece[whole:]

    def pack(self, part: torch.Tensor, start: int, stop: int, records: torch.Tensor) -> None:
        """Writes the records of rows start ... stop - 1; a short row is padded with zeros."""
        if not records.shape[0]:
            return
        rows, rest = self._split(part, start, stop)
        self.backend.pack_rows(rows, self.wire, None, records[: rows.shape[0]])
        if rest.numel():
            padded = part.new_zeros(1, self.row)
            padded[0, : rest.numel()] = rest
            self.backend.pack_rows(padded, self.wire, None, records[rows.shape[0] : rows.shape[0] + 1])

    def fill(self, part: torch.Tensor, start: int, stop: int, make: Callable[[int, int, torch.Tensor], None]) -> None:
        """Fills rows of a part. `make(first, last, rows)` fills rows [last - first, row] with those that it has."""
        rows, rest = self._split(part, start, stop)
        last = start + rows.shape[0]
        if rows.shape[0]:
            make(start, last, rows)
        if rest.numel():
            padded = part.new_empty(1, self.row)
            make(last, last + 1, padded)
            rest.copy_(padded[0, : rest.numel()])

    def unpack(self, records: torch.Tensor, part: torch.Tensor, start: int) -> None:
        """Fills rows of a part, from `start` on, from their records."""

        def make(first: int, last: int, rows: torch.Tensor) -> None:
            self.backend.unpack_rows(records[first - start : last - start], self.wire, None, None, rows)

        if records.shape[0]:
            self.fill(part, start, start + records.shape[0], make)


def arrived(x: torch.Tensor, world: int, wire: WireFormat, threads: int = 1) -> torch.Tensor:
    """What a rank's summand (1-D, contiguous) of an all-reduce is when it is added up, rounded to its dtype.

    Up to `threads` threads share the rows of large tensors.
    """
    parts, row = split_parts(x.numel(), world)
    form, out = _Rows(x.device, threads, row, wire, x.dtype), torch.empty_like(x)
    for part, target, rows in zip(parts.cut(x), parts.cut(out), form.counts(parts), strict=True):
        records = torch.empty(rows, form.record_bytes, dtype=torch.uint8, device=x.device)
        form.pack(part, 0, rows, records)
        form.unpack(records, target, 0)
    return out


class ScatterLeg(_Rows):
    """Rows of every part of x (1-D, contiguous), on their way to its owner; x may then be overwritten.

    Args:
        call: all that the ranks must agree on, in words.
        ranks: who takes part, this one among them; the parts of others are empty. None: everyone.
    """

    def __init__(
        self,
        comm: Communicator,
        x: torch.Tensor,
        parts: Segments,
        row: int,
        wire: WireFormat,
        call: str,
        ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(comm.device, comm.cpu_share.threads, row, wire, x.dtype)
        ranks, counts = range(comm.size) if ranks is None else ranks, self.counts(parts)
        self.world = len(ranks)
        self.own_rows = counts[comm.rank]

        def pack(start: int, stop: int, records: torch.Tensor) -> None:
            shares = records.split(dense_segments(counts).within(start, stop).counts)
            for part, share in zip(parts.cut(x), shares, strict=True):
                self.pack(part, start, stop, share)

        receives = [self.own_rows if peer in ranks else 0 for peer in range(comm.size)]
        self.exchange = StagedExchange.post(comm, counts, receives, self.record_bytes, pack, f"scatter: {call}")

    def sum_rows(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Sums rows start ... stop - 1, which have arrived, in ascending rank, in float32, then rounded."""
        if not self.wire.quantized and out.dtype != self.dtype:
            # The backend's sums of exact rows are of their own dtype.
            records = self.exchange.received.view(self.world, self.own_rows, -1)[:, start:stop]
            total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
            for rows in records:
                elements = rows[:, : self.row * self.dtype.itemsize].contiguous().view(self.dtype)
                total += elements.float()
            out.copy_(total)
            return
        ranks = torch.arange(self.world, device=out.device) * self.own_rows
        index = torch.arange(start, stop, device=out.device)[:, None] + ranks
        self.backend.sum_records(self.exchange.received, index, self.wire, out)

    def sum_into(self, part: torch.Tensor) -> None:
        """Waits for all rows and sums them into this rank's part, 1-D."""
        for start, stop in self.exchange.arrivals():
            stop = min(stop, self.own_rows)
            if start < stop:
                self.fill(part, start, stop, self.sum_rows)


class GatherLeg(_Rows):
    """Rows of every rank's part, on their way to everyone.

    Args:
        own: this rank's part, 1-D; or the leg that brings its summands, which are summed as they arrive and sent on.
        call, ranks: see `ScatterLeg`; only those parts come that these ranks have.
    """

    def __init__(
        self,
        comm: Communicator,
        parts: Segments,
        row: int,
        wire: WireFormat,
        dtype: torch.dtype,
        own: torch.Tensor | ScatterLeg,
        call: str,
        ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(comm.device, comm.cpu_share.threads, row, wire, dtype)
        self.parts, counts, cut_like = parts, self.counts(parts), 0
        if ranks is not None:
            counts = [count if peer in ranks else 0 for peer, count in enumerate(counts)]
        if isinstance(own, ScatterLeg):
            pack, cut_like = self._packs_sums(own, max(counts)), own.record_bytes
        else:
            pack = functools.partial(self.pack, own)
        self.slots = dense_segments(counts)
        self.piece_record_bytes = max(self.record_bytes, cut_like)
        self.exchange = StagedExchange.post(
            comm, None, counts, self.record_bytes, pack, f"gather: {call}", cut_like, ranks=ranks
        )

    def _packs_sums(self, leg: ScatterLeg, most_rows: int) -> Callable[[int, int, torch.Tensor], None]:
        # Sums of exact rows go on as they are; quantised ones from float32, rounded once.
        dtype = torch.float32 if self.wire.quantized else self.dtype
        arrivals, arrived = leg.exchange.arrivals(), 0

        def pack(start: int, stop: int, records: torch.Tensor) -> None:
            nonlocal arrived
            while arrived < min(stop, most_rows):
                _, arrived = next(arrivals)
            if records.shape[0]:
                sums = torch.empty(records.shape[0], self.row, dtype=dtype, device=records.device)
                leg.sum_rows(start, start + records.shape[0], sums)
                self.backend.pack_rows(sums, self.wire, None, records)

        return pack

    def recv_into(self, out: torch.Tensor) -> None:
        """Waits for everything, and dequantises it into the whole tensor, 1-D."""
        for start, stop in self.exchange.arrivals():
            arrivals = self.slots.within(start, stop).cut(self.exchange.received)
            for records, part in zip(arrivals, self.parts.cut(out), strict=True):
                self.unpack(records, part, start)


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
