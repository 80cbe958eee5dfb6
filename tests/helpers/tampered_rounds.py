"""Rounds whose memory is corrupted on its way, on ranks that share this process: what both kinds of kernels are put to.

One rank is the victim. With checksums, what it returns is right, or its lane has ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.helpers.rounds import Tokens, make_lanes
from tests.helpers.tampering import CHANGES
from thinwire.triton_kernels.cpu import combine, dispatch, permute
from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH, REPORT_ROW, REPORT_SOURCE, Lane
from thinwire.triton_kernels.signal import CORRUPTED, REPORT_STATUS, RUNNING

__all__ = ["VICTIM", "Kernels", "Rounds", "Sizes", "regions"]

POINTS = ("send_tokens", "wait dispatch", "route", "send_sums", "wait combine")
VICTIM = 1


class Kernels:
    """Those of numba, under the names that a round has for them."""

    send_tokens, wait, close_round = dispatch.send_tokens, dispatch.wait, dispatch.close_round
    route, gather, send_sums, sum_home = permute.route, permute.gather, combine.send_sums, combine.sum_home


@dataclass(frozen=True)
class Sizes:
    """Of a round; every rank sends `tokens`."""

    world: int = 3
    experts: int = 7
    top_k: int = 3
    hidden: int = 72
    tokens: int = 6
    weight_grads: bool = False  # lanes are of backward


def regions(lane: Lane) -> dict[str, torch.Tensor]:
    """What peers write at a rank, but for flags and stuck lines, which end waits and no more."""
    layout, buffer = lane.layout, lane.buffer
    world, tokens = layout.WORLD, layout.MAX_TOKENS
    plane = world * tokens * layout.TOP_K * 4
    lines = buffer[layout.SIGNALS :][: 2 * world * 64].view(2 * world, 64)
    grads = {"weight_grads": lane.weight_grads.view(torch.uint8)} if layout.WEIGHT_GRADS else {}
    return grads | {
        "lines": lines[:, 4:12],
        "ids": buffer[layout.IDS :][:plane],
        "weights": buffer[layout.WEIGHTS :][:plane],
        "records": buffer[layout.RECORDS :][: world * tokens * layout.RECORD_BYTES],
        "sums": buffer[layout.SUMS :][: tokens * layout.SLOTS * layout.SUM_BYTES],
        "checksums": buffer[layout.CHECKSUMS :],
    }


def _experts(lane: Lane) -> range:
    return range(lane.layout.first_expert(lane.rank), lane.layout.first_expert(lane.rank + 1))


@dataclass(frozen=True)
class Rounds:
    """Rounds of some sizes, with these kernels."""

    kernels: Any = Kernels
    sizes: Sizes = Sizes()

    def drawn(self, seed: int, spec: str, checksums: bool) -> tuple[list[Lane], list[Tokens]]:
        """A lane and tokens of each rank."""
        sizes = self.sizes
        lanes = make_lanes(
            sizes.world, sizes.experts, sizes.top_k, sizes.hidden, sizes.tokens, spec, checksums=checksums,
            weight_grads=sizes.weight_grads,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        shape = sizes.tokens, sizes.hidden, sizes.top_k, sizes.experts
        return lanes, [Tokens.random(*shape, torch.float32, generator) for _ in lanes]

    def play(
        self, lanes: list[Lane], tokens: list[Tokens], corrupt: Callable[[str], None] = lambda point: None
    ) -> list[torch.Tensor] | None:
        """What the victim's gather and combine give in one round, or None once its lane has ended."""
        generator = torch.Generator().manual_seed(8)
        grads = [torch.randn(lane.weights.shape, generator=generator) for lane in lanes]
        home = torch.full(tokens[VICTIM].ids.shape, 7.0)
        for lane, mine in zip(lanes, tokens, strict=True):
            self.kernels.send_tokens(lane, mine.x, mine.ids, mine.weights)
        corrupt("send_tokens")
        sent, victim = [], lanes[VICTIM]
        for lane in lanes:
            self.kernels.wait(lane, DISPATCH, 1.0, 0.1)
            if lane is victim:
                corrupt("wait dispatch")
            self.kernels.route(lane)
            if lane is victim:
                corrupt("route")
            x = torch.full((int(lane.expert_offsets[-1]), self.sizes.hidden), 7.0)
            self.kernels.gather(lane, x, torch.tensor(False))
            sent.append(x)
        if victim.report[REPORT_STATUS] != RUNNING:
            return None
        for lane, x, of_weights in zip(lanes, sent, grads, strict=True):
            self.kernels.send_sums(lane, x, x.dtype, None, *[of_weights][: self.sizes.weight_grads])
        corrupt("send_sums")
        self.kernels.wait(victim, COMBINE, 1.0, 0.1)
        corrupt("wait combine")
        for lane in lanes:
            if lane is not victim:
                self.kernels.wait(lane, COMBINE, 1.0, 0.1)
        out = torch.full_like(tokens[VICTIM].x, 7.0)
        self.kernels.sum_home(victim, out, *[home][: self.sizes.weight_grads])
        return [sent[VICTIM], out, home] if victim.report[REPORT_STATUS] == RUNNING else None

    def check_corrupted(self, seed: int, spec: str) -> bool:
        """Something drawn is changed somewhere: whether the lane ended. If not, the results must be right."""
        rng = random.Random(seed)
        lanes, tokens = self.drawn(seed, spec, True)
        first = self.drawn(seed + 10**6, spec, True)[1]
        assert self.play(lanes, first) is not None
        expected = Rounds(sizes=self.sizes).play(self.drawn(seed, spec, False)[0], tokens)
        assert expected is not None
        point, region = rng.choice(POINTS), rng.choice(list(regions(lanes[0])))
        before = regions(lanes[VICTIM])[region].clone()  # of the round before

        def corrupt(now: str) -> None:
            if now != point:
                return
            octets = regions(lanes[VICTIM])[region]
            if rng.random() < 0.2:
                octets.copy_(before)
                return
            changed = octets.flatten()
            CHANGES[0 if rng.random() < 0.5 else rng.randrange(len(CHANGES))](rng, changed)
            octets.copy_(changed.view_as(octets))

        got = self.play(lanes, tokens, corrupt)
        if got is None:
            assert lanes[VICTIM].report[REPORT_STATUS] == CORRUPTED, f"seed {seed}: {region} after {point}"
            return True
        for right, found in zip(expected, got, strict=True):
            assert torch.equal(right, found), f"seed {seed}: {region} after {point}"
        return False

    def check_stale(self) -> None:
        """The same tokens, but all of it is what was left from the round before."""
        lanes, tokens = self.drawn(1, "int8", True)
        assert self.play(lanes, tokens) is not None
        kept = {name: octets.clone() for name, octets in regions(lanes[VICTIM]).items()}

        def replay(point: str) -> None:
            if point == "send_tokens":
                for name, octets in regions(lanes[VICTIM]).items():
                    octets.copy_(kept[name])

        assert self.play(lanes, tokens, replay) is None

    def check_rows(self, change: str) -> None:
        """All records, and all sums, with the checksums beside them: `zeroed`, or in each other's slots (`swapped`)."""
        for rows in ("records", "sums"):
            lanes, tokens = self.drawn(2, "int8", True)
            layout, victim = lanes[0].layout, lanes[VICTIM]
            size, sums = {
                "records": (layout.RECORD_BYTES, layout.CHECKSUMS),
                "sums": (layout.SUM_BYTES, layout.SUM_CHECKSUMS),
            }[rows]

            def spoil(point: str, rows: str = rows, size: int = size, sums: int = sums, victim: Lane = victim) -> None:
                if point == ("send_tokens" if rows == "records" else "send_sums"):
                    slots = regions(victim)[rows].view(-1, size)
                    for octets in (slots, victim.buffer[sums:][: 16 * len(slots)].view(-1, 16)):
                        octets.copy_(octets.flip(0) if change == "swapped" else torch.zeros_like(octets))

            assert self.play(lanes, tokens, spoil) is None, f"{rows} {change}"

    def check_weight_grads(self, bits: range = range(0, 32, 5)) -> None:
        """One bit of a router weight's gradient is changed on its way: of each that came, whichever the bit."""
        for bit in bits:
            lanes, tokens = self.drawn(3, "int8", True)
            ids = tokens[VICTIM].ids
            # Only an expert's first mention has a gradient, which is nowhere else.
            earlier = (ids.unsqueeze(2) == ids.unsqueeze(1)).tril(-1).any(2)
            places = ((ids >= 0) & ~earlier).nonzero().tolist()
            token, k = places[bit % len(places)]
            expected = self.play(lanes, tokens)
            assert expected is not None and expected[2][token, k] != 0

            def corrupt(
                point: str, lanes: list[Lane] = lanes, bit: int = bit, of: tuple[int, int] = (token, k)
            ) -> None:
                if point == "send_sums":
                    lanes[VICTIM].weight_grads.view(torch.int32)[of] ^= torch.tensor(1 << bit).int()

            assert self.play(lanes, tokens, corrupt) is None, f"bit {bit}"
            report = lanes[VICTIM].report
            owner = [lane for lane in lanes if int(ids[token, k]) in _experts(lane)][0].rank
            assert (int(report[REPORT_SOURCE]), int(report[REPORT_ROW])) == (owner, token)
            out, home = torch.zeros(tokens[VICTIM].x.shape), torch.zeros(ids.shape)
            self.kernels.sum_home(lanes[VICTIM], out, home)
            assert out.isnan().all() and home.isnan().all()

    def check_finding(self) -> None:
        """Of many records that do not fit, the report names the first that was found, by its rank and its token.

        An interpreted gather is three programs, of which the first finds rows 0 and 3.
        """
        lanes, tokens = self.drawn(4, "int8", True)
        found: list[int] = []

        def corrupt(point: str) -> None:
            if point == "route":
                index = lanes[VICTIM].index
                found.extend(index[index >= 0].tolist())
                lanes[VICTIM].records[sorted(set(found)), 5] ^= 16

        assert self.play(lanes, tokens, corrupt) is None
        report = lanes[VICTIM].report
        assert divmod(found[0], self.sizes.tokens) == (int(report[REPORT_SOURCE]), int(report[REPORT_ROW]))
        assert found[0] != found[3]
        out = torch.zeros(tokens[VICTIM].x.shape)
        self.kernels.sum_home(lanes[VICTIM], out)
        assert out.isnan().all()
