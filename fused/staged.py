"""The staged transport: records are packed into a buffer, travel point to point, and land in slot order.

A pair's records travel in pieces of about `piece_bytes`, cut alike by both sides; a piece is packed while the one
before travels. Every rank posts its pieces in ascending order and waits only after it has posted all of them, so no
rank can wait for one that waits for it.

A rank's own records take the same way but for the network: what a row looks like on arrival does not depend on which
rank it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from thinwire.comm.communicator import Communicator
from thinwire.comm.exchange import Posted, Sizes
from thinwire.comm.flight_recorder import FlightRecorder
from thinwire.comm.integrity import Rows
from thinwire.fused.counts import dense_segments

#: Bytes of one piece of one pair's records. Over NCCL each piece costs launches on every rank, which take as long as
#: NVLink needs for a few MiB.
PIECE_BYTES, NCCL_PIECE_BYTES = 1 << 20, 8 << 20


def piece_bytes(backend: str) -> int:
    """Bytes of one piece of one pair's records over the backend of a process group, the same on all its ranks.

    >>> piece_bytes("gloo"), piece_bytes("nccl")
    (1048576, 8388608)
    """
    return NCCL_PIECE_BYTES if backend == "nccl" else PIECE_BYTES


@dataclass
class StagedExchange:
    """Records under way.

    Attributes:
        received: uint8 [sum of receive counts, record_bytes], by source rank and then in the source's order; a record
            is there once `arrivals` has passed it.
    """

    received: torch.Tensor
    _pieces: list[tuple[Posted, int, int]]
    _recorder: FlightRecorder

    @classmethod
    def post(
        cls,
        comm: Communicator,
        send_counts: list[int] | None,
        recv_counts: list[int],
        record_bytes: int,
        pack: Callable[[int, int, torch.Tensor], None],
        label: str,
        piece_rows: int | None = None,
        sizes: Sizes | None = None,
    ) -> StagedExchange:
        """Packs and posts everything; waits for nothing but what `pack` waits for.

        Args:
            send_counts: records for each rank; None: this rank's own in `recv_counts` go to everyone, packed once.
            record_bytes: of one record, a multiple of 16.
            pack: `pack(start, stop, records)` fills records, uint8 [n, record_bytes], with records start ... stop - 1
                of every rank's share (fewer where a share ends before), in order of ranks.
            label, sizes: what the records are, and how much they hold; see `Communicator.post`. Records are padded, so
                those of different sizes may have as many bytes.
            piece_rows: of a piece of a pair's records; None: about `piece_bytes`.
        """
        recorder, slots = comm._recorder, dense_segments(recv_counts)
        octet = torch.empty(1, dtype=torch.uint8, device=comm.device)
        received = comm._result_memory.new_empty(octet, (sum(recv_counts), record_bytes))
        packed = comm._result_memory.new_empty(octet, (sum(send_counts or [0]), record_bytes))
        piece_rows = piece_rows or max(1, piece_bytes(comm._exchange.backend) // record_bytes)
        pieces = []
        for start in range(0, max(*recv_counts, *(send_counts or [0])), piece_rows):
            stop = start + piece_rows
            incoming = slots.within(start, stop).cut(received)
            recorder.phase("pack")
            if send_counts is None:
                outgoing = [incoming[comm.rank]] * comm.size
                pack(start, stop, incoming[comm.rank])
            else:
                shares = dense_segments(send_counts).within(start, stop).counts
                sent, packed = packed.split([sum(shares), len(packed) - sum(shares)])
                pack(start, stop, sent)
                outgoing = list(sent.split(shares))
                incoming[comm.rank].copy_(outgoing[comm.rank])
            recorder.phase("post")
            rows = Rows(record_bytes, start)
            work = comm.post(_for_peers(outgoing, comm.rank), _for_peers(incoming, comm.rank), label, sizes, rows)
            pieces.append((work, start, stop))
        return cls(received, pieces, recorder)

    def arrivals(self) -> Iterator[tuple[int, int]]:
        """Waits for each piece in turn and yields the (start, stop) that `pack` had."""
        for work, start, stop in self._pieces:
            self._recorder.phase("wait for peers")
            work.wait()
            self._recorder.phase("unpack")
            yield start, stop
        self._pieces.clear()

    def wait(self) -> torch.Tensor:
        """Waits for everything and returns `received`."""
        for _ in self.arrivals():
            pass
        return self.received


def _for_peers(views: list[torch.Tensor], rank: int) -> list[torch.Tensor | None]:
    return [None if peer == rank or not view.numel() else view.view(-1) for peer, view in enumerate(views)]
