"""The direct all-reduce, reduce-scatter and all-gather on a GPU: the CPU's bits, CUDA graphs, failures told later."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="compiled kernels need Triton")

import torch

import thinwire as tw
from tests.gpu.capture import capture
from tests.gpu.sharing import on_host, run_on_one_gpu, sharing
from tests.gpu.waiting import waiting_refused
from tests.helpers.wires import DTYPES, WIRES, assert_same_bits, magnitudes
from thinwire.comm.communicator import Communicator
from thinwire.errors import ConfigMismatch, PeerTimeout
from thinwire.fused.collective import DirectCollectives, open_collectives
from thinwire.testing import run_ranks
from thinwire.triton_kernels import LAUNCHES, LAUNCHES_VARIABLE

#: Small enough that calls of some ten thousand elements a rank are several epochs.
SLOT_BYTES = 32768


def _as_on_the_cpu(mode: str, fn: Callable[..., list[tuple[str, torch.Tensor]]]) -> None:
    """Compares what `fn` gives on the GPU, name by name, with what it gives on as many ranks of the CPU."""
    results = run_on_one_gpu(mode, fn)
    expected = run_ranks(fn, len(results), mode="thread", timeout=600)
    for rank, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
        assert isinstance(ours, list) and len(ours) == len(theirs) > 0
        for (name, got), (same_name, wanted) in zip(ours, theirs, strict=True):
            assert name == same_name
            assert_same_bits(f"{name}, rank {rank} of {len(results)}", wanted, got)


def _collectives(comm: Communicator, slot_bytes: int | None = SLOT_BYTES) -> DirectCollectives | None:
    """On the GPU, what a communicator's direct collectives work with."""
    if comm.device.type != "cuda":
        return None
    collectives = open_collectives(comm, slot_bytes)
    assert isinstance(collectives, DirectCollectives), collectives.reason
    return collectives


def _transport(comm: Communicator) -> str:
    return "direct" if comm.device.type == "cuda" else "auto"


