"""CPU ranks that pull: rows and sums in pieces of a few bytes, ranks that disagree, stop, leave or are interrupted."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import numpy as np
import torch

import thinwire as tw
from tests.helpers.speeds import exhaustive_but
from tests.helpers.wires import DTYPES, WIRES, assert_same_bits
from thinwire.comm.communicator import Communicator
from thinwire.errors import CapacityError, ConfigMismatch, CountsError, PeerTimeout
from thinwire.fused import pulled
from thinwire.fused.codec import dequantize, quantize
from thinwire.fused.pulled_legs import NAME, PulledLegs, memory_bytes, open_legs, piece_bytes
from thinwire.testing import run_ranks
from thinwire.triton_kernels.cpu import lines

FLAT = 1024  # elements of a 1-D tensor that are one record
Call = Callable[[str], torch.Tensor]


def legs_of(comm: Communicator, piece: int = 4608) -> PulledLegs:
    """Legs whose odd ranks store past the caches."""
    legs = open_legs(comm, piece=piece)
    assert isinstance(legs, PulledLegs)
    legs.board._words[-comm.size :] = comm.rank % 2 - (1 << 62)
    return legs


# ---------------------------------------------------------------------------------------------------------------------
# What arrives


def problem(world: int, rng: random.Random, unit: int) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Counts [source][target], send displacements, and receive displacements in any order and with gaps."""
    counts = [[rng.choice([0, 0, 1, 2, 3, 11]) * rng.randint(1, unit) for _ in range(world)] for _ in range(world)]
    kind = rng.randrange(4)
    if kind == 0:  # everything to one rank
        counts = [[sum(row) if target == 0 else 0 for target in range(world)] for row in counts]
    if kind == 1:  # a rank without rows
        counts[rng.randrange(world)] = [0] * world
    send_displs = [[rng.randint(0, 3) for _ in row] for row in counts]
    recv_displs = []
    for target in range(world):
        displs, position = [0] * world, rng.randint(0, 2)
        for source in rng.sample(range(world), world):
            displs[source] = position
            position += counts[source][target] + rng.randint(0, 2)
        recv_displs.append(displs)
    return counts, send_displs, recv_displs


def through(part: torch.Tensor, spec: str) -> torch.Tensor:
    """What arrives of rows, or of a 1-D part, which travels as records of its own."""
    if part.dim() > 1:
        return dequantize(quantize(part, spec)) if len(part) else part
    padded = torch.nn.functional.pad(part, (0, -len(part) % FLAT)).view(-1, FLAT)
    return (dequantize(quantize(padded, spec)) if len(part) else padded).view(-1)[: len(part)]


def arrivals(comm: Communicator, piece: int, widths: tuple[int, ...]) -> None:
    """Rows of every wire and dtype, of so many elements; 0: 1-D tensors, whose parts end within a record."""
    legs_of(comm, piece)
    rng, generator = random.Random(comm.size), torch.Generator().manual_seed(1)  # the same on every rank
    for spec in WIRES:
        for dtype in DTYPES:
            for width in widths:
                counts, starts, places = problem(comm.size, rng, 1 if width else 500)
                tail = (width,) if width else ()
                most = max(map(max, [*counts, *places])) + max(map(max, starts)) + max(map(max, counts))
                inputs = [torch.randn(most, 2 * max(1, width), generator=generator).to(dtype) for _ in counts]
                inputs = [x[:, 1 : 1 + width] if width else x[:, 0] for x in inputs]  # values lie apart
                blank = torch.full((most + 2, *tail), 7).to(dtype)
                expected = blank.clone()
                for source, x in enumerate(inputs):
                    count, place = counts[source][comm.rank], places[comm.rank][source]
                    expected[place : place + count] = through(x[starts[source][comm.rank] :][:count], spec)
                for known in ([row[comm.rank] for row in counts], None):
                    got = tw.all_to_all_v(
                        inputs[comm.rank], counts[comm.rank], known, send_displs=starts[comm.rank],
                        recv_displs=places[comm.rank],
                        out=blank.clone(), wire=spec, comm=comm, transport="direct",
                    )  # fmt: skip
                    assert_same_bits(f"{spec} {dtype} {width} {known}", expected, got)  # type: ignore[arg-type]


