"""The way back of rounds over two levels on CPUs: part by part, so that first sums travel while later ones are made.

Each forwarder adds up its host's sums, as the host's ranks store them. At home those of the hosts are added up in
ascending rank of the forwarders, this host's among them, quantised like the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from thinwire.comm.hosts import forwarder
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.fused.staged import StagedExchange
from thinwire.moe.config import ParallelConfig
from thinwire.moe.plan import SendPlan, owners
from thinwire.moe.round_transport import left_open
from thinwire.moe.staged import StagedRounds
from thinwire.moe.two_level_lanes import EXACT, TwoLevelLanes
from thinwire.triton_kernels.cpu import combine
from thinwire.triton_kernels.round_layout import (
    ABANDONED,
    COMBINE,
    DISPATCH,
    LEFT_OPEN,
    SIGNAL_END,
    WITH_SUMS,
    Lane,
    RoundLayout,
)

_WORDS = replace(EXACT, alignment=16)  # records as words, of as many bytes as they have, whatever their alignment is
_PART_BYTES = 1 << 20  # of a rank's records that go home: as much as the first piece that the network gets


class Ends(NamedTuple):
    """One lane, for rounds of one dtype; `records` in the name of each rank that is served here."""

    records: dict[int, Lane]  # takes records as float32 words, and stores them as they are
    sums: Lane  # this rank's own, on which sums are float32


class Passage(NamedTuple):
    """How the tokens of the round on a lane came here and went, which their sums take back."""

    dtype: torch.dtype
    home: SendPlan  # of the sums that come back, from this rank for its own host
    counts: list[int]  # records that came from each rank of other hosts
    tokens: dict[int, torch.Tensor]  # of each rank that is served: int64 [records], their numbers there
    ids: dict[int, torch.Tensor]  # int32 [records, top_k], their experts on this host, -1 for others


class TwoLevelSums(TwoLevelLanes):
    """Lanes on which sums come home.

    Attributes:
        passages: of the round on each lane.
    """

    forwarded_phases = (DISPATCH, COMBINE)

    def __init__(self, config: ParallelConfig, layout: RoundLayout, memory: SymmetricMemory, reason: str) -> None:
        self._outer = StagedRounds(config, reason)
        self._outer.tagged_by = self.tagged_by
        super().__init__(config, layout, memory, reason)
        hosts, size = config.comm.hosts, config.comm.size
        self._controls = [{rank: lane.control.clone() for rank in self.served[1:]} for lane in self.lanes]
        # Of each rank, and of none: whom this one's tokens for it are sent to, and whether it is on this host.
        by_host = [next(number for number, members in enumerate(hosts) if peer in members) for peer in range(size)]
        self._targets = torch.tensor(
            [forwarder(hosts, self.rank, number) for number in by_host] + [size], device=self.device
        )
        self._here = torch.tensor([number == self.host for number in by_host] + [False], device=self.device)
        self._host = self._here.nonzero()[:, 0]
        self._elsewhere = (~self._here[:-1]).nonzero()[:, 0]
        self.passages: dict[int, Passage] = {}
        self._ends: dict[tuple[int, torch.dtype], Ends] = {}

    def begin_combine(
        self,
        lane: int,
        expert_out: torch.Tensor,
        dtype: torch.dtype,
        out: torch.Tensor,
        weight_grads: tuple[torch.Tensor, torch.Tensor] | None = None,
        tensors: Lane | None = None,
        as_they_are: bool = False,
    ) -> Callable[[], None]:
        """Stores this rank's sums within the host; the wait adds up the host's, sends them home, and adds those up."""
        self.raise_failure(lane)
        of_experts, of_tokens = weight_grads or (None, None)
        end = self._ends_of(lane, dtype).sums
        if tensors is not None:
            end = replace(end, positions=tensors.positions, weights=tensors.weights)
        expert_out = self.as_floats(expert_out)
        come_home = self._send_home(lane, end, expert_out, of_experts)
        hear_ends = self._outer.tell_end(lane, WITH_SUMS)  # once nothing can fail any more
        return lambda: self._sum_at_home(lane, come_home, hear_ends, out, of_tokens)

    def close_round(self, lane: int, end: int) -> None:
        """Peers' sums still go their way; those that come home here are thrown away."""
        self.raise_failure(lane)
        come_home = self._send_home(lane, self._ends_of(lane, self.passages[lane].dtype).sums, None, None)
        hear_ends = self._outer.tell_end(lane, end)
        self._sum_at_home(lane, come_home, hear_ends, None, None)

    def _send_home(
        self, lane: int, end: Lane, expert_out: torch.Tensor | None, of_experts: torch.Tensor | None
    ) -> Callable[[], torch.Tensor]:
        """Sums for other hosts, part by part, each of which goes on its way when all of this host have stored it.

        Then those for this host. What is returned waits for what comes home, records uint8 [records, bytes].
        """
        config, comm, phase = self.config, self.config.comm, self.config.comm.recorder.phase
        passage, layout, wire = self.passages[lane], end.layout, config.combine_wire
        counts, home, dtype = passage.counts, passage.home, passage.dtype
        row_bytes = wire.row_bytes(config.hidden_size, dtype)
        record_bytes = -(-(row_bytes + 4 * config.top_k * (layout.WEIGHT_GRADS > 0)) // 16) * 16
        at_a_time = max(_PART_BYTES // record_bytes, -(-config.max_tokens // (combine.MOST_PARTS - 1)), 1)
        homes: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
        stored, held = 0, self.memory.held()  # as in `begin`

        def store(stop: int) -> None:
            """Parts of other hosts' tokens, up to these."""
            nonlocal stored
            while stored * at_a_time < stop:
                tokens = range(stored * at_a_time, (stored + 1) * at_a_time)
                stored += 1
                combine.send_part(end, expert_out, self._elsewhere, tokens, stored, of_experts)

        def sum_up(rank: int, start: int, stop: int, records: torch.Tensor) -> None:
            if rank not in homes:
                homes[rank] = self._home_of(lane, rank, passage)
            rows, terms, grads = homes[rank]
            terms, tail = terms[start:stop], records.view(torch.float32)[:, row_bytes // 4 :]
            ones = torch.ones(terms.shape, dtype=torch.float32, device=self.device)
            config.combine_backend.pack_weighted_sums(rows, terms, ones, wire, dtype, records[:, :row_bytes])
            if grads is not None:
                tail[:, : config.top_k], tail[:, config.top_k :] = grads[start:stop], 0.0

        def pack(start: int, stop: int, records: torch.Tensor) -> None:
            parts = [(rank, start, min(stop, count)) for rank, count in enumerate(counts) if count > start]
            if not parts:  # only what comes back has as many pieces
                return
            phase("sum and store")
            store(max(1 + int(passage.tokens[rank][last - 1]) for rank, _, last in parts))
            phase("wait for peers")
            deadline = time.monotonic() + self.wait_seconds(lane)
            came = combine.wait_for_parts(end, self._host, stored, self.wait_seconds(lane))
            self.require_not_closed()
            if not came:  # in time, or before another rank said that it is stuck: the others have what is left of it
                self._wait(lane, COMBINE, max(deadline - time.monotonic(), 0.0))  # says who is missed
            phase("sum for other hosts")
            for rank, first, last in parts:
                sum_up(rank, first, last, records[: last - first])
                records = records[last - first :]

        label = f"combine {wire!r} {dtype}"
        exchange = StagedExchange.post(comm, counts, home.counts, record_bytes, pack, label)
        phase("sum and store")
        store(config.max_tokens)
        combine.send_part(end, expert_out, self._host, range(config.max_tokens), combine.MOST_PARTS, of_experts)
        self.kernels.close_round(end, ABANDONED if expert_out is None else WITH_SUMS)
        for rank in self.served[1:]:  # ranks of other hosts have no experts here, so nothing is stored in their name
            self.kernels.close_round(self._ends_of(lane, dtype).records[rank], WITH_SUMS)
        self._open[lane] = False
        del held

        def come_home() -> torch.Tensor:
            self.require_not_closed()
            held = self.memory.held()
            phase("wait for peers")
            self._wait(lane, COMBINE)
            phase("sum for this host")
            own = home.counts[comm.rank]
            sum_up(comm.rank, 0, own, exchange.received[sum(home.counts[: comm.rank]) :][:own])
            del held
            return exchange.wait()

        return come_home

    def _sum_at_home(
        self,
        lane: int,
        come_home: Callable[[], torch.Tensor],
        hear_ends: Callable[[], list[int]],
        out: torch.Tensor | None,
        of_tokens: torch.Tensor | None,
    ) -> None:
        config, passage, received = self.config, self.passages[lane], come_home()
        missing = [peer for peer, end in enumerate(hear_ends()) if end == LEFT_OPEN]
        if out is None:
            return
        if missing:
            raise left_open(lane, missing)
        config.comm.recorder.phase("sum at home")
        row_bytes = config.combine_wire.row_bytes(config.hidden_size, passage.dtype)
        config.combine_backend.sum_records(received[:, :row_bytes], passage.home.record_index, config.combine_wire, out)
        if of_tokens is not None:  # all but one host's are zero
            tails = received[:, row_bytes : row_bytes + 4 * config.top_k].contiguous().view(torch.float32)
            of_tokens.copy_(torch.nn.functional.pad(tails, (0, 0, 0, 1))[passage.home.record_index].sum(1))

    def _home_of(
        self, lane: int, rank: int, passage: Passage
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What came home for a rank that is served here.

        Gives the sums of this host's ranks, float32 [max_tokens * SLOTS, hidden]; which of them are those of each
        record, int64 [records, SLOTS], in ascending rank, -1 for none; and if they travel the gradients of its weights.
        """
        config, layout, tokens = self.config, self.lanes[lane].layout, passage.tokens[rank]
        first = layout.SUMS + self.served.index(rank) * self.home_bytes
        buffer, size = self.lanes[lane].buffer, config.max_tokens * layout.SLOTS * layout.SUM_BYTES
        rows = buffer[first : first + size].view(torch.float32).view(-1, layout.SUM_BYTES // 4)[:, : config.hidden_size]
        told = self._lines(lane, layout.COMBINE_SIGNALS)[:, SIGNAL_END] == WITH_SUMS
        told = torch.nn.functional.pad(told, (0, 1))
        owner = owners(passage.ids[rank], config.num_experts, config.comm.size)
        wanted = torch.zeros(len(tokens), config.comm.size + 1, dtype=torch.bool, device=self.device)
        wanted.scatter_(1, owner, True)
        wanted[:, -1] = False
        places = torch.where(wanted, wanted.cumsum(1) - 1, layout.SLOTS)
        numbers = torch.where(wanted & told, tokens.unsqueeze(1) * layout.SLOTS + places, -1)
        terms = torch.full((len(tokens), layout.SLOTS + 1), -1, dtype=torch.int64, device=self.device)
        terms = terms.scatter_(1, places, numbers)[:, :-1]
        if not layout.WEIGHT_GRADS:
            return rows, terms, None
        first += layout.WEIGHT_GRADS - layout.SUMS
        grads = buffer[first : first + 4 * config.max_tokens * config.top_k].view(torch.float32).view(-1, config.top_k)
        return rows, terms, torch.where(told[owner], grads[tokens], 0.0)

    # -----------------------------------------------------------------------------------------------------------------

    def _ends_of(self, lane: int, dtype: torch.dtype) -> Ends:
        ends = self._ends.get((lane, dtype))
        if ends is None:
            own = self.lanes[lane]
            row_bytes = self.config.wire.row_bytes(self.config.hidden_size, dtype)
            words = replace(own.layout, HIDDEN=row_bytes // 4, SUM_BYTES=row_bytes)  # of which these look at no sum
            sending = replace(own, wire=_WORDS, combine_wire=_WORDS, layout=words, tokens_dtype=dtype)
            layout = replace(own.layout, RECORD_BYTES=own.layout.SUM_BYTES)  # of which these look at no record
            summing = replace(own, wire=EXACT, combine_wire=EXACT, layout=layout, tokens_dtype=dtype)
            records = {rank: replace(sending, rank=rank, control=end) for rank, end in self._controls[lane].items()}
            ends = self._ends[lane, dtype] = Ends({self.rank: sending, **records}, summing)
        return ends

    def close(self) -> None:
        """See `DirectLanes.close`."""
        super().close()
        self._ends.clear()
