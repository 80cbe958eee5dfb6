"""Rounds whose memory is corrupted on its way: with checksums, what a rank returns is right, or the lane has ended."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import torch

from tests import rounds
from tests.rounds import Tokens, make_lanes
from tests.speeds import exhaustive_but
from tests.tampering import CHANGES
from thinwire.triton_kernels.cpu import combine, dispatch, permute
from thinwire.triton_kernels.round_layout import (
    CHECKED_RECORD,
    COMBINE,
    DISPATCH,
    REPORT_CHECKED,
    REPORT_ROW,
    REPORT_SOURCE,
    Lane,
)
from thinwire.triton_kernels.signal import CORRUPTED, REPORT_PEERS, REPORT_STATUS, RUNNING, TIMED_OUT

WORLD, EXPERTS, TOP_K, HIDDEN, TOKENS = 3, 7, 3, 72, 6
POINTS = ("send_tokens", "wait dispatch", "route", "send_sums", "wait combine")
VICTIM = 1


class Kernels:
    """Those of numba, under the names that a round has for them."""

    send_tokens, wait, close_round = dispatch.send_tokens, dispatch.wait, dispatch.close_round
    route, gather, send_sums, sum_home = permute.route, permute.gather, combine.send_sums, combine.sum_home


def drawn(seed: int, spec: str, checksums: bool) -> tuple[list[Lane], list[Tokens]]:
    lanes = make_lanes(WORLD, EXPERTS, TOP_K, HIDDEN, TOKENS, spec, checksums=checksums)
    generator = torch.Generator().manual_seed(seed)
    return lanes, [Tokens.random(TOKENS, HIDDEN, TOP_K, EXPERTS, torch.float32, generator) for _ in lanes]


@pytest.mark.parametrize("spec", exhaustive_but(["int8"], ["int8", "none", "int4", "int8:row"]))
def test_rounds_with_checksums_give_what_rounds_without_give(spec: str) -> None:
    scales = torch.arange(1.0, EXPERTS + 1)[:, None].expand(-1, HIDDEN)
    plain, checked = (drawn(3, spec, checksums)[0] for checksums in (False, True))
    for seed in range(3):
        tokens, closing = drawn(seed, spec, True)[1], (2,) * (seed == 2)
        results = [rounds.run_round(Kernels, lanes, tokens, scales, closing) for lanes in (plain, checked)]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_without_checksums_the_layout_is_what_it_was() -> None:
    (plain, *_), (checked, *_) = (drawn(0, "int8", checksums)[0] for checksums in (False, True))
    assert plain.layout.CHECKSUMS == plain.layout.SUM_CHECKSUMS == 0
    assert checked.layout.CHECKSUMS == plain.layout.NUM_BYTES
    assert checked.layout.NUM_BYTES - plain.layout.NUM_BYTES == 2 * 384 + 128 + 384


def play(lanes: list[Lane], tokens: list[Tokens], corrupt: Callable[[str], None]) -> list[torch.Tensor] | None:
    """What the victim's gather and combine give in one round, or None once its lane has ended."""
    for lane, mine in zip(lanes, tokens, strict=True):
        dispatch.send_tokens(lane, mine.x, mine.ids, mine.weights)
    corrupt("send_tokens")
    sent, victim = [], lanes[VICTIM]
    for lane in lanes:
        dispatch.wait(lane, DISPATCH, 1.0, 0.1)
        if lane is victim:
            corrupt("wait dispatch")
        permute.route(lane)
        if lane is victim:
            corrupt("route")
        x = torch.full((int(lane.expert_offsets[-1]), HIDDEN), 7.0)
        permute.gather(lane, x, torch.tensor(False))
        sent.append(x)
    if victim.report[REPORT_STATUS] != RUNNING:
        return None
    for lane, x in zip(lanes, sent, strict=True):
        combine.send_sums(lane, x, x.dtype)
    corrupt("send_sums")
    dispatch.wait(victim, COMBINE, 1.0, 0.1)
    corrupt("wait combine")
    for lane in lanes:
        if lane is not victim:
            dispatch.wait(lane, COMBINE, 1.0, 0.1)
    out = torch.full_like(tokens[VICTIM].x, 7.0)
    combine.sum_home(victim, out)
    return [sent[VICTIM], out] if victim.report[REPORT_STATUS] == RUNNING else None


def regions(lane: Lane) -> dict[str, torch.Tensor]:
    """What peers write at a rank, but for flags and stuck lines, which end waits and no more."""
    layout, buffer = lane.layout, lane.buffer
    plane = WORLD * TOKENS * TOP_K * 4
    lines = buffer[layout.SIGNALS :][: 2 * WORLD * 64].view(2 * WORLD, 64)
    return {
        "lines": lines[:, 4:12],
        "ids": buffer[layout.IDS :][:plane],
        "weights": buffer[layout.WEIGHTS :][:plane],
        "records": buffer[layout.RECORDS :][: WORLD * TOKENS * layout.RECORD_BYTES],
        "sums": buffer[layout.SUMS :][: TOKENS * layout.SLOTS * layout.SUM_BYTES],
        "checksums": buffer[layout.CHECKSUMS :],
    }


