"""Symmetric memory: the same bytes for all, everything or nothing at allocation, and nothing left, whoever dies."""

from __future__ import annotations

import ctypes
import gc
import inspect
import os
import pickle
import platform
import re
import resource
import signal
import socket
import stat
import threading
import time
import weakref
from collections import Counter
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import _symmetric_memory

from tests.helpers.files import open_files
from tests.helpers.speeds import exhaustive_but
from thinwire import testing
from thinwire.comm import Communicator, allocate
from thinwire.comm import resources as available
from thinwire.comm.memory import cuda_heap, symmetric
from thinwire.comm.memory import heap as heaps
from thinwire.comm.memory.cuda_heap import CudaHeap
from thinwire.comm.memory.heap import PosixHeap
from thinwire.comm.threads import ThreadWorld
from thinwire.errors import CapacityError, ConfigMismatch, PeerTimeout, ThinwireError, TransportUnavailable
from thinwire.testing import RankError, run_ranks

MODES = ("process", "thread")
FAR_TOO_MUCH = 1 << 50


def store(address, value):
    ctypes.memset(address, value, 1)


def load(address):
    return ctypes.string_at(address, 1)[0]


def bytes_at(address, num_bytes):
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


def written(owner, places):
    return ((places * 31 + owner * 7) % 251 + 1).to(torch.uint8)


def held():
    """What this process holds that outlives a call: open files, and how many mappings of files in memory."""
    files = open_files()
    maps = Path("/proc/self/maps").read_text().splitlines()
    # Gloo closes connections, as peers end, whenever it likes.
    return sorted(file for file in files if "socket:" not in file), sum("memfd:thinwire" in line for line in maps)


def kept_since(before, limit=5.0):
    """Files that are open and were not before. A thread that answers peers may have one open for a moment."""
    deadline = time.monotonic() + limit
    while (kept := Counter(held()[0]) - Counter(before[0])) and time.monotonic() < deadline:
        time.sleep(0.01)
    return kept


def use_every_base(comm, sizes):
    for generation, num_bytes in enumerate(sizes):
        memory = allocate(comm, num_bytes, generation)
        buffer_ptrs = memory.buffer_ptrs.tolist()
        assert (memory.num_bytes, memory.generation, memory.closed) == (num_bytes, generation, False)
        assert memory.kind == ("threads" if comm.in_process else "posix")
        assert (memory.local.dtype, memory.local.shape, memory.local.device) == (torch.uint8, (num_bytes,), comm.device)
        assert (memory.buffer_ptrs.dtype, memory.buffer_ptrs.shape, memory.buffer_ptrs.device) == (
            torch.int64,
            (comm.size,),
            comm.device,
        )
        assert buffer_ptrs[comm.rank] == memory.local.data_ptr() and all(base % 64 == 0 for base in buffer_ptrs)
        assert not memory.local.any()
        comm.barrier()
        # Each byte of each buffer is written by one rank, and says by which, where and in whose.
        places = torch.arange(num_bytes)
        for owner, base in enumerate(buffer_ptrs):
            bytes_at(base, num_bytes)[comm.rank :: comm.size] = written(owner, places)[comm.rank :: comm.size]
        comm.barrier()
        assert torch.equal(memory.local, written(comm.rank, places))
        for owner, base in enumerate(buffer_ptrs):
            assert torch.equal(bytes_at(base, num_bytes), written(owner, places))
        comm.barrier()
        memory.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_see_the_same_bytes_at_the_same_offsets_of_zeroed_buffers(mode, world_size):
    run_ranks(use_every_base, world_size, (world_size, 4095, 4096, 70_001), mode=mode)


def allocate_under_inference_mode(comm):
    with torch.inference_mode():
        memory = allocate(comm, 16)
    memory.local.fill_(comm.rank)
    memory.close()


@pytest.mark.parametrize("mode", MODES)
def test_memory_made_under_inference_mode_can_be_written_to_later(mode):
    run_ranks(allocate_under_inference_mode, 2, mode=mode)


def error_of(comm, *request):
    before = held()
    with pytest.raises(ThinwireError) as caught:
        allocate(comm, *request)
    gc.collect()
    if not comm.in_process:
        # Although the error, and with it its traceback, is still there.
        assert not kept_since(before) and held()[1] <= before[1]  # what was left of earlier ones may go
    return type(caught.value).__name__, str(caught.value)


