"""`integrity="checksum"` compares messages: every operation takes the staged transport, says so, and gives the same."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import torch

import thinwire as tw
from tests.helpers.tampering import Arrival, tamper_with
from thinwire.comm.communicator import Communicator
from thinwire.errors import IntegrityError, PeerTimeout, TransportUnavailable
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

VICTIM = 1

REASON = r"checksums \(integrity='checksum'\) are of messages, and the direct transport sends none"


def _results(comm: Communicator, transport: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(comm.rank)
    x, weights = torch.randn(9, 200, generator=generator), torch.rand(9, 2, generator=generator)
    ids = torch.randint(-1, 7, (9, 2), generator=generator)
    with ExpertParallel(comm, 7, 2, 200, 9, wire="int8") as ep:
        assert ep.transport == transport
        d = ep.dispatch(x, ids, weights)
        results = [ep.combine(d.tokens * 3, d)]
    for call in (tw.all_reduce, tw.all_gather, tw.reduce_scatter, tw.all_to_all_v):
        result = call(x, wire="int8", comm=comm)
        assert isinstance(result, torch.Tensor)
        results.append(result)
    return results


def _alike(comm: Communicator) -> None:
    expected = _results(comm, "direct")
    with Communicator(comm.group, integrity="checksum") as checked:
        assert all(map(torch.equal, expected, _results(checked, "staged")))
        assert checked.explain().count("staged, as checksums (integrity='checksum') are of messages") == 2
        with pytest.raises(TransportUnavailable, match=REASON):
            ExpertParallel(checked, 7, 2, 200, 9, transport="direct")
        with pytest.raises(TransportUnavailable, match=REASON):
            tw.all_reduce(torch.ones(4), comm=checked, transport="direct")
        with pytest.raises(TransportUnavailable, match=REASON):
            tw.empty(4, comm=checked)


def test_operations_are_staged_for_this_reason_and_give_the_same_bits() -> None:
    run_ranks(_alike, 3)


def _corrupted(comm: Communicator) -> str:
    def flip(seen: list[Arrival]) -> None:
        if seen[-1].label.startswith("dispatch"):
            seen[-1].octets[5] ^= 1

    x = torch.ones(9, 200)
    ids, weights = torch.arange(18).view(9, 2) % 7, torch.ones(9, 2)
    short = Communicator(comm.group, timeout=2.0, integrity="checksum")
    with ExpertParallel(short, 7, 2, 200, 9) as ep:
        if comm.rank == VICTIM:
            tamper_with(short, flip)
        with pytest.raises(IntegrityError if comm.rank == VICTIM else PeerTimeout) as caught:
            for _ in range(2):  # the others learn when they next wait for the victim
                d = ep.dispatch(x, ids, weights)
                ep.combine(d.tokens, d)
        time.sleep(1.0 if comm.rank == VICTIM else 0.0)
        ep.rebuild()
        assert ep.comm.size == comm.size and ep.comm.integrity == "checksum" and ep.transport == "staged"
        d = ep.dispatch(x, ids, weights)
        assert torch.isfinite(ep.combine(d.tokens, d)).all()
        return str(caught.value)


def test_after_a_corrupted_round_rebuild_goes_on_with_all_ranks() -> None:
    assert "what arrived is not what was sent" in run_ranks(_corrupted, 3)[VICTIM]
