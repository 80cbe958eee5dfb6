"""Whole rounds on compiled kernels, all ranks at once: what plain torch gives, and no race."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

import torch

from tests.helpers.round_kernels import KERNELS
from tests.helpers.rounds import Tokens, make_lanes, run_round
from verification.ptx.device import Device
from verification.ptx.rounds import Rounds


def _run(world: int, seed: int, *, hidden: int = 64, weight_grads: bool = False, invariant: bool = False) -> None:
    device = Device(ranks=world, races=True, seed=seed, warps="any order")
    with device.patch(queued=True):
        rounds = Rounds.of(device, world, hidden=hidden, weight_grads=weight_grads, invariant=invariant, seed=seed)
        rounds.queue()
        rounds.queue(closing=(1,))
        device.run_queued()
    rounds.check()
    assert not device.races.found


@pytest.mark.parametrize("invariant", [False, True])
def test_rounds_of_two_ranks_without_a_race(invariant: bool) -> None:
    _run(2, 0, invariant=invariant)


def test_rounds_by_record_without_a_race() -> None:
    """Each with fewer tokens than the one before, but for the last."""
    device = Device(ranks=2, races=True, seed=2, warps="any order")
    with device.patch(queued=True):
        rounds = Rounds.of(device, 2, top_k=3, max_tokens=20, num_experts=5, seed=2)
        for counts in ((20, 13), (2, 0), (0, 3)):
            rounds.queue(counts=counts, by_record=True)
        device.run_queued()
    rounds.check()
    assert device.launches["list_records_kernel"] == 6 and not device.races.found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("world", "hidden", "weight_grads"),
    [(2, 64, True), (4, 64, False), (2, 1536, True)],
)
def test_rounds_without_a_race(world: int, hidden: int, weight_grads: bool) -> None:
    """Rows of 1536 elements are the work of several warps."""
    _run(world, 1, hidden=hidden, weight_grads=weight_grads)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("wire", "invariant"), [("int4", False), ("int6+h64", False), ("int8+h64", True)])
def test_every_step_of_a_round_gives_what_plain_torch_gives(wire: str, invariant: bool) -> None:
    """Phase by phase, so that the memory between the kernels is compared too."""
    generator = torch.Generator().manual_seed(3)
    device = Device(ranks=2, warps="any order")
    with device.patch():
        lanes = make_lanes(2, 5, 3, 150, 4, wire, align=4, weight_grads=not invariant, invariant=invariant)
        for lane in lanes:
            device.register(f"rank {lane.rank}'s buffer", lane.buffer)
        tokens = [Tokens.random(count, 150, 3, 5, torch.bfloat16, generator) for count in (4, 3)]
        run_round(KERNELS, lanes, tokens, torch.randn(5, 150, generator=generator))