# Of 640 bytes a piece holds many rows, some, or not one.
@pytest.mark.parametrize(("piece", "widths"), [(640, (1, 33, 128, 1500)), (6400, (0,))])
@pytest.mark.parametrize("world", exhaustive_but([3], [1, 2, 3, 5]))
def test_rows_of_every_wire_and_dtype_arrive_where_they_belong(world: int, piece: int, widths: tuple[int, ...]) -> None:
    run_ranks(arrivals, world, piece, widths, mode="thread", timeout=300)


def a_call(rng: random.Random, comm: Communicator) -> Call:
    """One that all ranks draw alike, but for the values: of its transport."""
    world, rank = comm.size, comm.rank
    kind = rng.choice(("rows", "rows", "rows", "flat", "odd", "reduce", "scatter", "gather", "gather_v"))
    dtype, wire = rng.choice(DTYPES), rng.choice(("none", "none", "int8", "int8:row", "int4", "int6+h64"))
    options: dict[str, Any] = {"wire": wire, "comm": comm}
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30) + rank)
    size = rng.choice((1, 5, 64, 1000, 4097, 20_000))
    known, wait, spare, width = rng.random() < 0.5, rng.random() < 0.7, rng.randint(0, 2), rng.choice((1, 7, 64, 900))
    counts = [[rng.choice((0, 1, 3, 40)) for _ in range(world)] for _ in range(world)]
    sent, received = counts[rank], [row[rank] for row in counts]
    if kind in ("rows", "flat", "odd"):
        tail = {"rows": (width,), "flat": (), "odd": (3, 2)}[kind]
        x = torch.randn(sum(sent) + spare, *tail, generator=generator).to(dtype)
        if kind == "odd":
            options["wire"], x = "none", x.mul(1e4).to(rng.choice((torch.int64, torch.uint8, torch.complex64)))
        if spare == 2 and tail:
            x = x.repeat_interleave(2, -1)[..., ::2]

        def move(transport: str) -> torch.Tensor:
            displs = {"send_displs": [spare + sum(sent[:peer]) for peer in range(world)]} if spare else {}
            work: Any = tw.all_to_all_v(
                x, sent, received if known else None, **displs, transport=transport, async_op=not wait, **options
            )
            if wait:
                return work  # type: ignore[no-any-return]
            if rng.random() < 0.5:
                comm.barrier()  # which ends it
            return work.wait()  # type: ignore[no-any-return]

        return move
    if kind == "gather_v":
        x = torch.randn(counts[0][rank], 5, generator=generator).to(dtype)
        return lambda transport: tw.all_gather_v(x, counts[0], transport=transport, **options)
    shape = (size * world,) if kind == "scatter" else (size,)
    x = torch.randn(shape, generator=generator).to(dtype)
    function: Any = {"reduce": tw.all_reduce, "scatter": tw.reduce_scatter, "gather": tw.all_gather}[kind]
    if kind == "reduce" and known:
        return lambda transport: function(given := x.clone(), out=given, transport=transport, **options)
    return lambda transport: function(x, transport=transport, **options)


def programs(comm: Communicator, seeds: range, piece: int) -> None:
    """Calls on both transports, among ranks that are late now and then."""
    legs_of(comm, piece)
    naps = random.Random(comm.rank)
    for seed in seeds:
        rng = random.Random(seed)
        for number in range(4):
            state = rng.getstate()
            results = []
            for transport in ("staged", "direct"):
                rng.setstate(state)
                results.append(a_call(rng, comm)(transport).contiguous().view(-1).view(torch.uint8))
                if naps.random() < 0.1:
                    time.sleep(naps.random() * 2e-3)
            assert torch.equal(*results), f"program {seed}, call {number}"


@pytest.mark.parametrize(
    ("world", "piece"),
    exhaustive_but([(2, 17920), (3, 17920)], [(world, 17920) for world in (1, 2, 3, 4, 5)], several=True),
)
def test_random_programs_give_the_bits_of_the_staged_transport(world: int, piece: int) -> None:
    first = 1000 * world
    run_ranks(programs, world, range(first, first + 100), piece, mode="thread", timeout=500)


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that disagree