def _tensor(comm: Communicator, elements: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """What this rank gives: large and small values; not on a boundary of 16 bytes."""
    generator = torch.Generator().manual_seed(1000 * seed + comm.rank)
    x = magnitudes(1, elements + 1, dtype, generator)[0] if seed % 2 else torch.randn(elements + 1, generator=generator)
    return x.to(dtype).to(comm.device)[1:]


def _every_wire(comm: Communicator) -> list[tuple[str, torch.Tensor]]:
    collectives = _collectives(comm)
    options = {"comm": comm, "transport": _transport(comm)}
    results = []
    for number, wire in enumerate(WIRES):
        for elements in (7, 1500, 9001):  # of a part
            dtype = DTYPES[(number + elements) % 3]
            x, own = (_tensor(comm, size, dtype, number) for size in (comm.size * elements, elements))
            name = f"{wire} {dtype} {elements}"
            gather_wire = ("none", "int8", None)[number % 3]
            reduced = tw.all_reduce(x[: x.numel() - 3], wire=wire, gather_wire=gather_wire, **options)
            results.append((f"all_reduce {gather_wire} {name}", on_host(reduced)))
            results.append((f"reduce_scatter {name}", on_host(tw.reduce_scatter(x, wire=wire, **options))))
            results.append((f"all_gather {name}", on_host(tw.all_gather(own, wire=wire, **options))))
    if collectives is not None:
        collectives.check()
    return results


@sharing
def test_every_wire_gives_the_bits_of_the_cpu(mode: str) -> None:
    _as_on_the_cpu(mode, _every_wire)


def _many_calls(comm: Communicator) -> list[tuple[str, torch.Tensor]]:
    """Nothing is waited for between the calls, so ranks run ahead of each other as far as the protocol lets them."""
    collectives = _collectives(comm, 8192)
    options = {"comm": comm, "transport": _transport(comm)}
    results = []
    sizes = [(3, 5000, 40000)[call * call % 3] * comm.size for call in range(60)]
    # A copy from the host between the calls would wait for the stream, and may keep other threads from launching.
    xs = [_tensor(comm, elements, torch.bfloat16, 2 * call) for call, elements in enumerate(sizes)]
    for call, (elements, x) in enumerate(zip(sizes, xs, strict=True)):
        if call % 3 == 0:
            out = tw.all_reduce(x, out=x, wire="int8", **options)
        elif call % 3 == 1:
            out = tw.reduce_scatter(x, wire="int8", async_op=True, **options).wait()
        else:
            out = tw.all_gather(x[: elements // comm.size], wire="int4", **options)
        results.append((f"call {call}", out))
    if collectives is not None:
        collectives.check()
    return [(name, on_host(out)) for name, out in results]


@pytest.mark.parametrize("launches", LAUNCHES)
@sharing
def test_many_calls_of_all_kinds_through_small_slots(mode: str, launches: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHES_VARIABLE, launches)
    _as_on_the_cpu(mode, _many_calls)


# ---------------------------------------------------------------------------------------------------------------------
# The host


def _graphs(comm: Communicator) -> None:
    """Collectives in a graph, of several epochs, replayed with other data each time and eager calls in between."""
    collectives = _collectives(comm)
    assert collectives is not None
    options = {"comm": comm, "transport": "direct"}
    x = torch.zeros(20001 * comm.size, dtype=torch.bfloat16, device=comm.device)
    out = torch.empty_like(x)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        tw.all_reduce(x, out=out, wire="int8", gather_wire="none", **options)
        own = tw.reduce_scatter(x, wire="int4", **options)
        return own, tw.all_gather(own, wire="int8", **options)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    collectives.check()
    graph, (own, everyones) = capture(comm, step)
    for seed in range(6):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(100 * seed + comm.rank)))
        graph.replay()
        replayed = [out.clone(), own.clone(), everyones.clone()]
        eager = step()
        for name, expected, got in zip(("sum", "own part", "all parts"), (out, *eager), replayed, strict=True):
            assert_same_bits(f"{name}, replay {seed}", on_host(expected), on_host(got))
        exact = sum(
            torch.randn(x.shape, generator=torch.Generator().manual_seed(100 * seed + rank))
            for rank in range(comm.size)
        )
        assert isinstance(exact, torch.Tensor)
        assert (on_host(replayed[0]).float() - exact).norm() < 0.02 * exact.norm(), "the data of this replay"
    collectives.check()


@pytest.mark.parametrize("launches", LAUNCHES)
@sharing
def test_graphs_replay_with_other_data(mode: str, launches: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHES_VARIABLE, launches)
    run_on_one_gpu(mode, _graphs)


def _no_synchronisation(comm: Communicator) -> None:
    collectives = _collectives(comm)
    assert collectives is not None
    x = torch.randn(30000 * comm.size, device=comm.device).bfloat16()

    def step() -> None:
        for wire in ("int8", "none"):
            tw.all_reduce(x, wire=wire, comm=comm, transport="direct")
            tw.all_gather(tw.reduce_scatter(x, wire=wire, comm=comm, transport="direct"), wire=wire, comm=comm)

    step()
    collectives.check()
    with waiting_refused(comm):
        for _ in range(5):
            step()
    collectives.check()


@sharing
def test_calls_never_wait_for_the_device(mode: str) -> None:
    run_on_one_gpu(mode, _no_synchronisation)


# ---------------------------------------------------------------------------------------------------------------------
# Failures


def _a_silent_rank(comm: Communicator, op: str) -> tuple[tuple[int, ...], float]:
    """The last rank stays away: the others' output is NaN, and the next call says why."""
    collectives = _collectives(comm)
    assert collectives is not None
    call: Callable[..., torch.Tensor] = getattr(tw, op)
    x = torch.ones(5000 * comm.size, device=comm.device)
    call(x, wire="int8", comm=comm, transport="direct")
    collectives.check()
    collectives.timeout = 2.0
    comm.barrier()
    blamed: tuple[int, ...] = ()
    waited = 0.0
    if comm.rank < comm.size - 1:
        started = time.monotonic()
        got = call(x, wire="int8", comm=comm, transport="direct")
        with pytest.raises(PeerTimeout) as caught:
            collectives.check()
        waited, blamed = time.monotonic() - started, caught.value.ranks
        assert got.isnan().all() and caught.value.phase == "rows"
        with pytest.raises(PeerTimeout, match="cannot be used any more"):
            call(x, wire="int8", comm=comm, transport="direct")
    comm.barrier()
    return blamed, waited


@sharing
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
def test_survivors_name_a_rank_that_never_comes(mode: str, op: str) -> None:
    results = run_on_one_gpu(mode, _a_silent_rank, op)
    for blamed, waited in results[:-1]:  # type: ignore[misc]
        assert blamed == (len(results) - 1,) and waited < 5.0


def _disagree(comm: Communicator) -> str:
    """Rank 1 calls something else: all are told, and nobody waits until time is up."""
    collectives = _collectives(comm)
    assert collectives is not None
    x = torch.ones(40000 * comm.size, device=comm.device)
    for known in (tw.all_reduce, tw.all_gather):  # to load a kernel would wait for threads that share the device
        known(x, wire="int8", comm=comm, transport="direct")
    collectives.check()
    comm.barrier()
    started = time.monotonic()
    call: Callable[..., torch.Tensor] = tw.all_gather if comm.rank == 1 else tw.all_reduce
    got = call(x, wire="int8", comm=comm, transport="direct")
    with pytest.raises(ConfigMismatch) as caught:
        collectives.check()
    assert got.isnan().all() and time.monotonic() - started < 15  # not the communicator's 30 seconds
    comm.barrier()
    return str(caught.value)


@sharing
def test_ranks_that_disagree_are_all_told_in_that_call(mode: str) -> None:
    results = run_on_one_gpu(mode, _disagree)
    for rank, told in enumerate(results):
        assert isinstance(told, str) and "rank 1: all_gather" in told
        assert (f"rank {rank}: all_reduce" in told) == (rank != 1)
