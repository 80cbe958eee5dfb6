"""Rounds over the staged transport: records are packed, travel through the process group, and are unpacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from thinwire.errors import RoutingError, ThinwireError
from thinwire.fused.counts import new_rows
from thinwire.fused.staged import StagedExchange, dense_segments
from thinwire.moe.config import ROUND_DTYPES, ParallelConfig
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.gradients import MOST_LAYERS, MOST_WANTS, GradientPlan, Wants, describe_tag
from thinwire.moe.plan import ArrivalPlan, SendPlan, merge_repeated_experts
from thinwire.moe.received import Arrived
from thinwire.moe.round_transport import MOST_REFUSALS, Rounds, left_open, refused_by
from thinwire.triton_kernels.round_layout import ABANDONED, LEFT_OPEN, WITH_SUMS
from thinwire.wire import Traffic

_REFUSED = 2**63 - MOST_REFUSALS  # and from there on, in place of a count: the rank raised


class Messages(NamedTuple):
    """Views of a dispatch's messages, uint8 [n, message_bytes]."""

    records: torch.Tensor  # uint8 [n, row_bytes]
    ids: torch.Tensor  # int32 [n, top_k]
    weights: torch.Tensor  # int32 [n, words of top_k weights], or floats
    numbers: torch.Tensor  # int32 [n], of the tokens at their source
    rest: torch.Tensor  # int32, zero


