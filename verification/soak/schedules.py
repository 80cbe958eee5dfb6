"""Runs random rounds of the direct transport on real ranks, in random order and time, and compares each bit for bit.

    python -m verification.soak.schedules --rounds 500 --json benchmarks/results/cpu/schedules.json

All ranks draw the same rounds from one seed, and each computes the results in plain torch. A rank's own behaviour, its
pauses above all, depends on nothing else. A failure names its seed; `--only NAME --seed SEED` draws the same rounds
again, but not the same moments.
"""

from __future__ import annotations

import argparse
import random
import secrets
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.timing import machine, write_json
from tests.helpers.wires import DTYPES, WIRES, assert_same_bits
from thinwire.comm.communicator import Communicator
from thinwire.comm.exchange import name_ranks
from thinwire.errors import RoutingError
from thinwire.moe.direct import DirectRounds, RoundKernels
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.parallel import ExpertParallel
from thinwire.moe.pulled import PulledRounds
from thinwire.moe.routing import expert_range
from thinwire.testing import RankError, RanksTimeout, run_ranks
from thinwire.triton_kernels.codec_reference import (
    dequantize_reference,
    quantize_reference,
    round_reference,
    row_reference,
    scaled_reference,
)
from thinwire.triton_kernels.cpu.lane import PulledLane
from thinwire.triton_kernels.cpu.lines import FIELDS, LINE_BYTES
from thinwire.triton_kernels.signal import CONTROL_EPOCH, SIGNAL_LINE_BYTES
from thinwire.wire import WireFormat

POISON = 0xFF  # as a float NaN, as an id none
ROUNDS_OF_ONE_EP = 10
PULLED_KERNELS = "send_tokens", "tell", "route", "gather", "copy_records", "send_sums", "take", "sum_home"
_INTERPRETED = {"TRITON_INTERPRET": "1", "THINWIRE_BACKEND": "triton"}
_ROUTINGS = ("any", "any", "one rank", "one expert", "nowhere", "repeated", "empty ranks", "one token", "full")


# ---------------------------------------------------------------------------------------------------------------------
# What is drawn