def make_bad_requests(comm):
    told = [error_of(comm, value) for value in (0, -4, 2.5, True, None)]
    told.append(error_of(comm, 64, -1))
    told.append(error_of(comm, 64 + comm.rank))
    told.append(error_of(comm, 64, comm.rank))
    told.append(error_of(comm, "64" if comm.rank else 64))
    allocate(comm, 64).close()  # the ranks are still in step
    return told


@pytest.mark.parametrize("mode", exhaustive_but(["process"], MODES))
def test_bad_requests_and_different_ones_are_refused_alike_on_every_rank(mode):
    first, second = run_ranks(make_bad_requests, 2, mode=mode)
    assert first == second
    for (kind, text), value in zip(first, (0, -4, 2.5, True, None), strict=False):
        assert kind == "ThinwireError" and f"num_bytes of symmetric memory is {value!r}, expected an int" in text
    assert "generation of symmetric memory is -1, expected an int of at least 0" in first[5][1]
    assert [kind for kind, _ in first[6:]] == [ConfigMismatch.__name__] * 3
    assert "num_bytes: 64 on rank 0; 65 on rank 1" in first[6][1] and "generation: 0 on rank 0; 1" in first[7][1]


def ask_for_far_too_much(comm):
    told = error_of(comm, FAR_TOO_MUCH)
    allocate(comm, 64).close()
    return told


@pytest.mark.parametrize("mode", MODES)
def test_more_than_there_is_gives_both_figures_on_every_rank_and_takes_nothing(mode):
    results = run_ranks(ask_for_far_too_much, 2, mode=mode)
    assert results[0] == results[1]
    kind, text = results[0]
    figures = re.search(r"2 ranks asked for (\d+) bytes .* (\d+) bytes in all; (\d+) bytes are available on", text)
    assert kind == CapacityError.__name__ and figures is not None
    each, total, there = (int(figure) for figure in figures.groups())
    assert (each, total) == (FAR_TOO_MUCH, 2 * FAR_TOO_MUCH)
    assert 0 < there <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def fall_short_on_one_rank(comm):
    """Once before anything is allocated, and once in the middle of it."""
    told = []
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):
        before = resource.getrlimit(limit)
        if comm.rank == 1:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(limit, (used + (64 << 20) if limit == resource.RLIMIT_AS else 4096, before[1]))
        told.append(error_of(comm, 100 << 20))
        resource.setrlimit(limit, before)
        allocate(comm, 64).close()
    return told


def test_what_one_process_cannot_have_fails_on_all_of_them():
    results = run_ranks(fall_short_on_one_rank, 3)
    assert results[0] == results[1] == results[2]
    (first_kind, first), (second_kind, second) = results[0]
    assert first_kind == second_kind == CapacityError.__name__
    assert f"3 ranks asked for {100 << 20} bytes" in first
    there = re.search(r"(\d+) bytes are available on this host", first)
    assert there is not None and int(there[1]) <= 64 << 20
    assert f"rank 1 cannot set aside {100 << 20} bytes of shared memory: File too large; " in second
    assert re.search(r"\d+ bytes are available to it", second)


def test_what_one_thread_cannot_have_fails_on_all_of_them(monkeypatch):
    zeros = torch.zeros

    def scarce(*size, **options):
        if threading.current_thread().name == "rank 1" and size == (12345,):
            raise RuntimeError("out of memory")
        return zeros(*size, **options)

    monkeypatch.setattr(torch, "zeros", scarce)
    results = run_ranks(error_of, 3, 12345, mode="thread")
    assert results[0] == results[1] == results[2]
    assert results[0][0] == CapacityError.__name__
    assert re.search(r"rank 1 cannot allocate 12345 bytes on cpu \(out of memory\); \d+ bytes are", results[0][1])


def stand_in_for_another_host(comm):
    if comm.rank == 1:
        platform.node = lambda: "elsewhere"


def live_among_other_processes(comm):
    inspect = PosixHeap.inspect
    if comm.rank == 2:
        PosixHeap.inspect = lambda heap: inspect(heap)._replace(processes=1)


def have_no_memfd(comm):
    if comm.rank == 1:
        del os.memfd_create


