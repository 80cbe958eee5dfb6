"""Rounds over two levels on CPUs: a token crosses once to each other host that owns one of its experts.

Ranks tell each other how many records they send, and these travel in pieces, as the staged transport's do. A forwarder
stores each piece into its host's memory while later ones arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch

from thinwire.fused.staged import StagedExchange, dense_segments
from thinwire.moe.direct_gradients import BackwardRounds
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.gradients import MOST_LAYERS, MOST_WANTS
from thinwire.moe.plan import SendPlan, merge_repeated_experts, owners
from thinwire.moe.two_level_lanes import TwoLevelRound
from thinwire.moe.two_level_sums import Passage, TwoLevelSums
from thinwire.triton_kernels.cpu import dispatch
from thinwire.triton_kernels.round_layout import (
    DISPATCH,
    Lane,
)
from thinwire.wire import Traffic


class TwoLevelRounds(TwoLevelSums):
    """The legs of these rounds."""

    def begin(
        self, lane: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, tag: int
    ) -> Callable[[], Dispatched]:
        """Posts what other hosts need, and stores what this one does. The wait forwards what comes from there."""
        self.raise_failure(lane)
        held = self.memory.held()  # until this returns, whoever closes it meanwhile
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
        self.require_not_closed()
        row_bytes, message_bytes = config.wire.row_bytes(config.hidden_size, x.dtype), config.message_bytes(x.dtype)
        ends, slots, encoded = self._ends_of(lane, x.dtype), dense_segments(sends.counts), 0
        messages = comm.result_memory.new_empty(ids, (len(x), message_bytes), torch.uint8)
        records, tail = messages[:, :row_bytes], messages.view(torch.int32)[:, row_bytes // 4 :]
        tail[:, : config.top_k], tail[:, config.top_k : 2 * config.top_k] = ids, weights.view(torch.int32)
        tail[:, 2 * config.top_k] = torch.arange(len(x), device=x.device)
        tail[:, 2 * config.top_k + 1 :] = 0

        def encode(stop: int) -> None:
            """Each token once, and no sooner than the next message needs it."""
            nonlocal encoded
            if stop > encoded:
                config.dispatch_backend.pack_rows(x[encoded:stop], config.wire, None, records[encoded:stop])
                encoded = stop

        def pack(start: int, stop: int, out: torch.Tensor) -> None:
            tokens = sends.tokens[slots.row_index(start, stop)]
            encode(int(tokens.max()) + 1 if len(tokens) else 0)
            torch.index_select(messages, 0, tokens, out=out)

        label = f"dispatch {config.wire!r} {x.dtype}"
        exchange = StagedExchange.post(comm, sends.counts, counts, message_bytes, pack, label)
        phase("quantise and store")
        encode(len(x))
        local = torch.where(targets == comm.rank, ids, -1)
        self.kernels.send_tokens(
            ends.records[comm.rank], records.view(torch.float32), local, weights, config.num_programs, tag
        )
        self._open[lane] = True
        del held

        def end() -> Dispatched:
            self.require_not_closed()
            held = self.memory.held()
            of_host = home.tokens[sum(home.counts[: comm.rank]) :][: home.counts[comm.rank]]
            passage = Passage(x.dtype, home, counts, {comm.rank: of_host}, {comm.rank: local[of_host]})
            messages, waiting = dense_segments(counts).cut(exchange.received), self.served[1:]
            layout, of_a_rank = ends.sums.layout, config.max_tokens * config.top_k
            planes = ends.sums.buffer[layout.IDS : layout.WEIGHTS].view(torch.int32)
            for rank in waiting:
                passage.tokens[rank] = of_host.new_empty(counts[rank])
                passage.ids[rank] = local.new_empty(counts[rank], config.top_k)
                planes[rank * of_a_rank :][:of_a_rank] = -1  # as some tokens go to other hosts alone
            for start, stop in chain([(0, 0)], exchange.arrivals()):  # the first for ranks that send nothing
                self.require_not_closed()
                phase("forward")
                piece = slice(start, stop)
                for rank in waiting:
                    tokens, own = passage.tokens[rank], ends.records[rank]
                    tokens[piece], passage.ids[rank][piece] = self._forward(own, messages[rank][piece], row_bytes)
                    if counts[rank] <= stop:
                        rows = int(tokens.max()) + 1 if len(tokens) else 0
                        dispatch.publish_tokens(own, rows, torch.float32, tag)
                waiting = [rank for rank in waiting if counts[rank] > stop]
            self.passages[lane] = passage
            phase("wait for peers")
            self._wait(lane, DISPATCH)
            phase("routing")
            self.kernels.route(self.lanes[lane])
            del held
            return _Round(self, lane, x)

        return end

    def _forward(self, end: Lane, messages: torch.Tensor, row_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores some of a rank's records into this host. Gives their numbers, and experts here."""
        config, words = self.config, messages.view(torch.int32)[:, row_bytes // 4 :]
        # Whatever a peer sent as a number or an id, it is a place, and an expert of this host or none.
        tokens = words[:, 2 * config.top_k].long().clamp_(0, max(config.max_tokens - 1, 0))
        ids, weights = (part.contiguous() for part in words[:, : 2 * config.top_k].split(config.top_k, dim=1))
        known = self._here[owners(ids, config.num_experts, config.comm.size)] & (ids < config.num_experts)
        ids, records = torch.where(known, ids, -1), messages[:, :row_bytes].view(torch.float32)
        dispatch.store_tokens_at(end, tokens, records, ids, weights.view(torch.float32))
        return tokens, ids

    def refuse(self, lane: int, why: int) -> None:
        """All ranks hear of it with the counts, before anything is stored."""
        self.raise_failure(lane)
        self.rounds_begun[lane] += 1
        self._outer.refuse(lane, why)


class TwoLevelBackward(TwoLevelRounds, BackwardRounds):
    """Those on which gradients travel."""


class _Round(TwoLevelRound):
    _rounds: TwoLevelRounds

    def __init__(self, rounds: TwoLevelRounds, lane: int, x: torch.Tensor) -> None:
        super().__init__(rounds, lane, x)
        self._passage = rounds.passages[lane]

    def _far_dispatch(self) -> Traffic:
        return self._traffic(self._passage.home.counts, self._rounds.config.message_bytes(self._dtype))

    def _far_combine(self) -> Traffic:
        config = self._rounds.config
        return self._traffic(self._passage.counts, config.combine_wire.row_bytes(config.hidden_size, self._dtype))
