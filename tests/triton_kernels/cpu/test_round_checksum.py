"""Rounds whose memory is corrupted on its way: with checksums, what a rank returns is right, or the lane has ended."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import torch

from tests.helpers import rounds
from tests.helpers.speeds import exhaustive_but
from tests.helpers.tampered_rounds import VICTIM, Kernels, Rounds, Sizes
from thinwire.triton_kernels.cpu import combine, dispatch
from thinwire.triton_kernels.round_layout import CHECKED_RECORD, COMBINE, REPORT_CHECKED, REPORT_ROW, REPORT_SOURCE
from thinwire.triton_kernels.signal import REPORT_PEERS, REPORT_STATUS, TIMED_OUT

SIZES = Sizes()
ROUNDS = Rounds(sizes=SIZES)


@pytest.mark.parametrize("spec", exhaustive_but(["int8"], ["int8", "none", "int4", "int8:row"]))
def test_rounds_with_checksums_give_what_rounds_without_give(spec: str) -> None:
    scales = torch.arange(1.0, SIZES.experts + 1)[:, None].expand(-1, SIZES.hidden)
    plain, checked = (ROUNDS.drawn(3, spec, checksums)[0] for checksums in (False, True))
    for seed in range(3):
        tokens, closing = ROUNDS.drawn(seed, spec, True)[1], (2,) * (seed == 2)
        results = [rounds.run_round(Kernels, lanes, tokens, scales, closing) for lanes in (plain, checked)]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_without_checksums_the_layout_is_what_it_was() -> None:
    (plain, *_), (checked, *_) = (ROUNDS.drawn(0, "int8", checksums)[0] for checksums in (False, True))
    assert plain.layout.CHECKSUMS == plain.layout.SUM_CHECKSUMS == 0
    assert checked.layout.CHECKSUMS == plain.layout.NUM_BYTES
    assert checked.layout.NUM_BYTES - plain.layout.NUM_BYTES == 2 * 384 + 128 + 384


@pytest.mark.parametrize("spec", ["int8", "none"])
@pytest.mark.parametrize("rounds", exhaustive_but([100], [100, 1000]))
def test_no_corrupted_round_gives_a_wrong_result(spec: str, rounds: int) -> None:
    assert sum(ROUNDS.check_corrupted(seed, spec) for seed in range(rounds)) > rounds // 4


@pytest.mark.parametrize("spec", ["int8", "none"])
def test_no_corrupted_round_of_backward_gives_a_wrong_gradient(spec: str) -> None:
    rounds = Rounds(sizes=Sizes(weight_grads=True))
    assert sum(rounds.check_corrupted(seed, spec) for seed in range(100)) > 20


def test_each_bit_of_a_gradient_that_came_home_is_compared() -> None:
    Rounds(sizes=Sizes(weight_grads=True)).check_weight_grads()


def test_a_whole_round_that_was_left_from_before_does_not_fit() -> None:
    ROUNDS.check_stale()


@pytest.mark.parametrize("change", ["swapped", "zeroed"])
def test_rows_that_are_consistent_with_their_sums_do_not_fit_elsewhere(change: str) -> None:
    ROUNDS.check_rows(change)


def test_what_a_peer_corrupted_ends_its_lane_and_tells_the_others() -> None:
    lanes, tokens = ROUNDS.drawn(4, "int8", True)

    def corrupt(point: str) -> None:
        if point == "route":
            record = int(lanes[VICTIM].index[0])
            lanes[VICTIM].records[record, 5] ^= 16

    assert ROUNDS.play(lanes, tokens, corrupt) is None
    report, slot = lanes[VICTIM].report, int(lanes[VICTIM].index[0])
    assert report[REPORT_CHECKED] == CHECKED_RECORD
    assert divmod(slot, SIZES.tokens) == (int(report[REPORT_SOURCE]), int(report[REPORT_ROW]))
    other = lanes[0]
    for lane in (lanes[0], lanes[2]):
        combine.send_sums(lane, torch.zeros(int(lane.expert_offsets[-1]), SIZES.hidden), torch.float32)
    start = time.monotonic()
    dispatch.wait(other, COMBINE, 30.0, 0.1)  # and it does not take 30 seconds
    assert time.monotonic() < start + 20.0
    blamed, missing, said = other.report[REPORT_PEERS:].view(3, SIZES.world).tolist()
    assert other.report[REPORT_STATUS] == TIMED_OUT and missing[VICTIM] == said[VICTIM] == 1 and not blamed[VICTIM]
    out = torch.zeros(tokens[VICTIM].x.shape)
    combine.sum_home(lanes[VICTIM], out)
    assert out.isnan().all()
