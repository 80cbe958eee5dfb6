"""Pieces of a pair's records are cut alike by both of its ranks, whatever other pairs have."""

from __future__ import annotations

import pytest
import torch

from thinwire.comm import Communicator
from thinwire.fused import staged
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.testing import run_ranks


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("record_bytes", [32, 4160, 3 << 20])
def test_cuts_are_at_the_same_places_however_many_records_there_are(record_bytes: int, backend: str) -> None:
    first, longest = staged.NCCL_PIECE_BYTES if backend == "nccl" else staged.PIECE_BYTES
    most = (5 * longest) // record_bytes + 1
    cuts = list(staged.cut_pieces(most, record_bytes, backend))
    assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])] and cuts[-1][1] >= most
    assert all((stop - start) * record_bytes <= max(longest, record_bytes) for start, stop in cuts)
    assert (cuts[0][1] + 1) * record_bytes > first
    for rows in (0, 1, cuts[0][1], cuts[0][1] + 1, most // 2):
        fewer = list(staged.cut_pieces(rows, record_bytes, backend))
        assert fewer == cuts[: len(fewer)] and (fewer[-1][1] if fewer else 0) >= rows


def _times_given_way(comm: Communicator, rows: int) -> int:
    times = 0

    def count() -> None:
        nonlocal times
        times += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staged.os, "sched_yield", count)
        all_to_all_v(torch.ones(2 * rows, 1024), wire="int8", comm=comm, transport="staged")
    return times


@pytest.mark.parametrize("rows, times", [(8, 0), (1500, 1), (9000, 3)])
def test_ranks_give_way_after_each_of_the_first_pieces_but_the_last(rows: int, times: int) -> None:
    assert run_ranks(_times_given_way, 2, rows) == [times] * 2