def be_kept_out(comm):
    open_file, processes = os.open, comm.all_gather_object(os.getpid())
    if comm.rank == 2:

        def refuse(path, *rest, **options):
            if str(path).startswith(f"/proc/{processes[0]}/fd/"):
                raise PermissionError(13, "Permission denied", path)
            return open_file(path, *rest, **options)

        os.open = refuse


def offer_something_else(comm):
    """Rank 1's number means another process of the same shape where the peers look."""
    create = PosixHeap.create
    if comm.rank == 1:

        def mislead(heap, facts):
            segment = create(heap, facts)
            return segment._replace(token="0" * len(segment.token))

        PosixHeap.create = mislead


def offer_another_file(comm):
    create = PosixHeap.create
    if comm.rank == 1:
        PosixHeap.create = lambda heap, facts: create(heap, facts)._replace(descriptor=os.open("/dev/null", os.O_RDWR))


def offer_a_file_that_can_shrink(comm):
    create = PosixHeap.create
    if comm.rank == 1:

        def copy(heap, facts):
            segment = create(heap, facts)
            descriptor = os.memfd_create("thinwire", os.MFD_ALLOW_SEALING)
            os.write(descriptor, Path(f"/proc/self/fd/{segment.descriptor}").read_bytes())
            return segment._replace(descriptor=descriptor)

        PosixHeap.create = copy


def break_unexpectedly(comm):
    if comm.rank == 0:
        PosixHeap.attach = lambda heap, offers: [][0]


OBSTACLES = [
    (stand_in_for_another_host, r"rank 1 cannot map the memory of rank 0: it runs on host 'elsewhere'"),
    (live_among_other_processes, r"rank 2 cannot map the memory of rank 0: they are in different pid namespaces"),
    (have_no_memfd, r"rank 1 cannot share memory with its peers: Linux lacks memfd_create"),
    (be_kept_out, r"rank 2 cannot map the memory of rank 0: opening file \d+ of process \d+ gave 'Permission denied'"),
    (offer_something_else, r"rank 0 cannot map the memory of rank 1: process \d+ here is not rank 1's process"),
    (offer_another_file, r"rank 0 cannot map the memory of rank 1: process \d+ here is not rank 1's process"),
    (offer_a_file_that_can_shrink, r"rank 0 cannot map the memory of rank 1: process \d+ here is not rank 1's process"),
    (break_unexpectedly, r"rank 0 could not make symmetric memory: IndexError: list index out of range"),
]


def meet_an_obstacle(comm, obstacle):
    originals = (PosixHeap.inspect, PosixHeap.create, PosixHeap.attach, platform.node, os.memfd_create, os.open)
    obstacle(comm)
    before = held()
    with pytest.raises(TransportUnavailable) as caught:
        allocate(comm, 4096)
    mappings = held()[1]
    PosixHeap.inspect, PosixHeap.create, PosixHeap.attach, platform.node, os.memfd_create, os.open = originals
    assert mappings == before[1] == 0
    if obstacle not in (offer_another_file, offer_a_file_that_can_shrink):  # which themselves open one
        kept = kept_since(before)
        assert not kept, kept
    with allocate(comm, 4096) as memory:
        assert not memory.local.any()
    return str(caught.value)


@pytest.mark.parametrize(("obstacle", "told"), OBSTACLES, ids=[obstacle.__name__ for obstacle, _ in OBSTACLES])
def test_a_rank_that_cannot_map_a_peer_is_named_on_every_rank_and_nothing_is_kept(obstacle, told):
    results = run_ranks(meet_an_obstacle, 3, obstacle)
    assert results[0] == results[1] == results[2]
    assert re.match(told, results[0]), results[0]


