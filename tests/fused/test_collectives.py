"""All-reduce, reduce-scatter and all-gather, quantised: the computed bits on both transports and on every rank."""

from __future__ import annotations

import random
import time
from unittest import mock

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import torch
import torch.distributed as dist

import thinwire as tw
from benchmarks.bench_accuracy import errors_of_collectives
from tests.helpers.collectives import all_gathered, all_reduced, reduce_scattered
from tests.helpers.speeds import exhaustive_but
from tests.helpers.wires import DTYPES, WIRES, assert_same_bits, magnitudes
from thinwire.comm.communicator import Communicator
from thinwire.comm.work import Work
from thinwire.errors import (
    ConfigMismatch,
    PeerTimeout,
)
from thinwire.fused.collective import DirectCollectives, open_collectives
from thinwire.fused.ops import all_gather, all_gather_v, all_reduce, reduce_scatter
from thinwire.fused.pulled_legs import PulledLegs, open_legs
from thinwire.testing import RankError, run_ranks
from thinwire.triton_kernels.cpu.pull import aligned_slots
from thinwire.wire import WireFormat

MODES = ("process", "thread")
TRANSPORTS = ("direct", "staged")
#: A piece that holds one record of 4096 float32 elements: longer messages go in chunks.
SMALL_PIECE = 16384
SIZES = (1, 127, 1024, 3 * 1024 + 5, 4 * 4096 + 1, 50_000)


