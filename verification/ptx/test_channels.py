"""All-to-all-v on compiled kernels, all ranks at once: every row arrives as it should, and no race.

Pieces are small, so that rows go several times round their rings.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

import torch

from verification.ptx.channels import Channels
from verification.ptx.device import Device

#: One pair fills its ring of two slots more than twice; one is empty.
LONG = [[3, 45], [0, 31]]
TINY = 640


def _channels(world: int, seed: int = 0, piece_bytes: int = TINY) -> Channels:
    device = Device(ranks=world, races=True, seed=seed, warps="any order")
    return Channels.of(device, world, piece_bytes)


def _run(channels: Channels) -> None:
    channels.device.run_queued()
    channels.check()
    assert not channels.device.races.found


def test_pieces_go_round_the_ring_without_a_race() -> None:
    channels = _channels(2)
    with channels.device.patch(queued=True):
        channels.queue(LONG, (40,), torch.bfloat16, "int8")
        channels.queue(LONG, (5,), torch.int8, "none")
        _run(channels)


@pytest.mark.exhaustive
def test_rows_of_many_kinds_arrive_without_a_race() -> None:
    """Exact rows of lengths that allow words of 16, 8, 4, 2 bytes and single ones, and a flat tensor."""
    channels = _channels(2, 1, 2432)
    with channels.device.patch(queued=True):
        channels.queue([[5, 150], [0, 31]], (2, 2), torch.complex64, "none")
        channels.queue([[5, 97], [0, 31]], (33,), torch.bfloat16, "none")
        channels.queue([[1, 3000], [1024, 0]], (), torch.bfloat16, "int8")
        _run(channels)


@pytest.mark.exhaustive
def test_ranks_with_different_numbers_of_steps() -> None:
    channels = _channels(3, 2)
    with channels.device.patch(queued=True):
        channels.queue([[0, 0, 45], [2, 0, 0], [0, 1, 0]], (40,), torch.bfloat16, "int8")
        channels.queue([[0, 45, 1], [0, 0, 0], [30, 1, 10]], (20,), torch.float32, "none")
        channels.queue([[0, 0, 0]] * 3, (4,), torch.float64, "none")
        _run(channels)