def disagreements(comm: Communicator, seed: int, rounds: int) -> list[str]:
    """Ranks that do one of a few things each, and what a model says of it; then all of them the same."""
    legs_of(comm, 17920)
    rng, seen = random.Random(seed), set()
    for number in range(rounds):
        kinds = [rng.choice(("rows", "rows", "reduce", "gather", "scatter")) for _ in range(2)]
        doings = [(kind, rng.choice((1, 6000)), rng.choice((4, 4, 9)), rng.random() < 0.5) for kind in kinds]
        chosen = [rng.choice(doings) for _ in range(comm.size)]
        kind, size, width, known = own = chosen[comm.rank]
        others = [other for rank, other in enumerate(chosen) if rank != comm.rank]
        expected: Any = ()
        x = torch.full((size * comm.size, width), 1.0 + comm.rank)
        if kind == "rows":
            # Who does not know how much comes takes any number.
            if any(o[0] != "rows" or o[2] != width or known and o[1] != size for o in others):
                expected = CountsError
            counts = [size] * comm.size
            call = partial(tw.all_to_all_v, x, counts, counts if known else None)
        else:
            if any(other[:3] != own[:3] for other in others):
                expected = ConfigMismatch
            call = partial({"reduce": tw.all_reduce, "gather": tw.all_gather, "scatter": tw.reduce_scatter}[kind], x)
        found: Any = ()
        try:
            call(wire="int8" if kind == "gather" else "none", comm=comm, transport="direct")
        except (CountsError, ConfigMismatch) as error:
            found = type(error)
            seen.add(found.__name__ + " " + ("in" if "is in" in str(error) else ""))
        assert found == expected, f"seed {seed}, round {number}: rank {comm.rank} of {chosen}: {found}"
        again: Any = tw.all_reduce(torch.ones(3), wire="none", comm=comm, transport="direct")
        assert again.tolist() == [comm.size] * 3
    return sorted(seen)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_do_different_things_are_told_and_go_on(world: int) -> None:
    for seen in run_ranks(disagreements, world, world, 120, mode="thread", timeout=120):
        assert seen == ["ConfigMismatch ", "CountsError ", "CountsError in"]


def refusals(comm: Communicator) -> None:
    """What one rank has no place for, and what no rank can send."""
    legs = legs_of(comm, 128)
    x, ones, most = torch.arange(800.0).view(-1, 1) + comm.rank, [1] * comm.size, [400] * comm.size
    for _ in range(2):
        if comm.rank == 0:
            with pytest.raises(CountsError, match="rows"):
                tw.all_to_all_v(x, most, out=torch.zeros(3, 1), wire="none", comm=comm)
        else:
            got: Any = tw.all_to_all_v(x, most, wire="none", comm=comm)
            assert torch.equal(got[:400], x[400:] - 1) and torch.equal(got[400:], x[400:])
        moved: Any = tw.all_to_all_v(x, ones, wire="none", comm=comm)
        assert moved.tolist() == [[comm.rank], [comm.rank + 1]]
    for call in (tw.all_reduce, partial(tw.all_to_all_v, send_counts=ones)):
        with pytest.raises(CapacityError, match="a piece of the direct transport"):
            call(torch.ones(4096), wire="int8", comm=comm)
    assert legs.describe() == f"{NAME}: direct, 0.0 MiB of shared memory, pieces of 128 bytes"
    with pytest.raises(CapacityError, match="pieces of 100 bytes: expected a positive multiple of 128"):
        with comm.split(groups=[[0, 1]]) as other:
            open_legs(other, piece=100)


def test_what_has_no_place_or_no_room_is_refused_and_ranks_go_on() -> None:
    run_ranks(refusals, 2, mode="thread", timeout=60)


def wide_sums(comm: Communicator) -> None:
    legs_of(comm, 1 << 17)
    x, wide = torch.arange(9000.0) * (comm.rank + 1), tw.WireFormat("none", alignment=1 << 15)
    options: Any = {"wire": "int8", "gather_wire": wide, "comm": comm}
    assert torch.equal(*(tw.all_reduce(x, transport=transport, **options) for transport in ("staged", "direct")))


def test_sums_whose_records_are_longer_than_a_kernels_stack_arrive() -> None:
    run_ranks(wide_sums, 2, mode="process", timeout=120)


