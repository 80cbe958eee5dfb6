"""What runs only over NCCL, over a stand-in with NCCL's watchdog: results, ranks that are away, and who ends first."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import torch

import thinwire as tw
from tests.helpers.nccl_stand_in import ENDED, over_nccl
from thinwire.comm import groups
from thinwire.errors import PeerTimeout
from thinwire.testing import RankError, run_ranks

HOURS = timedelta(hours=1)


def results(comm):
    """Of each kind of call that moves data over the group."""
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(6, 64, generator=generator)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(6)])
    weights = torch.rand(6, 2, generator=generator)
    with comm.split(groups=[list(range(comm.size))]) as again:
        assert again.all_gather_object({"rank": comm.rank}) == [{"rank": rank} for rank in range(comm.size)]
    exact, large, part = torch.full((3,), comm.rank + 1.0), torch.randn(40_000, generator=generator), torch.zeros(2, 64)
    comm.all_reduce(exact)
    comm.all_reduce(large)  # in two steps
    comm.reduce(x, 1)
    comm.reduce_scatter(part, x.split(2))
    comm.broadcast(weights, 2)
    gathered = [torch.empty_like(ids) for _ in range(comm.size)]
    comm.all_gather(gathered, ids)
    received = tw.all_to_all_v(x, [comm.rank, 2, 4 - comm.rank], comm=comm, transport="staged")
    reduced = tw.all_reduce(x, comm=comm, transport="staged")
    with tw.ExpertParallel(comm, 4, 2, 64, 8, transport="staged") as ep:
        dispatched = ep.dispatch(x, ids, weights)
        combined = ep.combine(dispatched.tokens * 2, dispatched)
    return [exact, large, x, part, weights, *gathered, received, reduced, combined]


def both(comm):
    with over_nccl(HOURS) as other:
        assert other._exchange.backend == "nccl" and other.timeout == 3600
        return results(comm), results(other)


def test_the_bits_are_those_over_gloo():
    for ours, others in run_ranks(both, 3):
        for mine, other in zip(ours, others, strict=True):
            assert torch.equal(mine, other)


def away(comm, seconds):
    """Rank 1 is away between two steps, rank 0 waits for it in the second."""
    with over_nccl(groups.limit_of_group("nccl", 600.0)) as other:
        sums = []
        for step in range(2):
            if step and comm.rank == 1:
                time.sleep(seconds)
            rows = tw.all_to_all_v(torch.ones(2, 64), [1, 1], comm=other, transport="staged")
            sums.append((rows.sum() + tw.all_reduce(rows, comm=other, transport="staged").sum()).item())
        return sums, other.timeout


@pytest.mark.parametrize("seconds", [3.0])
def test_a_rank_may_be_away_between_steps(seconds):
    for sums, timeout in run_ranks(away, 2, seconds, timeout=seconds + 60):
        assert sums == [pytest.approx(384, rel=0.02)] * 2 and timeout >= 600


def gather(comm):
    comm.all_gather_object(1)


def exchange(comm):
    tw.all_to_all_v(torch.ones(2, 64), [1, 1], comm=comm, transport="staged")


def dispatch(comm):
    ids = torch.zeros(2, 1, dtype=torch.int64)
    with tw.ExpertParallel(comm, 2, 1, 64, 8, transport="staged") as ep:
        ep.dispatch(torch.ones(2, 64), ids, torch.ones(2, 1))


def alone(comm, call, limit):
    """Rank 0 waits for rank 1, which does not come before rank 0 has told it of its error."""
    with over_nccl(limit, timeout=1.0) as other:
        text = ""
        if comm.rank == 0:
            with pytest.raises(PeerTimeout) as caught:
                call(other)
            text = str(caught.value)
            time.sleep(0.5)  # the watchdog has time to look
        return comm.all_gather_object(text)[0]


@pytest.mark.parametrize("call", [gather, exchange, dispatch])
def test_waits_on_the_host_end_before_the_watchdog_does(call, monkeypatch):
    monkeypatch.setattr(groups, "DEFAULT_TIMEOUT", 0.0)
    monkeypatch.setattr(groups, "COMPILE_SECONDS", 0.0)  # only a GPU's kernels may be compiled for so long
    for text in run_ranks(alone, 2, call, groups.limit_of_group("nccl", 1.0)):
        assert "was not done within 1 s" in text and "pass timeout= to tw.init" in text


def test_the_stand_ins_watchdog_ends_processes():
    with pytest.raises(RankError, match=str(ENDED)):
        run_ranks(alone, 2, gather, timedelta(seconds=0.3))
