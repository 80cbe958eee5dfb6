"""Rounds over two levels on compiled kernels, all ranks at once, and a pretended network: right, and without a race."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

from thinwire.triton_kernels.signal import REPORT_PEERS, REPORT_STATUS, RUNNING, TIMED_OUT
from verification.ptx.device import Device
from verification.ptx.rails import RailedRounds

ONE_EACH, TWO_EACH = ((0,), (1,)), ((0, 1), (2, 3))


def _run(hosts: tuple[tuple[int, ...], ...], seed: int, wire: str = "int8", weight_grads: bool = False) -> Device:
    device = Device(ranks=sum(map(len, hosts)), races=True, seed=seed, warps="any order")
    with device.patch(queued=True):
        rounds = RailedRounds.on_hosts(device, hosts, wire=wire, weight_grads=weight_grads, seed=seed)
        rounds.queue()
        rounds.queue(closing=(1,))
        rounds.queue()
        device.run_queued()
    rounds.check()
    assert device.races is not None and not device.races.found
    return device


def test_rounds_of_two_hosts_without_a_race() -> None:
    device = _run(ONE_EACH, 0)
    # Of a rank's round, beside two exchanges and three copies of lines; a rank once has no tokens to sum up.
    assert sum(device.launches.values()) == 2 * 3 * 14 - 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("wire", "weight_grads"), [("int8", False), ("int8", True), ("none", False), ("int8+h64", False)]
)
@pytest.mark.parametrize("hosts", [TWO_EACH, ((0,), (1,), (2,))], ids=str)
def test_rounds_of_more_ranks_without_a_race(hosts: tuple[tuple[int, ...], ...], wire: str, weight_grads: bool) -> None:
    _run(hosts, 1, wire, weight_grads)


def test_a_rank_that_gave_up_is_missed_on_all_hosts() -> None:
    """Though its messages still come: they have the flag of its last round."""
    device = Device(ranks=4)
    with device.patch(queued=True):
        rounds = RailedRounds.on_hosts(device, TWO_EACH, hidden=32, max_tokens=1)
        rounds.queue(counts=(1, 1, 1, 1))
        rounds.timeout, rounds.grace = 60e-6, 30e-6
        rounds.queue(absent=(1,), counts=(1, 1, 1, 1))
        rounds.queue_given_up(1)
        device.run_queued()
    # On its own host rank 3 is missed as well, whose rows it takes there.
    for rank, missed in {0: [0, 1, 0, 1], 2: [0, 1, 0, 0], 3: [0, 1, 0, 0]}.items():
        report = rounds.lanes[rank].report
        assert report[REPORT_STATUS] == TIMED_OUT and report[REPORT_PEERS:][:4].tolist() == missed, rank
        assert rounds.rounds[1].results[rank].isnan().all()


def test_a_rank_that_missed_sums_is_missed_on_other_hosts() -> None:
    """Though its own flag was out before it waited, and what it missed is there by the time it sends its NaN."""
    device = Device(ranks=4)
    with device.patch(queued=True):
        rounds = RailedRounds.on_hosts(device, TWO_EACH, hidden=32, max_tokens=1)
        rounds.timeout, rounds.grace, rounds.late = 1e-3, 30e-6, (1, 0)
        rounds.queue(counts=(1, 1, 1, 1))
        device.run_queued()
    for rank, missed in {0: [0, 1, 0, 0], 2: [1, 0, 0, 0]}.items():
        report = rounds.lanes[rank].report
        assert report[REPORT_STATUS] == TIMED_OUT and report[REPORT_PEERS:][:4].tolist() == missed, rank
        assert rounds.rounds[0].results[rank].isnan().all()
    for rank in (1, 3):
        assert rounds.lanes[rank].report[REPORT_STATUS] == RUNNING
        assert not rounds.rounds[0].results[rank].isnan().any()