def _tensors(seed: int, world: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Every rank's tensor; each rank makes all of them."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(world)]


def _through_wires(comm: Communicator, seed: int) -> None:
    rng = random.Random(seed)
    open_legs(comm, piece=SMALL_PIECE)
    none = WireFormat("none")
    for number, spec in enumerate(WIRES):
        wire, dtype = WireFormat.parse(spec), DTYPES[(number + seed) % 3]
        gather_wire = WireFormat.parse(rng.choice((spec, "none", "int8", "int4")))
        size = SIZES[(number + seed) % len(SIZES)]
        tensors = _tensors(rng.randrange(1 << 30), comm.size, (size,), dtype)
        rows = _tensors(rng.randrange(1 << 30), comm.size, (comm.size * (number + 2), 1 + size % 997), dtype)
        counts = [rng.choice((0, 1, 2)) for _ in range(comm.size)]
        ragged = [tensor[:count] for tensor, count in zip(rows, counts, strict=True)]
        for transport in TRANSPORTS:
            name = f"{spec} {gather_wire} {dtype} {size} {transport} rank {comm.rank}"
            got = all_reduce(tensors[comm.rank], wire=wire, gather_wire=gather_wire, comm=comm, transport=transport)
            assert_same_bits(f"all_reduce {name}", all_reduced(tensors, wire, gather_wire), got)
            got = reduce_scatter(rows[comm.rank], wire=wire, comm=comm, transport=transport)
            assert_same_bits(f"reduce_scatter {name}", reduce_scattered(rows, wire, comm.rank), got)
            got = all_gather(rows[comm.rank], wire=wire, comm=comm, transport=transport)
            assert_same_bits(f"all_gather {name}", all_gathered(rows, wire), got)
            got = all_gather_v(ragged[comm.rank], counts, wire=wire, comm=comm, transport=transport)
            if wire != none and sum(counts):
                assert_same_bits(f"all_gather_v {name}", all_gathered(ragged, wire), got)
            else:
                assert torch.equal(got, torch.cat(ragged))
            asked = all_gather_v(ragged[comm.rank], wire=wire, comm=comm, transport=transport)
            assert_same_bits(f"all_gather_v, counts asked for, {name}", got, asked)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world", exhaustive_but((1, 2, 3), (1, 2, 3, 5)))
def test_every_wire_gives_the_computed_bits(mode: str, world: int) -> None:
    run_ranks(_through_wires, world, world, mode=mode)


def _through_interpreted_kernels(comm: Communicator) -> None:
    opened = open_collectives(comm, SMALL_PIECE)
    assert isinstance(opened, DirectCollectives), opened
    for number, (spec, gather) in enumerate(
        (("int8", "int8"), ("int8:row", "none"), ("none", "none"), ("int4", "fp8"))
    ):
        wire, gather_wire, dtype = WireFormat.parse(spec), WireFormat.parse(gather), DTYPES[number % 3]
        tensors = _tensors(number, comm.size, (comm.size * 1100,), dtype)
        got = all_reduce(tensors[comm.rank], wire=wire, gather_wire=gather_wire, comm=comm, transport="direct")
        assert_same_bits(f"all_reduce {spec} {gather} {dtype}", all_reduced(tensors, wire, gather_wire), got)
        got = reduce_scatter(tensors[comm.rank], wire=wire, comm=comm, transport="direct")
        assert_same_bits(f"reduce_scatter {spec} {dtype}", reduce_scattered(tensors, wire, comm.rank), got)
        if wire.quantized:
            got = all_gather(tensors[comm.rank], wire=wire, comm=comm, transport="direct")
            assert_same_bits(f"all_gather {spec} {dtype}", all_gathered(tensors, wire), got)
    generator = torch.Generator().manual_seed(3)
    large = [magnitudes(4, 300, torch.float32, generator).abs() for _ in range(comm.size)]
    expected = all_reduced(large, WireFormat.parse("int8"), WireFormat.parse("int8"))
    assert expected.isfinite().all() and expected.max() > 3e38
    assert_same_bits("sums past the largest float32", expected, all_reduce(large[comm.rank], wire="int8", comm=comm))
    with pytest.raises(ConfigMismatch, match="the ranks do different things"):
        all_reduce(torch.ones(5 + (comm.rank == 1)), comm=comm, transport="direct")
    assert torch.equal(all_reduce(torch.ones(5), wire="none", comm=comm), torch.full((5,), float(comm.size)))


@pytest.mark.exhaustive
def test_triton_interpreted_gives_the_computed_bits() -> None:
    pytest.importorskip("triton", reason="interpreting kernels needs Triton")
    env = {"TRITON_INTERPRET": "1", "THINWIRE_BACKEND": "triton"}
    run_ranks(_through_interpreted_kernels, 3, env=env, timeout=180)


def _extremes(comm: Communicator) -> None:
    """Magnitudes from subnormal to the largest, not-a-numbers and infinities among them."""
    for dtype in DTYPES:
        generator = torch.Generator().manual_seed(comm.size)
        tensors = [magnitudes(40, 333, dtype, generator) for _ in range(comm.size)]
        tensors[0][3, 5], tensors[-1][7, 11] = float("nan"), float("inf")
        for spec, gather in (("int8", "int8"), ("int8", "none"), ("none", "none"), ("int8:row", "int8:row")):
            wire, gather_wire = WireFormat.parse(spec), WireFormat.parse(gather)
            expected = all_reduced(tensors, wire, gather_wire)
            assert wire.quantized is False or not expected.isinf().any(), "sums of quantised rows saturate"
            for transport in TRANSPORTS:
                got = all_reduce(tensors[comm.rank], wire=spec, gather_wire=gather, comm=comm, transport=transport)
                assert_same_bits(f"{spec} {gather} {dtype} {transport}", expected, got)


def test_extreme_values_saturate_and_what_is_not_finite_stays_so() -> None:
    run_ranks(_extremes, 3, mode="thread")


# ---------------------------------------------------------------------------------------------------------------------
# Accuracy


def test_errors_stay_within_their_gates_at_every_world_size() -> None:
    found = {world: run_ranks(errors_of_collectives, world, mode="thread")[0] for world in range(2, 9)}
    for world, errors in found.items():
        # The gates, and nine tenths of what a uniform error of half a step comes to: less would mean that nothing was
        # quantised.
        assert 0.9 * 0.0065 < errors["reduce_scatter"] <= 0.0070, (world, errors)
        assert 0.9 * 0.0065 < errors["16-bit gather"] <= 0.0070, (world, errors)
        assert 0.9 * 0.0092 < errors["int8 both legs"] <= 0.0096, (world, errors)
        assert abs(errors["bias"]) < 1e-4, (world, errors)
        assert errors["beside outliers"] < 0.05, (world, errors)
        assert errors["of the summands"] < 0.0070 * world**0.5, (world, errors)
    for name in ("reduce_scatter", "16-bit gather", "int8 both legs"):
        values = [errors[name] for errors in found.values()]
        assert max(values) < 1.05 * min(values), (name, values)


# Half a step is four times as much in 6 bits as in 8.
@pytest.mark.parametrize(("wire", "times"), [("int8+h64", 1.0), ("int6+h64", 127 / 31)])
@pytest.mark.parametrize("world", [2, 5])
def test_rotated_rows_keep_the_same_gates_and_do_not_mind_outliers(world: int, wire: str, times: float) -> None:
    found = run_ranks(errors_of_collectives, world, wire, mode="thread")[0]
    errors = {name: error / times for name, error in found.items()}
    assert 0.9 * 0.0065 < errors["reduce_scatter"] <= 0.0070 and errors["16-bit gather"] <= 0.0070, found
    assert 0.9 * 0.0092 < errors["int8 both legs"] <= 0.0096, found
    assert abs(errors["bias"]) < 1e-4 and errors["beside outliers"] < 0.0100, found


# ---------------------------------------------------------------------------------------------------------------------
# Tensors and outputs


def _shapes(comm: Communicator) -> None:
    generator = torch.Generator().manual_seed(comm.rank)
    for transport in TRANSPORTS:
        x = torch.randn(comm.size * 6, 700, generator=generator)
        through = {"wire": "int8", "comm": comm, "transport": transport}
        expected = all_reduce(x, **through)
        # Not contiguous: transposed, strided, negative, behind an offset that is no multiple of 16 bytes.
        assert torch.equal(all_reduce(x.t().contiguous().t(), **through), expected)
        wide = torch.zeros(x.shape[0], 2 * x.shape[1])
        wide[:, ::2] = x
        assert torch.equal(all_reduce(wide[:, ::2], **through), expected)
        assert torch.equal(all_reduce(torch._neg_view(-x), **through), expected)
        odd = torch.zeros(x.numel() + 1)[1:].view(x.shape)
        odd.copy_(x)
        assert torch.equal(all_reduce(odd, **through), expected)
        # In place, wholly or in its part.
        same = x.clone()
        assert all_reduce(same, out=same, **through) is same and torch.equal(same, expected)
        scattered = reduce_scatter(x, **through)
        same = x.clone()
        own = same.chunk(comm.size)[comm.rank]
        assert reduce_scatter(same, out=own, **through) is own and torch.equal(own, scattered)
        gathered = all_gather(scattered, **through)
        whole = torch.zeros_like(gathered)
        own = whole.chunk(comm.size)[comm.rank]
        own.copy_(scattered)
        assert all_gather(own, out=whole, **through) is whole and torch.equal(whole, gathered)
        exact = {**through, "wire": "none"}
        copied = own.clone()
        assert torch.equal(all_gather(own, out=whole, **exact), all_gather(copied, **exact))
        # Nothing at all.
        assert all_reduce(x[:0], **through).shape == (0, 700)
        assert reduce_scatter(x[:, :0], **through).shape == (6, 0)
        assert all_gather(x[:0], **through).shape == (0, 700)
        pending = [
            all_reduce(x, async_op=True, **through),
            all_gather(scattered, async_op=True, **through),
            reduce_scatter(x, async_op=True, **through),
        ]
        assert all(isinstance(call, Work) for call in pending)
        for call, result in zip(pending, (expected, gathered, scattered), strict=True):
            assert torch.equal(call.wait(), result) and torch.equal(call.wait(), result)


@pytest.mark.parametrize("mode", MODES)
def test_layouts_of_tensors_and_outputs_in_place(mode: str) -> None:
    run_ranks(_shapes, 3, mode=mode)


def _exact_ones(comm: Communicator) -> None:
    """What no kernel of ours sums goes to the process group, or from thread to thread."""
    x = torch.arange(comm.size * 2).view(comm.size, 2) + comm.rank
    everyone = torch.stack([torch.arange(comm.size * 2).view(comm.size, 2) + rank for rank in range(comm.size)])
    assert torch.equal(all_reduce(x, wire="none", comm=comm), everyone.sum(0))
    assert torch.equal(all_reduce(x, "max", wire="none", comm=comm), everyone.amax(0))
    assert torch.equal(reduce_scatter(x, wire="none", comm=comm), everyone.sum(0)[comm.rank : comm.rank + 1])
    assert torch.equal(all_gather(x, wire="none", comm=comm), everyone.flatten(0, 1))
    own = x.clone()
    part = own[comm.rank : comm.rank + 1]
    assert torch.equal(reduce_scatter(own, "prod", out=part, wire="none", comm=comm), everyone.prod(0)[comm.rank, None])
    assert torch.equal(all_reduce(x.double(), wire="none", comm=comm, async_op=True).wait(), everyone.sum(0).double())


@pytest.mark.parametrize("mode", MODES)
def test_integers_and_other_operations_move_exactly(mode: str) -> None:
    run_ranks(_exact_ones, 3, mode=mode)


# ---------------------------------------------------------------------------------------------------------------------
# The direct transport


def _no_group_call(comm: Communicator) -> None:
    x = torch.randn(1000)
    all_reduce(x, comm=comm, transport="direct")  # which opens the memory
    forbidden = mock.Mock(side_effect=AssertionError("the direct path asked the process group"))
    names = ("isend", "irecv", "all_reduce", "all_gather", "barrier", "batch_isend_irecv", "all_to_all_single")
    with (
        mock.patch.multiple(dist, **dict.fromkeys(names, forbidden)),
        mock.patch.object(Communicator, "post", forbidden),
    ):
        all_reduce(x, comm=comm, transport="direct")
        reduce_scatter(x[: comm.size], comm=comm, transport="direct")
        all_gather(x, comm=comm, transport="direct")
    assert not forbidden.called
    assert "collectives: direct" in comm.explain()


def test_the_direct_path_makes_no_process_group_call() -> None:
    run_ranks(_no_group_call, 2)


def _poisoned(comm: Communicator) -> None:
    """All slots are overwritten before every call: what is read was sent in this call."""
    legs = open_legs(comm, piece=SMALL_PIECE)
    assert isinstance(legs, PulledLegs)
    slots = legs.memory.local[aligned_slots(legs.board.num_bytes) :]
    wire = WireFormat.parse("int8+h64")

    def poison() -> None:
        comm.barrier()
        slots[:] = 0xFF
        comm.barrier()

    for seed in range(6):
        tensors = _tensors(seed, comm.size, (comm.size * 30, 301), torch.float32)
        poison()
        got = all_reduce(tensors[comm.rank], comm=comm)
        assert_same_bits("all_reduce", all_reduced(tensors, wire, wire), got)
        poison()
        got = reduce_scatter(tensors[comm.rank], comm=comm)
        assert_same_bits("reduce_scatter", reduce_scattered(tensors, wire, comm.rank), got)
        got = all_gather(tensors[comm.rank], comm=comm)
        assert_same_bits("all_gather", all_gathered(tensors, wire), got)


def test_nothing_is_read_that_was_not_sent() -> None:
    run_ranks(_poisoned, 3)


def _in_a_hurry(comm: Communicator) -> None:
    """Calls of changing kinds back to back, with ranks that sleep between them at random."""
    rng, shared = random.Random(comm.rank), random.Random(99)
    open_legs(comm, piece=SMALL_PIECE)
    for number in range(60):
        wire = WireFormat.parse(shared.choice(("int8", "int4", "none")))
        op, rows = shared.randrange(3), shared.randrange(1, 40)
        tensors = _tensors(number, comm.size, (comm.size * rows, 257), torch.bfloat16)
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.004)
        if op == 0:
            assert_same_bits(
                "all_reduce", all_reduced(tensors, wire, wire), all_reduce(tensors[comm.rank], wire=wire, comm=comm)
            )
        elif op == 1:
            got = reduce_scatter(tensors[comm.rank], wire=wire, comm=comm)
            assert_same_bits("reduce_scatter", reduce_scattered(tensors, wire, comm.rank), got)
        elif wire.quantized:
            assert_same_bits(
                "all_gather", all_gathered(tensors, wire), all_gather(tensors[comm.rank], wire=wire, comm=comm)
            )


