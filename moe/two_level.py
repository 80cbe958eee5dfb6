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

from thinwire.comm.hosts import forwarder, served_by
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.fused.counts import dense_segments
from thinwire.fused.staged import StagedExchange
from thinwire.moe.config import ParallelConfig
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.gradients import MOST_LAYERS, MOST_WANTS
from thinwire.moe.plan import SendPlan, merge_repeated_experts, owners
from thinwire.moe.pulled import PulledRounds
from thinwire.moe.round_transport import left_open
from thinwire.moe.staged import StagedRounds
from thinwire.triton_kernels.cpu.lane import PulledLane, PulledLayout
from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH, DTYPE_BITS, DTYPE_CODES, LEFT_OPEN
from thinwire.wire import EXACT, Traffic


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
    """Rounds of a host's ranks, inside of staged ones between hosts.

    Attributes:
        served: the ranks whose rows this one takes to its host, itself first.
        passages: of the round on each lane.
    """

    name = "two_level"

    def __init__(
        self, config: ParallelConfig, layout: PulledLayout, memory: SymmetricMemory, reason: str, crowded: bool
    ) -> None:
        hosts, size, rank = config.comm.hosts, config.comm.size, config.comm.rank
        by_host = [next(number for number, members in enumerate(hosts) if peer in members) for peer in range(size)]
        takers = [forwarder(hosts, peer, by_host[rank]) for peer in range(size)]
        parts = [(taker, served_by(hosts, taker).index(peer)) for peer, taker in enumerate(takers)]
        super().__init__(config, layout, memory, reason, crowded, hosts[by_host[rank]], parts, EXACT, torch.float32)
        self._outer = StagedRounds(config, reason)
        self._outer.tagged_by = self.tagged_by
        self.served, self.takers = served_by(hosts, rank), takers
        # Of each rank, and of none: whom this one's tokens for it are sent to, and whether it is on this host.
        targets = [forwarder(hosts, rank, number) for number in by_host]
        self._targets = torch.tensor([*targets, size], device=self.device)
        self._here = torch.tensor([number == by_host[rank] for number in by_host] + [False], device=self.device)
        self.passages: dict[int, Passage] = {}

    def begin(
        self, lane: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, tag: int
    ) -> Callable[[], Dispatched]:
        """Posts what other hosts need. The wait puts what comes from there beside this rank's own tokens."""
        self._begin_leg(lane)
        config, rank, size, phase = self.config, self.config.comm.rank, self.size, self.config.comm.recorder.phase
        self.passages.pop(lane, None)
        self.rounds_begun[lane] += 1
        phase("plan")
        ids, weights = merge_repeated_experts(topk_ids, topk_weights)
        targets = self._targets[owners(ids, config.num_experts, size)]
        home = SendPlan.towards(targets, size)
        sends = home.without(rank)
        phase("exchange counts")
        counts = self._outer.exchange_counts(sends.counts, x.dtype, tag % (MOST_LAYERS * MOST_WANTS))
        held = self._hold()
        phase("quantise and store")
        own = self.lanes[lane].part()
        records = own["records"][: len(x), : config.wire.row_bytes(config.hidden_size, x.dtype)]
        config.dispatch_backend.pack_rows(x, config.wire, None, records)
        own["ids"][: len(x)] = torch.where(targets == rank, ids, -1)
        own["weights"][: len(x)] = weights
        own["tokens"].fill_(len(x))

        def pack(tokens: torch.Tensor, out: torch.Tensor) -> None:
            out.copy_(records[tokens])

        exchange = self._outer.post_tokens(sends, counts, ids, weights, x.dtype, pack)
        self._open[lane] = True
        del held

        def end() -> Dispatched:
            messages = dense_segments(counts).cut(exchange.wait())
            held, tensors = self._hold(), self.lanes[lane]
            phase("forward")
            tokens = {rank: dense_segments(home.counts).cut(home.tokens)[rank]}
            for place, peer in enumerate(self.served[1:], 1):
                tokens[peer] = self._forward(tensors.part(place), messages[peer], x.dtype)
            self.passages[lane] = Passage(x.dtype, home, counts, tokens)
            word = DTYPE_CODES[x.dtype] | tag << DTYPE_BITS
            self.kernels.tell(tensors, word)
            d = self._arrive(lane, x, word)
            del held
            return d

        return end

    def _forward(self, part: dict[str, torch.Tensor], messages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Puts a rank's messages into its part. Gives the numbers of their tokens."""
        config, arrived = self.config, self._outer.read_tokens(messages, dtype)
        # Whatever a peer sent as a number or an id, it is a place, and an expert of this host or none.
        tokens = arrived.numbers.long().clamp_(0, max(config.max_tokens - 1, 0))
        ids = arrived.ids.contiguous()
        known = self._here[owners(ids, config.num_experts, self.size)] & (ids < config.num_experts)
        used = int(tokens.max()) + 1 if len(tokens) else 0
        part["ids"][:used] = -1  # as some tokens go to other hosts alone
        part["ids"][tokens] = torch.where(known, ids, -1)
        part["weights"][tokens] = arrived.weights
        part["records"][:, : arrived.records.shape[1]][tokens] = arrived.records
        part["tokens"].fill_(used)
        return tokens

    def refuse(self, lane: int, why: int) -> None:
        """All ranks hear of it with the counts, before anything is stored."""
        self.raise_failure(lane)
        self.rounds_begun[lane] += 1
        self._outer.refuse(lane, why)

    def _bring_home(
        self, lane: int, end: int, out: torch.Tensor | None, of_tokens: torch.Tensor | None
    ) -> Callable[[], None]:
        """Tells all hosts of the end. The wait sends the host's sums on, and adds up what comes home if there is `out`.

        Without `out` peers' sums still go their way.
        """
        hear_ends = self._outer.tell_end(lane, end)
        config, comm, passage = self.config, self.config.comm, self.passages[lane]
        phase, home, wire = comm.recorder.phase, passage.home, config.combine_wire
        row_bytes = wire.row_bytes(config.hidden_size, passage.dtype)

        def sum_at_home() -> None:
            phase("wait for peers")
            held, tensors = self._await(lane, COMBINE), self.lanes[lane]
            self.kernels.take(tensors)
            grad_bytes = 4 * config.top_k if tensors.layout.WEIGHT_GRADS else 0

            def pack(start: int, stop: int, records: torch.Tensor) -> None:
                shares = dense_segments(passage.counts).within(start, stop).counts
                for rank, share in enumerate(records.split(shares)):
                    self._sum_for(tensors, passage, rank, start, share)

            phase("sum for other hosts")
            record_bytes, label = -(-(row_bytes + grad_bytes) // 16) * 16, f"combine {wire!r} {passage.dtype}"
            exchange = StagedExchange.post(comm, passage.counts, home.counts, record_bytes, pack, label)
            phase("sum for this host")
            own = dense_segments(home.counts).cut(exchange.received)[comm.rank]
            self._sum_for(tensors, passage, comm.rank, 0, own)
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
                grads = received[:, row_bytes : row_bytes + grad_bytes].contiguous().view(torch.float32)
                of_tokens.copy_(torch.nn.functional.pad(grads, (0, 0, 0, 1))[home.record_index].sum(1))

        return sum_at_home

    def _sum_for(self, lane: PulledLane, passage: Passage, rank: int, start: int, records: torch.Tensor) -> None:
        """Fills records with this host's sums for a rank's tokens, from one on; behind them, gradients of weights."""
        if not len(records):
            return
        config, tokens = self.config, passage.tokens[rank][start : start + len(records)]
        rows = torch.empty(len(tokens), config.hidden_size, dtype=torch.float32, device=self.device)
        grads = torch.empty(len(tokens), config.top_k, dtype=torch.float32, device=self.device)
        self.kernels.sum_for(lane, passage.dtype, rank, tokens, rows, grads)
        row_bytes = config.combine_wire.row_bytes(config.hidden_size, passage.dtype)
        places, ones = torch.arange(len(tokens), device=self.device)[:, None], torch.ones_like(rows[:, :1])
        config.combine_backend.pack_weighted_sums(
            rows, places, ones, config.combine_wire, passage.dtype, records[:, :row_bytes]
        )
        if lane.layout.WEIGHT_GRADS:
            tail = records.view(torch.float32)[:, row_bytes // 4 :]
            tail[:, : config.top_k], tail[:, config.top_k :] = grads, 0.0

    def crossing(self, d: Dispatched, phase: int) -> Traffic:
        """See `Rounds.crossing`."""
        passage, config = self.passages[d.lane], self.config
        if phase == DISPATCH:
            return d._traffic(passage.home.counts, config.message_bytes(passage.dtype))
        return d._traffic(passage.counts, config.combine_wire.row_bytes(config.hidden_size, passage.dtype))
