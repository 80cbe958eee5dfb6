"""Collectives in one launch on compiled kernels, all ranks and programs at once: their bits, no race, and every end.

Rows are few, and programs several: each waits, and the first gives up for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

import torch

from tests.helpers.collective_calls import Call
from tests.helpers.speeds import exhaustive_but
from thinwire.triton_kernels.collective import send
from thinwire.triton_kernels.leg_layout import ALL_GATHER, ALL_REDUCE, FIRST_LEG, REDUCE_SCATTER, SECOND_LEG
from thinwire.triton_kernels.pack import pack_rows
from thinwire.triton_kernels.signal import (
    CONTROL_ARRIVALS,
    CONTROL_EPOCH,
    CONTROL_STATUS,
    MISMATCHED,
    REPORT_EPOCH,
    REPORT_PEERS,
    REPORT_PHASE,
    REPORT_STATUS,
    SIGNAL_LINE_BYTES,
    TIMED_OUT,
)
from thinwire.wire import WireFormat
from verification.ptx.collectives import Collectives
from verification.ptx.device import Device

PROGRAMS, SLOT_BYTES = 3, 2048
TIMEOUT, GRACE = 100e-6, 50e-6  # of the device's clock, which goes by how often it is read
COUNTS = (300, 257, 128, 0)
SLOWLY = 0.99  # how often a turn of a slow program goes to any that is there


def _device(world: int, seed: int = 0) -> Device:
    return Device(ranks=world, races=True, seed=seed, warps="any order")


def _calls(world: int) -> list[Call]:
    """One of each, of parts that differ, the last of which is empty in a group of four; twice, for both halves."""
    counts = COUNTS[:world]
    small = Call(ALL_REDUCE, counts, rows_per_chunk=3, num_programs=PROGRAMS, at_once=True)
    return [
        small,
        replace(small, op=REDUCE_SCATTER, counts=counts[::-1], wire="int4", gap=3, dtype=torch.bfloat16, seed=1),
        replace(small, op=ALL_GATHER, counts=counts[::-1], gather_wire="none", seed=2),
        replace(small, counts=counts[::-1], in_place=True, num_programs=2, seed=3),
        replace(small, op=ALL_GATHER, in_place=True, num_programs=5, seed=4),
        replace(small, op=REDUCE_SCATTER, in_place=True, num_programs=1, seed=5),
    ]


def _run(world: int, seed: int, apart: tuple[int, ...] = ()) -> None:
    device = _device(world, seed)
    with device.patch(queued=True):
        collectives = Collectives.of(device, world, SLOT_BYTES)
        for number, call in enumerate(_calls(world)):
            collectives.queue(call, apart=apart)
            if number % 2 and not apart:  # between two of them a call in several launches
                collectives.queue(replace(call, at_once=False, rows_per_chunk=1))
        device.run_queued()
    collectives.check()
    assert not device.races.found
    assert not any(end.control[CONTROL_ARRIVALS] for end in collectives.ends)


def test_collectives_of_two_ranks_without_a_race() -> None:
    _run(2, 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("world", [1, 3, 4])
def test_collectives_without_a_race(world: int, seed: int) -> None:
    _run(world, seed)


@pytest.mark.parametrize("seed", exhaustive_but([0], range(4)))
def test_a_rank_in_several_launches_meets_others_in_one(seed: int) -> None:
    _run(3, seed, (seed % 3,))


@pytest.mark.parametrize("wire", exhaustive_but(["int8:row"], ["int8:row", "int8+h64", "fp8", "int6", "int8:32"]))
def test_other_wires(wire: str) -> None:
    device = _device(2)
    with device.patch(queued=True):
        collectives = Collectives.of(device, 2, SLOT_BYTES)
        for op in (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER):
            call = Call(op, (200, 70), wire, wire, torch.bfloat16, num_programs=2, seed=op, at_once=True)
            collectives.queue(call)
        device.run_queued()
    collectives.check()
    assert not device.races.found


@pytest.mark.parametrize("seed", exhaustive_but([0], range(6)))
def test_programs_look_again_and_again_for_a_late_rank(seed: int) -> None:
    x, wire = torch.ones(1, 32), WireFormat.parse("int8")
    device = _device(2, seed)
    with device.patch(queued=True):
        collectives, device.rank = Collectives.of(device, 2, SLOT_BYTES), seed % 2
        for _ in range(80):
            pack_rows(x, wire, None, torch.zeros(1, wire.row_bytes(32, x.dtype), dtype=torch.uint8))
        for call in _calls(2)[:3]:
            collectives.queue(call)
        device.run_queued()
    collectives.check()
    assert not device.races.found


@pytest.mark.parametrize("leg", [FIRST_LEG, SECOND_LEG])
@pytest.mark.parametrize("seed", exhaustive_but([0], range(6)))
def test_survivors_name_the_rank_that_never_came(leg: int, seed: int) -> None:
    """Or that came no further than its first leg. One program of each survivor says so, and later calls give NaN."""
    world = 3
    device = _device(world, seed)
    with device.patch(queued=True):
        collectives = Collectives.of(device, world, SLOT_BYTES)
        collectives.timeout, collectives.grace = TIMEOUT, GRACE
        call = Call(ALL_REDUCE, (300, 300, 300), rows_per_chunk=3, num_programs=PROGRAMS, at_once=True)
        collectives.queue(replace(call, seed=1))
        outs = [collectives.queue(call, absent=(2,))]
        if leg == SECOND_LEG:
            device.rank = 2
            send(collectives.ends[2], call.job(), call.tensors(2)[0], 0, PROGRAMS)
        for op in (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE):
            outs.append(collectives.queue(replace(call, op=op), absent=(2,)))
        device.run_queued()
    assert not device.races.found
    for end in collectives.ends[:2]:
        assert end.report[REPORT_STATUS] == end.control[CONTROL_STATUS] == TIMED_OUT
        assert end.report[[REPORT_EPOCH, REPORT_PHASE]].tolist() == [3 + leg, leg]
        gone = [0, 0, 1]
        assert end.report[REPORT_PEERS:].view(3, world).tolist() == [gone, gone, [1, 1, 0]]
        assert all(each[end.rank].isnan().all() for each in outs)


@pytest.mark.parametrize("seed", exhaustive_but([5], range(8)))
@pytest.mark.parametrize("op", [ALL_GATHER, ALL_REDUCE])
def test_nobody_gives_up_while_a_program_of_its_rank_still_sends(op: int, seed: int) -> None:
    """Rank 1 has said that it is stuck, and is not lost. Rank 0's last program is slow, and its output is its input."""
    device = _device(2, seed)
    with device.patch(queued=True):
        collectives = Collectives.of(device, 2, 8192)
        call = Call(op, (128 * 36, 128), rows_per_chunk=40, num_programs=PROGRAMS, at_once=True, in_place=True)
        end = collectives.ends[0]
        end.buffer[end.layout.STUCK + SIGNAL_LINE_BYTES :][:4].view(torch.int32)[:] = 1
        out = collectives.queue(call)[0]
    choose = Device._choose

    def choose_seldom(self: Device, running: dict[Iterator[None], Any]) -> Iterator[None]:
        turn = choose(self, running)
        state = running[turn].state
        slow = state._special["%ctaid.x"] == PROGRAMS - 1 and out.data_ptr() in state.arguments.values()
        return choose(self, running) if slow and self._random.random() < SLOWLY else turn

    with mock.patch.object(Device, "_choose", choose_seldom):
        device.run_queued()
    assert not device.races.found
    collectives.check()


