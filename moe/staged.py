"""Rounds over the staged transport: records are packed, travel through the process group, and are unpacked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from thinwire.errors import RoutingError
from thinwire.fused.codec import FLOAT_DTYPES
from thinwire.fused.staged import StagedExchange, dense_segments
from thinwire.moe.plan import ArrivalPlan, SendPlan, merge_repeated_experts
from thinwire.moe.rounds import Round, Rounds, Traffic

if TYPE_CHECKING:
    from thinwire.moe.parallel import ExpertParallel

__all__ = ["StagedRounds"]


class StagedRounds(Rounds):
    """Counts are exchanged first; both sides derive the order of records from ids alone."""

    name = "staged"

    def __init__(self, ep: ExpertParallel, reason: str) -> None:
        self.ep = ep
        self.reason = reason

    def dispatch(self, lane: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> Round:
        """Sends each token's record, its expert ids and router weights behind it, to the ranks that own its experts."""
        ep = self.ep
        ids, weights = merge_repeated_experts(topk_ids, topk_weights)
        sends = SendPlan.of(ids, ep.num_experts, ep.comm.size)
        recv_counts = self._exchange_counts(sends.counts, x.dtype)
        row_bytes, record_bytes = ep.wire.row_bytes(ep.hidden_size, x.dtype), self.message_bytes(x.dtype)
        id_words = slice(row_bytes // 4, row_bytes // 4 + ep.top_k)
        weight_words = slice(id_words.stop, id_words.stop + ep.top_k)
        slots = dense_segments(sends.counts)

        def pack(start: int, stop: int, records: torch.Tensor) -> None:
            tokens = sends.tokens[slots.row_index(start, stop, x.device)]
            ep.dispatch_backend.pack_rows(x, ep.wire, tokens, records[:, :row_bytes])
            tail = records.view(torch.int32)
            tail[:, id_words] = ids[tokens]
            tail[:, weight_words] = weights[tokens].view(torch.int32)
            tail[:, weight_words.stop :] = 0

        label = f"dispatch {ep.wire!r} {x.dtype}"
        arrived = StagedExchange.post(ep.comm, sends.counts, recv_counts, record_bytes, pack, label).wait()
        words = arrived.view(torch.int32)
        arrival = ArrivalPlan.of(
            words[:, id_words], words[:, weight_words].view(torch.float32), ep.local_experts, ep.align
        )
        return _StagedRound(self, x.dtype, sends, recv_counts, arrived[:, :row_bytes], arrival)

    def message_bytes(self, dtype: torch.dtype) -> int:
        """A dispatched record with the token's expert ids and weights behind it; kernels need a multiple of 16."""
        return -(-(self.ep.wire.row_bytes(self.ep.hidden_size, dtype) + 8 * self.ep.top_k) // 16) * 16

    def _exchange_counts(self, counts: list[int], dtype: torch.dtype) -> list[int]:
        """The peers' counts; with them everyone learns everyone's dtype, which must be the same."""
        kinds, comm = len(FLOAT_DTYPES), self.ep.comm
        received = comm.exchange_counts([count * kinds + FLOAT_DTYPES.index(dtype) for count in counts])
        for peer, value in enumerate(received):
            if FLOAT_DTYPES[value % kinds] != dtype:
                raise RoutingError(
                    f"rank {comm.rank} dispatches {dtype} tokens, rank {peer} {FLOAT_DTYPES[value % kinds]}; all ranks "
                    "of a round need the same dtype"
                )
        return [value // kinds for value in received]

    @property
    def memory_bytes(self) -> int:
        """None: what a call needs is allocated for that call."""
        return 0

    def check(self) -> None:
        """Nothing to look for: its calls raise what goes wrong."""

    def close(self) -> None:
        """Nothing to give back."""

    def describe(self) -> str:
        """For `explain`."""
        return f"transport: staged ({self.reason}); a round waits for peers as long as the communicator does"


class _StagedRound(Round):
    def __init__(
        self,
        rounds: StagedRounds,
        dtype: torch.dtype,
        sends: SendPlan,
        recv_counts: list[int],
        rows: torch.Tensor,
        arrival: ArrivalPlan,
    ) -> None:
        self._rounds = rounds
        self._sends = sends
        self._recv_counts = recv_counts
        self._arrival = arrival
        self.dtype = dtype
        self.num_tokens = sends.record_index.shape[0]
        self.rows = rows
        self.index = torch.full((arrival.num_rows,), -1, dtype=torch.int64, device=rows.device)
        self.index[arrival.rows] = arrival.index
        self.expert_counts = arrival.expert_counts
        self.expert_offsets = arrival.expert_offsets

    def num_rows(self) -> int:
        return self._arrival.num_rows

    def gather(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        ep, arrival = self._rounds.ep, self._arrival
        tokens = torch.zeros(capacity, ep.hidden_size, dtype=self.dtype, device=self.rows.device)
        fits = arrival.rows < capacity
        ep.dispatch_backend.unpack_rows(self.rows, ep.wire, arrival.index[fits], arrival.rows[fits], tokens)
        return tokens, torch.tensor(arrival.num_rows > capacity, device=self.rows.device)

    def combine(self, expert_out: torch.Tensor, out: torch.Tensor) -> None:
        ep, dtype = self._rounds.ep, self.dtype
        positions = torch.where(self._arrival.positions < expert_out.shape[0], self._arrival.positions, -1)
        slots = dense_segments(self._recv_counts)

        def pack(start: int, stop: int, records: torch.Tensor) -> None:
            chosen = slots.row_index(start, stop, positions.device)
            ep.combine_backend.pack_weighted_sums(
                expert_out, positions[chosen], self._arrival.weights[chosen], ep.combine_wire, dtype, records
            )

        row_bytes = ep.combine_wire.row_bytes(ep.hidden_size, dtype)
        label = f"combine {ep.combine_wire!r} {dtype}"
        home = StagedExchange.post(ep.comm, self._recv_counts, self._sends.counts, row_bytes, pack, label).wait()
        ep.combine_backend.sum_records(home, self._sends.record_index, ep.combine_wire, out)

    def abandon(self) -> None:
        ep, device = self._rounds.ep, self.rows.device
        nothing = torch.empty(0, ep.hidden_size, dtype=self.dtype, device=device)
        self.combine(nothing, torch.empty(self.num_tokens, ep.hidden_size, dtype=self.dtype, device=device))

    def dispatch_traffic(self) -> Traffic:
        ep = self._rounds.ep
        rows = sum(self._sends.counts) - self._sends.counts[ep.comm.rank]
        return Traffic(rows, rows * self._logical_bytes, rows * self._rounds.message_bytes(self.dtype))

    def combine_traffic(self) -> Traffic:
        ep = self._rounds.ep
        rows = sum(self._recv_counts) - self._recv_counts[ep.comm.rank]
        return Traffic(rows, rows * self._logical_bytes, rows * ep.combine_wire.row_bytes(ep.hidden_size, self.dtype))

    @property
    def _logical_bytes(self) -> int:
        return self._rounds.ep.hidden_size * self.dtype.itemsize
