"""The staged transport: records are packed into a buffer, travel point to point, and land in slot order.

A pair's records travel in pieces that both sides cut alike (`cut_pieces`); a piece is packed while the one before
travels. Every rank posts its pieces in ascending order and waits only after it has posted all of them, so no rank can
wait for one that waits for it.

A rank's own records take the same way but for the network: what a row looks like on arrival does not depend on which
rank it came from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from thinwire.comm.communicator import Communicator
from thinwire.comm.exchange import Posted, Sizes
from thinwire.fused.counts import dense_segments

#: Bytes of the first piece of a pair's records, and of the longest. Over Gloo each costs posts, waits and wake-ups,
#: which compete with Gloo's own thread for cores; but nothing travels before the first one is packed, and the sums of
#: an all-reduce go on by pieces. Over NCCL each costs launches on every rank, which take as long as NVLink needs for a
#: few MiB.
PIECE_BYTES, NCCL_PIECE_BYTES = (1 << 20, 2 << 20), (8 << 20, 8 << 20)
#: Pieces after which a rank gives way, once each. Gloo's thread must answer the peer before anything travels, and where
#: it has no core of its own, a scheduler may let the thread that packs go on for milliseconds, with the link idle. Then
#: there is enough under way. With a free core it costs a system call.
_GIVES_WAY = 3


def cut_pieces(rows: int, record_bytes: int, backend: str) -> Iterator[tuple[int, int]]:
    """Where pieces of so many records of a pair start and stop; the last may stop after them.

    That depends on where a piece starts, and not on how many records there are: pairs differ in that.

    Args:
        record_bytes: of one record.
        backend: of the process group, the same on all its ranks.

    >>> list(cut_pieces(5000, 1 << 10, "gloo"))
    [(0, 1024), (1024, 2048), (2048, 4096), (4096, 6144)]
    >>> list(cut_pieces(5000, 1 << 10, "nccl"))
    [(0, 8192)]
    """
    first, longest = NCCL_PIECE_BYTES if backend == "nccl" else PIECE_BYTES
    start = 0
    while start < rows:
        num_bytes = min(max(first, start * record_bytes), longest)
        stop = start + max(1, num_bytes // record_bytes)
        yield start, stop
        start = stop


@dataclass
class StagedExchange:
    """Records under way.

    Attributes:
        received: uint8 [sum of receive counts, record_bytes], by source rank and then in the source's order; a record
            is there once `arrivals` has passed it.
    """

    received: torch.Tensor
    _pieces: list[tuple[Posted, int, int]]
    _phase: Callable[[str], None]

    @classmethod
    def post(
        cls,
        comm: Communicator,
        send_counts: list[int] | None,
        recv_counts: list[int],
        record_bytes: int,
        pack: Callable[[int, int, torch.Tensor], None],
        label: str,
        cut_like: int = 0,
        sizes: Sizes | None = None,
        ranks: Sequence[int] | None = None,
    ) -> StagedExchange:
        """Packs and posts everything; waits for nothing but what `pack` waits for.

        Args:
            send_counts: records for each rank; 0 for this rank itself leaves its own place in `received` to the caller;
                None: this rank's own in `recv_counts` go to everyone, packed once.
            record_bytes: of one record, a multiple of 16.
            pack: `pack(start, stop, records)` fills records, uint8 [n, record_bytes], with records start ... stop - 1
                of every rank's share (fewer where a share ends before), in order of ranks.
            label, sizes: what the records are, and how much they hold; see `Communicator.post`. Records are padded, so
                those of different sizes may have as many bytes.
            cut_like: bytes of larger records, whose pieces these shall be.
            ranks: who gets what is packed once; None: everyone.
        """
        phase, slots = comm.recorder.phase, dense_segments(recv_counts)
        octet = torch.empty(1, dtype=torch.uint8, device=comm.device)
        received = comm.result_memory.new_empty(octet, (sum(recv_counts), record_bytes))
        packed = comm.result_memory.new_empty(octet, (sum(send_counts or [0]), record_bytes))
        pieces: list[tuple[Posted, int, int]] = []
        most_rows = max(*recv_counts, *(send_counts or [0]))
        for start, stop in cut_pieces(most_rows, max(record_bytes, cut_like), comm.backend):
            if 0 < len(pieces) <= _GIVES_WAY and comm.backend == "gloo":
                os.sched_yield()
            incoming = slots.within(start, stop).cut(received)
            phase("pack")
            if send_counts is None:
                own = incoming[comm.rank]
                outgoing = [own if ranks is None or peer in ranks else own[:0] for peer in range(comm.size)]
                pack(start, stop, own)
            else:
                shares = dense_segments(send_counts).within(start, stop).counts
                sent, packed = packed.split([sum(shares), len(packed) - sum(shares)])
                pack(start, stop, sent)
                outgoing = list(sent.split(shares))
                if shares[comm.rank]:  # else whoever posts fills in his own
                    incoming[comm.rank].copy_(outgoing[comm.rank])
            phase("post")
            work = comm.post(_for_peers(outgoing, comm.rank), _for_peers(incoming, comm.rank), label, sizes)
            pieces.append((work, start, stop))
        return cls(received, pieces, phase)

    def arrivals(self) -> Iterator[tuple[int, int]]:
        """Waits for each piece in turn and yields the (start, stop) that `pack` had."""
        for work, start, stop in self._pieces:
            self._phase("wait for peers")
            work.wait()
            self._phase("unpack")
            yield start, stop
        self._pieces.clear()

    def wait(self) -> torch.Tensor:
        """Waits for everything and returns `received`."""
        for _ in self.arrivals():
            pass
        return self.received


def _for_peers(views: list[torch.Tensor], rank: int) -> list[torch.Tensor | None]:
    return [None if peer == rank or not view.numel() else view.view(-1) for peer, view in enumerate(views)]
