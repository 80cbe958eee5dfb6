"""Signals and waits of CPU ranks: what the compiler made of them, and whom the survivors of a silent rank blame.

All ranks share this process. One that waits does so on a thread; its kernel leaves the interpreter to the others.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

numba = pytest.importorskip("numba", reason="the CPU kernels need numba")

import torch

from tests.helpers.speeds import exhaustive_but
from thinwire.triton_kernels.cpu import combine, dispatch
from thinwire.triton_kernels.cpu.dispatch import close_round, send_tokens, wait
from thinwire.triton_kernels.cpu.ir.atomics import monotonic_ns, store_release
from thinwire.triton_kernels.cpu.signal import nap_after, signalled
from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH, Lane, RoundLayout
from thinwire.triton_kernels.signal import (
    CONTROL_EPOCH,
    CONTROL_STATUS,
    REPORT_EPOCH,
    REPORT_PEERS,
    REPORT_PHASE,
    REPORT_STATUS,
    RUNNING,
    SIGNAL_LINE_BYTES,
    SIGNAL_STUCK_EPOCH,
    SIGNAL_STUCK_ON_YOU,
    SIGNAL_STUCK_PHASE,
    TIMED_OUT,
)
from thinwire.wire import WireFormat

ROOT = Path(__file__).parents[3]
TIMEOUT, GRACE = 0.3, 0.5
PLENTY = 20.0  # seconds, where nobody is to be blamed
SLACK = 5.0  # of a machine that has other things to do

both_phases = pytest.mark.parametrize("phase", (DISPATCH, COMBINE), ids=("dispatch", "combine"))


def make_lanes(world: int) -> list[Lane]:
    wire = WireFormat.parse("int8")
    layout = RoundLayout.of(
        world=world, num_experts=world, top_k=1, hidden=8, max_tokens=2, wire=wire, combine_wire=wire
    )
    buffers = [torch.zeros(layout.NUM_BYTES, dtype=torch.uint8) for _ in range(world)]
    buffer_ptrs = torch.tensor([buffer.data_ptr() for buffer in buffers])
    return [Lane.of(layout, wire, wire, rank, 1, buffer, buffer_ptrs) for rank, buffer in enumerate(buffers)]


def line(lane: Lane, offset: int, source: int) -> torch.Tensor:
    first = offset + source * SIGNAL_LINE_BYTES
    return lane.buffer[first : first + SIGNAL_LINE_BYTES].view(torch.int32)


def begin(lane: Lane) -> None:
    """A dispatch of one token to every rank in turn."""
    ids = torch.tensor([[int(lane.control[CONTROL_EPOCH]) % lane.layout.WORLD]])
    send_tokens(lane, torch.ones(1, 8), ids, torch.ones(1, 1))


def deaf_to(lane: Lane, peers: set[int]) -> tuple[Lane, list[torch.Tensor]]:
    """The lane of a rank whose stores to some peers never arrive, as if it had died before them."""
    nowhere = [torch.zeros_like(lane.buffer) for _ in peers]
    buffer_ptrs = lane.buffer_ptrs.clone()
    buffer_ptrs[list(peers)] = torch.tensor([memory.data_ptr() for memory in nowhere])
    return dataclasses.replace(lane, buffer_ptrs=buffer_ptrs), nowhere


def all_at_once(calls: list[Callable[[], None]]) -> float:
    """Runs calls on threads of their own and returns how long the longest took."""
    ready = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> None:
        ready.wait()
        call()

    start = time.monotonic()
    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a wait did not end"
    return time.monotonic() - start


def report_of(lane: Lane) -> tuple[list[int], list[int], list[int]]:
    """Who is to blame, who was missing, and what everyone said of itself; all for this rank's lane."""
    blamed, missing, said = lane.report[REPORT_PEERS:].view(3, lane.layout.WORLD).tolist()
    return blamed, missing, said


def assert_gave_up(lane: Lane, epoch: int, phase: int) -> None:
    assert lane.control[CONTROL_STATUS] == lane.report[REPORT_STATUS] == TIMED_OUT
    assert lane.report[REPORT_EPOCH] == epoch and lane.report[REPORT_PHASE] == phase


def only(rank: int, world: int, value: int = 1) -> list[int]:
    return [value if peer == rank else 0 for peer in range(world)]


# ---------------------------------------------------------------------------------------------------------------------
# What the compiler made of it


