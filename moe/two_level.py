"""Rounds over two levels on CPUs: a round between hosts, of messages, around one of each host's ranks, which pull.

Each rank has a *forwarder* on every other host (`thinwire.comm.hosts.forwarder`). A token crosses once to each other
host that owns one of its experts: to that rank, which puts it into its memory beside its own tokens. So all that
experts see is as on one host. On the way back a host's ranks leave float32 sums in their memory. The forwarder adds
them up in ascending rank, and one record a token crosses. At home those of the hosts are added up in ascending rank of
the forwarders, this host's among them, quantised like the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from thinwire.comm.hosts import describe, forwarder
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.errors import LaneError
from thinwire.fused.staged import StagedExchange, dense_segments
from thinwire.moe.config import ParallelConfig
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.gradients import MOST_LAYERS, MOST_WANTS
from thinwire.moe.plan import SendPlan, merge_repeated_experts, owners
from thinwire.moe.pulled import CLOSED, PulledBackward, PulledRound, PulledRounds, Terms
from thinwire.moe.round_transport import left_open
from thinwire.moe.staged import StagedRounds
from thinwire.moe.two_level_lanes import EXACT, TwoLevelTraffic, served_by
from thinwire.triton_kernels.cpu.lane import PulledLayout
from thinwire.triton_kernels.round_layout import COMBINE, DTYPE_BITS, DTYPE_CODES, LEFT_OPEN, WITH_SUMS
from thinwire.wire import Traffic


def layout_of(config: ParallelConfig, backward: bool) -> PulledLayout:
    """Of each lane: parts for all that a rank serves, and float32 sums."""
    hosts, size = config.comm.hosts, config.comm.size
    served = max(len(served_by(hosts, rank)) for rank in range(size))
    exact = {"combine_wire": EXACT, "sum_dtype": torch.float32}
    return config.pulled_layout(size, weight_grads=backward, served=served, **exact)


class Passage(NamedTuple):
    """How the tokens of the round on a lane came here and went, which their sums take back."""

    dtype: torch.dtype
    home: SendPlan  # of the sums that come back, from this rank for its own host
    counts: list[int]  # records that came from each rank of other hosts
    tokens: dict[int, torch.Tensor]  # of each rank that is served: int64 [records], their numbers there


class TwoLevelRounds(PulledRounds):
    """The legs of these rounds.

    Attributes:
        served: the ranks whose rows this one takes to its host, itself first.
        takers: of each rank of the group, which rank of this host takes its rows here.
        passages: of the round on each lane.
    """

    name = "two_level"

    def __init__(
        self, config: ParallelConfig, layout: PulledLayout, memory: SymmetricMemory, reason: str, crowded: bool
    ) -> None:
        hosts, size, rank = config.comm.hosts, config.comm.size, config.comm.rank
        self._outer = StagedRounds(config, reason)
        self._outer.tagged_by = self.tagged_by
        by_host = [next(number for number, members in enumerate(hosts) if peer in members) for peer in range(size)]
        self.host = by_host[rank]
        self.served = served_by(hosts, rank)
        self.takers = [forwarder(hosts, peer, self.host) for peer in range(size)]
        parts = [(taker, served_by(hosts, taker).index(peer)) for peer, taker in enumerate(self.takers)]
        super().__init__(config, layout, memory, reason, crowded, hosts[self.host], parts, EXACT, torch.float32)
        # Of each rank, and of none: whom this one's tokens for it are sent to, and whether it is on this host.
        targets = [forwarder(hosts, rank, number) for number in by_host]
        self._targets = torch.tensor([*targets, size], device=self.device)
        self._here = torch.tensor([number == self.host for number in by_host] + [False], device=self.device)
        self.passages: dict[int, Passage] = {}

    def begin(
        self, lane: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, tag: int
    ) -> Callable[[], Dispatched]:
        """Posts what other hosts need. The wait puts what comes from there beside this rank's own tokens."""
        held = self._begin_leg(lane)
        config, comm, phase = self.config, self.config.comm, self.config.comm.recorder.phase
        self.passages.pop(lane, None)
        self.rounds_begun[lane] += 1
        phase("plan")
        ids, weights = merge_repeated_experts(topk_ids, topk_weights)
        targets = self._targets[owners(ids, config.num_experts, comm.size)]
        home = SendPlan.towards(targets, comm.size)
        sends = home.without(comm.rank)
        phase("exchange counts")
        counts = self._outer.exchange_counts(sends.counts, x.dtype, tag % (MOST_LAYERS * MOST_WANTS))
        self._require_not_closed()
        phase("quantise and store")
        row_bytes, top_k = config.wire.row_bytes(config.hidden_size, x.dtype), config.top_k
        own, slots = self.lanes[lane].part(), dense_segments(sends.counts)
        records = own["records"][: len(x), :row_bytes]
        config.dispatch_backend.pack_rows(x, config.wire, None, records)
        own["ids"][: len(x)] = torch.where(targets == comm.rank, ids, -1)
        own["weights"][: len(x)] = weights
        own["tokens"].fill_(len(x))

        def pack(start: int, stop: int, messages: torch.Tensor) -> None:
            tokens = sends.tokens[slots.row_index(start, stop)]
            words = messages.view(torch.int32)[:, row_bytes // 4 :]
            messages[:, :row_bytes] = records[tokens]
            words[:, :top_k], words[:, top_k : 2 * top_k] = ids[tokens], weights[tokens].view(torch.int32)
            words[:, 2 * top_k], words[:, 2 * top_k + 1 :] = tokens, 0

        label = f"dispatch {config.wire!r} {x.dtype}"
        exchange = StagedExchange.post(comm, sends.counts, counts, config.message_bytes(x.dtype), pack, label)
        word, tokens = DTYPE_CODES[x.dtype] | tag << DTYPE_BITS, {comm.rank: home.tokens[targets_of(home, comm.rank)]}
        self._open[lane] = True
        del held

        def end() -> Dispatched:
            self._require_not_closed()
            held, messages = self.board, dense_segments(counts).cut(exchange.wait())
            self._require_not_closed()
            phase("forward")
            for place, rank in enumerate(self.served[1:], 1):
                tokens[rank] = self._forward(self.lanes[lane].part(place), messages[rank], row_bytes)
            self.passages[lane] = Passage(x.dtype, home, counts, tokens)
            self.kernels.tell(self.lanes[lane], word)
            d = self._arrive(lane, x, word)
            del held
            return d

        return end

    def _forward(self, part: dict[str, torch.Tensor], messages: torch.Tensor, row_bytes: int) -> torch.Tensor:
        """Puts a rank's records into its part. Gives their numbers."""
        config, words = self.config, messages.view(torch.int32)[:, row_bytes // 4 :]
        # Whatever a peer sent as a number or an id, it is a place, and an expert of this host or none.
        tokens = words[:, 2 * config.top_k].long().clamp_(0, max(config.max_tokens - 1, 0))
        ids = words[:, : config.top_k].contiguous()
        known = self._here[owners(ids, config.num_experts, config.comm.size)] & (ids < config.num_experts)
        used = int(tokens.max()) + 1 if len(tokens) else 0
        part["ids"][:used] = -1  # as some tokens go to other hosts alone
        part["ids"][tokens] = torch.where(known, ids, -1)
        part["weights"][tokens] = words[:, config.top_k : 2 * config.top_k].contiguous().view(torch.float32)
        part["records"][:, :row_bytes][tokens] = messages[:, :row_bytes]
        part["tokens"].fill_(used)
        return tokens

    def _round(self, lane: int, x: torch.Tensor) -> Dispatched:
        return _Round(self, lane, x)

    def refuse(self, lane: int, why: int) -> None:
        """All ranks hear of it with the counts, before anything is stored."""
        self.raise_failure(lane)
        self.rounds_begun[lane] += 1
        self._outer.refuse(lane, why)

    def begin_combine(
        self,
        lane: int,
        expert_out: torch.Tensor,
        dtype: torch.dtype,
        out: torch.Tensor,
        grads: tuple[torch.Tensor | None, torch.Tensor] | None = None,
        terms: Terms = (None, None),
        as_they_are: bool = False,
    ) -> Callable[[], None]:
        """Puts this rank's sums into its memory. The wait sends the host's on, and adds up what comes home."""
        held = self._begin_leg(lane)
        self.config.comm.recorder.phase("sum and store")
        (of_rows, of_tokens), (positions, weights) = grads or (None, None), terms
        self.kernels.send_sums(self.lanes[lane], self._as_floats(expert_out), dtype, positions, weights, of_rows)
        self._open[lane] = False
        hear_ends = self._outer.tell_end(lane, WITH_SUMS)
        del held
        return lambda: self._sum_at_home(lane, hear_ends, out, of_tokens)

    def close_round(self, lane: int, end: int) -> None:
        """Peers' sums still go their way; those that come home here are thrown away."""
        held = self._begin_leg(lane)
        self.kernels.tell(self.lanes[lane], end)
        self._open[lane] = False
        self._sum_at_home(lane, self._outer.tell_end(lane, end), None, None)
        del held

    def _as_floats(self, expert_out: torch.Tensor) -> torch.Tensor:
        """Experts' rows; those that are records in `combine_wire` as float32, as sums are float32 here."""
        if expert_out.dtype != torch.uint8:
            return expert_out
        rows = expert_out.new_empty(len(expert_out), self.config.hidden_size, dtype=torch.float32)
        self.config.combine_backend.unpack_rows(expert_out, self.config.combine_wire, None, None, rows)
        return rows

    def _sum_at_home(
        self,
        lane: int,
        hear_ends: Callable[[], list[int]],
        out: torch.Tensor | None,
        of_tokens: torch.Tensor | None,
    ) -> None:
        """Adds up the host's sums, sends them home, and adds up what comes home."""
        config, comm, phase, passage = (
            self.config,
            self.config.comm,
            self.config.comm.recorder.phase,
            self.passages[lane],
        )
        wire, home, dtype, counts = config.combine_wire, passage.home, passage.dtype, passage.counts
        phase("wait for peers")
        held = self._await(lane, COMBINE)
        self.kernels.take(self.lanes[lane])
        has_grads = self.lanes[lane].layout.WEIGHT_GRADS > 0
        row_bytes = wire.row_bytes(config.hidden_size, dtype)
        record_bytes = -(-(row_bytes + 4 * config.top_k * has_grads) // 16) * 16

        def sum_up(rank: int, start: int, stop: int, records: torch.Tensor) -> None:
            tokens = passage.tokens[rank][start:stop]
            rows = torch.empty(len(tokens), config.hidden_size, dtype=torch.float32, device=self.device)
            grads = torch.empty(len(tokens), config.top_k, dtype=torch.float32, device=self.device)
            self.kernels.sum_for(self.lanes[lane], dtype, rank, tokens, rows, grads)
            places, ones = torch.arange(len(tokens), device=self.device)[:, None], torch.ones_like(rows[:, :1])
            config.combine_backend.pack_weighted_sums(rows, places, ones, wire, dtype, records[:, :row_bytes])
            if has_grads:
                tail = records.view(torch.float32)[:, row_bytes // 4 :]
                tail[:, : config.top_k], tail[:, config.top_k :] = grads, 0.0

        def pack(start: int, stop: int, records: torch.Tensor) -> None:
            self._require_not_closed()
            for rank, count in enumerate(counts):
                if count > start:
                    last = min(stop, count)
                    sum_up(rank, start, last, records[: last - start])
                    records = records[last - start :]

        phase("sum for other hosts")
        exchange = StagedExchange.post(comm, counts, home.counts, record_bytes, pack, f"combine {wire!r} {dtype}")
        phase("sum for this host")
        own = targets_of(home, comm.rank)
        sum_up(comm.rank, 0, home.counts[comm.rank], exchange.received[own])
        del held
        received = exchange.wait()
        missing = [peer for peer, end in enumerate(hear_ends()) if end == LEFT_OPEN]
        if out is None:
            return
        if missing:
            raise left_open(lane, missing)
        phase("sum at home")
        config.combine_backend.sum_records(received[:, :row_bytes], home.record_index, wire, out)
        if of_tokens is not None:  # all but one host's are zero
            tails = received[:, row_bytes : row_bytes + 4 * config.top_k].contiguous().view(torch.float32)
            of_tokens.copy_(torch.nn.functional.pad(tails, (0, 0, 0, 1))[home.record_index].sum(1))

    def _require_not_closed(self) -> None:
        """LaneError after `close`, which a signal handler may have called while the network was waited for."""
        if self.closed:
            raise LaneError(CLOSED)

    def describe(self) -> str:
        """For `explain`."""
        return f"{super().describe()}; hosts: {describe(self.config.comm.hosts)}"


def targets_of(plan: SendPlan, rank: int) -> slice:
    """Which records of a plan are for a rank."""
    first = sum(plan.counts[:rank])
    return slice(first, first + plan.counts[rank])


class TwoLevelBackward(TwoLevelRounds, PulledBackward):
    """Those on which gradients travel."""


class _Round(TwoLevelTraffic, PulledRound):
    _rounds: TwoLevelRounds

    def __init__(self, rounds: TwoLevelRounds, lane: int, x: torch.Tensor) -> None:
        super().__init__(rounds, lane, x)
        self._passage = rounds.passages[lane]

    def _far_dispatch(self) -> Traffic:
        return self._traffic(self._passage.home.counts, self._rounds.config.message_bytes(self._dtype))

    def _far_combine(self) -> Traffic:
        config = self._rounds.config
        return self._traffic(self._passage.counts, config.combine_wire.row_bytes(config.hidden_size, self._dtype))
