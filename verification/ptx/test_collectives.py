"""Direct collectives on compiled kernels, all ranks at once: what plain torch gives, and no race.

Rows are few, so that a call is several epochs; several programs, so that one waits for the peers and the others for it.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

import torch

from tests.helpers.collective_calls import Call
from tests.helpers.speeds import exhaustive_but
from thinwire.triton_kernels.leg_layout import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from verification.ptx.collectives import Collectives
from verification.ptx.device import Device

PROGRAMS = 3


def _run(world: int, calls: list[Call], seed: int = 0) -> None:
    device = Device(ranks=world, races=True, seed=seed, warps="any order")
    with device.patch(queued=True):
        collectives = Collectives.of(device, world)
        for call in calls:
            collectives.queue(call)
        device.run_queued()
    collectives.check()
    assert not device.races.found


def _calls(world: int) -> list[Call]:
    """One of each, of parts that differ; of the last, the fourth is empty."""
    counts = (300, 257, 128, 0)[:world]
    return [
        Call(ALL_REDUCE, counts, num_programs=PROGRAMS),
        Call(REDUCE_SCATTER, counts[::-1], wire="int4", gap=3, dtype=torch.bfloat16, num_programs=PROGRAMS, seed=1),
        Call(ALL_GATHER, counts[::-1], gather_wire="none", num_programs=PROGRAMS, seed=2),
        Call(ALL_REDUCE, counts[::-1], in_place=True, num_programs=2, seed=3),
    ]


def test_collectives_of_two_ranks_without_a_race() -> None:
    _run(2, _calls(2))


@pytest.mark.parametrize("wire", exhaustive_but(["int8"], ["int8", "fp8"]))
def test_groups_without_a_scale_leave_those_beside_them_alone(wire: str) -> None:
    device = Device(ranks=2)
    with device.patch(queued=True):
        collectives = Collectives.of(device, 2, 2048)
        collectives.queue(Call(ALL_REDUCE, (1024, 1024), wire, wire, row=1024, rows_per_chunk=1, zeros=128))
        device.run_queued()
    collectives.check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [3, 4])
def test_collectives_without_a_race(world: int) -> None:
    _run(world, _calls(world), 1)
