"""Memory of GPUs that cannot be used as mapped: all ranks are staged, know why, and wait no longer than they must.

CPU ranks stand in: their heap has the steps of the GPUs' one, and Triton's interpreter runs the kernel.
"""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton", reason="the kernel is Triton's")

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

import thinwire as tw
from tests.helpers.wires import assert_same_bits
from thinwire.comm import Communicator, allocate
from thinwire.comm.memory import cuda_heap, symmetric
from thinwire.comm.memory.cuda_heap import CudaHeap
from thinwire.comm.memory.heap import PosixHeap
from thinwire.testing import run_ranks
from thinwire.triton_kernels.reach import exchange, find_lost
from verification.ptx.device import Device

INTERPRETED = {"TRITON_INTERPRET": "1", "THINWIRE_BACKEND": "triton"}
TIMEOUT = 60.0
TRIAL = 10.0  # an interpreted kernel on a busy machine may take longer than a GPU is given


class _Heap(PosixHeap):
    """That of CPU ranks, with a first exchange; what rank 1 stores at rank 2 may get lost, or come to another place."""

    shift: int | None = None  # bytes

    def attach(self, offers: list[Any]) -> list[int]:
        addresses = super().attach(offers)
        if self.comm.rank == 1 and self.shift is not None:
            self.elsewhere = torch.zeros(self.num_bytes, dtype=torch.uint8)
            addresses[2] = addresses[2] + self.shift if self.shift else self.elsewhere.data_ptr()
        return addresses

    trials = CudaHeap.trials


class _RefusedHeap(_Heap):
    """Of ranks of which one cannot map a peer, as torch maps them: the others wait in its store."""

    def attach(self, offers: list[Any]) -> list[int]:
        addresses = super().attach(offers)

        def rendezvous(local: torch.Tensor, group: dist.ProcessGroup) -> SimpleNamespace:
            if self.comm.rank == 1:
                raise RuntimeError("CUDA driver error: peer access is not supported between these two devices")
            group.get_group_store().wait(["what rank 1 would have set"])
            return SimpleNamespace(buffer_ptrs=addresses)

        with mock.patch.object(_symmetric_memory, "rendezvous", rendezvous):
            return CudaHeap.attach(self, offers)  # type: ignore[arg-type]


def _all_reduce(comm: Communicator, heap: type[_Heap], shift: int | None) -> str:
    heap.shift = shift
    with (
        mock.patch.object(symmetric, "_choose_heap", lambda comm: heap),
        mock.patch.object(cuda_heap, "_TRIAL_SECONDS", TRIAL),
    ):
        before = time.monotonic()
        x = torch.arange(3000.0) + comm.rank
        out = tw.all_reduce(x, comm=comm, wire="int8")
        assert time.monotonic() - before < TIMEOUT
    assert_same_bits("the sum", tw.all_reduce(x, comm=comm, wire="int8", transport="staged"), out)
    return comm.explain()


@pytest.mark.parametrize(("shift", "at"), [(0, "lost"), (64, "at the wrong place"), (None, "")])
def test_stores_that_do_not_arrive_are_found_before_a_call_waits_for_them(shift: int | None, at: str) -> None:
    for told in run_ranks(_all_reduce, 3, _Heap, shift, env=INTERPRETED, timeout=120):
        # Rank 1's words at the wrong place may lie on rank 2's own.
        why = r"staged, as what ranks \[1(, 2)?\] stored in the memory of rank 2 on cpu did not arrive whole in 10 s"
        assert bool(re.search(why, told)) == bool(at) and ("collectives: direct" in told) != bool(at), told


def _all_reduce_twice(comm: Communicator) -> list[str]:
    with mock.patch.object(cuda_heap, "_MOST_SECONDS", 2.0):
        told = [_all_reduce(comm, _RefusedHeap, None)]
    assert comm.group.get_group_store().timeout.total_seconds() > 2.0
    with mock.patch.object(symmetric, "_choose_heap", lambda comm: CudaHeap):
        told.append(tw.all_to_all_v(torch.ones(3), [1] * 3, [1] * 3, comm=comm, wire="none") is None or comm.explain())
    return told


def test_a_rank_that_cannot_map_a_peer_leaves_none_waiting() -> None:
    for first, second in run_ranks(_all_reduce_twice, 3, env=INTERPRETED, timeout=120):
        why = "staged, as rank 1 could not make symmetric memory: RuntimeError: CUDA driver error: peer access is not"
        assert why in first, first
        assert "staged, as torch failed to map peers' memory before in the process of rank 0" in second, second


def _zero_again(comm: Communicator) -> None:
    for num_bytes in (1, 128 * comm.size, 128 * comm.size + 4 * comm.size + 1, 1 << 20):
        with mock.patch.object(symmetric, "_choose_heap", lambda comm: _Heap), allocate(comm, num_bytes) as memory:
            assert not memory.local.any()


def test_the_memory_is_zero_afterwards() -> None:
    run_ranks(_zero_again, 2, env=INTERPRETED, timeout=120)


@pytest.mark.parametrize("world", [2, 3])
def test_the_compiled_kernel_has_no_race(world: int) -> None:
    device = Device(ranks=world, races=True, warps="any order")
    buffers = [torch.zeros(8192, dtype=torch.uint8) for _ in range(world)]
    buffer_ptrs = torch.tensor([buffer.data_ptr() for buffer in buffers])
    for rank, buffer in enumerate(buffers):
        device.register(f"buffer {rank}", buffer)
    for seconds in (0.0, 1.0):
        with device.patch(queued=True):
            for device.rank, buffer in enumerate(buffers):
                exchange(device.rank, buffer, buffer_ptrs, seconds)
            device.run_queued()
        assert not device.races.found
        assert any(buffer.any() for buffer in buffers) == bool(seconds)
    assert [find_lost(rank, buffer, world) for rank, buffer in enumerate(buffers)] == [[]] * world
    assert not any(buffer.any() for buffer in buffers)