def compiled(entry: object, arguments: int) -> str:
    """IR of a kernel whose arguments are all int64; one from the cache has none to look at."""
    options = {name: value for name, value in entry.targetoptions.items() if name != "nopython"}
    fresh = numba.njit(**options)(entry.py_func)
    fresh.compile("(" + "int64, " * arguments + ")")
    return fresh.inspect_llvm(fresh.signatures[0])


def test_waits_load_flags_with_acquire_order_and_report_with_release_order() -> None:
    ir = compiled(dispatch.wait_kernel, 4)
    assert len(re.findall(r"load atomic i32, .* acquire, align 4", ir)) >= 4  # flags and reports, twice each
    assert re.search(r"store atomic i32 1, .* release, align 4", ir)
    assert not re.search(r"atomic .*(?:monotonic|unordered)", ir)


@pytest.mark.parametrize(
    ("entry", "arguments"),
    exhaustive_but(
        [(dispatch.close_round_kernel, 2)],
        [(dispatch.send_tokens_kernel, 9), (dispatch.close_round_kernel, 2), (combine.send_sums_kernel, 8)],
        several=True,
    ),
    ids=lambda value: "" if isinstance(value, int) else value.py_func.__name__,
)
def test_flags_are_published_with_release_order(entry: object, arguments: int) -> None:
    ir = compiled(entry, arguments)
    assert re.search(r"store atomic i32 %.* release, align 4", ir)
    assert not re.search(r"atomic i32.*(?:monotonic|unordered)", ir)  # flags are of 32 bits, the rest says nothing


def test_flags_are_compared_across_the_wrap() -> None:
    @numba.njit
    def has_come(line, epoch):
        return signalled(line, epoch)

    flag = torch.zeros(1, dtype=torch.int32)
    last, first = 2**31 - 1, -(2**31)
    for value, epoch, expected in (
        (0, 1, False),
        (1, 1, True),
        (2, 1, True),
        (last, last, True),
        (last - 1, last, False),
        (last, first, False),
        (first, last, True),
        (first, first, True),
        (first + 1, last, False),  # further than a peer can be ahead
        (3, 1, False),
        (2**30, 1, False),
        (-1, 0, False),
        (0, -1, True),
        (0, last - 1, False),
    ):
        flag[0] = value
        assert has_come(flag.data_ptr(), epoch) is expected, (value, epoch)


def test_the_clock_is_that_of_python() -> None:
    @numba.njit
    def now():
        return monotonic_ns()

    now()
    before = time.monotonic_ns()
    between = now()
    assert before <= between <= time.monotonic_ns()


# ---------------------------------------------------------------------------------------------------------------------
# Waits that end well


def test_a_wait_ends_when_the_last_flag_comes() -> None:
    lanes = make_lanes(3)
    for lane in lanes[:2]:
        begin(lane)
    late = threading.Timer(0.3, begin, (lanes[2],))
    late.start()
    start = time.monotonic()
    wait(lanes[0], DISPATCH, PLENTY, GRACE)
    assert time.monotonic() - start < SLACK and lanes[0].control[CONTROL_STATUS] == RUNNING
    late.join()
    wait(lanes[2], DISPATCH, PLENTY, GRACE)
    assert lanes[2].control[CONTROL_STATUS] == RUNNING


@both_phases
def test_time_that_is_up_does_not_matter_when_nothing_is_missing(phase: int) -> None:
    """A rank that was not running for a while finds its deadline gone, and all flags there."""
    lanes = make_lanes(3)
    for lane in lanes:
        begin(lane)
    if phase == COMBINE:
        for lane in lanes:
            close_round(lane)
    for lane in lanes:
        line(lane, lane.layout.STUCK, (lane.rank + 1) % 3)[0] = 1  # nor does a peer that is stuck later on
    for lane in lanes:
        wait(lane, phase, 0.0, 0.0)
        assert lane.control[CONTROL_STATUS] == RUNNING and (lane.report == 0).all()