def be_killed_at(comm, moment, folder):
    """What the survivors held afterwards, left in files: a run with a dead rank has no results."""
    doomed, heap = comm.rank == 1, PosixHeap
    before = held()

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if doomed and moment == "before":
        die()
    if doomed and moment == "set aside":
        heaps.secrets = SimpleNamespace(token_bytes=die)
    if doomed and moment == "mapping":
        heap._map = die
    if moment == "after":
        memory = allocate(comm, 10_000)
        buffer_ptrs = memory.buffer_ptrs.tolist()
        store(buffer_ptrs[1] + comm.rank, 7)
        comm.barrier()
        if doomed:
            die()
        with pytest.raises(PeerTimeout) as caught:
            comm.barrier()
        # The dead rank's memory is still there for those who mapped it.
        store(buffer_ptrs[1] + 9_999, 8)
        assert [load(buffer_ptrs[1] + place) for place in (0, 1, 2, 9_999)] == [7, 7, 7, 8]
        memory.close()
    else:
        with pytest.raises(PeerTimeout) as caught:
            allocate(comm, 10_000)
    assert caught.value.ranks == (1,), caught.value
    gc.collect()
    deadline = time.monotonic() + 20
    kept = kept_since(before, 10.0)  # the other may still ask this one's board
    (Path(folder) / str(comm.rank)).write_text(repr((sorted(kept), held()[1])))
    while len(os.listdir(folder)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def shared_memory_files():
    # Open MPI's programs, which may be running beside, have theirs there.
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sm_segment")}


@pytest.mark.parametrize("moment", ["before", "set aside", "mapping", "after"])
def test_a_killed_rank_leaves_nothing_and_survivors_can_close(moment, tmp_path, monkeypatch):
    monkeypatch.setattr(testing, "_GRACE", 20.0)  # in which survivors write what they held, also on a busy machine
    shared = shared_memory_files()
    with pytest.raises(RankError) as caught:
        run_ranks(be_killed_at, 3, moment, str(tmp_path))
    assert list(caught.value.failures) == [1], caught.value
    assert "killed by SIGKILL" in caught.value.failures[1]
    assert [(tmp_path / name).read_text() for name in ("0", "2")] == ["([], 0)"] * 2
    assert shared_memory_files() <= shared


def stay_away(comm):
    short = Communicator(dist.new_group(range(3)), timeout=0.5)
    if comm.rank == 2:
        time.sleep(1.0)
        ranks = ()
    else:
        with pytest.raises(PeerTimeout) as caught:
            allocate(short, 64)
        ranks = caught.value.ranks
    comm.barrier()
    return ranks, held()[1]


def test_a_process_that_does_not_take_part_is_blamed_by_the_others():
    assert run_ranks(stay_away, 3) == [((2,), 0), ((2,), 0), ((), 0)]


def close_in_any_order(comm):
    before = held()
    memory = allocate(comm, 10_000)
    comm.barrier()
    buffer_ptrs = memory.buffer_ptrs.tolist()
    for base in buffer_ptrs:
        store(base + comm.rank, 50 + comm.rank)
    comm.barrier()
    last = comm.size - 1
    if comm.rank != last:
        memory.close()
        memory.close()
        del memory
    comm.barrier()
    if comm.rank == last:  # closing is each rank's own affair: the others' memory is there for this one
        assert all(load(base + rank) == 50 + rank for base in buffer_ptrs for rank in range(comm.size))
        view = memory.local[: comm.size].view(1, -1)
        with memory as same:
            assert same is memory
        assert memory.closed and "closed" in repr(memory)
        for attribute in ("local", "buffer_ptrs"):
            with pytest.raises(ThinwireError, match="closed"):
                getattr(memory, attribute)
        if not comm.in_process:
            assert held()[1] == 1  # the own one, for the view's sake
        view[0, 0] += 1
        assert view.tolist() == [[51, *(50 + rank for rank in range(1, comm.size))]]
        del view
    gc.collect()
    if not comm.in_process:
        assert held() == before


@pytest.mark.parametrize("mode", MODES)
def test_memory_lives_as_long_as_its_tensors_and_its_peers_need_it(mode):
    run_ranks(close_in_any_order, 3, mode=mode)


def drop_without_closing(comm):
    before = held()
    memory = allocate(comm, 10_000)
    comm.barrier()
    del memory
    return not kept_since(before) and held()[1] == before[1]


def test_memory_that_nobody_closed_goes_with_its_last_reference():
    assert run_ranks(drop_without_closing, 2) == [True, True]


def test_threads_memory_goes_once_all_ranks_have_closed():
    alive = []

    def keep_track(comm):
        memory = allocate(comm, 4096)
        alive.append(weakref.ref(memory.local.untyped_storage()))
        comm.barrier()
        if comm.rank:
            memory.close()
        comm.barrier()
        mapped = sum(tensor is not None for tensor in memory._mappings)
        memory.close()
        return mapped

    assert run_ranks(keep_track, 3, mode="thread") == [3, 0, 0]
    gc.collect()
    assert len(alive) == 3 and all(reference() is None for reference in alive)


def test_control_groups_limit_what_is_available(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 20000\nactive_file 3000\nslab 9\n")
    monkeypatch.setattr(available, "control_groups", lambda controller: [(tmp_path / "none", True), (tmp_path, True)])
    assert available.available_bytes() == 323_000 - 323_000 // 32
    for odd in ("max", "", "many"):
        (tmp_path / "memory.max").write_text(odd + "\n")
        assert available.available_bytes() > 323_000
    (tmp_path / "memory.max").write_text("1000000\n")
    for name, odd in (("memory.stat", "anon\n"), ("memory.current", "\n")):
        (tmp_path / name).write_text(odd)
        assert available.available_bytes() > 323_000


def test_files_in_memory_are_private_hold_all_their_pages_and_keep_their_size():
    heap = PosixHeap(SimpleNamespace(rank=0, size=1), 1 << 20, range(1))
    try:
        segment = heap.create([heap.inspect()])
        status = os.fstat(segment.descriptor)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_blocks * 512 >= heap.segment_bytes == status.st_size > 1 << 20
        for size in (0, 1 << 22):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.descriptor, size)
        assert not os.get_inheritable(segment.descriptor)
        other = PosixHeap(SimpleNamespace(rank=0, size=1), 1 << 20, range(1)).create([heap.inspect()])
        assert len(segment.token) >= 32 and segment.token != other.token
        os.close(other.descriptor)
    finally:
        heap.finish()


# --- the decisions of the CUDA heap; the memory itself needs a GPU ----------------------------------------------------


GPUS = [cuda_heap._Gpu("host", "boot", f"GPU-{number}", number, 1 << 30) for number in range(3)]


@pytest.fixture
def three_gpus(monkeypatch):
    """GPUs 0 and 1 reach each other; 2 reaches none."""
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=f"GPU-{i}"))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: 2 not in (a, b))