@dataclass(frozen=True)
class Schedule:
    """How one run of random rounds goes about it.

    Attributes:
        name: for people.
        world: ranks.
        mode: "process" or "thread".
        poison: "barriers": before a round all of the lane but its signals is overwritten, while all ranks stand still.
            "own": each rank, whenever it likes, overwrites what is its own at that moment. "none".
        lanes: rounds that may be open at once.
        interpreted: with Triton's kernels under its interpreter, of which a round takes long.
    """

    name: str
    world: int
    mode: str
    poison: str
    lanes: int = 2
    interpreted: bool = False

    def rounds_of(self, rounds: int) -> int:
        """How many rounds it runs where others run `rounds`."""
        return max(5, rounds // 10) if self.interpreted else rounds


SCHEDULES = (
    Schedule("4 processes, poisoned between barriers", 4, "process", "barriers"),
    Schedule("4 processes, poisoned at any time", 4, "process", "own"),
    Schedule("3 processes, not poisoned", 3, "process", "none"),
    Schedule("6 threads, poisoned at any time", 6, "thread", "own"),
    Schedule("4 threads, poisoned between barriers", 4, "thread", "barriers"),
    Schedule("2 threads, one lane, poisoned at any time", 2, "thread", "own", lanes=1),
    Schedule("2 processes, interpreted, poisoned between barriers", 2, "process", "barriers", interpreted=True),
    Schedule("2 processes, interpreted, poisoned at any time", 2, "process", "own", interpreted=True),
)


@dataclass(frozen=True)
class Settings:
    """Of one ExpertParallel."""

    world: int
    num_experts: int
    top_k: int
    hidden: int
    max_tokens: int
    wire: str
    combine_wire: str
    dtype: torch.dtype | None
    align: int
    lanes: int
    first_epoch: int

    @classmethod
    def draw(cls, schedule: Schedule, rng: random.Random) -> Settings:
        """At random: some ranks may have no expert, and numbers of rounds may be about to wrap."""
        num_experts = rng.choice((1, 2, 5, 7, 9))
        return cls(
            world=schedule.world,
            num_experts=num_experts,
            top_k=rng.choice([top_k for top_k in (1, 2, 3, 5) if top_k <= num_experts]),
            hidden=rng.choice((1, 33, 72, 130)),
            max_tokens=rng.choice((1, 3, 4) if schedule.interpreted else (1, 3, 6, 13, 40)),
            wire=rng.choice((*WIRES, "none", "none")),
            combine_wire=rng.choice((*WIRES, "none", "none")),
            dtype=rng.choice((None, None, *DTYPES)),
            align=rng.choice((1, 1, 4)),
            lanes=schedule.lanes,
            first_epoch=rng.choice((0, 0, 2**31 - 4, -3)),
        )

    def make(self, comm: Communicator, timeout: float) -> ExpertParallel:
        """The object itself. Collective."""
        ep = ExpertParallel(
            comm, self.num_experts, self.top_k, self.hidden, self.max_tokens, wire=self.wire,
            combine_wire=self.combine_wire, transport="direct", lanes=self.lanes, align=self.align, dtype=self.dtype,
            timeout=timeout,
        )  # fmt: skip
        begin_at(ep, self.first_epoch)
        comm.barrier()  # a rank that began at once would have its first signals overwritten
        return ep


@dataclass(frozen=True)
class Part:
    """One rank's part in a round."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    reads: str  # "tokens", "gather" or "both"; the experts' outputs have as many rows as what was read last
    capacity: float  # of `gather`, in parts of the rows that there are
    output: torch.dtype  # of its experts
    end: str  # "combine" or "abandon"


@dataclass(frozen=True)
class Plan:
    """One round, as every rank knows it."""

    parts: list[Part]
    scales: torch.Tensor  # [num_experts, hidden]; an expert multiplies by the one and adds the other
    shifts: torch.Tensor

    @classmethod
    def draw(cls, settings: Settings, seed: str, abandons: bool) -> Plan:
        """The same from the same seed. `abandons` is whether some ranks may abandon the round."""
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(rng.getrandbits(62))
        dtype = settings.dtype or rng.choice(DTYPES)
        routing = rng.choice(_ROUTINGS)
        shape = (settings.num_experts, settings.hidden)
        scales, shifts = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        target = rng.randrange(settings.world)
        parts = []
        for rank in range(settings.world):
            count = {"empty ranks": 0, "one token": int(rank == target), "full": settings.max_tokens}.get(routing)
            if count is None or (routing == "empty ranks" and rank == target):
                count = rng.randint(0, settings.max_tokens)
            parts.append(
                Part(
                    x=_draw_tokens(count, settings.hidden, dtype, rng, generator),
                    ids=_draw_ids(settings, count, routing, target, rng, generator),
                    weights=torch.randn(count, settings.top_k, generator=generator, dtype=rng.choice(DTYPES[:2])),
                    reads=rng.choice(("tokens", "gather", "both")),
                    capacity=rng.choice((0.0, 0.4, 1.0, 1.0, 1.7)),
                    output=rng.choice(DTYPES),
                    end=rng.choice(("combine",) * 5 + ("abandon",)) if abandons else "combine",
                )
            )
        return cls(parts, scales, shifts)


def _draw_tokens(
    count: int, hidden: int, dtype: torch.dtype, rng: random.Random, generator: torch.Generator
) -> torch.Tensor:
    """Rows of all magnitudes, now and then one of zeros or one with an infinity; some lie apart from each other."""
    wide = torch.randn(count, hidden + rng.choice((0, 0, 5)), generator=generator)
    wide *= 2.0 ** torch.randint(-6, 7, (count, 1), generator=generator)
    if count > 2 and rng.random() < 0.2:
        wide[0], wide[1, 0] = 0.0, torch.inf
    return wide.to(dtype)[:, :hidden]


def _draw_ids(
    settings: Settings, count: int, routing: str, target: int, rng: random.Random, generator: torch.Generator
) -> torch.Tensor:
    experts, shape = settings.num_experts, (count, settings.top_k)
    ids = torch.randint(-1, experts, shape, generator=generator, dtype=rng.choice((torch.int32, torch.int64)))
    theirs = expert_range(experts, settings.world, target)
    if routing == "one rank" and theirs:
        ids = torch.randint(theirs.start, theirs.stop, shape, generator=generator)
    elif routing == "one expert":
        ids.fill_(target % experts)
    elif routing == "nowhere":
        ids.fill_(-1)
    elif routing == "repeated":
        ids[:, -1] = ids[:, 0]
    return ids


# ---------------------------------------------------------------------------------------------------------------------
# What must come of it


class Oracle:
    """A round in plain torch, over the tokens of all ranks, one rank's after the other's.

    Attributes:
        counts, offsets: int64 of each rank's experts, as `Dispatched` has them.
    """

    def __init__(self, settings: Settings, plan: Plan) -> None:
        self.settings, self.plan = settings, plan
        self.wires = WireFormat.parse(settings.wire), WireFormat.parse(settings.combine_wire)
        self.dtype = plan.parts[0].x.dtype
        self.experts = [expert_range(settings.num_experts, settings.world, rank) for rank in range(settings.world)]
        x = torch.cat([part.x for part in plan.parts])
        ids = torch.cat([part.ids.long() for part in plan.parts])
        weights = torch.cat([part.weights.float() for part in plan.parts])
        self.received = dequantize_reference(quantize_reference(x, self.wires[0]), self.wires[0], x.shape[1], x.dtype)
        self.wanted = torch.zeros(x.shape[0], settings.num_experts, dtype=torch.bool)
        self.weights = torch.zeros(x.shape[0], settings.num_experts)
        for k in range(settings.top_k):  # a repeated expert counts once, its weights added in this order
            named = (ids[:, k] >= 0).nonzero()[:, 0]
            self.wanted[named, ids[named, k]] = True
            self.weights[named, ids[named, k]] += weights[named, k]
        self.counts, self.offsets = [], []
        self.rows = torch.zeros_like(self.wanted, dtype=torch.int64)  # the token's row at the expert's rank
        for mine in self.experts:
            wanted = self.wanted[:, mine.start : mine.stop]
            counts = wanted.sum(0)
            padded = -(-counts // settings.align) * settings.align
            offsets = torch.cat((torch.zeros(1, dtype=torch.int64), padded.cumsum(0)))
            self.rows[:, mine.start : mine.stop] = offsets[:-1] + wanted.cumsum(0) - 1
            self.counts.append(counts)
            self.offsets.append(offsets)

    def index(self, rank: int, num_rows: int) -> torch.Tensor:
        """The record of each row: the token's source and its number there; -1 where there is none."""
        counts = [part.x.shape[0] for part in self.plan.parts]
        first = [source * self.settings.max_tokens for source in range(self.settings.world)]
        slots = torch.cat([at + torch.arange(count) for at, count in zip(first, counts, strict=True)])
        index = torch.full((num_rows,), -1)
        for expert in self.experts[rank]:
            wanted = self.wanted[:, expert]
            index[self.rows[wanted, expert]] = slots[wanted]
        return index

    def sent(self, source: int, target: int) -> int:
        """How many records go from one rank to another, and how many sums come back."""
        first = sum(part.x.shape[0] for part in self.plan.parts[:source])
        wanted = self.wanted[first : first + self.plan.parts[source].x.shape[0]]
        return int(wanted[:, self.experts[target].start : self.experts[target].stop].any(1).sum())

    def capacity(self, rank: int) -> int:
        """What the rank passes to `gather`."""
        return int(self.plan.parts[rank].capacity * int(self.offsets[rank][-1]))

    def rows_given(self, rank: int) -> int:
        """How many rows the rank's experts give back."""
        return self.capacity(rank) if self.plan.parts[rank].reads == "gather" else int(self.offsets[rank][-1])

    def tokens(self, rank: int, num_rows: int) -> torch.Tensor:
        """The experts' input in so many rows."""
        out = torch.zeros(max(num_rows, int(self.offsets[rank][-1])), self.settings.hidden, dtype=self.dtype)
        for expert in self.experts[rank]:
            wanted = self.wanted[:, expert]
            out[self.rows[wanted, expert]] = self.received[wanted]
        return out[:num_rows]

    def apply(self, expert: int, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What an expert makes of rows."""
        return (tokens.float() * self.plan.scales[expert] + self.plan.shifts[expert]).to(dtype)

    def result(self, home: int) -> torch.Tensor:
        """What `combine` gives a rank, when those that abandon the round send no sums."""
        first = sum(part.x.shape[0] for part in self.plan.parts[:home])
        own = slice(first, first + self.plan.parts[home].x.shape[0])
        wire, hidden = self.wires[1], self.settings.hidden
        total = torch.zeros(own.stop - own.start, wire.columns(hidden))
        for rank, part in enumerate(self.plan.parts):
            if part.end == "abandon":
                continue
            part_sum = torch.zeros(len(total), hidden)
            for expert in self.experts[rank]:
                there = self.wanted[own, expert] & (self.rows[own, expert] < self.rows_given(rank))
                term = self.weights[own, expert, None] * self.apply(expert, self.received[own], part.output).float()
                part_sum = torch.where(there[:, None], part_sum + term, part_sum)
            sent = self.wanted[own, self.experts[rank].start : self.experts[rank].stop].any(1)
            record = quantize_reference(part_sum if wire.quantized else part_sum.to(self.dtype), wire)
            home_sum = scaled_reference(record, wire, hidden, self.dtype)
            total = torch.where(sent[:, None], total + home_sum, total)
        return round_reference(row_reference(total, wire, hidden), self.dtype, saturate=wire.quantized)


# ---------------------------------------------------------------------------------------------------------------------
# One rank


def lanes_of(ep: ExpertParallel) -> list[Any]:
    """The lanes of CPU ranks: `PulledLane`, or `Lane` where kernels are interpreted."""
    rounds: Any = ep._assembly.rounds
    assert isinstance(rounds, DirectRounds | PulledRounds)
    return list(rounds.lanes)


def begin_at(ep: ExpertParallel, number: int) -> None:
    """Rounds, or lines, go on from a number; no peer has written anything yet."""
    rounds: Any = ep._assembly.rounds
    if isinstance(rounds, PulledRounds):
        board = rounds.board
        board._words[len(FIELDS) + rounds.world :] = number
        lines = rounds.memory.local[: board.num_bytes].view(torch.int32).view(-1, LINE_BYTES // 4)
        lines[1 + 2 * rounds.world :, 0] = number
        return
    for lane in rounds.lanes:
        lane.control[CONTROL_EPOCH] = number
        size = 2 * rounds.world * SIGNAL_LINE_BYTES
        signals = lane.buffer[lane.layout.SIGNALS : lane.layout.SIGNALS + size].view(torch.int32)
        signals.view(2 * rounds.world, -1)[:, 0] = number


def poison_lane(lane: Any) -> None:
    """Overwrites all that ranks share of a lane but its signals."""
    if isinstance(lane, PulledLane):
        lane.memory[:] = POISON
    else:
        lane.buffer[lane.layout.IDS :] = POISON


class RandomRound:
    """A drawn round at one rank, checked at every step.

    Args:
        ep, settings: what it runs on; the settings' world is the communicator's size.
        seed: the same on all ranks.
        where: what to say of it in an error.
        abandons: whether some ranks may abandon it.
    """

    def __init__(
        self, ep: ExpertParallel, settings: Settings, seed: str, where: str = "", abandons: bool = True
    ) -> None:
        self.ep, self.me, self.where = ep, ep.comm.rank, f"{where} seed {seed}, {settings}"
        plan = Plan.draw(settings, seed, abandons)
        self.part = plan.parts[self.me]
        self.oracle = Oracle(settings, plan)
        self.lane = 0
        self.dispatched: Dispatched | None = None
        self.expert_out: torch.Tensor | None = None

    def dispatch(self, lane: int) -> None:
        """Sends the tokens, and checks what was routed here."""
        self.lane = lane
        d = self.dispatched = self.ep.dispatch(self.part.x, self.part.ids, self.part.weights, lane=lane)
        for expected, got in ((self.oracle.counts, d.expert_counts), (self.oracle.offsets, d.expert_offsets)):
            assert torch.equal(got, expected[self.me]), (self.where, got, expected[self.me])
        assert torch.equal(d.index, self.oracle.index(self.me, d.index.shape[0])), (self.where, d.index)
        peers = [rank for rank in range(self.ep.comm.size) if rank != self.me]
        there = sum(self.oracle.sent(self.me, peer) for peer in peers)
        back = sum(self.oracle.sent(peer, self.me) for peer in peers)
        assert (d.dispatch_traffic.rows, d.combine_traffic.rows) == (there, back), self.where

    def read(self) -> None:
        """Takes the experts' input out of the lane and computes their outputs, with NaN where nobody may look."""
        assert self.dispatched is not None
        d, oracle, part = self.dispatched, self.oracle, self.part
        if part.reads != "gather":
            tokens = d.tokens
            assert_same_bits(f"d.tokens: {self.where}", oracle.tokens(self.me, int(d.expert_offsets[-1])), tokens)
        if part.reads != "tokens":
            capacity = oracle.capacity(self.me)
            gathered, overflow = d.gather(capacity)
            given = min(capacity, int(d.expert_offsets[-1]))
            assert_same_bits(f"d.gather: {self.where}", oracle.tokens(self.me, given), gathered[:given])
            assert bool(overflow) == (capacity < int(d.expert_offsets[-1])), self.where
            if part.reads == "gather":
                tokens = gathered
        out = torch.full((tokens.shape[0], tokens.shape[1] + 3), torch.nan, dtype=part.output)[:, :-3]
        for place, expert in enumerate(oracle.experts[self.me]):
            begin = int(d.expert_offsets[place])
            rows = slice(begin, min(begin + int(d.expert_counts[place]), tokens.shape[0]))
            out[rows] = oracle.apply(expert, tokens[rows], part.output)
        self.expert_out = out

    def end(self, into: torch.Tensor | None = None, without: frozenset[int] = frozenset()) -> None:
        """Combines and checks the result, or abandons the round, as was drawn. `without` leave it open."""
        assert self.dispatched is not None and self.expert_out is not None
        if self.part.end == "abandon":
            self.dispatched.abandon()
            return
        try:
            y = self.ep.combine(self.expert_out, self.dispatched, out=into)
        except RoutingError as error:
            assert without and f"{name_ranks(without)} left this round open" in str(error), (str(error), self.where)
        else:
            assert not without, f"sums of ranks that left the round open were not missed: {self.where}"
            assert_same_bits(f"combine: {self.where}", self.oracle.result(self.me), y)

    def play(self, lane: int) -> None:
        """All of it."""
        self.dispatch(lane)
        self.read()
        self.end()


class Pauses:
    """Random waits of one rank, whose pace is drawn anew for every ExpertParallel."""

    def __init__(self) -> None:
        self.rng = random.Random(secrets.randbits(64))
        self.pace = 0.0

    def draw_pace(self) -> None:
        """Some ranks never pause, some are many times slower than others."""
        self.pace = self.rng.choice((0.0, 0.3, 1.0, 1.0, 4.0))

    def between(self, chance: float, seconds: float) -> None:
        """Perhaps a pause, of up to so many seconds at pace 1."""
        if self.rng.random() < chance:
            time.sleep(self.rng.random() * seconds * self.pace)

    def around(self, kernels: Any) -> Any:
        """The same kernels, now and then late."""

        def late(kernel: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any) -> Any:
                self.between(0.25, 0.003)
                return kernel(*arguments)

            return run

        if isinstance(kernels, RoundKernels):
            return replace(kernels, **{field.name: late(getattr(kernels, field.name)) for field in fields(kernels)})
        return SimpleNamespace(**{name: late(getattr(kernels, name)) for name in PULLED_KERNELS})


def run_rank(
    comm: Communicator,
    schedule: Schedule,
    seed: int,
    rounds: int,
    change: Callable[[Any], None] | None = None,
    timeout: float = 20.0,
) -> Counter[str]:
    """One rank of a schedule; returns how often what happened.

    Args:
        change: makes rounds do something wrong, to see that it shows.
        timeout: of waits for peers, in seconds.

    Raises:
        AssertionError: something differs from the oracle.
    """
    rng, pauses, seen = random.Random(f"{seed} {schedule.name}"), Pauses(), Counter[str]()
    while seen["rounds"] < rounds:
        settings = Settings.draw(schedule, rng)
        pauses.draw_pace()
        ep = settings.make(comm, timeout)
        made: Any = ep._assembly.rounds
        if change is not None:
            change(made)
        made.kernels = pauses.around(made.kernels)
        memory_bytes = ep.memory_bytes
        rank = _Rank(ep, schedule, settings, rng, pauses, seen, f"{schedule.name}, seed {seed}, rank {comm.rank}")
        for _ in range(min(ROUNDS_OF_ONE_EP, rounds - seen["rounds"])):
            rank.begin_a_round()
            pauses.between(0.2, 0.01)
        if seen["rounds"] == rounds:  # however few there are, some are combined; before, an ep closes over open ones
            rank.end_open_rounds()
        ep.check()
        assert ep.memory_bytes == memory_bytes
        ep.close()
        seen["eps"] += 1
    return seen


@dataclass
class _Rank:
    """One rank and its ExpertParallel. `rng` draws the same on all ranks, `pauses.rng` does not."""

    ep: ExpertParallel
    schedule: Schedule
    settings: Settings
    rng: random.Random
    pauses: Pauses
    seen: Counter[str]
    name: str

    def __post_init__(self) -> None:
        self.me = self.ep.comm.rank
        self.open: list[RandomRound | None] = [None] * self.settings.lanes

    def begin_a_round(self) -> None:
        """Ends rounds until a lane is to begin one, and begins it, perhaps over one that is open."""
        while True:
            lane = self.rng.randrange(self.settings.lanes)
            before = self.open[lane]
            if before is None:
                break
            if self.rng.random() < 0.3:
                self._leave(before)
                break
            self._end(before)
        self._poison_between_barriers(lane)
        if self.settings.dtype is None and self.settings.world > 1 and self.rng.random() < 0.15:
            self._dispatch_different_dtypes(lane)
        self.seen["rounds"] += 1
        where = f"{self.name}, round {self.seen['rounds']}, lane {lane},"
        round_ = RandomRound(self.ep, self.settings, f"{self.rng.getrandbits(64)}", where)
        if self.rng.random() < 0.1:
            self._dispatch_nonsense(lane, round_.part)
        if self.schedule.interpreted:
            num_programs = self.pauses.rng.randint(1, 5)
            self.ep._assembly.rounds.config = replace(self.ep._assembly.rounds.config, num_programs=num_programs)
        round_.dispatch(lane)
        self.open[lane] = round_
        if self.pauses.rng.random() < 0.5:
            self._read(round_)

    def end_open_rounds(self) -> None:
        """Ends every round that is open."""
        for round_ in self.open:
            if round_ is not None:
                self._end(round_)

    def _read(self, round_: RandomRound) -> None:
        round_.read()
        if self.schedule.poison == "own":
            # Dispatch is over for all ranks, and what this one needed is read. Its ids it needs until it has combined.
            lane = lanes_of(self.ep)[round_.lane]
            if isinstance(lane, PulledLane):  # peers may still read records, and no longer the last round's sums
                lane.memory[lane.layout.SUMS :] = POISON
            else:
                lane.buffer[lane.layout.WEIGHTS : lane.layout.SUMS] = POISON

    def _end(self, round_: RandomRound, without: frozenset[int] = frozenset()) -> None:
        if round_.expert_out is None:
            self._read(round_)
        self.pauses.between(0.3, 0.005)
        self.open[round_.lane] = None
        x = round_.part.x
        round_.end(torch.full(x.shape, 7.0, dtype=x.dtype) if self.pauses.rng.random() < 0.5 else None, without)
        self.seen["abandoned" if round_.part.end == "abandon" else "results"] += 1
        if self.schedule.poison == "own":
            self._poison_own(round_.lane)

    def _leave(self, round_: RandomRound) -> None:
        """The next dispatch ends the round at some ranks; the others end it themselves."""
        leaving = frozenset(rank for rank in range(self.settings.world) if self.rng.random() < 0.5)
        if self.schedule.poison == "barriers":  # where who leaves would meet who waits for it
            leaving = frozenset(range(self.settings.world))
        if self.me in leaving:
            self.open[round_.lane] = None
            self.seen["left open"] += 1
        else:
            self._end(round_, leaving)

    def _poison_own(self, lane: int) -> None:
        """From its combine to its next dispatch: what it sent, or what peers write that it has read."""
        tensors = lanes_of(self.ep)[lane]
        layout = tensors.layout
        if isinstance(tensors, PulledLane):
            tensors.memory[: layout.SUMS] = POISON
            return
        tensors.buffer[layout.SUMS :] = POISON
        for begin, size in (
            (layout.IDS, 4 * layout.MAX_TOKENS * layout.TOP_K),
            (layout.WEIGHTS, 4 * layout.MAX_TOKENS * layout.TOP_K),
            (layout.RECORDS, layout.MAX_TOKENS * layout.RECORD_BYTES),
        ):
            tensors.buffer[begin + self.me * size : begin + (self.me + 1) * size] = POISON

    def _poison_between_barriers(self, lane: int) -> None:
        if self.schedule.poison == "barriers":
            self.ep.comm.barrier()
            poison_lane(lanes_of(self.ep)[lane])
            self.ep.comm.barrier()

    def _dispatch_different_dtypes(self, lane: int) -> None:
        """All ranks refuse, and go on."""
        odd = self.rng.randrange(self.settings.world)
        x = torch.ones(1, self.settings.hidden, dtype=DTYPES[1] if self.me == odd else DTYPES[2])
        ids = torch.zeros(1, self.settings.top_k, dtype=torch.int64)
        try:
            self.ep.dispatch(x, ids, torch.ones(ids.shape), lane=lane)
        except RoutingError as error:
            assert f"rank {odd} 1 tokens of {DTYPES[1]}" in str(error), (str(error), self.name)
            self.seen["mismatches"] += 1
        else:
            raise AssertionError(f"tokens of different dtypes were taken: {self.name}")

    def _dispatch_nonsense(self, lane: int, part: Part) -> None:
        """One rank's ids are refused; all ranks hear of it, and go on."""
        odd = self.rng.randrange(self.settings.world)
        ids, told = part.ids, f"rank {odd} refused"
        if self.me == odd:
            ids, told = (
                torch.full((max(1, part.x.shape[0]), self.settings.top_k), self.settings.num_experts),
                "topk_ids",
            )
        try:
            self.ep.dispatch(part.x, ids, part.weights, lane=lane)
        except RoutingError as error:
            assert told in str(error), (str(error), self.name)
            self.seen["refused"] += 1
        else:
            raise AssertionError(f"a round in which ids were no experts' was begun: {self.name}")


# ---------------------------------------------------------------------------------------------------------------------
# All of it


def run(schedule: Schedule, rounds: int, seed: int, timeout: float) -> Counter[str]:
    """Runs a schedule and returns the counts of all ranks, "rounds" and "eps" those of one.

    Raises:
        RankError, RanksTimeout: a rank found a difference, or did not come to its end.
    """
    env = _INTERPRETED if schedule.interpreted else None
    results = run_ranks(
        run_rank, schedule.world, schedule, seed, schedule.rounds_of(rounds), mode=schedule.mode, timeout=timeout,
        env=env,
    )  # fmt: skip
    of_one = Counter({name: results[0][name] for name in ("rounds", "eps")})
    return Counter({**sum(results, Counter()), **of_one})


def main() -> None:
    """Runs all schedules, goes on after failures, and ends with 1 if there were any."""
    parser = argparse.ArgumentParser(description="Random rounds of the direct transport, compared bit for bit.")
    parser.add_argument("--rounds", type=int, default=500, help="of each schedule; interpreted ones run a tenth")
    parser.add_argument("--seed", type=int, help="default: a new one")
    parser.add_argument("--only", help="the schedules with this in their names")
    parser.add_argument("--json", help="where to write what was run")
    arguments = parser.parse_args()
    seed = secrets.randbits(31) if arguments.seed is None else arguments.seed
    chosen = [schedule for schedule in SCHEDULES if (arguments.only or "") in schedule.name]
    if not chosen:
        raise SystemExit(f"no schedule has {arguments.only!r} in its name; there are {[s.name for s in SCHEDULES]}")
    described = machine(torch.device("cpu"))
    records = []
    for schedule in chosen:
        started, failure, seen = time.monotonic(), None, Counter[str]()
        try:
            seen = run(schedule, arguments.rounds, seed, timeout=60.0 + 2.0 * arguments.rounds)
        except (RankError, RanksTimeout) as error:
            failure = str(error)
            print(failure, file=sys.stderr)
        seconds = round(time.monotonic() - started, 1)
        records.append(asdict(schedule) | {"seed": seed, "seconds": seconds, "failure": failure, **dict(seen)})
        print(f"{schedule.name}: {'failed' if failure else dict(seen)}, {seconds} s", flush=True)
    failures = sum(record["failure"] is not None for record in records)
    print(f"{len(records)} schedules, {sum(r.get('rounds', 0) for r in records)} rounds, {failures} failures")
    if arguments.json:
        write_json(
            arguments.json,
            command=shlex.join(["python", "-m", "verification.soak.schedules", *sys.argv[1:]]),
            machine=described,
            failures=failures,
            rounds=sum(record.get("rounds", 0) for record in records),
            seconds=round(sum(record["seconds"] for record in records), 1),
            schedules=records,
        )
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