@pytest.mark.parametrize("world", [1, 2, 8, 72])
def test_memory_is_bounded_for_any_number_of_ranks(world: int) -> None:
    assert piece_bytes(world) >= 4096 * 4 + 64 and memory_bytes(world, piece_bytes(world)) < 65 << 20


# ---------------------------------------------------------------------------------------------------------------------
# Lines


def sleepers(comm: Communicator, rounds: int) -> float:
    """The longest of many calls in which ranks sleep at once, and are late now and then."""
    legs_of(comm).board._look_ns = 0
    naps, x, longest = random.Random(comm.rank), torch.ones(8), 0.0
    for number in range(rounds):
        if naps.random() < 0.3:
            time.sleep(naps.random() * 3e-4)
        begun = time.monotonic()
        total: Any = tw.all_reduce(x * number, wire="none", comm=comm, transport="direct")
        assert total[0] == comm.size * number
        longest = max(longest, time.monotonic() - begun)
    return longest


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_no_wake_up_is_lost(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mode == "thread":
        monkeypatch.setattr(pulled, "SLICE_SECONDS", 25.0)  # of a sleep that nobody ends
    assert max(run_ranks(sleepers, 4, 400, mode=mode, timeout=120)) < 10


def numbers_that_begin_anew(comm: Communicator) -> None:
    legs = legs_of(comm, 128)
    wait = legs.await_peers

    def wait_and_sleep(*arguments: Any) -> None:
        wait(*arguments)
        time.sleep(2e-3)  # the peer has packed all that there is room for

    if comm.rank == 0:
        legs.await_peers = wait_and_sleep  # type: ignore[method-assign]
    for near in (1 << 31, 1 << 32):
        comm.barrier()
        board, number = legs.board, near - 9
        board._words[len(lines.FIELDS) + comm.size :] = number
        first = lines.LINE_BYTES * (1 + 2 * comm.size)
        acks = board._local[first : first + comm.size * lines.LINE_BYTES].numpy().view(np.int32).reshape(-1, 16)
        acks[:, 0] = np.int64(number).astype(np.int32)
        legs._pool_words[len(legs._pool_words) - 4 * comm.size :] = number
        comm.barrier()
        for call in range(4):
            sent, received = ([1, 1], [1, 400]) if comm.rank == 0 else ([400, 1], [1, 1])
            x = torch.arange(401.0).view(-1, 1)[: sum(sent)] + call + 1000 * comm.rank
            got: Any = tw.all_to_all_v(x, sent, received, wire="none", comm=comm, transport="direct")
            of_one = torch.arange(400.0).view(-1, 1) + 1000 if comm.rank == 0 else torch.tensor([[1400.0]])
            assert torch.equal(got, torch.cat([torch.tensor([[0.0 + comm.rank]]), of_one]) + call)


def test_lines_are_counted_past_the_largest_number() -> None:
    run_ranks(numbers_that_begin_anew, 2, mode="thread", timeout=60)


def stays_away(comm: Communicator) -> tuple[tuple[int, ...], str, float]:
    legs, x = legs_of(comm), torch.ones(600, 64)
    legs.timeout = legs.grace = 1.0
    begun, counts = time.monotonic(), [200] * 3
    if comm.rank == 2:
        time.sleep(2.5)
    with pytest.raises(PeerTimeout) as caught:
        tw.all_to_all_v(x, counts, counts, wire="none", comm=comm)
        tw.all_to_all_v(x, counts, counts, wire="none", comm=comm)
    took = time.monotonic() - begun
    for again in (tw.all_to_all_v, tw.all_reduce):
        with pytest.raises(PeerTimeout, match="cannot be used any more"):
            again(x[:3], comm=comm, transport="direct")
    return caught.value.ranks, str(caught.value), took


def test_who_never_comes_is_named_and_hears_of_it() -> None:
    first, second, late = run_ranks(stays_away, 3, mode="thread", timeout=60)
    for ranks, text, took in (first, second):
        assert "no answer from rank 2 within 1 s" in text and 1.0 <= took < 4.0
        assert ranks == () and "nobody is lost" in text  # as the ranks agree: it is there, and was elsewhere
    assert "ranks 0, 1 waited for this rank for too long and gave up" in late[1]