def rank_on_gpu(rank):
    device = torch.device("cuda", rank)
    group = SimpleNamespace(get_group_store=dist.HashStore)
    comm = SimpleNamespace(rank=rank, size=3, device=device, group=group, in_process=False, timeout=30.0)
    return CudaHeap(comm, 4096, range(comm.size))


def test_gpus_out_of_reach_are_named_before_anything_is_allocated(three_gpus, monkeypatch):
    with pytest.raises(TransportUnavailable, match="rank 0 .* rank 2: cuda:0 has no peer-to-peer access to cuda:2"):
        rank_on_gpu(0).create(GPUS)
    elsewhere = GPUS[1]._replace(host="other")
    with pytest.raises(TransportUnavailable, match="rank 0 .* rank 1: .* different hosts, 'host' and 'other'"):
        rank_on_gpu(0).create([GPUS[0], elsewhere])
    for own in (GPUS[0], GPUS[0]._replace(number=1)):
        why = cuda_heap._why_out_of_reach(own, GPUS[0]) or ""
        assert "they share one GPU" in why and "ALLOW_OVERLAPPING_DEVICES=1, and a gloo" in why
    each_sees_its_own = GPUS[2]._replace(identity="GPU-of-another-container", number=0)
    assert cuda_heap._why_out_of_reach(GPUS[0], each_sees_its_own) is None
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert cuda_heap._why_out_of_reach(GPUS[0], GPUS[0]) is None
    unseen = GPUS[2]._replace(identity="GPU-of-another-container")
    assert cuda_heap._why_out_of_reach(GPUS[0], unseen) is None  # only trying will tell


def test_ranks_on_one_gpu_count_together(three_gpus, monkeypatch):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    crowded = [GPUS[0]._replace(available_bytes=8191), GPUS[0]._replace(available_bytes=9000), GPUS[1]]
    with pytest.raises(CapacityError, match="2 ranks asked for 4096 .* 8192 bytes in all; 8191 bytes are available"):
        rank_on_gpu(0).create(crowded)


def aligned_bytes():
    """A buffer as torch's CUDA backend places it."""
    room = torch.zeros(4096 + 128, dtype=torch.uint8)
    return room[-room.data_ptr() % 128 :][:4096]


