"""Ranks on one GPU: threads with a stream each, and processes that map each other's memory."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.helpers.wires import assert_same_bits
from thinwire.comm import Communicator, allocate
from thinwire.errors import TransportUnavailable
from thinwire.testing import run_ranks

OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
A_WHILE = 50_000_000  # clock cycles


def at(address: int, num_bytes: int) -> torch.Tensor:
    """The bytes at an address of the current GPU."""

    class Memory:
        __cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}

    return torch.as_tensor(Memory(), device="cuda")


def _use_every_base(comm: Communicator, kind: str) -> None:
    for generation, num_bytes in enumerate((1, 4097, 3 << 20)):
        with allocate(comm, num_bytes, generation) as memory:
            buffer_ptrs = memory.buffer_ptrs.tolist()
            assert memory.kind == kind and memory.buffer_ptrs.device == memory.local.device == comm.device
            assert buffer_ptrs[comm.rank] == memory.local.data_ptr() and not memory.local.any()
            comm.barrier()
            for owner, base in enumerate(buffer_ptrs):
                at(base, num_bytes)[comm.rank :: comm.size] = 16 * owner + comm.rank + 1
            torch.cuda.synchronize()
            comm.barrier()
            expected = torch.arange(num_bytes, device=comm.device) % comm.size + 1
            assert torch.equal(memory.local.long(), expected + 16 * comm.rank)
            comm.barrier()


def test_threads_see_the_same_bytes() -> None:
    run_ranks(_use_every_base, 3, "threads", mode="thread", device="cuda")


def _use_every_base_of_processes(comm: Communicator) -> None:
    with Communicator(comm.group, device="cuda:0") as on_gpu:
        _use_every_base(on_gpu, "cuda")


def test_processes_that_share_a_gpu_see_the_same_bytes() -> None:
    run_ranks(_use_every_base_of_processes, 2, env={OVERLAPPING: "1"}, timeout=120)


def _share_without_leave(comm: Communicator) -> str:
    with Communicator(comm.group, device="cuda:0") as on_gpu, pytest.raises(TransportUnavailable) as caught:
        allocate(on_gpu, 64)
    return str(caught.value)


def test_processes_that_share_a_gpu_are_told_what_torch_needs() -> None:
    first, second = run_ranks(_share_without_leave, 2, env={OVERLAPPING: "0"}, timeout=120)
    assert first == second and "rank 0 cannot map the memory of rank 1: they share one GPU" in first
    assert f"{OVERLAPPING}=1, and a gloo group" in first


def _exchange_slowly(comm: Communicator) -> list[torch.cuda.Stream]:
    """Buffers are filled by kernels that have hardly begun when they are posted, and read as soon as wait returns."""
    for turn in range(10):
        sends: list[torch.Tensor | None] = [None] * comm.size
        receives: list[torch.Tensor | None] = [None] * comm.size
        for peer in range(comm.size):
            if peer != comm.rank:
                receives[peer] = torch.zeros(1 << 20, dtype=torch.uint8, device=comm.device)
                torch.cuda._sleep(A_WHILE // comm.size)
                sends[peer] = torch.full((1 << 20,), 10 * comm.rank + turn, dtype=torch.uint8, device=comm.device)
        pending = comm.post(sends, receives, f"turn {turn}")
        pending.wait() if turn % 2 else pending.wait_on_host()
        found = [None if received is None else received.clone() for received in receives]
        for buffer in (*sends, *receives):
            if buffer is not None:
                buffer.fill_(255)  # which must come after the copies
        for peer, received in enumerate(found):
            assert received is None or bool((received == 10 * peer + turn).all()), (turn, peer)
    return comm.share_objects(torch.cuda.current_stream())


def test_threads_exchange_on_streams_of_their_own_in_the_right_order() -> None:
    callers = torch.cuda.current_stream()
    streams = run_ranks(_exchange_slowly, 3, mode="thread", device="cuda")[0]
    assert len({stream.cuda_stream for stream in (*streams, callers)}) == 4
    assert torch.cuda.current_stream() == callers


def _all_to_all(comm: Communicator) -> torch.Tensor:
    x = torch.randn(6, 200, generator=torch.Generator().manual_seed(comm.rank)).to(comm.device)
    rows = tw.all_to_all_v(x, [1, 3, 2], wire="int8", comm=comm, check=True)
    assert isinstance(rows, torch.Tensor)
    return rows.cpu()


def test_rows_are_the_same_to_the_last_bit_on_the_gpu_and_on_the_cpu() -> None:
    on_gpu, on_cpu = (run_ranks(_all_to_all, 3, mode="thread", device=device) for device in ("cuda", "cpu"))
    for rank in range(3):
        assert_same_bits(f"rank {rank}", on_cpu[rank], on_gpu[rank])
