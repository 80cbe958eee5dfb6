"""Staged all-reduce, reduce-scatter and all-gather: records through the process group, piece by piece.

Every rank packs and posts all pieces of a leg before it waits for the first of them, so packing, transfer and summing
overlap, and no rank can wait for one that waits for it. The result has the bits of the direct transport.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from thinwire.comm.communicator import Communicator
from thinwire.fused.backend import Backend, select_backend
from thinwire.fused.counts import Segments
from thinwire.fused.partition import split_parts
from thinwire.fused.staged import PIECE_BYTES, StagedExchange
from thinwire.wire import WireFormat

__all__ = ["GatherLeg", "ScatterLeg", "arrived"]


def _rows_of(part: torch.Tensor, start: int, stop: int, row: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Whole rows of those from `start` to before `stop` of a 1-D part, and the elements of a short last one."""
    piece = part[start * row : min(stop * row, part.numel())]
    whole = piece.numel() // row
    rest = piece[whole * row :]
    return piece[: whole * row].view(whole, row), rest if rest.numel() else None


def _pack(
    backend: Backend, part: torch.Tensor, start: int, stop: int, row: int, wire: WireFormat, out: torch.Tensor
) -> None:
    """Records of rows of a part; a short row is padded with zeros."""
    rows, rest = _rows_of(part, start, stop, row)
    backend.pack_rows(rows, wire, None, out[: rows.shape[0]])
    if rest is not None:
        padded = part.new_zeros(1, row)
        padded[0, : rest.numel()] = rest
        backend.pack_rows(padded, wire, None, out[rows.shape[0] : rows.shape[0] + 1])


def _fill(part: torch.Tensor, start: int, stop: int, row: int, make: Callable[[int, int, torch.Tensor], None]) -> None:
    """Fills rows of a part. `make(first, last, rows)` fills rows [last - first, row] with those that it has."""
    rows, rest = _rows_of(part, start, stop, row)
    if not part.is_inference():
        torch.autograd.graph.increment_version(part)  # kernels write where autograd does not see it
    last = start + rows.shape[0]
    if rows.shape[0]:
        make(start, last, rows)
    if rest is not None:
        padded = part.new_empty(1, row)
        make(last, last + 1, padded)
        rest.copy_(padded[0, : rest.numel()])


