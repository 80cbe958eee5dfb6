"""Splits have the ranks that the layout says, in its order, in processes and in threads; and they end."""

from __future__ import annotations

import gc
import operator
import os
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from thinwire.comm import Communicator
from thinwire.comm.communicator import shared_split
from thinwire.comm.groups import keeps_order
from thinwire.comm.layout import Layout
from thinwire.errors import (
    PeerTimeout,
    TransportUnavailable,
)
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import RankError, run_ranks

CUBE = Layout((2, 2, 2), ("dp", "sp", "mp"))
SQUARE = Layout((2, 2), ("dp", "ep"))
IN_ORDER = ("mp", "dp", ("dp", "mp"), ())
AXES = (*IN_ORDER, ("mp", "dp"), ("sp", "dp", "mp"))
KEEPS_ORDER = keeps_order()


def split_along(comm: Communicator, layout: Layout, axes: tuple[str | tuple[str, ...], ...]) -> list[list[int]]:
    """For each entry of axes the ranks of `comm` that the split has, in its order."""
    found = []
    for along in axes:
        with comm.split(layout, along) as part:
            assert (part.device, part.timeout, part.in_process) == (comm.device, comm.timeout, comm.in_process)
            members = part.all_gather_object(comm.rank)
            assert members[part.rank] == comm.rank and not part.closed
            found.append(members)
        assert part.closed and not comm.closed
    comm.barrier()
    return found


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_split_has_the_ranks_along_its_axes_with_the_first_counting_most(mode: str) -> None:
    asked = AXES if KEEPS_ORDER or mode == "thread" else IN_ORDER
    for rank, found in enumerate(run_ranks(split_along, 8, CUBE, asked, mode=mode)):
        assert found == [list(CUBE.ranks_along(axes, rank)) for axes in asked]


def split_where_ranks_are_sorted(comm: Communicator) -> None:
    with (
        mock.patch("thinwire.comm.communicator.keeps_order", lambda: False),
        pytest.raises(TransportUnavailable, match=r"the process group \[2, 0\] would lose its order"),
    ):
        comm.split(groups=[[1, 3], [2, 0]])
    with comm.split(groups=[[1, 3], [0, 2]]) as half:
        assert half.all_gather_object(comm.rank) == [comm.rank % 2, comm.rank % 2 + 2]


def test_an_order_that_pytorch_would_not_keep_is_refused_by_all_ranks() -> None:
    run_ranks(split_where_ranks_are_sorted, 4)


def split_again_and_again(comm: Communicator) -> tuple[int, int]:
    groups = [[2, 0] if KEEPS_ORDER else [0, 2], [1, 3]]
    before = len(dist.distributed_c10d._world.pg_names)
    for _ in range(5):
        with comm.split(groups=groups) as half:
            assert half.all_gather_object(comm.rank) == groups[comm.rank % 2]
            with half.split(groups=[[0], [1]]) as alone:  # of a part of the default group
                assert alone.size == 1 and alone.all_gather_object(comm.rank) == [comm.rank]
            with half.split(groups=[[0, 1]]) as both:
                assert both.all_gather_object(comm.rank) == groups[comm.rank % 2]
    first = shared_split(comm, ((0, 1), (2, 3)))
    assert shared_split(comm, ((0, 1), (2, 3))) is first and "split: 2 groups" in comm.explain()
    comm.barrier()
    comm_again = Communicator(comm.group)
    comm.close()
    assert first.closed and not comm_again.closed
    return before, len(dist.distributed_c10d._world.pg_names)


def test_splits_may_be_closed_made_anew_and_split_themselves() -> None:
    for before, after in run_ranks(split_again_and_again, 4):
        # What remains are the two splits a round of a communicator that leaves ranks out; see `split`.
        assert after == before + 2 * 5


def use_experts(comm: Communicator) -> tuple[list[int], torch.Tensor]:
    """Experts over "ep", each replica of "dp" alone: rank r's tokens are all r + 1, and expert e multiplies by e."""
    with comm.split(SQUARE, "ep") as part, ExpertParallel(part, 4, 1, 64, 8, wire="none") as ep:
        ids = torch.arange(4).view(4, 1)
        d = ep.dispatch(torch.full((4, 64), comm.rank + 1.0), ids, torch.ones(4, 1))
        experts = torch.tensor(list(ep.local_experts)).repeat_interleave(d.expert_counts)
        assert d.tokens.shape[0] == 4 and sorted(set(d.tokens[:, 0].tolist())) == [
            comm.rank // 2 * 2 + i for i in (1, 2)
        ]
        y = ep.combine(d.tokens * experts[:, None], d)
    return list(ep.local_experts), y[:, 0]


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_expert_parallelism_takes_its_group_from_layout_axes(mode: str) -> None:
    for rank, (experts, y) in enumerate(run_ranks(use_experts, 4, mode=mode)):
        assert experts == ([0, 1] if rank % 2 == 0 else [2, 3])
        assert y.tolist() == [(rank + 1.0) * expert for expert in range(4)]


def lose_one(comm: Communicator) -> str:
    part = Communicator(comm.group, timeout=2.0).split(SQUARE, "ep")
    if comm.rank == 3:
        return ""
    if comm.rank < 2:
        part.barrier()
        return ""
    with pytest.raises(PeerTimeout) as caught:
        part.barrier()
    return str(caught.value.ranks)


def test_a_split_that_fails_leaves_the_others_alone() -> None:
    assert run_ranks(lose_one, 4) == ["", "", "(1,)", ""]


def test_threads_that_wait_within_a_split_are_released_when_a_rank_has_failed() -> None:
    released = threading.Event()

    def fail_or_wait(comm: Communicator) -> None:
        half = comm.split(groups=[[0, 1], [2, 3]])
        if comm.rank == 1:
            raise ValueError("on purpose")
        if comm.rank == 0:
            with pytest.raises(PeerTimeout):
                half.barrier()
            released.set()

    with pytest.raises(RankError, match="on purpose"):
        run_ranks(fail_or_wait, 4, mode="thread")
    assert released.wait(10.0)  # the barrier by itself would wait 30 s


def drop_splits(comm: Communicator) -> list[tuple[int, int, int]]:
    held = []
    for _ in range(2):
        for _ in range(4):
            half = comm.split(groups=[[0, 1]])
            half.barrier()
            work = half.all_reduce(torch.ones(40_000), async_op=True)  # of two steps
            del half
            gc.collect()
            work.wait()
            del work
        gc.collect()
        comm.barrier()
        ends = time.monotonic() + 10  # a thread of Gloo's may take its time to end
        now = what_is_held()
        while held and any(map(operator.gt, now, held[0])) and time.monotonic() < ends:
            time.sleep(0.05)
            now = what_is_held()
        held.append(now)
    return held


def what_is_held() -> tuple[int, int, int]:
    groups = len(dist.distributed_c10d._world.pg_names)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), groups


def test_a_split_that_is_dropped_leaves_nothing() -> None:
    for first, second in run_ranks(drop_splits, 2):
        assert all(later <= earlier for earlier, later in zip(first, second, strict=True)) and second[2] == 1
