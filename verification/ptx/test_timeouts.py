"""Waits that end, on compiled kernels: whom the survivors name, that what follows gives NaN, and no race.

The last rank is gone. The others are stuck, say so, and hear so of each other.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

import torch

from tests.helpers.collective_calls import Call
from thinwire.triton_kernels.leg_layout import ALL_GATHER, ALL_REDUCE
from thinwire.triton_kernels.signal import (
    CONTROL_STATUS,
    MISMATCHED,
    REPORT_EPOCH,
    REPORT_PEERS,
    REPORT_PHASE,
    REPORT_STATUS,
    TIMED_OUT,
)
from verification.ptx.channels import Channels
from verification.ptx.collectives import Collectives
from verification.ptx.device import Device
from verification.ptx.rounds import Rounds

WORLD, GONE = 3, 2
TIMEOUT, GRACE = 100e-6, 50e-6  # of the device's clock, which goes by how often it is read


def _device(seed: int) -> Device:
    return Device(ranks=WORLD, races=True, seed=seed, warps="any order")


def _assert_blamed(report: torch.Tensor, control: torch.Tensor, epoch: int, phase: int) -> None:
    """One rank is to blame, was missing, and said nothing; the others said that they are stuck, and not on this one."""
    assert report[REPORT_STATUS] == control[CONTROL_STATUS] == TIMED_OUT
    assert (report[REPORT_EPOCH], report[REPORT_PHASE]) == (epoch, phase)
    gone = [0, 0, 1]
    assert report[REPORT_PEERS:].view(3, WORLD).tolist() == [gone, gone, [1, 1, 0]]


def _rounds(seed: int, backward: bool) -> None:
    device = _device(seed)
    with device.patch(queued=True):
        rounds = Rounds.of(device, WORLD, weight_grads=backward)
        rounds.timeout, rounds.grace = TIMEOUT, GRACE
        rounds.queue()
        late = [rounds.queue(absent=(GONE,)) for _ in range(2)]
        device.run_queued()
    assert not device.races.found
    for lane in rounds.lanes[:GONE]:
        _assert_blamed(lane.report, lane.control, 2, 0)
        for round_ in late:
            assert round_.results[lane.rank].isnan().all() and round_.gathered[lane.rank].isnan().all()
            if backward:
                assert round_.home[lane.rank].isnan().all()


def test_survivors_of_a_round_name_the_rank_that_never_came() -> None:
    _rounds(0, False)


@pytest.mark.exhaustive
def test_survivors_of_a_round_of_backward() -> None:
    _rounds(1, True)


@pytest.mark.exhaustive
def test_survivors_of_a_collective_name_the_rank_that_never_came() -> None:
    device = _device(0)
    with device.patch(queued=True):
        collectives = Collectives.of(device, WORLD)
        collectives.timeout, collectives.grace = TIMEOUT, GRACE
        collectives.queue(Call(ALL_REDUCE, (100, 100, 100), num_programs=3))
        late = [
            collectives.queue(Call(op, (300, 300, 300), num_programs=3), absent=(GONE,))
            for op in (ALL_REDUCE, ALL_GATHER)
        ]
        device.run_queued()
    assert not device.races.found
    for end in collectives.ends[:GONE]:
        _assert_blamed(end.report, end.control, 3, 0)
        assert all(outs[end.rank].isnan().all() for outs in late)


COUNTS = [[12, 11, 13]] * WORLD


@pytest.mark.exhaustive
@pytest.mark.parametrize("halfway", [False, True])
def test_survivors_of_an_all_to_all_name_the_rank_that_never_came(halfway: bool) -> None:
    """Or that sent its first pieces, and died then."""
    device = _device(3)
    gone = {"halfway" if halfway else "absent": (GONE,)}
    with device.patch(queued=True):
        channels = Channels.of(device, WORLD, timeout=TIMEOUT)
        channels.queue([[1, 3, 2]] * WORLD, (40,), torch.bfloat16, "int8")
        first = channels.queue(COUNTS, (40,), torch.bfloat16, "int8", **gone)
        second = channels.queue(COUNTS, (40,), torch.float32, "none", absent=(GONE,))
        device.run_queued()
    assert not device.races.found
    for channel in channels.channels[:GONE]:
        end = channel._end
        _assert_blamed(end.report, end.control, 2, int(halfway))
        unwritten = WORLD  # the rows between the segments
        rows = [outs[end.rank].isnan().all(1) for outs in (first, second)]
        assert halfway or int(rows[0].sum()) == len(rows[0]) - unwritten
        assert rows[0].any() and int(rows[1].sum()) == len(rows[1]) - unwritten


@pytest.mark.exhaustive
def test_a_count_that_differs_ends_an_all_to_all_everywhere() -> None:
    device = _device(4)
    with device.patch(queued=True):
        channels = Channels.of(device, WORLD, timeout=TIMEOUT)
        channels.queue(COUNTS, (40,), torch.bfloat16, "int8", expects={(1, 0): 12})
        device.run_queued()
    assert not device.races.found
    reports = [channel._end.report for channel in channels.channels]
    assert [int(report[REPORT_STATUS]) for report in reports] == [TIMED_OUT, MISMATCHED, TIMED_OUT]
    assert reports[1][REPORT_PEERS : REPORT_PEERS + WORLD].tolist() == [1, 0, 0]
    for report in (reports[0], reports[2]):
        blamed, _, said = report[REPORT_PEERS:].view(3, WORLD).tolist()
        assert not any(blamed) and said[1] == 1
