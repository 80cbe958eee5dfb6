"""What calls keep for those alike never shows: any sequence of them gives what communicators without a past give.

The first call of a communicator knows nothing yet, so each call is made twice: on a communicator that has made all the
others before, and on one that is new.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import numpy as np
import torch

import thinwire as tw
from tests.helpers.odd_tensors import odd
from tests.helpers.speeds import exhaustive_but
from thinwire.comm.communicator import Communicator
from thinwire.comm.recorder import NAME, TRANSPORT
from thinwire.errors import CountsError, WireFormatError
from thinwire.fused import call as calls
from thinwire.fused import pulled_legs
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.ops import all_reduce
from thinwire.testing import run_ranks
from thinwire.wire import WireFormat

WORLD = 2
TAILS = ((), (8,), (3, 5))
DTYPES = (torch.float32,) * 4 + (torch.bfloat16, torch.int64, torch.complex64)
WIRES = (*("none", "int8") * 3, "int4", WireFormat("none"), WireFormat.parse("int8"), "int9")
Call = Callable[[Communicator], Any]


def fresh(x: torch.Tensor) -> torch.Tensor:
    """The same elsewhere, as both calls of a pair shall find it."""
    if x.is_neg():
        return x  # a copy would be positive
    return x.detach().clone().requires_grad_(x.requires_grad)


def all_to_all(kind: random.Random, rng: random.Random, rank: int) -> Call:
    """A call of a kind, which all ranks make alike; what is wrong, or odd, is so on all of them."""
    tail, dtype, wire = kind.choice(TAILS), kind.choice(DTYPES), kind.choice(WIRES)
    rows: Any = [[kind.choice((0, 1, 1, 1, 2)) for _ in range(WORLD)] for _ in range(WORLD)]
    equal = kind.random() < 0.4
    if equal:
        rows = [[kind.choice((0, 1, 2))] * WORLD] * WORLD
    sends, receives = list(rows[rank]), [rows[peer][rank] for peer in range(WORLD)]
    spare, filled, wrong, strange, mode = (rng.random() for _ in range(5))
    seed = rng.randrange(1 << 30)
    generator = torch.Generator().manual_seed(seed + rank)
    x: Any = (torch.randn(sum(sends) + (equal and spare < 0.1), *tail, generator=generator) * 9).to(dtype)
    if strange < 0.15:
        x = odd(rng, x)
    if wrong < 0.2 and not equal:
        counts, value = rng.choice((sends, receives)), rng.choice((True, 1.0, -1, 1 << 63, 1 << 70, "1", None, 77))
        if value != 77 or counts is sends:  # a rank that expects what nobody sends would be alone with that
            counts[rng.randrange(WORLD)] = value
    elif wrong < 0.25 and not equal:
        rng.choice((sends, receives)).append(0)
    shape_of_out = rng.random()
    expected = sum(rows[peer][rank] for peer in range(WORLD)) + (2 if spare < 0.3 else 0)

    def call(comm: Communicator) -> Any:
        out = None
        if filled < 0.5:
            shape = (expected + (shape_of_out < 0.1), *tail) if shape_of_out < 0.9 else (max(0, expected - 1), *tail, 1)
            out = torch.full(shape, 5, dtype=torch.float16 if shape_of_out < 0.05 else dtype)
        given = fresh(x) if type(x) is torch.Tensor and x.layout is torch.strided and not x.is_nested else x
        counts = () if equal else (sends[:], receives[:])
        with torch.inference_mode() if mode < 0.2 else torch.enable_grad():
            y: Any = all_to_all_v(given, *counts, out=out, wire=wire, comm=comm)
        for values in counts:
            values[:] = [7] * len(values)  # they are the caller's
        assert out is None or y is out
        if y.requires_grad:
            y.float().sum().backward()
            return y.detach(), given.grad
        return y, y.is_inference()

    return call


def sums(kind: random.Random, rng: random.Random, rank: int) -> Call:
    """An all-reduce of a kind, likewise."""
    shape = kind.choice(((), (0,), (1,), (7, 3), (7, 3), (21,), (3000,)))
    dtype, wire, gather_wire = kind.choice(DTYPES), kind.choice(WIRES), kind.choice((None, None, *WIRES))
    op = rng.choice(("sum",) * 6 + ("max", "nonsense"))
    strange, where, mode = (rng.random() for _ in range(3))
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30) + rank)
    x: Any = (torch.randn(shape, generator=generator) * 9).to(dtype)
    if strange < 0.15:
        x = odd(rng, x)

    def call(comm: Communicator) -> Any:
        plain = type(x) is torch.Tensor and x.layout is torch.strided and not x.is_nested and x.device.type == "cpu"
        given, out = fresh(x) if plain else x, None
        if where < 0.2 and plain:
            out = given
        elif where < 0.4 and plain:
            out = torch.full(shape, 5, dtype=dtype)
        elif where < 0.5 and plain and x.numel() > 1:
            both = torch.zeros(x.numel() + 1, dtype=dtype)
            given, out = both[1:].view(shape).copy_(x.detach()), both[:-1].view(shape)  # they overlap
        elif where < 0.6:
            out = torch.zeros(2, 2, dtype=dtype)
        with torch.inference_mode() if mode < 0.2 else torch.enable_grad():
            y: Any = all_reduce(given, op, out=out, wire=wire, gather_wire=gather_wire, comm=comm)
        if y.requires_grad:
            y.float().sum().backward()
            return y.detach(), given.grad
        return y, y.is_inference()

    return call


def outcome(call: Call, comm: Communicator) -> tuple[Any, ...]:
    try:
        y, beside = call(comm)
    except Exception as error:
        return type(error), str(error)
    octets = y.resolve_conj().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist()
    return y.dtype, y.shape, y.stride(), octets, str(beside)


def compare(comm: Communicator, seed: int, calls: int) -> tuple[int, int]:
    """How many calls raised, and how many went by what earlier ones had left."""
    rng, raised, served = random.Random(seed), 0, 0
    kinds = [rng.randrange(1 << 30) for _ in range(12)]  # few, so that they come again
    for number in range(calls):
        kind = random.Random(rng.choice(kinds))
        call = kind.choice((all_to_all, sums))(kind, rng, comm.rank)
        with comm.split(groups=[[*range(WORLD)]]) as new:
            expected = outcome(call, new)
        before = kept_by(comm)
        got = outcome(call, comm)
        assert got == expected, f"seed {seed}, call {number}"
        raised += isinstance(expected[0], type)
        served += not isinstance(expected[0], type) and kept_by(comm) == before
    return raised, served


def kept_by(comm: Communicator) -> list[int]:
    return [*map(id, comm.prepared.values())]


@pytest.mark.parametrize("seed", exhaustive_but([0], range(25)))
def test_any_sequence_of_calls_gives_what_new_communicators_give(seed: int) -> None:
    for raised, served in run_ranks(compare, WORLD, seed, 150, mode="thread"):
        assert raised and served > 20


def test_nothing_holds_what_callers_passed() -> None:
    with tw.init() as comm:
        held = []
        for _ in range(3):
            x, out = torch.ones(2, 8), torch.empty(2, 8)
            all_to_all_v(x, [2], [2], out=out, wire="none", comm=comm)
            held += [weakref.ref(tensor) for tensor in (x, out, all_to_all_v(x, comm=comm))]
            held += [weakref.ref(tensor) for tensor in (all_reduce(x, comm=comm), all_reduce(x, out=out, comm=comm))]
        del x, out
        gc.collect()
        assert [ref() for ref in held] == [None] * len(held)


def test_what_is_kept_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_MOST_KEPT", 3)
    monkeypatch.setattr(pulled_legs, "_MOST_JOBS", 3)
    with tw.init() as comm:
        for size in [*range(1, 8), *range(1, 8)]:
            x = torch.arange(float(size)).view(1, size)
            for _ in range(3):
                assert torch.equal(all_to_all_v(x, wire="none", comm=comm), x)  # type: ignore[arg-type]
                assert torch.equal(all_reduce(x, wire="none", comm=comm), x)  # type: ignore[arg-type]
        assert len(comm.prepared) <= 3
        assert len(comm.attached(pulled_legs.NAME)._jobs) <= 3


def test_the_environment_is_looked_at_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 256)
    with tw.init() as comm:
        for name in ("none", "int8", "int4", "none", "nonsense", "int8"):
            monkeypatch.setenv("THINWIRE_WIRE", name)
            for function in (all_to_all_v, all_reduce):
                for _ in range(3):
                    if name == "nonsense":
                        with pytest.raises(WireFormatError, match="nonsense"):
                            function(x, comm=comm)
                    else:
                        assert torch.equal(function(x, comm=comm), function(x, wire=name, comm=comm))  # type: ignore[arg-type]


def test_an_asynchronous_call_ends_before_one_that_is_kept() -> None:
    with tw.init() as comm:
        x, y = torch.randn(3, 8), torch.randn(3, 8)
        for _ in range(3):
            all_to_all_v(x, [3], [3], wire="none", comm=comm)
        work: Any = all_to_all_v(y, [1], [1], wire="none", comm=comm, async_op=True)
        assert torch.equal(all_to_all_v(x, [3], [3], wire="none", comm=comm), x)  # type: ignore[arg-type]
        assert torch.equal(work.wait(), y[:1])
        assert torch.equal(all_to_all_v(x, [3], [3], wire="none", comm=comm), x)  # type: ignore[arg-type]


def test_counts_may_be_changed_in_place() -> None:
    with tw.init() as comm:
        x, counts = torch.randn(3, 8), [1]
        for rows in (1, 1, 2, 3, 0, 3, 1):
            counts[0] = rows
            assert torch.equal(all_to_all_v(x, counts, counts, wire="none", comm=comm), x[:rows])  # type: ignore[arg-type]


def test_a_tensor_that_was_changed_in_place_is_looked_at_again() -> None:
    with tw.init() as comm:
        x, out = torch.randn(4, 4), torch.empty(4, 4)

        def check(like: torch.Tensor) -> None:
            x.data = like
            got: Any = all_to_all_v(x, [len(x)], [len(x)], out=out, wire="none", comm=comm)
            assert torch.equal(got, like)

        for odd_one in (torch.randn(4, 4).t(), torch._neg_view(torch.randn(4, 4))):
            check(torch.randn(4, 4))
            check(odd_one)
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad) * 2:
            with mode():
                given: Any = torch.randn(4, 4)
                assert torch.equal(all_to_all_v(given, [4], [4], out=out.zero_(), wire="none", comm=comm), given)  # type: ignore[arg-type]
        for change, error in ((lambda: x.requires_grad_(), WireFormatError), (lambda: out.resize_(5, 3), CountsError)):
            check(torch.randn(4, 4))
            change()
            with pytest.raises(error):
                all_to_all_v(x, [4], [4], out=out, wire="none", comm=comm)
            x.requires_grad_(False)
        out.resize_(4, 4)
        x.data = torch.randn(4, 4, dtype=torch.float64)
        with pytest.raises(CountsError, match="it must be torch.float64"):
            all_to_all_v(x, [4], [4], out=out, wire="none", comm=comm)


def test_a_call_of_another_kind_in_between_leaves_nothing_behind() -> None:
    with tw.init() as comm:
        x, out = torch.randn(3, 8), torch.empty(3, 8)
        for rows in (1, 0, 1, 0):
            for _ in range(2):
                out.zero_()
                assert torch.equal(all_to_all_v(x, [3], [3], out=out, wire="none", comm=comm), x)  # type: ignore[arg-type]
            moved: Any = all_to_all_v(x, [rows], [rows], send_displs=[2], recv_displs=[1], wire="none", comm=comm)
            assert torch.equal(moved[1:], x[2 : 2 + rows])


def sums_after_others_were_forgotten(comm: Communicator) -> list[float]:
    x = torch.arange(64.0)
    for _ in range(3):
        all_reduce(x, wire="none", comm=comm)
    comm.barrier()
    gc.collect()
    littered = [np.full(WORLD, -1, np.int64) for _ in range(1000)]  # in memory of that size
    comm.barrier()
    summed = all_reduce(x, wire="none", comm=comm)
    del littered
    return summed.tolist()


def test_what_kernels_have_the_address_of_is_kept_with_it() -> None:
    assert run_ranks(sums_after_others_were_forgotten, WORLD, mode="thread") == [torch.arange(0.0, 128, 2).tolist()] * 2


def entries(comm: Communicator) -> list[tuple[Any, ...]]:
    for gather_wire in (None, "none", "int8"):
        for number in range(3):
            x = torch.ones(8, 16)[:, ::2] if comm.rank and number else torch.ones(8, 8)
            all_reduce(x, wire="int8", gather_wire=gather_wire, comm=comm)
    made = [entry for entry in comm.recorder._entries if entry is not None and entry[1] == "all_reduce"]
    return [(entry[1], tuple(entry[2]), str(entry[3]), str(entry[4])) for entry in made]


def test_a_kept_call_is_recorded_as_a_first_one() -> None:
    one, other = run_ranks(entries, WORLD, mode="thread")
    assert one == other and len(one) == 9


def counts_that_change(comm: Communicator) -> None:
    """A check tells how many rows come; that is for one call only."""
    for sends in ([[2, 2], [1, 3]], [[2, 2], [3, 1]], [[2, 2], [2, 2]]):
        x = torch.arange(8.0).view(4, 2) + 100 * comm.rank
        out = torch.full((9, 2), -1.0)
        rows = sends[0][comm.rank] + sends[1][comm.rank]
        got: Any = tw.all_to_all_v(x, sends[comm.rank], out=out[:rows], wire="none", comm=comm, check=True)
        expected = [
            torch.arange(8.0).view(4, 2)[sum(row[: comm.rank]) :][: row[comm.rank]] + 100 * source
            for source, row in enumerate(sends)
        ]
        assert torch.equal(got, torch.cat(expected)) and (out[rows:] == -1).all()


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_calls_that_a_check_tells_the_counts_of_keep_none(mode: str) -> None:
    run_ranks(counts_that_change, WORLD, mode=mode)


def transports_recorded(comm: Communicator) -> set[object]:
    x = torch.ones(4, 2)
    for _ in range(3):
        tw.all_gather(x, wire="none", comm=comm)
        tw.all_gather_v(x, wire="none", comm=comm)
    return {entry[TRANSPORT] for entry in comm.recorder.entries() if str(entry[NAME]).startswith("all_gather")}


def test_a_call_within_a_call_tells_its_transport_each_time() -> None:
    assert run_ranks(transports_recorded, WORLD, mode="thread") == [{"direct"}] * WORLD