def test_a_report_does_not_matter_when_nothing_is_missing() -> None:
    """A peer signals and is stuck at once, later in its round: who waits for its signal goes on to that phase too.

    Where a wait looked at reports after flags, a rank might see the second without the first, and give up a phase
    before the others, with nobody to blame.
    """

    @numba.njit(nogil=True)
    def signal_and_be_stuck(flag, epoch, stuck):
        store_release(flag, epoch)
        store_release(stuck, 1)

    lanes = make_lanes(2)
    lane, layout = lanes[0], lanes[0].layout
    flag = line(lane, layout.SIGNALS, 1).data_ptr()
    stuck = line(lane, layout.STUCK, 1)
    for _ in range(50):
        begin(lane)
        waiting = threading.Thread(target=wait, args=(lane, DISPATCH, PLENTY, 0.0), daemon=True)
        waiting.start()
        time.sleep(0.005)
        signal_and_be_stuck(flag, int(lane.control[CONTROL_EPOCH]), stuck.data_ptr())
        waiting.join(PLENTY)
        assert lane.control[CONTROL_STATUS] == RUNNING
        stuck[0] = 0


def test_there_is_no_longest_timeout() -> None:
    (lane,) = make_lanes(1)
    begin(lane)
    wait(lane, DISPATCH, 1e30, 1e30)
    assert lane.control[CONTROL_STATUS] == RUNNING


def test_ranks_may_outnumber_cores() -> None:
    lanes = make_lanes(24)

    def rounds(lane: Lane) -> None:
        for _ in range(20):
            begin(lane)
            wait(lane, DISPATCH, PLENTY, GRACE)
            close_round(lane)
            wait(lane, COMBINE, PLENTY, GRACE)

    all_at_once([lambda lane=lane: rounds(lane) for lane in lanes])
    assert all(lane.control[CONTROL_STATUS] == RUNNING and lane.control[CONTROL_EPOCH] == 20 for lane in lanes)


@pytest.mark.parametrize("giving_up", [False, True])
def test_a_wait_can_be_interrupted(giving_up: bool) -> None:
    lanes = make_lanes(2 + giving_up)
    to_phase(lanes, COMBINE, set())
    for lane in lanes:
        wait(lane, COMBINE, PLENTY, GRACE)  # by now everything is compiled
    begin(lanes[0])
    if giving_up:  # a peer's report ends the wait, but not before the silent one has had its time
        line(lanes[0], lanes[0].layout.STUCK, 2)[0] = 1

    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        start = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            wait(lanes[0], DISPATCH, 60.0, GRACE)
        assert time.monotonic() - start < SLACK
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    for lane in lanes[1:]:
        begin(lane)
    wait(lanes[0], DISPATCH, PLENTY, GRACE)  # and gone on with
    assert lanes[0].control[CONTROL_STATUS] == RUNNING


def test_other_phases_are_refused() -> None:
    with pytest.raises(ValueError, match=r"phase is 2; accepted: 0 \(dispatch\), 1 \(combine\)"):
        wait(make_lanes(1)[0], 2, PLENTY, GRACE)


# ---------------------------------------------------------------------------------------------------------------------
# Waits that do not


def to_phase(lanes: list[Lane], phase: int, silent: set[int]) -> None:
    """Takes all lanes to a phase, which some ranks do not signal."""
    for lane in lanes:
        if phase == COMBINE or lane.rank not in silent:
            begin(lane)
    if phase == COMBINE:
        for lane in lanes:
            wait(lane, DISPATCH, PLENTY, GRACE)
        for lane in lanes:
            if lane.rank not in silent:
                close_round(lane)


@both_phases
@pytest.mark.parametrize(("world", "silent"), [(2, 0), (3, 2), (4, 1)])
def test_everyone_blames_the_rank_that_is_silent(world: int, silent: int, phase: int) -> None:
    lanes = make_lanes(world)
    for lane in lanes:
        lane.control[CONTROL_EPOCH] = 2**31 - 1  # as far as a signed difference reaches from the zeros of new lines
        for other in lanes:
            line(lane, lane.layout.SIGNALS, other.rank)[0] = 2**31 - 1
            line(lane, lane.layout.SIGNALS + world * SIGNAL_LINE_BYTES, other.rank)[0] = 2**31 - 1
    to_phase(lanes, phase, {silent})
    survivors = [lane for lane in lanes if lane.rank != silent]
    seconds = all_at_once([lambda lane=lane: wait(lane, phase, TIMEOUT, GRACE) for lane in survivors])
    assert seconds < TIMEOUT + GRACE + SLACK
    for lane in survivors:
        assert_gave_up(lane, -(2**31), phase)
        said = [int(peer != silent) for peer in range(world)]
        assert report_of(lane) == (only(silent, world), only(silent, world), said)
        words = line(lanes[silent], lane.layout.STUCK, lane.rank)
        assert words[0] == 1 and words[SIGNAL_STUCK_EPOCH] == -(2**31)
        assert words[SIGNAL_STUCK_PHASE] == phase and words[SIGNAL_STUCK_ON_YOU] == 1
        for other in survivors:
            words = line(other, lane.layout.STUCK, lane.rank)
            assert words[0] == 1 and words[SIGNAL_STUCK_ON_YOU] == 0