def test_what_torch_maps_is_checked(monkeypatch):
    heap = rank_on_gpu(0)
    heap.local = aligned_bytes()
    own = heap.local.data_ptr()
    for pointers, told in (
        ([own, 0, 256], "rank 0 cannot map the memory of rank 1"),
        ([own, 128, 320], "memory of rank 2: torch gave the address 320; a multiple of 128"),
        ([own + 128, 128, 256], "not support"),
    ):
        monkeypatch.setattr(_symmetric_memory, "rendezvous", lambda *_, p=pointers: SimpleNamespace(buffer_ptrs=p))
        with pytest.raises(TransportUnavailable, match=told):
            heap.attach([])
    monkeypatch.setattr(_symmetric_memory, "rendezvous", lambda *_: SimpleNamespace(buffer_ptrs=[own, 128, 256]))
    assert heap.attach([]) == [own, 128, 256]


@pytest.mark.parametrize("given", [None, "0", "1"])
def test_torch_makes_no_multicast_object(monkeypatch, given):
    """In whichever order threads leave, the variable is what it was once the last has left, and set until then."""
    name = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
    monkeypatch.delenv(name, raising=False) if given is None else monkeypatch.setenv(name, given)
    heaps, seen = [rank_on_gpu(0) for _ in range(2)], []
    entered, may_leave = threading.Barrier(3), [threading.Event() for _ in heaps]

    def rendezvous(local, group):
        entered.wait(10)
        may_leave[group.number].wait(10)
        seen.append(os.environ.get(name))
        return SimpleNamespace(buffer_ptrs=[local.data_ptr(), 128, 256])

    monkeypatch.setattr(_symmetric_memory, "rendezvous", rendezvous)
    threads = []
    for number, heap in enumerate(heaps):
        heap.local, heap.comm.group.number = aligned_bytes(), number
        threads.append(threading.Thread(target=heap.attach, args=([],)))
        threads[-1].start()
    entered.wait(10)
    for thread, leave in zip(threads, may_leave, strict=True):
        leave.set()
        thread.join(10)
    assert seen == ["1", "1"] and os.environ.get(name) == given


def test_a_wait_that_holds_the_interpreter_ends_in_time_and_says_so(monkeypatch):
    """As torch's for a peer's socket does, so that no thread of Python's could end it. The process is then staged."""
    heap, (ours, _peers) = rank_on_gpu(0), socket.socketpair()
    heap.local, heap.comm.timeout = aligned_bytes(), 0.4
    monkeypatch.setattr(cuda_heap, "_undone", [])

    def rendezvous(*_):
        if ctypes.PyDLL(None).recv(ours.fileno(), ctypes.create_string_buffer(1), 1, 0) < 0:
            raise RuntimeError("Failed to receive fd: Interrupted system call")

    monkeypatch.setattr(_symmetric_memory, "rendezvous", rendezvous)
    told = r"rank 0 waited 0.2 s for torch to map the memory of ranks \[1, 2\] on cuda:0.*Interrupted system call"
    with pytest.raises(TransportUnavailable, match=told):
        heap.attach([])
    monkeypatch.setattr(_symmetric_memory, "get_backend", lambda device: "CUDA")
    with pytest.raises(TransportUnavailable, match="left its part undone: Failed to receive fd"):
        heap.inspect()
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_socket_that_is_in_the_way_is_named(monkeypatch, tmp_path):
    heap = rank_on_gpu(0)
    heap.local = aligned_bytes()
    monkeypatch.setattr(cuda_heap, "_undone", [])
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    path = tmp_path / f"symm_mem-{os.getpid()}"
    for problem in ("Failed to bind socket: Address already in use", "Failed to send fd: No such file or directory"):

        def fail(*_, problem=problem):
            raise RuntimeError(problem)

        monkeypatch.setattr(_symmetric_memory, "rendezvous", fail)
        with pytest.raises(TransportUnavailable, match=f"{problem}; torch's socket is {path}, .* same folder"):
            heap.attach([])


