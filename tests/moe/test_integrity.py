"""`integrity="checksum"` in rounds of the direct transport, between processes: what is raised where, and what then."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("numba", reason="ranks of the CPU need numba")

import torch

from thinwire.comm.communicator import Communicator
from thinwire.errors import IntegrityError, PeerTimeout
from thinwire.moe.direct import DirectRounds
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

CHECKED = {"THINWIRE_INTEGRITY": "checksum"}
VICTIM = 1


def tokens(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(comm.rank)
    x, weights = torch.randn(9, 200, generator=generator), torch.rand(9, 2, generator=generator)
    return x, torch.randint(-1, 7, (9, 2), generator=generator), weights


def one_round(ep: ExpertParallel, lane: int = 0) -> torch.Tensor:
    d = ep.dispatch(*tokens(ep.comm), lane=lane)
    return ep.combine(d.tokens * 3, d)


def alike(comm: Communicator) -> None:
    results = []
    for integrity in ("none", "checksum"):
        with Communicator(comm.group, integrity=integrity) as part, ExpertParallel(part, 7, 2, 200, 9) as ep:
            assert ep.transport == "direct"
            results.append([one_round(ep) for _ in range(3)])
            results[-1].append(torch.tensor(ep.memory_bytes))
    (*plain, small), (*checked, large) = results
    assert all(torch.equal(a, b) for a, b in zip(plain, checked, strict=True)) and small < large


def test_results_are_the_same_to_the_last_bit() -> None:
    run_ranks(alike, 3)


def corrupted(comm: Communicator, leg: str, backends: tuple[str, ...] = ()) -> str:
    text = ""
    if backends:
        os.environ["THINWIRE_BACKEND"] = backends[comm.rank]
    with ExpertParallel(comm, 7, 2, 200, 9, lanes=2, timeout=100.0 if backends else 20.0) as ep:
        one_round(ep)
        assert isinstance(ep._assembly.rounds, DirectRounds)
        lane, kernels, told = (
            ep._assembly.rounds.lanes[0],
            ep._assembly.rounds.kernels,
            IntegrityError if comm.rank == VICTIM else PeerTimeout,
        )
        wait = kernels.wait

        def waits(tensors: object, phase: int, *times: float) -> None:
            wait(tensors, phase, *times)
            if tensors is lane and phase == ("dispatch", "combine").index(leg):
                layout = lane.layout
                plane = {"dispatch": layout.WEIGHTS, "combine": layout.SUMS}[leg]
                lane.buffer[plane : plane + 9 * 2 * 4] ^= 1

        if comm.rank == VICTIM:
            object.__setattr__(kernels, "wait", waits)
        with pytest.raises(told) as caught:
            for lane_number in (0, 1, 0, 1):  # the others learn when they next wait for the victim
                one_round(ep, lane_number)
        text = str(caught.value)
        if isinstance(caught.value, PeerTimeout):
            assert caught.value.ranks == (), text
        for other in (0, 1):
            with pytest.raises(told):
                one_round(ep, other)
        object.__setattr__(kernels, "wait", wait)
        ep.rebuild()
        assert ep.comm.size == comm.size and ep.comm.integrity == "checksum"
        one_round(ep, 1)
    return text


@pytest.mark.parametrize("leg", ["dispatch", "combine"])
def test_a_corrupted_round_ends_all_lanes_and_rebuild_goes_on_with_all_ranks(leg: str) -> None:
    check_texts(run_ranks(corrupted, 3, leg, env=CHECKED), leg)


@pytest.mark.exhaustive
@pytest.mark.parametrize("leg", ["dispatch", "combine"])
def test_the_same_with_kernels_of_both_kinds_and_tritons_at_who_finds_it(leg: str) -> None:
    pytest.importorskip("triton", reason="interpreting kernels needs Triton")
    env = CHECKED | {"TRITON_INTERPRET": "1"}
    check_texts(run_ranks(corrupted, 3, leg, ("numba", "triton", "triton"), env=env, timeout=280), leg)


def check_texts(texts: list[str], leg: str) -> None:
    what = "the expert ids and weights of its token" if leg == "dispatch" else "the sum of this rank's token"
    assert f"rank {VICTIM} of 3, lane 0" in texts[VICTIM] and what in texts[VICTIM], texts[VICTIM]
    assert all("gave up" in texts[rank] for rank in (0, 2)), texts