@pytest.mark.parametrize("spec", ["int8", "none"])
@pytest.mark.parametrize("rounds", exhaustive_but([100], [100, 1000]))
def test_no_corrupted_round_gives_a_wrong_result(spec: str, rounds: int) -> None:
    ended = 0
    for seed in range(rounds):
        rng = random.Random(seed)
        lanes, tokens = drawn(seed, spec, True)
        first = drawn(seed + 10**6, spec, True)[1]
        assert play(lanes, first, lambda point: None) is not None
        expected = play(drawn(seed, spec, False)[0], tokens, lambda point: None)
        point, region = rng.choice(POINTS), rng.choice(list(regions(lanes[0])))
        before = regions(lanes[VICTIM])[region].clone()  # of the round before

        def corrupt(
            now: str, rng: random.Random = rng, lane: Lane = lanes[VICTIM], point: str = point, region: str = region,
            before: torch.Tensor = before,
        ) -> None:  # fmt: skip
            if now != point:
                return
            octets = regions(lane)[region]
            if rng.random() < 0.2:
                octets.copy_(before)
                return
            changed = octets.flatten()
            CHANGES[0 if rng.random() < 0.5 else rng.randrange(len(CHANGES))](rng, changed)
            octets.copy_(changed.view_as(octets))

        got = play(lanes, tokens, corrupt)
        if got is None:
            assert lanes[VICTIM].report[REPORT_STATUS] == CORRUPTED
            ended += 1
        else:
            assert expected is not None
            for right, found in zip(expected, got, strict=True):
                assert torch.equal(right, found), f"seed {seed}: {region} after {point}"
    assert ended > rounds // 4


def test_a_whole_round_that_was_left_from_before_does_not_fit() -> None:
    lanes, tokens = drawn(1, "int8", True)
    assert play(lanes, tokens, lambda point: None) is not None
    kept = {name: octets.clone() for name, octets in regions(lanes[VICTIM]).items()}

    def replay(point: str) -> None:
        if point == "send_tokens":
            for name, octets in regions(lanes[VICTIM]).items():
                octets.copy_(kept[name])

    assert play(lanes, tokens, replay) is None, "the same tokens, but of the round before"


def test_swapped_slots_do_not_fit() -> None:
    for rows in ("records", "sums"):
        lanes, tokens = drawn(2, "int8", True)
        layout, victim = lanes[0].layout, lanes[VICTIM]
        size, sums = {
            "records": (layout.RECORD_BYTES, layout.CHECKSUMS),
            "sums": (layout.SUM_BYTES, layout.SUM_CHECKSUMS),
        }[rows]

        def swap(point: str, rows: str = rows, size: int = size, sums: int = sums, victim: Lane = victim) -> None:
            if point == ("send_tokens" if rows == "records" else "send_sums"):
                slots = regions(victim)[rows].view(-1, size)
                beside = victim.buffer[sums:][: 16 * len(slots)].view(-1, 16)
                order = torch.arange(len(slots)).flip(0)
                for octets in (slots, beside):
                    octets.copy_(octets[order].clone())

        assert play(lanes, tokens, swap) is None, rows


def test_what_a_peer_corrupted_ends_its_lane_and_tells_the_others() -> None:
    lanes, tokens = drawn(4, "int8", True)

    def corrupt(point: str) -> None:
        if point == "route":
            record = int(lanes[VICTIM].index[0])
            lanes[VICTIM].records[record, 5] ^= 16

    assert play(lanes, tokens, corrupt) is None
    report, slot = lanes[VICTIM].report, int(lanes[VICTIM].index[0])
    assert report[REPORT_CHECKED] == CHECKED_RECORD
    assert divmod(slot, TOKENS) == (int(report[REPORT_SOURCE]), int(report[REPORT_ROW]))
    other = lanes[0]
    for lane in (lanes[0], lanes[2]):
        combine.send_sums(lane, torch.zeros(int(lane.expert_offsets[-1]), HIDDEN), torch.float32)
    start = time.monotonic()
    dispatch.wait(other, COMBINE, 30.0, 0.1)  # and it does not take 30 seconds
    assert time.monotonic() < start + 20.0
    blamed, missing, said = other.report[REPORT_PEERS:].view(3, WORLD).tolist()
    assert other.report[REPORT_STATUS] == TIMED_OUT and missing[VICTIM] == said[VICTIM] == 1 and not blamed[VICTIM]
    out = torch.zeros(tokens[VICTIM].x.shape)
    combine.sum_home(lanes[VICTIM], out)
    assert out.isnan().all()
