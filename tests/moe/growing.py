"""Random calls on lanes that grow, some of which are not finished, each compared bit for bit with plain torch.

What `tests.moe.schedules` runs where a schedule `grows`. All ranks draw the same calls, and who does not finish which:
so every rank knows what must come of each at every other, a round or which error.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.moe.schedules import Oracle, Plan, Schedule, Settings
from tests.wires import assert_same_bits
from thinwire.comm.communicator import Communicator
from thinwire.errors import LaneError, RoutingError, ThinwireError
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.parallel import ExpertParallel

_CALLS_OF_ONE_EP = 15
_MOST = (0, 1, 1, 2, 5, 9, 17, 40)


@dataclass
class _Open:
    """A round of a lane, as all ranks know it."""

    oracle: Oracle
    parts: Plan
    without: frozenset[int]  # ranks that have left it
    d: Dispatched | None  # None at these


def run_rank(comm: Communicator, schedule: Schedule, seed: int, calls: int) -> Counter[str]:
    """One rank of a schedule; returns how often what happened.

    Raises:
        AssertionError: something differs from what must come of it.
    """
    rng, seen = random.Random(f"{seed} {schedule.name}"), Counter[str]()
    while seen["rounds"] < calls:
        settings = replace(Settings.draw(schedule, rng), first_epoch=0, max_tokens=40)
        transport = rng.choice(("direct", "direct", "direct", "staged"))
        with ExpertParallel(
            comm, settings.num_experts, settings.top_k, settings.hidden, None, wire=settings.wire,
            combine_wire=settings.combine_wire, transport=transport, lanes=schedule.lanes, align=settings.align,
            dtype=settings.dtype, timeout=20.0,
        ) as ep:  # fmt: skip
            rank = _Rank(ep, settings, rng, seen, f"{schedule.name}, seed {seed}, rank {comm.rank}")
            for _ in range(_CALLS_OF_ONE_EP):
                if seen["rounds"] < calls:
                    rank.call()
            rank.end_all()
            ep.check()
        seen["eps"] += 1
    return seen


class _Rank:
    """One rank and its ExpertParallel. `rng` draws the same on all ranks."""

    def __init__(
        self, ep: ExpertParallel, settings: Settings, rng: random.Random, seen: Counter[str], name: str
    ) -> None:
        self.ep, self.settings, self.rng, self.seen, self.name = ep, settings, rng, seen, name
        self.me, self.direct = ep.comm.rank, ep.transport == "direct"
        self.room = 1 if self.direct else 2**31 - 1
        self.open: list[_Open | None] = [None] * settings.lanes
        self.next_lane: int | None = None  # the only one on which ranks that left something may go on
        self.left = False  # whether some rank left the last dispatch

    def call(self) -> None:
        """One call, or a round and its end."""
        self.where = f"{self.name}, round {self.seen['rounds']}, {self.settings}"
        kind = self.rng.choice(("dispatch",) * 6 + ("end", "end", "capacity", "refused"))
        lane = self.rng.randrange(self.settings.lanes)
        if self.next_lane is not None:
            kind, lane, self.next_lane = "dispatch", self.next_lane, None
        if kind == "end":
            self._end(lane)
        elif kind == "capacity":
            self._ensure_capacity()
        else:
            self._dispatch(lane, refused=kind == "refused")

    def end_all(self) -> None:
        """Ends every round that all ranks have, once none of them has left anything that others wait for."""
        while self.left:
            self.call()
        for lane in range(self.settings.lanes):
            self._end(lane)

    def _end(self, lane: int) -> None:
        round_ = self.open[lane]
        if round_ is None or round_.without:
            return  # who left it closes it with the next dispatch
        self.open[lane] = None
        self._combine(round_, frozenset())

    def _combine(self, round_: _Open, without: frozenset[int]) -> None:
        d, oracle, part = round_.d, round_.oracle, round_.parts.parts[self.me]
        assert d is not None
        tokens = d.tokens
        assert_same_bits(f"tokens: {self.where}", oracle.tokens(self.me, int(oracle.offsets[self.me][-1])), tokens)
        out = torch.full(tokens.shape, torch.nan, dtype=part.output)
        for place, expert in enumerate(oracle.experts[self.me]):
            begin = int(oracle.offsets[self.me][place])
            rows = slice(begin, begin + int(oracle.counts[self.me][place]))
            out[rows] = oracle.apply(expert, tokens[rows], part.output)
        if without:
            self._raises(RoutingError, "left this round open", lambda: self.ep.combine(out, d))
            return
        y = self.ep.combine(out, d)
        assert_same_bits(f"combine: {self.where}", oracle.result(self.me), y)
        self.seen["results"] += 1

    def _ensure_capacity(self) -> None:
        needs = [self.rng.choice(_MOST) for _ in range(self.settings.world)]
        in_use = any(round_ is not None for round_ in self.open)
        if max(needs) > self.room and in_use:
            self._raises(LaneError, "is made while no lane is in use", lambda: self.ep.ensure_capacity(needs[self.me]))
            return
        self.ep.ensure_capacity(needs[self.me])
        self.room = max(self.room, *needs)
        assert self.ep.max_tokens == self.room, self.where

    def _raises(self, kind: type[ThinwireError], match: str, call: Callable[[], object]) -> None:
        try:
            call()
        except kind as error:
            assert match in str(error), (str(error), self.where)
            self.seen[kind.__name__] += 1
        else:
            raise AssertionError(f"{match} was not raised: {self.where}")

    def _dispatch(self, lane: int, refused: bool) -> None:
        rng, world = self.rng, self.settings.world
        self.seen["rounds"] += 1
        most = rng.choice(_MOST)
        plan = Plan.draw(replace(self.settings, max_tokens=most), f"{rng.getrandbits(64)}", abandons=False)
        plan = replace(plan, parts=[replace(part, reads="tokens") for part in plan.parts])
        oracle = Oracle(self.settings, plan)
        part = plan.parts[self.me]
        need = max(len(part.x) for part in plan.parts)
        halves = rng.random() < 0.3
        others = any(round_ is not None for number, round_ in enumerate(self.open) if number != lane)
        leaving = frozenset[int]()  # who starts it and does not finish it
        if self.direct and not refused and rng.random() < 0.2:
            leaving = frozenset(rng.sample(range(world), rng.choice((1, 1, world))))
        grows = need > self.room
        self.open[lane] = None
        if refused:
            self._refused(lane, part, rng.randrange(world))
            return
        if self.me in leaving:
            self.ep.dispatch_start(part.x, part.ids, part.weights, lane=lane)
            self.seen["not finished"] += 1
        self.left, d = bool(leaving), None
        if self.me not in leaving:
            if grows and others:
                self._raises(LaneError, "no lane is in use", lambda: self._whole(lane, part, halves))
            elif grows and leaving:
                names = ", ".join(map(str, sorted(leaving)))
                match = f"rank{'s' if len(leaving) > 1 else ''} {names} cannot send it again"
                self._raises(RoutingError, match, lambda: self._whole(lane, part, halves))
            else:
                d = self._whole(lane, part, halves)
                assert torch.equal(d.expert_counts, oracle.counts[self.me]), self.where
        if grows and not others:
            self.room = 1 << (need - 1).bit_length()
            self.seen["growths"] += 1
        if not (grows and (others or leaving)) and len(leaving) < world:
            round_ = _Open(oracle, plan, leaving, d)
            if leaving and rng.random() < 0.5:  # who left it closes it at once
                if d is not None:
                    self._combine(round_, leaving)
            else:
                self.open[lane] = round_
        if leaving:
            self.next_lane = lane

    def _whole(self, lane: int, part: Any, halves: bool) -> Dispatched:
        if halves:
            return self.ep.dispatch_finish(self.ep.dispatch_start(part.x, part.ids, part.weights, lane=lane))
        return self.ep.dispatch(part.x, part.ids, part.weights, lane=lane)

    def _refused(self, lane: int, part: Any, odd: int) -> None:
        ids, match = part.ids, f"rank {odd} refused"
        if self.me == odd:
            shape = max(1, len(part.x)), self.settings.top_k
            ids, match = torch.full(shape, self.settings.num_experts), "topk_ids"
        self._raises(RoutingError, match, lambda: self.ep.dispatch(part.x, ids, part.weights, lane=lane))
