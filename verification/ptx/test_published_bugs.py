"""Bugs that other libraries shipped, made again in rounds on compiled kernels: each is found.

They gave wrong rows now and then, without an error, or hung, and were found on many GPUs after months.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

import torch

from thinwire.triton_kernels import combine, dispatch, permute
from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH, Lane
from thinwire.triton_kernels.signal import CONTROL_EPOCH
from verification.ptx.device import Device, Edit
from verification.ptx.mutations import mutations_of
from verification.ptx.rounds import Round, Rounds


class _ReadAgain(Rounds):
    """Rows are read after the signal by which this rank gives the slots back."""

    def _queue_rank(self, lane: Lane, round_: Round) -> None:
        super()._queue_rank(lane, round_)
        permute.gather(lane, torch.empty_like(round_.gathered[lane.rank]), torch.tensor(False))


class _SameFlags(Rounds):
    """A flag says that something came, and not in which round."""

    def _queue_rank(self, lane: Lane, round_: Round) -> None:
        self.device.call(lambda: lane.control[CONTROL_EPOCH].zero_() and None)
        super()._queue_rank(lane, round_)


class _SameRoom(Rounds):
    """Sums come home to where records are."""

    def _queue_rank(self, lane: Lane, round_: Round) -> None:
        super()._queue_rank(replace(lane, layout=replace(lane.layout, SUMS=lane.layout.RECORDS)), round_)


class _OthersRouting(Rounds):
    """Sums are added up by where the tokens of another rank went."""

    def _queue_rank(self, lane: Lane, round_: Round) -> None:
        rank, gathered = lane.rank, round_.gathered[lane.rank]
        mine = round_.tokens[rank]
        dispatch.send_tokens(lane, mine.x, mine.ids, mine.weights, self.num_programs)
        dispatch.wait(lane, DISPATCH, self.timeout, self.grace)
        permute.route(lane)
        permute.gather(lane, gathered, torch.tensor(False))
        self.device.call(lambda: self._apply_experts(lane, gathered))
        combine.send_sums(lane, gathered, gathered.dtype, self.num_programs)
        dispatch.wait(lane, COMBINE, self.timeout, self.grace)
        combine.sum_home(replace(lane, rank=1 - rank), round_.results[rank])


def _release_of_one_warp(name: str, ptx: str) -> str:
    """The last program publishes what its own warp has stored, and not what the others have."""
    if name != "send_tokens_kernel":
        return ptx
    first = next(change for change in mutations_of(ptx) if change.place.startswith("arrive"))
    assert first.was.startswith("bar.")
    return first.apply(ptx)


#: What shipped, and how it is made again.
BUGS: dict[str, tuple[type[Rounds], Edit | None]] = {
    "https://github.com/AMD-AGI/Primus-Turbo/pull/482": (Rounds, _release_of_one_warp),
    "https://github.com/deepseek-ai/DeepEP/issues/621": (_ReadAgain, None),
    "https://github.com/NVIDIA/nccl/issues/2303": (_SameFlags, None),
    "https://github.com/ROCm/mori/pull/80": (_SameRoom, None),
    "https://github.com/ROCm/mori/issues/475": (_OthersRouting, None),
}


def _races(kind: type[Rounds], edit: Edit | None, seed: int) -> bool:
    device = Device(ranks=2, races=True, edit=edit, seed=seed, warps="any order")
    with device.patch(queued=True):
        rounds = kind.of(device, 2, hidden=1536, max_tokens=2)
        for counts in ((2, 1), (1, 2), (2, 2)):
            rounds.queue(counts=counts)
        device.run_queued()
    assert device.races is not None
    return bool(device.races.found)


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_that_others_shipped_is_a_race(bug: str) -> None:
    """In one of a few orders: a flag that says too little may come at the right time."""
    assert any(_races(*BUGS[bug], seed) for seed in range(4))
    assert not _races(Rounds, None, 0)