def arrived(x: torch.Tensor, world: int, wire: WireFormat) -> torch.Tensor:
    """What a rank's summand of an all-reduce is by the time that it is added up, rounded to its dtype.

    Args:
        x: 1-D, contiguous.
        world: ranks of the all-reduce.
        wire: quantised.
    """
    parts, row = split_parts(x.numel(), world)
    backend, out = select_backend(x.device, wire), torch.empty_like(x)
    records = torch.empty(
        -(-max(parts.counts) // row), wire.row_bytes(row, x.dtype), dtype=torch.uint8, device=x.device
    )
    for count, displ in zip(parts.counts, parts.displs, strict=True):
        rows = -(-count // row)
        if rows:
            _pack(backend, x[displ : displ + count], 0, rows, row, wire, records)

            def unpack(first: int, last: int, target: torch.Tensor) -> None:
                backend.unpack_rows(records[first:last], wire, None, None, target)

            _fill(out[displ : displ + count], 0, rows, row, unpack)
    return out


class ScatterLeg:
    """Rows of every part, on their way to its owner.

    Args:
        comm: the group.
        x: the whole tensor, 1-D, contiguous. It may be overwritten once this returns.
        parts: in elements.
        row: elements of a row.
        wire: the records' format.
    """

    def __init__(self, comm: Communicator, x: torch.Tensor, parts: Segments, row: int, wire: WireFormat) -> None:
        self.wire, self.row, self.world, self.dtype = wire, row, comm.size, x.dtype
        self.backend = select_backend(comm.device, wire)
        rows = [-(-count // row) for count in parts.counts]
        self.own_rows = rows[comm.rank]
        pieces = [x[displ : displ + count] for count, displ in zip(parts.counts, parts.displs, strict=True)]

        def pack(start: int, stop: int, records: torch.Tensor) -> None:
            first = 0
            for part, count in zip(pieces, rows, strict=True):
                share = min(stop, count) - min(start, count)
                if share:
                    _pack(self.backend, part, start, stop, row, wire, records[first : first + share])
                first += share

        receives = [self.own_rows] * comm.size
        record_bytes = wire.row_bytes(row, x.dtype)
        self.exchange = StagedExchange.post(comm, rows, receives, record_bytes, pack, f"scatter {x.dtype} {wire}")

    def sum_rows(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Sums rows start ... stop - 1, which have arrived, in ascending rank, in float32.

        Args:
            out: [stop - start, row], of the tensor's dtype, which it is rounded to, or float32.
        """
        if not self.wire.quantized and out.dtype != self.dtype:
            # The backend's sums of exact rows are of their own dtype.
            records = self.exchange.received.view(self.world, self.own_rows, -1)[:, start:stop]
            out.zero_()
            for rows in records:
                elements = rows[:, : self.row * self.dtype.itemsize].contiguous().view(self.dtype)
                out += elements.float()
            return
        ranks = torch.arange(self.world, device=out.device) * self.own_rows
        index = torch.arange(start, stop, device=out.device)[:, None] + ranks
        self.backend.sum_records(self.exchange.received, index, self.wire, out)

    def sum_into(self, part: torch.Tensor) -> None:
        """Waits for all rows and sums them into this rank's part, 1-D.

        Raises:
            PeerTimeout: a peer did not answer in time.
        """
        for start, stop in self.exchange.arrivals():
            stop = min(stop, self.own_rows)
            if start < stop:
                _fill(part, start, stop, self.row, self.sum_rows)


class GatherLeg:
    """Rows of every rank's part, on their way to everyone.

    Args:
        comm: the group.
        parts: in elements.
        row: elements of a row.
        wire: the records' format.
        dtype: of the tensor.
    """

    def __init__(self, comm: Communicator, parts: Segments, row: int, wire: WireFormat, dtype: torch.dtype) -> None:
        self.comm, self.parts, self.row, self.wire, self.dtype = comm, parts, row, wire, dtype
        self.backend = select_backend(comm.device, wire)
        self.rows = [-(-count // row) for count in parts.counts]
        self.record_bytes = wire.row_bytes(row, dtype)
        self._pieces: list[tuple[int, int, Callable[[], None], list[torch.Tensor], torch.Tensor]] = []

    def post(self, start: int, stop: int, fill: Callable[[torch.Tensor], None]) -> None:
        """Sends rows start ... stop - 1 of the own part to everyone. All ranks post the same ranges in the same order.

        Args:
            fill: writes the records of those that the own part has, uint8 [rows, record_bytes].
        """
        comm = self.comm
        shares = [min(stop, count) - min(start, count) for count in self.rows]

        def records(count: int) -> torch.Tensor:
            return torch.empty(count, self.record_bytes, dtype=torch.uint8, device=comm.device)

        own = records(shares[comm.rank])
        if shares[comm.rank]:
            fill(own)
        received = [own if peer == comm.rank else records(share) for peer, share in enumerate(shares)]
        peers = [peer != comm.rank for peer in range(comm.size)]
        work = comm.post(
            [own.view(-1) if peer and own.numel() else None for peer in peers],
            [rows.view(-1) if peer and rows.numel() else None for rows, peer in zip(received, peers, strict=True)],
            f"gather {self.dtype} {self.wire}",
        )
        self._pieces.append((start, stop, work.wait, received, own))

    def post_part(self, part: torch.Tensor) -> None:
        """Sends the whole own part, 1-D, to everyone."""
        step = max(1, PIECE_BYTES // self.record_bytes)
        for start in range(0, max(self.rows), step):
            stop = start + step

            def fill(records: torch.Tensor, start: int = start, stop: int = stop) -> None:
                _pack(self.backend, part, start, stop, self.row, self.wire, records)

            self.post(start, stop, fill)

    def post_sums(self, leg: ScatterLeg) -> None:
        """Sums what arrives of the own part and sends it on to everyone.

        Raises:
            PeerTimeout: a peer did not answer in time.
        """
        # Sums of exact rows go on as they are; quantised ones from float32, rounded once.
        dtype = torch.float32 if self.wire.quantized else self.dtype
        step = max(1, PIECE_BYTES // max(self.record_bytes, leg.wire.row_bytes(self.row, self.dtype)))
        arrivals, arrived = leg.exchange.arrivals(), 0
        for start in range(0, max(self.rows), step):
            while arrived < min(start + step, max(self.rows)):
                _, arrived = next(arrivals)

            def fill(records: torch.Tensor, start: int = start) -> None:
                sums = torch.empty(records.shape[0], self.row, dtype=dtype, device=records.device)
                leg.sum_rows(start, start + records.shape[0], sums)
                self.backend.pack_rows(sums, self.wire, None, records)

            self.post(start, start + step, fill)

    def recv_into(self, out: torch.Tensor) -> None:
        """Waits for everything, and dequantises it into the whole tensor, 1-D.

        Raises:
            PeerTimeout: a peer did not answer in time.
        """
        for start, stop, wait, received, _ in self._pieces:
            wait()
            for records, count, displ in zip(received, self.parts.counts, self.parts.displs, strict=True):
                if not records.shape[0]:
                    continue

                unpack = functools.partial(self._unpack, records, start)
                _fill(out[displ : displ + count], start, stop, self.row, unpack)
        self._pieces.clear()

    def _unpack(self, records: torch.Tensor, start: int, first: int, last: int, rows: torch.Tensor) -> None:
        """Rows first ... last - 1 of a part from its records, which begin with row `start`."""
        self.backend.unpack_rows(records[first - start : last - start], self.wire, None, None, rows)