def test_a_socket_that_torch_cannot_make_is_told_before_peers_wait_for_it(three_gpus, monkeypatch, tmp_path):
    """In `create`, after which all ranks hear of it."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    (tmp_path / f"symm_mem-{os.getpid()}").touch()
    for folder, told in (
        (tmp_path, "exists, of a killed process: remove it"),
        (tmp_path / ("long" * 30), "has more than 107 bytes"),
        (tmp_path / "missing", "cannot make its socket"),
    ):
        monkeypatch.setenv("TMPDIR", str(folder))
        with pytest.raises(TransportUnavailable, match=f"rank 0 cannot map its peers' memory: .*{told}"):
            rank_on_gpu(0).create(GPUS)
    monkeypatch.setenv("TMPDIR", str(tmp_path.parent))
    with pytest.raises(RuntimeError, match="device type cuda"):  # as there is no GPU
        rank_on_gpu(0).create(GPUS)


def test_a_rank_that_failed_where_its_peers_do_not_hear_of_it_says_why():
    def gather(*_):
        raise PeerTimeout("rank 1 did not take part")

    def step():
        raise TransportUnavailable("no handle")

    with pytest.raises(PeerTimeout) as caught:
        symmetric._on_all_ranks(SimpleNamespace(rank=0, all_gather_data=gather), step, None)
    assert caught.value.__notes__ == ["before that: no handle"]


def test_an_alarm_of_the_program_that_ends_the_process_is_left_to_it(monkeypatch):
    heap = rank_on_gpu(0)
    heap.local = aligned_bytes()
    own = heap.local.data_ptr()
    monkeypatch.setattr(_symmetric_memory, "rendezvous", lambda *_: SimpleNamespace(buffer_ptrs=[own, 128, 256]))
    try:
        signal.setitimer(signal.ITIMER_REAL, 3000)
        heap.attach([])
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 2000
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_this_torch_has_what_the_heap_calls():
    """Names and parameters of its private functions, as it may change them in any version."""
    signatures = [inspect.signature(getattr(_symmetric_memory, name)) for name in ("get_backend", "rendezvous")]
    assert [list(signature.parameters) for signature in signatures] == [["device"], ["tensor", "group"]]
    assert re.match(
        r"empty_strided_p2p\(size: [^:]*, stride: [^:]*, dtype: torch.dtype, device: torch.device,",
        _SymmetricMemory.empty_strided_p2p.__doc__ or "",
    )
    assert isinstance(_SymmetricMemory.buffer_ptrs, property)
    assert hasattr(dist.ProcessGroup, "get_group_store")
    assert _symmetric_memory.get_backend(torch.device("cpu")) is None


def test_the_gpus_of_one_host_map_each_other_alone(three_gpus, monkeypatch):
    heap, asked = rank_on_gpu(2), []
    heap.ranks, heap.comm.timeout, heap.comm.group = (0, 2), 30.0, "the group"
    made = rank_on_gpu(0).comm.group
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: 1 not in (a, b))
    with pytest.raises(RuntimeError, match="device type cuda"):  # rank 1 is not asked for, and there is no GPU
        heap.create(GPUS)
    heap.local = aligned_bytes()
    own = heap.local.data_ptr()
    monkeypatch.setattr(cuda_heap.dist, "get_process_group_ranks", lambda _: [7, 8, 9])
    monkeypatch.setattr(cuda_heap.dist, "new_group", lambda *given, **more: asked.append((given, more)) or made)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", lambda *_: SimpleNamespace(buffer_ptrs=[128, own]))
    assert heap.attach([]) == [128, own, own]
    ((given, more),) = asked
    assert given == ([7, 9],) and more["timeout"] == timedelta(seconds=30) and more["use_local_synchronization"]


def test_another_backend_of_torch_is_refused(monkeypatch):
    monkeypatch.setattr(_symmetric_memory, "get_backend", lambda device: "NVSHMEM")
    with pytest.raises(TransportUnavailable, match="uses the backend 'NVSHMEM'; 'CUDA' is needed"):
        rank_on_gpu(0).inspect()


def test_errors_travel_whole():
    error = pickle.loads(pickle.dumps(PeerTimeout("gone", ranks={3, 1}, lane=0, epoch=7, phase="combine")))
    assert (str(error), error.ranks, error.lane, error.epoch, error.phase) == ("gone", (1, 3), 0, 7, "combine")
    assert isinstance(error, TimeoutError) and PeerTimeout("x").ranks == ()


def test_one_rank_alone_needs_no_peer():
    (comm,) = Communicator.of_threads(ThreadWorld(1))
    with allocate(comm, 100) as memory:
        assert memory.buffer_ptrs.tolist() == [memory.local.data_ptr()] and memory.kind == "threads"