class StagedRounds(Rounds):
    """Counts are exchanged first; both sides derive the order of records from ids alone."""

    name = "staged"

    def __init__(self, config: ParallelConfig, reason: str, lack: type[ThinwireError] | None = None) -> None:
        super().__init__(config, reason, lack)
        self._open: list[StagedRound | None] = [None] * config.lanes

    def begin(
        self, lane: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, tag: int
    ) -> Callable[[], Dispatched]:
        """Sends each token's record to the ranks that own its experts; behind it ids, router weights and its number."""
        config, phase = self.config, self.config.comm.recorder.phase
        self.rounds_begun[lane] += 1
        phase("plan")
        ids, weights = merge_repeated_experts(topk_ids, topk_weights, config.weight_dtype)
        sends = SendPlan.of(ids, config.num_experts, config.comm.size)

        def pack(tokens: torch.Tensor, records: torch.Tensor) -> None:
            config.dispatch_backend.pack_rows(x, config.wire, tokens, records)

        phase("exchange counts")
        recv_counts = self.exchange_counts(sends.counts, x.dtype, tag)
        exchange = self.post_tokens(sends, recv_counts, ids, weights, x.dtype, pack)

        def end() -> Dispatched:
            arrived = self.read_tokens(exchange.wait(), x.dtype)
            phase("routing")
            arrival = ArrivalPlan.of(arrived.ids, arrived.weights, config.local_places, config.align)
            d = self._open[lane] = StagedRound(
                self, lane, x, sends, recv_counts, arrived.records, arrival, arrived.numbers
            )
            if config.invariant:
                d.home = SendPlan.of_experts(ids, config.num_experts, config.comm.size)
            return d

        return end

    def post_tokens(
        self,
        sends: SendPlan,
        recv_counts: list[int],
        ids: torch.Tensor,
        weights: torch.Tensor,
        dtype: torch.dtype,
        pack: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> StagedExchange:
        """Posts a message for each record of a plan.

        Args:
            recv_counts: records that come from each rank, by `exchange_counts`.
            ids, weights: merged, of all tokens.
            pack: `pack(tokens, records)` fills uint8 [n, row_bytes] with the records of tokens, int64 [n].
        """
        slots = dense_segments(sends.counts)

        def fill(start: int, stop: int, messages: torch.Tensor) -> None:
            tokens, parts = sends.tokens[slots.row_index(start, stop, ids.device)], self._parts(messages, dtype)
            pack(tokens, parts.records)
            parts.ids.copy_(ids[tokens])
            parts.weights.copy_(weights[tokens].view(torch.int32))
            parts.numbers.copy_(tokens)
            parts.rest.zero_()

        label, size = f"dispatch {self.config.wire!r} {dtype}", self.config.message_bytes(dtype)
        return StagedExchange.post(self.config.comm, sends.counts, recv_counts, size, fill, label)

    def read_tokens(self, messages: torch.Tensor, dtype: torch.dtype) -> Messages:
        """What messages that came hold, with the weights as floats."""
        parts = self._parts(messages, dtype)
        return parts._replace(weights=_floats(parts.weights, self.config.weight_dtype))

    def _parts(self, messages: torch.Tensor, dtype: torch.dtype) -> Messages:
        config = self.config
        row_bytes, words = config.wire.row_bytes(config.hidden_size, dtype), messages.view(torch.int32)
        weights = row_bytes // 4 + config.top_k
        number = weights + config.top_k * config.weight_dtype.itemsize // 4
        return Messages(
            messages[:, :row_bytes], words[:, row_bytes // 4 : weights], words[:, weights:number], words[:, number],
            words[:, number + 1 :],
        )  # fmt: skip

    def is_open(self, lane: int) -> bool:
        return self._open[lane] is not None

    def close_round(self, lane: int, end: int) -> None:
        d = self._open[lane]
        assert d is not None
        ends = self.tell_end(lane, end)()
        # Peers that leave it open as well ask for nothing.
        d.answer([end == ABANDONED or other != LEFT_OPEN for other in ends])

    def tell_end(self, lane: int, end: int) -> Callable[[], list[int]]:
        """Tells all peers how this rank ends the round; what is returned waits, and gives how they do.

        NCCL's waits do not block the host, so there nobody is told, and a rank that leaves rounds open is out of step.
        """
        comm = self.config.comm
        self._open[lane] = None
        if comm.backend == "nccl":
            return lambda: [end] * comm.size
        told = torch.full((comm.size, 1), end, dtype=torch.uint8, device="cpu")
        heard = told.clone()
        sends, receives = (
            [None if peer == comm.rank else row for peer, row in enumerate(rows)] for rows in (told, heard)
        )
        posted = comm.post(sends, receives, f"end of round on lane {lane}")

        def wait() -> list[int]:
            posted.wait_on_host()
            ends: list[int] = heard[:, 0].tolist()
            return ends

        return wait

    def refuse(self, lane: int, why: int) -> None:
        """All ranks hear of it with the counts."""
        self.rounds_begun[lane] += 1
        self.config.comm.exchange_counts([_REFUSED + why] * self.config.comm.size)

    def exchange_counts(self, counts: list[int], dtype: torch.dtype, tag: int) -> list[int]:
        """The peers' counts; with them everyone learns everyone's dtype and tag, which must be the same."""
        config = self.config
        comm, dtypes, kinds = config.comm, len(ROUND_DTYPES), MOST_LAYERS * MOST_WANTS * len(ROUND_DTYPES)
        kind = dtypes * tag + ROUND_DTYPES.index(dtype)
        received = comm.exchange_counts([count * kinds + kind for count in counts])
        refusals = {peer: value - _REFUSED for peer, value in enumerate(received) if value >= _REFUSED}
        if refusals:
            raise RoutingError(refused_by(refusals))
        for peer, value in enumerate(received):
            if ROUND_DTYPES[value % dtypes] != dtype:
                raise RoutingError(
                    f"rank {comm.rank} dispatches {dtype} tokens, rank {peer} {ROUND_DTYPES[value % dtypes]}; all "
                    "ranks of a round need the same dtype"
                )
            if value % kinds != kind:
                raise RoutingError(
                    f"rank {comm.rank} dispatches with {describe_tag(tag, self.tagged_by)}, rank {peer} with "
                    f"{describe_tag(value % kinds // dtypes, self.tagged_by)}; all ranks of a round must be in the "
                    f"same {self.tagged_by} and want the same, those without tokens too"
                )
            if value // kinds > config.max_tokens:
                raise RoutingError(
                    f"rank {peer} says that it sends {value // kinds} tokens; accepted: at most {config.max_tokens}"
                )
        return [value // kinds for value in received]

    def describe(self) -> str:
        """For `explain`."""
        why = "" if self.config.transport == "staged" else "direct is not available: "
        return f"transport: staged ({why}{self.reason}); a round waits for peers as long as the communicator does"


def _floats(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int32 columns of records as what they are."""
    return words.clone(memory_format=torch.contiguous_format).view(dtype)  # float64s may lie at odd words there


class StagedRound(Dispatched):
    """A round whose rows came through the process group, and what combine and backward need of the way they took."""

    _rounds: StagedRounds

    def __init__(
        self,
        rounds: StagedRounds,
        lane: int,
        x: torch.Tensor,
        sends: SendPlan,
        recv_counts: list[int],
        rows: torch.Tensor,
        arrival: ArrivalPlan,
        token_numbers: torch.Tensor,
    ) -> None:
        super().__init__(rounds, lane, x)
        self._sends = self.home = sends  # home: of the sums that come back
        self._recv_counts = recv_counts
        self._arrival = arrival
        self._token_numbers = token_numbers  # int32 [records], at their sources
        self.rows = rows
        self.index = torch.full((arrival.num_rows,), -1, dtype=torch.int64, device=rows.device)
        self.index[arrival.rows] = arrival.index
        self.expert_counts = arrival.expert_counts
        self.expert_offsets = arrival.expert_offsets

    def _read_num_rows(self) -> int:
        return self._arrival.num_rows

    def _read_arrived(self) -> Arrived:
        arrival, device = self._arrival, self.rows.device
        counts = torch.tensor(self._recv_counts, device=device)
        ranks = torch.arange(len(counts), device=device).repeat_interleave(counts, output_size=len(self.rows))
        return Arrived(arrival.positions, arrival.weights, torch.stack((ranks, self._token_numbers.long()), 1))

    def _gather(self, capacity: int, zero_tail: bool) -> tuple[torch.Tensor, torch.Tensor]:
        arrival = self._arrival
        fits = arrival.rows < capacity
        used = capacity if zero_tail else min(capacity, arrival.num_rows)
        tokens = self._unpack_at(arrival.index[fits], arrival.rows[fits], capacity, used)
        return tokens, torch.tensor(arrival.num_rows > capacity, device=self.rows.device)

    def _unpack(self, chosen: torch.Tensor) -> torch.Tensor:
        there = (chosen >= 0).nonzero()[:, 0]
        return self._unpack_at(chosen[there], there, len(chosen), len(chosen))

    def _unpack_at(self, index: torch.Tensor, places: torch.Tensor, num_rows: int, used: int) -> torch.Tensor:
        """Records by number at places among so many rows; the others of the first `used` are zero."""
        config = self._rounds.config
        like = torch.empty(0, dtype=self._dtype, device=self.rows.device)
        tokens = new_rows(like, num_rows, (config.hidden_size,), memory=config.comm.result_memory)
        if len(places) < used:  # places are different ones, so as many leave none of them to be zero
            tokens[:used].zero_()
        config.dispatch_backend.unpack_rows(self.rows, config.wire, index, places, tokens)
        return tokens

    def _begin_combine(self, expert_out: torch.Tensor, out: torch.Tensor, weighted: bool) -> Callable[[], None]:
        config, dtype = self._rounds.config, self._dtype
        positions, weights = self._arrival.positions, self._arrival.weights
        if config.invariant:
            here = positions >= 0
            positions, weights = positions[here][:, None], weights[here][:, None]
        if weighted:
            positions = self._arrived.rows.unsqueeze(1)
            weights = weights.new_ones(positions.shape)
        positions = torch.where(positions < expert_out.shape[0], positions, -1)
        counts = self._sum_counts()
        slots = dense_segments(counts)

        def pack(start: int, stop: int, records: torch.Tensor) -> None:
            chosen = slots.row_index(start, stop, positions.device)
            if weighted and expert_out.dtype == torch.uint8:  # as they are
                there = (positions[chosen, 0] >= 0).nonzero()[:, 0]
                records.zero_()
                records[there] = expert_out[positions[chosen[there], 0]]
                return
            config.combine_backend.pack_weighted_sums(
                expert_out, positions[chosen], weights[chosen], config.combine_wire, dtype, records,
                hidden=config.hidden_size,
            )  # fmt: skip

        row_bytes = config.combine_wire.row_bytes(config.hidden_size, dtype)
        label = self._combine_label
        hear_ends = self._rounds.tell_end(self.lane, WITH_SUMS)
        exchange = StagedExchange.post(config.comm, counts, self.home.counts, row_bytes, pack, label)

        def end() -> None:
            missing = [peer for peer, end in enumerate(hear_ends()) if end == LEFT_OPEN]
            records = exchange.wait()
            if missing:
                raise left_open(self.lane, missing)
            config.comm.recorder.phase("sum at home")
            config.combine_backend.sum_records(records, self.home.record_index, config.combine_wire, out)

        return end

    def answer(self, awaited: list[bool]) -> None:
        """Takes part in the combine of the ranks that are `awaited`, with zeros; what comes is thrown away."""
        config = self._rounds.config
        sends, receives = (
            [count * there for count, there in zip(counts, awaited, strict=True)]
            for counts in (self._sum_counts(), self.home.counts)
        )

        def pack(start: int, stop: int, records: torch.Tensor) -> None:
            records.zero_()

        row_bytes = config.combine_wire.row_bytes(config.hidden_size, self._dtype)
        StagedExchange.post(config.comm, sends, receives, row_bytes, pack, self._combine_label).wait()

    def _sum_counts(self) -> list[int]:
        """Sums for each rank."""
        if not self._rounds.config.invariant:
            return self._recv_counts
        sums = torch.nn.functional.pad((self._arrival.positions >= 0).sum(1).cumsum(0), (1, 0))
        ends = torch.tensor([0, *accumulate(self._recv_counts)], device=sums.device)
        return [end - begin for begin, end in pairwise(sums[ends].tolist())]

    @property
    def _combine_label(self) -> str:
        return f"combine {self._rounds.config.combine_wire!r} {self._dtype}"

    @property
    def dispatch_traffic(self) -> Traffic:
        config = self._rounds.config
        sizes = config.dispatch_bytes("staged", config.comm.size, self._num_sent, self._dtype)
        return self._traffic(self._sends.counts, *sizes)

    @property
    def combine_traffic(self) -> Traffic:
        config = self._rounds.config
        return self._traffic(self._sum_counts(), *config.combine_bytes("staged", config.comm.size, self._dtype))


class StagedPlan(GradientPlan):
    """Both plans of a round, along which gradients travel without ids, and without counts."""

    def __init__(self, d: StagedRound, wants: Wants) -> None:
        self.wants = wants
        self._rounds, self._dtype, self._num_tokens = d._rounds, d._dtype, d._num_sent
        self._sends, self._recv_counts, self._arrival = d._sends, d._recv_counts, d._arrival
        self._place = d._rounds.place(d.lane)

    def send(self, dy: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        config, arrival = self._rounds.config, self._arrival
        slots = dense_segments(self._sends.counts)

        def pack(start: int, stop: int, records: torch.Tensor) -> None:
            tokens = self._sends.tokens[slots.row_index(start, stop, dy.device)]
            config.grad_backend.pack_rows(dy, config.grad_wire, tokens, records)

        row_bytes = config.grad_wire.row_bytes(config.hidden_size, self._dtype)
        arrived = self._exchange(
            "backward of combine", self._sends.counts, self._recv_counts, row_bytes, pack, dy.shape
        )
        fits = arrival.rows < num_rows
        index, places = arrival.index[fits], arrival.rows[fits]
        rows = new_rows(dy, num_rows, (config.hidden_size,), len(places) < num_rows, config.comm.result_memory)
        config.grad_backend.unpack_rows(arrived, config.grad_wire, index, places, rows)
        weights = arrival.weights.new_zeros(num_rows)
        fits = (arrival.positions >= 0) & (arrival.positions < num_rows)
        weights[arrival.positions[fits]] = arrival.weights[fits]
        return rows, weights

    def collect(
        self, rows: torch.Tensor | None, dots: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The weights' gradients travel behind the sums, as ids and weights did behind the tokens."""
        config, arrival, device = self._rounds.config, self._arrival, self._arrival.positions.device
        wire, hidden = config.grad_wire, config.hidden_size
        if rows is None:
            rows = torch.empty(0, hidden, dtype=self._dtype, device=device)
        rows = rows.resolve_neg().contiguous()
        positions = torch.where(arrival.positions < rows.shape[0], arrival.positions, -1)
        ones = torch.ones_like(arrival.weights)
        if dots is not None and dots.dtype != config.weight_dtype:  # whose bits travel as they are
            raise RoutingError(f"weight_grads is {dots.dtype}; accepted: {config.weight_dtype}")
        dots = arrival.weights.new_zeros(1) if dots is None else torch.nn.functional.pad(dots, (0, 1))
        of_ids = arrival.rows_of_ids
        by_id = dots[torch.where((of_ids >= 0) & (of_ids < len(dots)), of_ids, len(dots) - 1)].view(torch.int32)
        slots = dense_segments(self._recv_counts)
        row_bytes = wire.row_bytes(hidden, self._dtype) if self.wants.rows else 0
        tail = slice(row_bytes // 4, row_bytes // 4 + by_id.shape[1] * self.wants.weights)

        def pack(start: int, stop: int, records: torch.Tensor) -> None:
            chosen, words = slots.row_index(start, stop, device), records.view(torch.int32)
            if self.wants.rows:
                config.grad_backend.pack_weighted_sums(
                    rows, positions[chosen], ones[chosen], wire, self._dtype, records[:, :row_bytes]
                )
            if self.wants.weights:
                words[:, tail] = by_id[chosen]
                words[:, tail.stop :] = 0

        record_bytes = -(-4 * tail.stop // 16) * 16
        home = self._exchange(
            "backward of dispatch", self._recv_counts, self._sends.counts, record_bytes, pack, rows.shape
        )
        dx = dw = None
        if self.wants.rows:
            dx = config.comm.result_memory.new_empty(rows, (self._num_tokens, hidden), self._dtype)
            config.grad_backend.sum_records(home[:, :row_bytes], self._sends.record_index, wire, dx)
        if self.wants.weights:  # all but one of an expert's are zero
            tails = _floats(home.view(torch.int32)[:, tail], config.weight_dtype)
            dw = torch.nn.functional.pad(tails, (0, 0, 0, 1))[self._sends.record_index].sum(1)
        return dx, dw

    def _exchange(
        self,
        name: str,
        sends: list[int],
        receives: list[int],
        record_bytes: int,
        pack: Callable[[int, int, torch.Tensor], None],
        shape: Sequence[int],
    ) -> torch.Tensor:
        rounds = self._rounds
        config, wire = rounds.config, rounds.config.grad_wire
        with rounds.call_backward(name, shape, self._dtype, wire, self._place):
            label = f"{name} {wire!r} {self._dtype} {self._place}"
            return StagedExchange.post(config.comm, sends, receives, record_bytes, pack, label).wait()