@both_phases
def test_everyone_blames_all_that_are_silent(phase: int) -> None:
    lanes = make_lanes(4)
    to_phase(lanes, phase, {0, 3})
    all_at_once([lambda lane=lane: wait(lane, phase, TIMEOUT, GRACE) for lane in lanes[1:3]])
    for lane in lanes[1:3]:
        assert_gave_up(lane, 1, phase)
        assert report_of(lane) == ([1, 0, 0, 1], [1, 0, 0, 1], [0, 1, 1, 0])


@pytest.mark.exhaustive
def test_who_gives_up_with_another_keeps_its_own_time_before_it_blames() -> None:
    """Rank 2 is dead and rank 3 only late: rank 0, whose time was too short, names both, and rank 1 the dead one."""
    lanes = make_lanes(4)
    to_phase(lanes, DISPATCH, {2, 3})
    own_time = 6.0

    def signal_late() -> None:
        time.sleep(TIMEOUT + GRACE + 1.0)  # rank 0 has reported long since
        to_phase(lanes[3:], DISPATCH, set())

    elapsed = all_at_once(
        [
            lambda: wait(lanes[0], DISPATCH, TIMEOUT, GRACE),
            lambda: wait(lanes[1], DISPATCH, own_time, GRACE),
            signal_late,
        ]
    )
    assert elapsed < own_time + GRACE + SLACK
    assert report_of(lanes[0])[0] == [0, 0, 1, 1]
    assert report_of(lanes[1])[0] == [0, 0, 1, 0]


@pytest.mark.exhaustive
def test_a_death_between_two_dispatch_signals_is_blamed_alike() -> None:
    """Rank 2 reached rank 0 only: that one waits for its sums, in another phase than rank 1, which waits for tokens."""
    own_time = 2.0  # it leaves early, and keeps its own time before it blames
    lanes = make_lanes(4)
    dying, _ = deaf_to(lanes[2], {1, 3})
    for lane in (lanes[0], lanes[1], dying, lanes[3]):
        begin(lane)

    def go_on() -> None:
        wait(lanes[0], DISPATCH, PLENTY, GRACE)
        close_round(lanes[0])
        wait(lanes[0], COMBINE, own_time, GRACE)

    calls = [go_on, *(lambda lane=lane: wait(lane, DISPATCH, TIMEOUT, GRACE) for lane in (lanes[1], lanes[3]))]
    assert all_at_once(calls) < own_time + GRACE + SLACK
    assert_gave_up(lanes[0], 1, COMBINE)
    assert_gave_up(lanes[1], 1, DISPATCH)
    assert [report_of(lane)[0] for lane in (lanes[0], lanes[1], lanes[3])] == [only(2, 4)] * 3
    assert report_of(lanes[0])[1:] == ([0, 1, 1, 1], [1, 1, 0, 1])  # the others were missing too, and said why


@pytest.mark.exhaustive
def test_a_death_between_two_combine_signals_is_blamed_alike() -> None:
    """Rank 0 closed its round and waits for the next one's tokens when the others give up on the last one's sums."""
    own_time = 2.0
    lanes = make_lanes(3)
    to_phase(lanes, COMBINE, {2})
    dying, _ = deaf_to(lanes[2], {1})
    close_round(dying)

    def go_on() -> None:
        wait(lanes[0], COMBINE, PLENTY, GRACE)
        begin(lanes[0])
        wait(lanes[0], DISPATCH, own_time, GRACE)

    assert all_at_once([go_on, lambda: wait(lanes[1], COMBINE, TIMEOUT, GRACE)]) < own_time + GRACE + SLACK
    assert_gave_up(lanes[0], 2, DISPATCH)
    assert_gave_up(lanes[1], 1, COMBINE)
    assert report_of(lanes[0])[0] == report_of(lanes[1])[0] == [0, 0, 1]