@pytest.mark.parametrize("mode", exhaustive_but(["thread"], MODES))
def test_calls_of_changing_kinds_do_not_get_into_each_other(mode: str) -> None:
    run_ranks(_in_a_hurry, 4, mode=mode)


def _disagree(comm: Communicator) -> list[str]:
    last = comm.rank == comm.size - 1
    x = torch.ones(comm.size * 4)
    calls = [
        lambda: all_reduce(x, comm=comm, wire="int8") if last else reduce_scatter(x, comm=comm, wire="int8"),
        lambda: all_reduce(x, comm=comm, wire="int4" if last else "int8"),
        lambda: all_reduce(x.half() if last else x, comm=comm),
        lambda: all_gather(x[:3] if last else x, comm=comm),
        lambda: all_reduce(torch.ones(100_000) if last else x, comm=comm),
    ]
    messages = []
    for call in calls:
        with pytest.raises(ConfigMismatch, match="the ranks do different things") as caught:
            call()
        messages.append(str(caught.value))
        assert torch.equal(all_reduce(x, comm=comm, wire="none"), x * comm.size), "all go on"
    return messages


@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_disagree_all_learn_it_and_go_on(mode: str) -> None:
    first, *_, last = run_ranks(_disagree, 3, mode=mode)
    assert "rank 2: all_reduce of 12 float32" in first[0] and "rank 0: reduce_scatter of 12" in first[0]
    assert "rank 0: reduce_scatter" in last[0] and "rank 1: reduce_scatter" in last[0]
    assert "int4" in first[1] and "float16" in first[2] and "100000" in first[4]


