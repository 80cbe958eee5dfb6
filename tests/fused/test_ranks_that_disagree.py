"""Ranks of the staged transport that call different things: each gets an error, none a result.

Records are padded, so the bytes of different sizes may agree: what is compared must be the sizes themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import torch
import torch.distributed as dist

import thinwire as tw
from thinwire.comm.communicator import Communicator
from thinwire.errors import ConfigMismatch, PeerTimeout
from thinwire.testing import run_ranks

#: Seconds that a rank waits for its peers.
TIMEOUT = 1.0
STAGED: dict[str, Any] = {"transport": "staged"}


def _all_reduce(sizes: tuple[int, ...], **options: Any) -> Callable[[Communicator], object]:
    return lambda comm: tw.all_reduce(torch.ones(sizes[comm.rank]), comm=comm, **STAGED, **options)


def _reduce_scatter(sizes: tuple[int, ...]) -> Callable[[Communicator], object]:
    return lambda comm: tw.reduce_scatter(torch.ones(sizes[comm.rank]), comm=comm, **STAGED)


def _all_gather(sizes: tuple[int, ...]) -> Callable[[Communicator], object]:
    return lambda comm: tw.all_gather(torch.ones(sizes[comm.rank]), comm=comm, **STAGED)


def _gather_v(counts: tuple[int, ...], wrong: tuple[int, ...]) -> Callable[[Communicator], object]:
    """Rank 2 believes in other counts than ranks 0 and 1; its own is the same."""
    return lambda comm: tw.all_gather_v(
        torch.ones(counts[comm.rank], 3), wrong if comm.rank == 2 else counts, comm=comm, **STAGED
    )


def _all_to_all_v(shapes: tuple[tuple[int, ...], ...], counts: tuple[int, ...]) -> Callable[[Communicator], object]:
    """Rank r sends and expects `counts[r]` rows of a tensor of `shapes[r]`, to and from everyone."""

    def call(comm: Communicator) -> object:
        each = [counts[comm.rank]] * comm.size
        return tw.all_to_all_v(torch.ones(shapes[comm.rank]), each, each, comm=comm, **STAGED)

    return call


def _by_rank(*calls: Callable[[Communicator], object]) -> Callable[[Communicator], object]:
    return lambda comm: calls[comm.rank](comm)


def _exact(sizes: tuple[int, ...]) -> Callable[[Communicator], object]:
    return lambda comm: comm.all_reduce(torch.ones(sizes[comm.rank]))


CASES: dict[str, Callable[[Communicator], object]] = {
    "all_reduce of 3000 and 2400": _all_reduce((3000, 3000, 2400)),
    "all_reduce of 3000 and 3001": _all_reduce((3000, 3000, 3001)),
    "all_reduce of 4096 and 4095": _all_reduce((4096, 4095, 4096)),
    "all_reduce of 3000 and 2400, exactly": _all_reduce((3000, 3000, 2400), wire="none"),
    "all_reduce of 3000 and 2400, gathered exactly": _all_reduce((3000, 2400, 3000), gather_wire="none"),
    "reduce_scatter of 3000 and 2400": _reduce_scatter((3000, 3000, 2400)),
    "all_gather of 100 and 90": _all_gather((100, 100, 90)),
    "all_gather_v with other counts": _gather_v((10, 20, 30), (10, 21, 30)),
    "all_to_all_v of 1000 and 1024 elements": _all_to_all_v(((3000,), (3000,), (3072,)), (1000, 1000, 1024)),
    "all_to_all_v of rows of 60 and 64 elements": _all_to_all_v(((6, 60), (6, 60), (6, 64)), (2, 2, 2)),
    "all_reduce beside reduce_scatter": _by_rank(
        _all_reduce((3072,) * 3), _reduce_scatter((3072,) * 3), _all_reduce((3072,) * 3)
    ),
    "all_reduce beside another second wire": _by_rank(
        _all_reduce((30,) * 3), _all_reduce((30,) * 3, gather_wire="int4"), _all_reduce((30,) * 3)
    ),
    "the exact all_reduce of 25001 and 25000": _exact((25001, 25000, 25001)),
    "the exact all_reduce of int32 and float32": _by_rank(
        _exact((7,) * 3), lambda comm: comm.all_reduce(torch.ones(7, dtype=torch.int32)), _exact((7,) * 3)
    ),
    "a barrier beside counts": _by_rank(
        lambda comm: comm.barrier(), lambda comm: comm.exchange_counts([1] * comm.size), lambda comm: comm.barrier()
    ),
    "counts beside an exact all_gather of as many bytes": _by_rank(
        lambda comm: comm.exchange_counts([1] * comm.size),
        lambda comm: comm.all_gather([torch.zeros(1, dtype=torch.int64)] * comm.size, torch.zeros(1).long()),
        lambda comm: comm.exchange_counts([1] * comm.size),
    ),
}


def _disagree(comm: Communicator) -> dict[str, tuple[str, float]]:
    """Of each case, the error's name and the seconds until it came. A group is of no use after an error."""
    found = {}
    for name, call in CASES.items():
        short = Communicator(dist.new_group(timeout=timedelta(seconds=30)), timeout=TIMEOUT)
        start, error = time.monotonic(), "none"
        try:
            call(short)
        except (PeerTimeout, ConfigMismatch) as raised:
            error = type(raised).__name__
        found[name] = error, time.monotonic() - start
        comm.barrier()
    return found


def test_none_of_three_ranks_has_a_result() -> None:
    for rank, found in enumerate(run_ranks(_disagree, 3)):
        for name, (error, seconds) in found.items():
            assert error != "none" and seconds < TIMEOUT + 2, f"{name}: rank {rank} got {error} after {seconds:.1f} s"