def test_who_signals_in_the_grace_time_is_not_blamed() -> None:
    lanes = make_lanes(3)
    to_phase(lanes, DISPATCH, {2})

    def wake() -> None:
        stuck = [line(lanes[2], lanes[2].layout.STUCK, peer) for peer in (0, 1)]
        while not all(words[0] for words in stuck):
            time.sleep(0.01)
        begin(lanes[2])

    seconds = all_at_once([wake, *(lambda lane=lane: wait(lane, DISPATCH, 0.1, 30.0) for lane in lanes[:2])])
    assert seconds < SLACK, "the grace time goes on though nobody is silent"
    for lane in lanes[:2]:
        assert_gave_up(lane, 1, DISPATCH)
        assert report_of(lane)[:2] == ([0, 0, 0], [0, 0, 1])


@both_phases
def test_a_late_rank_is_told_that_it_was_waited_for(phase: int) -> None:
    lanes = make_lanes(3)
    to_phase(lanes, phase, {2})
    all_at_once([lambda lane=lane: wait(lane, phase, TIMEOUT, GRACE) for lane in lanes[:2]])
    # It wakes, and goes on as if nothing had been. Its own phase is complete: what ends it is that nobody goes on.
    if phase == DISPATCH:
        begin(lanes[2])
        wait(lanes[2], DISPATCH, PLENTY, GRACE)
        close_round(lanes[2])
    else:
        close_round(lanes[2])
        wait(lanes[2], COMBINE, PLENTY, GRACE)
        begin(lanes[2])
    assert lanes[2].control[CONTROL_STATUS] == RUNNING
    start = time.monotonic()
    wait(lanes[2], 1 - phase, 60.0, 60.0)
    assert time.monotonic() - start < SLACK, "it was told at once, and nobody is silent"
    assert_gave_up(lanes[2], int(lanes[2].control[CONTROL_EPOCH]), 1 - phase)
    assert report_of(lanes[2]) == ([0, 0, 0], [1, 1, 0], [2, 2, 1])


def test_what_a_peer_says_of_itself_is_one_of_three_things() -> None:
    lanes = make_lanes(2)
    begin(lanes[0])
    line(lanes[0], lanes[0].layout.STUCK, 1)[:] = torch.tensor([-7, 1, 1, 2**31 - 1] + [0] * 12, dtype=torch.int32)
    wait(lanes[0], DISPATCH, PLENTY, GRACE)
    assert report_of(lanes[0]) == ([0, 0], [0, 1], [1, 2])


@pytest.mark.exhaustive
def test_without_numba_the_round_imports_and_says_what_to_install() -> None:
    program = """
import sys
sys.modules["numba"] = sys.modules["llvmlite"] = None
import torch
from thinwire.errors import TransportUnavailable
from thinwire.triton_kernels.cpu import combine, dispatch, permute
from thinwire.triton_kernels.round_layout import Lane, RoundLayout
from thinwire.wire import WireFormat
wire, x = WireFormat.parse("int8"), torch.zeros(1, 8)
layout = RoundLayout.of(world=1, num_experts=1, top_k=1, hidden=8, max_tokens=1, wire=wire, combine_wire=wire)
buffer = torch.zeros(layout.NUM_BYTES, dtype=torch.uint8)
lane = Lane.of(layout, wire, wire, 0, 1, buffer, torch.tensor([buffer.data_ptr()]))
for call in (
    lambda: dispatch.send_tokens(lane, x, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)),
    lambda: dispatch.close_round(lane),
    lambda: dispatch.wait(lane, 0, 1.0, 1.0),
    lambda: permute.route(lane),
    lambda: permute.gather(lane, x, torch.tensor(False)),
    lambda: combine.send_sums(lane, x, x.dtype),
    lambda: combine.sum_home(lane, x),
):
    try:
        call()
    except TransportUnavailable as error:
        assert "pip install numba" in str(error), error
    else:
        raise AssertionError
print("said so")
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "said so\n", done.stderr


def test_a_rank_yields_at_first_and_then_naps_for_a_tenth_of_its_wait_up_to_a_millisecond() -> None:
    @numba.njit
    def naps(waits: list[int]) -> list[int]:
        return [nap_after(waited) for waited in waits]

    just_yields = [0, 1, 10_000, 199_999]
    assert naps([*just_yields, 200_000, 3_000_000, 10_000_000, 2**62]) == [0, 0, 0, 0, 20, 300, 1000, 1000]
