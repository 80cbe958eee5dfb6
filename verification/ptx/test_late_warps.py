"""What the last program of a launch publishes to more peers than a warp has threads, with warps in any order.

Every warp tells its own peers. One that comes late must not tell them what another has made of a word meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

import torch

from tests.helpers.speeds import exhaustive_but
from thinwire.triton_kernels.dispatch import send_tokens
from thinwire.triton_kernels.signal import SIGNAL_LINE_BYTES
from verification.ptx.channels import Channels
from verification.ptx.device import Device
from verification.ptx.mutations import mutations_of
from verification.ptx.rounds import Rounds

SEEDS = range(6)
#: More than the 32 peers of the first warp.
WORLD = 40


def _flags(buffers: list[torch.Tensor], lines: int) -> list[int]:
    """What rank 0's flags say at each peer."""
    return [int(buffer[lines : lines + 4].view(torch.int32)) for buffer in buffers]


def _dispatch(device: Device, world: int) -> list[int]:
    rounds = Rounds.of(device, world, num_experts=world, hidden=1536, max_tokens=1)
    lane, x = rounds.lanes[0], torch.ones(1, 1536)
    send_tokens(lane, x, torch.tensor([[0, world - 1]]), torch.ones(1, 2), num_programs=1)
    return _flags([lane.buffer for lane in rounds.lanes], lane.layout.SIGNALS)


def _first_pieces(device: Device, world: int) -> list[int]:
    channels = Channels.of(device, world)
    channels.queue([[1] * world] * world, (1,), torch.float32, "none", absent=tuple(range(1, world)), halfway=(0,))
    buffers = [channel.memory.local for channel in channels.channels]
    return _flags(buffers, channels.channels[0].layout.HEADERS + world * SIGNAL_LINE_BYTES)


CASES = pytest.mark.parametrize(
    ("publish", "flag"), exhaustive_but([(_dispatch, 1)], [(_dispatch, 1), (_first_pieces, 1)], True)
)


def _without_barrier(name: str, ptx: str) -> str:
    """Nothing stands between the load of a word and its store."""
    for mutation in mutations_of(ptx):
        if mutation.was.startswith("bar.sync") and mutation.place.startswith("advance"):
            return mutation.apply(ptx)
    return ptx


@CASES
def test_late_warps_publish_what_the_others_publish(publish: Callable[[Device, int], list[int]], flag: int) -> None:
    for seed in SEEDS:
        device = Device(ranks=1, seed=seed, warps="any order")
        with device.patch():
            assert publish(device, WORLD) == [flag] * WORLD, seed


@CASES
def test_without_the_barrier_they_do_not(publish: Callable[[Device, int], list[int]], flag: int) -> None:
    """In some order; the detector sees it in any, and with so few peers that no flag is wrong."""
    wrong = 0
    for seed in SEEDS:
        device = Device(ranks=1, edit=_without_barrier, seed=seed, warps="any order")
        with device.patch():
            wrong += publish(device, WORLD) != [flag] * WORLD
    assert wrong
    for seed in SEEDS:
        device = Device(ranks=1, races=True, edit=_without_barrier, seed=seed, warps="together")
        with device.patch():
            assert publish(device, 2) == [flag] * 2
        assert device.races.found
