"""THINWIRE_CPU_THREADS: calls whose rows several threads share give the bits that one thread gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("numba", reason="ranks of the CPU need numba")

import torch

from thinwire.comm.communicator import Communicator
from thinwire.comm.resources import THREADS_VARIABLE
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.codec import _SHARED_BYTES, dequantize, quantize
from thinwire.fused.ops import all_gather, all_reduce, reduce_scatter
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks
from thinwire.triton_kernels.cpu import pack

WORLD = 8
Call = Callable[[Communicator], list[torch.Tensor]]


def codec(comm: Communicator) -> list[torch.Tensor]:
    rows = quantize(values(comm, 4, 1 << 19), "int8")
    return [rows.records, dequantize(rows)]


def staged_rows(comm: Communicator) -> list[torch.Tensor]:
    counts = [(comm.rank + peer) % 4 for peer in range(WORLD)]
    received = all_to_all_v(values(comm, sum(counts), 300), counts, counts, comm=comm, transport="staged")
    assert isinstance(received, torch.Tensor)
    return [received]


def staged_gather(comm: Communicator) -> list[torch.Tensor]:
    return [all_gather(values(comm, 12, 300), comm=comm, wire="int8", transport="staged")]


def staged_scatter(comm: Communicator) -> list[torch.Tensor]:
    return [reduce_scatter(values(comm, WORLD, 12, 300), comm=comm, wire="int8", transport="staged")]


def staged_reduce(comm: Communicator) -> list[torch.Tensor]:
    return [all_reduce(values(comm, 100_000), comm=comm, wire="int8", transport="staged")]


def staged_round(comm: Communicator) -> list[torch.Tensor]:
    return round_of(comm, "staged")


def round_of(comm: Communicator, transport: str) -> list[torch.Tensor]:
    with ExpertParallel(comm, WORLD, 2, 72, 9, transport=transport, wire="int8") as ep:
        x, ids = values(comm, 9, 72).requires_grad_(), torch.arange(18).view(9, 2) * (comm.rank + 1) % WORLD
        weights = x.detach()[:, :2].abs().requires_grad_()
        d = ep.dispatch(x, ids, weights)
        tokens = d.tokens
        y = ep.combine(tokens * 2, d)
        (y * values(comm, 9, 72)).sum().backward()
        assert x.grad is not None and weights.grad is not None
        return [tokens.detach(), y.detach(), x.grad, weights.grad]


def values(comm: Communicator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(comm.rank))


@pytest.mark.parametrize(
    "call",
    [
        codec,
        staged_rows,
        staged_gather,
        staged_scatter,
        staged_reduce,
        staged_round,
    ],
)
def test_threads_change_no_bit(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "BYTES_PER_THREAD", 1)
    started: list[object] = []
    shared = pack.share_rows

    def share_rows(threads: int, count: int, run: Callable[[int, int], object]) -> None:
        started.extend([run] * (threads > 1))
        shared(threads, count, run)

    monkeypatch.setattr(pack, "share_rows", share_rows)
    results = []
    for threads in ("1", "3"):
        monkeypatch.setenv(THREADS_VARIABLE, threads)
        results.append(run_ranks(call, WORLD, mode="thread"))
        assert bool(started) == (threads == "3")
    for one, several in zip(*results, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, several, strict=True))


def test_the_share_is_asked_for_from_the_fewest_rows_that_two_threads_are_worth() -> None:
    assert _SHARED_BYTES == 2 * pack.BYTES_PER_THREAD