@pytest.mark.parametrize("seed", exhaustive_but([0], range(4)))
@pytest.mark.parametrize("op", [ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER])
def test_ranks_that_disagree_all_notice_it_in_that_leg(op: int, seed: int) -> None:
    """One of them also goes in several launches. Their outputs are NaN."""
    world = 3
    device = _device(world, seed)
    with device.patch(queued=True):
        collectives = Collectives.of(device, world, SLOT_BYTES)
        call = Call(op, (300, 300, 300), rows_per_chunk=3, num_programs=PROGRAMS, at_once=True)
        collectives.queue(replace(call, seed=1))
        other = replace(call.job(), signature=(1, 2, 3, 4))
        outs = collectives.queue(call, apart=(seed % 3,), changes={1: other})
        device.run_queued()
    assert not device.races.found
    leg = 3 if op == ALL_REDUCE else 2
    for end in collectives.ends:
        assert end.report[REPORT_STATUS] == end.control[CONTROL_STATUS] == MISMATCHED
        assert end.control[CONTROL_EPOCH] == end.report[REPORT_EPOCH] == leg
        assert not end.control[CONTROL_ARRIVALS]
        odd = [int((peer == 1) != (end.rank == 1)) for peer in range(world)]
        assert end.report[REPORT_PEERS:][:world].tolist() == odd
        assert outs[end.rank].isnan().all()