def _silent(comm: Communicator) -> tuple[tuple[int, ...], float]:
    x = torch.ones(5000)
    all_reduce(x, comm=comm)
    comm.barrier()
    if comm.rank == 1:
        time.sleep(4.0)
        return (), 0.0
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match="no answer from rank 1") as caught:
        all_reduce(x, comm=comm)
    elapsed = time.monotonic() - start
    with pytest.raises(PeerTimeout, match="cannot be used any more"):
        all_gather(x, comm=comm)
    return caught.value.ranks, elapsed


def test_a_silent_rank_is_named_in_time_by_everyone() -> None:
    found = run_ranks(_silent_within, 3)
    for ranks, elapsed in (found[0], found[2]):
        assert ranks == (1,) and elapsed < 1.0 + 2.0 + 1.0


def _silent_within(comm: Communicator) -> tuple[tuple[int, ...], float]:
    return _silent(Communicator(comm.group, timeout=1.0))


def test_a_rank_that_fails_does_not_hang_the_others() -> None:
    with pytest.raises(RankError, match="rank 0 first"):
        run_ranks(_one_fails, 3, mode="thread")


def _one_fails(comm: Communicator) -> None:
    all_reduce(torch.ones(10), comm=comm)
    if comm.rank == 0:
        raise ValueError("on purpose")
    comm.barrier()


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all_v"])
def test_the_first_lines_tell_the_quantised_collective_from_the_exact_one_of_its_name(name: str) -> None:
    quantised, exact = (getattr(of, name).__doc__.strip().partition("\n")[0] for of in (tw, tw.Communicator))
    assert quantised.startswith("Quantised") and f"`Communicator.{name}` is exact" in quantised
    assert exact.startswith("Exact") and f"`thinwire.{name}` quantises" in exact
