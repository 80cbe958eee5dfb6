"""Collectives of ranks on several hosts, which are pretended: the bits, the errors, and what crosses between hosts."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import torch
import torch.distributed as dist

import thinwire as tw
from benchmarks.bench_accuracy import errors_of_collectives
from tests.helpers.collectives import all_reduced, reduce_scattered
from tests.helpers.hosts import on_hosts
from tests.helpers.wires import assert_same_bits
from thinwire.comm.communicator import Communicator
from thinwire.comm.hosts import VARIABLE
from thinwire.errors import ConfigMismatch, PeerTimeout, ThinwireError, TransportUnavailable
from thinwire.fused.ops import all_gather, all_gather_v, all_reduce, reduce_scatter
from thinwire.testing import run_ranks
from thinwire.wire import WireFormat

NONE, INT8 = WireFormat("none"), WireFormat.parse("int8")
#: Hosts by the names of their ranks': two of two, three of two, two of three whose ranks take turns.
HOSTS = ("aabb", "aabbcc", "abbaab")


def _on_hosts(comm: Communicator, hosts: str) -> Communicator:
    os.environ[VARIABLE] = hosts[comm.rank]
    return comm.split(groups=[range(comm.size)])


def _tensors(seed: int, world: int, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(world)]


def _sums_of_hosts(comm: Communicator, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    sums = [torch.zeros_like(tensors[0]) for _ in comm.hosts]
    for members, total in zip(comm.hosts, sums, strict=True):
        for rank in members:
            total += tensors[rank]
    return sums


def _bits(comm: Communicator, hosts: str) -> None:
    comm = _on_hosts(comm, hosts)
    # 1 and 1025 leave some ranks of a rail without a part.
    for seed, size in enumerate((1, 1025, 5 * 4096 + 7, 40_000)):
        tensors = _tensors(seed, comm.size, size)
        x, sums = tensors[comm.rank], _sums_of_hosts(comm, tensors)
        for wire, gather_wire in ((INT8, INT8), (INT8, NONE), (NONE, NONE), (WireFormat.parse("int8+h64"), INT8)):
            name = f"{size} {wire} {gather_wire}"
            got = all_reduce(x, wire=wire, gather_wire=gather_wire, comm=comm)
            assert_same_bits(f"all_reduce {name}", all_reduced(sums, wire, gather_wire, comm.size), got)
        whole = size // comm.size * comm.size
        for wire in (INT8, NONE):
            got = reduce_scatter(x[:whole], wire=wire, comm=comm)
            halves = [total[:whole] for total in sums]
            assert_same_bits(f"reduce_scatter {size} {wire}", reduce_scattered(halves, wire, comm.rank, comm.size), got)
            assert_same_bits(
                f"all_gather {size} {wire}",
                all_gather(x, wire=wire, comm=comm, transport="staged"),
                all_gather(x, wire=wire, comm=comm, transport="two_level"),
            )
    assert "collectives: two levels" in comm.explain()


@pytest.mark.parametrize("hosts", HOSTS)
def test_hosts_sum_exactly_and_the_sums_cross_once(hosts: str) -> None:
    run_ranks(_bits, len(hosts), hosts, timeout=120)


def _pieces(comm: Communicator) -> None:
    comm = _on_hosts(comm, "aabb")
    x = (torch.arange(1_500_000 * comm.size - 4 * 4096) % 127).float()  # the rail of the last rank has fewer rows
    for wire, steps in (("none", 0.0), ("int8", 2 * 0.5)):
        got = all_reduce(x, wire=wire, comm=comm)
        torch.testing.assert_close(got, x * comm.size, rtol=1e-6, atol=steps * comm.size)
        assert torch.equal(*(all_gather(x, wire=wire, comm=comm, transport=name) for name in ("two_level", "staged")))


def test_long_tensors_cross_in_pieces() -> None:
    run_ranks(_pieces, 4)


def _gathered(comm: Communicator) -> None:
    comm = _on_hosts(comm, "aabb")
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8):
        counts = [3, 0, 1, 500]
        x = (torch.randn(counts[comm.rank], 7) * 100).to(dtype)
        for wire in ("none", "int8") if dtype.is_floating_point else ("none",):
            both = [
                all_gather_v(x, counts, wire=wire, comm=comm, transport=transport)
                for transport in ("staged", "two_level")
            ]
            assert torch.equal(*both) and both[1].dtype == dtype, (dtype, wire)
            assert torch.equal(all_gather_v(x, wire=wire, comm=comm), both[0])
    noise = torch.randint(256, (4 * 1003,), dtype=torch.uint8).view(torch.float32)  # not-a-numbers among them
    both = [all_gather(noise, wire="none", comm=comm, transport=transport) for transport in ("staged", "two_level")]
    assert torch.equal(*(got.view(torch.int32) for got in both))


def test_gathered_rows_are_those_of_one_level_to_the_last_bit() -> None:
    run_ranks(_gathered, 4)


def _sixteen_bits(comm: Communicator) -> None:
    comm = _on_hosts(comm, "aabb")
    for dtype in (torch.bfloat16, torch.float16):
        tensors = [tensor.to(dtype) for tensor in _tensors(3, comm.size, comm.size, 2001)]
        sums = _sums_of_hosts(comm, [tensor.float() for tensor in tensors])
        exact = (sums[0] + sums[1]).to(dtype)
        assert torch.equal(all_reduce(tensors[comm.rank], wire="none", comm=comm), exact), "rounded once"
        assert torch.equal(reduce_scatter(tensors[comm.rank], wire="none", comm=comm), exact[comm.rank, None])
        assert torch.equal(
            all_reduce(tensors[comm.rank], wire=INT8, comm=comm, gather_wire="none"),
            all_reduced(sums, INT8, NONE, comm.size).to(dtype),
        )


def test_sums_of_sixteen_bits_are_float32_and_rounded_once() -> None:
    run_ranks(_sixteen_bits, 4)


def _errors(comm: Communicator, hosts: str) -> dict[str, float]:
    return errors_of_collectives(_on_hosts(comm, hosts))


@pytest.mark.parametrize("hosts", HOSTS)
def test_errors_stay_within_the_gates_of_one_level(hosts: str) -> None:
    errors = run_ranks(_errors, len(hosts), hosts)[0]
    assert 0.9 * 0.0065 < errors["reduce_scatter"] <= 0.0070, errors
    assert 0.9 * 0.0065 < errors["16-bit gather"] <= 0.0070, errors
    assert 0.9 * 0.0092 < errors["int8 both legs"] <= 0.0096, errors
    assert abs(errors["bias"]) < 1e-4 and errors["beside outliers"] < 0.05, errors


def _shapes(comm: Communicator) -> None:
    comm = _on_hosts(comm, "aabb")
    through: dict[str, Any] = {"comm": comm, "transport": "two_level"}
    for wire in ("int8", "none"):
        through["wire"] = wire
        x = torch.randn(comm.size * 6, 700)
        reduced, scattered = all_reduce(x, **through), reduce_scatter(x, **through)
        gathered = all_gather(scattered, **through)
        assert torch.equal(all_reduce(x.t().contiguous().t(), **through), reduced)
        same = x.clone()
        assert all_reduce(same, out=same, **through) is same and torch.equal(same, reduced)
        own = (same := x.clone()).chunk(comm.size)[comm.rank]
        assert reduce_scatter(same, out=own, **through) is own and torch.equal(own, scattered)
        own = (whole := torch.zeros_like(gathered)).chunk(comm.size)[comm.rank].copy_(scattered)
        assert all_gather(own, out=whole, **through) is whole and torch.equal(whole, gathered)
        assert all_reduce(x[:0], **through).shape == (0, 700)
        assert reduce_scatter(x[:, :0], **through).shape == (6, 0)
        assert all_gather(x[:0], **through).shape == (0, 700)
        pending = [all_reduce(x, async_op=True, **through), all_gather(scattered, async_op=True, **through)]
        assert torch.equal(pending[1].wait(), gathered) and torch.equal(pending[0].wait(), reduced)
    for op, weight in (
        (all_reduce, reduced),
        (all_gather, torch.ones(comm.size * len(x), 700)),
        (reduce_scatter, x[:6]),
    ):
        grads = []
        for transport in ("two_level", "staged"):
            x.grad = None
            leaf = x.detach().requires_grad_()
            (op(leaf, wire="none", comm=comm, transport=transport) * weight).sum().backward()
            grads.append(leaf.grad)
        torch.testing.assert_close(*grads)
    whole = torch.arange(comm.size * 2).view(comm.size, 2)
    assert torch.equal(all_reduce(whole, "max", wire="none", comm=comm), whole), "torch.distributed reduces"


def test_outputs_in_place_and_nothing_at_all_and_gradients() -> None:
    run_ranks(_shapes, 4)


def _bytes_to_other_hosts(comm: Communicator, call: Callable[..., object], *arguments: object, **options: Any) -> int:
    own, crossed, post = next(members for members in comm.hosts if comm.rank in members), [0], comm.post

    def counting(sends: list[torch.Tensor | None], *others: Any, **more: Any) -> Any:
        crossed[0] += sum(sent.numel() for peer, sent in enumerate(sends) if sent is not None and peer not in own)
        return post(sends, *others, **more)

    comm.post = counting  # type: ignore[method-assign]
    try:
        call(*arguments, comm=comm, **options)
    finally:
        comm.post = post  # type: ignore[method-assign]
    return crossed[0]


def _crossing(comm: Communicator, hosts: str) -> None:
    comm = _on_hosts(comm, hosts)
    others, per_host, rows = len(comm.hosts) - 1, comm.size // len(comm.hosts), 300
    x = torch.randn(comm.size, rows * 4096)
    for wire in ("int8", "none"):
        record = WireFormat.parse(wire).row_bytes(4096, torch.float32)
        all_reduce(x, wire=wire, comm=comm)  # which opens the memory
        for call, legs, tensor in ((all_gather, 1, x[0]), (reduce_scatter, 1, x), (all_reduce, 2, x)):
            two = _bytes_to_other_hosts(comm, call, tensor, wire=wire)
            assert two == legs * others * rows * record, (call, wire)
            assert _bytes_to_other_hosts(comm, call, tensor, wire=wire, transport="staged") == per_host * two


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_rank_sends_its_part_to_other_hosts_once_each(hosts: str) -> None:
    run_ranks(_crossing, len(hosts), hosts)


def _refused(comm: Communicator, hosts: str, reason: str) -> None:
    comm = _on_hosts(comm, hosts)
    x = torch.ones(comm.size, 3)
    for call in (all_gather, reduce_scatter, all_reduce):
        for wire in ("int8", "none"):
            with pytest.raises(TransportUnavailable, match=f"cannot take two levels: {reason}"):
                call(x, wire=wire, comm=comm, transport="two_level")
    assert torch.equal(all_reduce(x, wire="none", comm=comm), x * comm.size)
    assert len(comm.hosts) == 1 or f"collectives: staged, as {reason}" in comm.explain()


@pytest.mark.parametrize(
    ("hosts", "reason"),
    [
        ("ab", "every host has one rank"),
        ("aa", "its ranks are on one host"),
        ("aab", "its hosts have different numbers of ranks: 2, of ranks 0-1 and 2"),
    ],
)
def test_why_there_are_no_two_levels(hosts: str, reason: str) -> None:
    run_ranks(_refused, len(hosts), hosts, reason)


def _not_built(comm: Communicator) -> None:
    comm = _on_hosts(comm, "aabb")
    with pytest.raises(
        TransportUnavailable, match="all_to_all_v cannot take two levels: its ranks are on several hosts"
    ):
        tw.all_to_all_v(torch.ones(4, 2), comm=comm, transport="two_level")
    with pytest.raises(TransportUnavailable, match="cannot take the direct transport: its ranks are on several hosts"):
        all_reduce(torch.ones(4), comm=comm, transport="direct")


def test_what_is_not_built_for_two_levels_says_so() -> None:
    run_ranks(_not_built, 4)


def _silent(comm: Communicator) -> tuple[int, ...]:
    os.environ[VARIABLE] = "aabb"[comm.rank]
    comm = Communicator(comm.group, timeout=1.5)
    all_reduce(torch.ones(5000), comm=comm)
    if comm.rank == 3:
        time.sleep(6.0)
        return ()
    with pytest.raises(PeerTimeout, match=f"rank {comm.rank} of 4") as caught:
        all_reduce(torch.ones(5000), comm=comm)
    with pytest.raises(PeerTimeout, match="cannot be used any more"):
        all_gather(torch.ones(3), comm=comm)
    return caught.value.ranks


def test_a_silent_rank_is_named_on_all_hosts() -> None:
    assert run_ranks(_silent, 4) == [(3,), (3,), (3,), ()]


#: What ranks disagree about: tensor and wire of most, and of the odd ones.
DIFFERENCES = (
    ((torch.ones(3000), "int8"), (torch.ones(4000), "int8")),
    ((torch.ones(3000), "int8"), (torch.ones(3000, dtype=torch.bfloat16), "int8")),
    ((torch.ones(3000), "int8"), (torch.ones(3000), "fp8")),  # whose records are as long
)


def _disagree(comm: Communicator, odd: tuple[int, ...], timeout: float, step: int) -> list[str]:
    found = []
    calls = itertools.product((all_reduce, reduce_scatter, all_gather), DIFFERENCES)
    for call, given in itertools.islice(calls, 0, None, step):
        two = on_hosts(Communicator(dist.new_group(timeout=timedelta(seconds=timeout)), timeout=timeout))
        x, wire = given[comm.rank in odd]
        all_gather(torch.ones(3), comm=two, transport="two_level")  # which opens the memory
        with pytest.raises((ConfigMismatch, PeerTimeout)) as caught:
            call(x, wire=wire, comm=two, transport="two_level")
        found.append(type(caught.value).__name__)
        comm.barrier()
    return found


@pytest.mark.parametrize(
    ("odd", "timeout", "step", "errors"),
    [
        ((2, 3), 1.0, 4, ["PeerTimeout"] * 4),
        ((1, 3), 30.0, 1, ["ConfigMismatch"] * 4),
        pytest.param((3,), 1.0, 4, ["PeerTimeout"] * 2 + ["ConfigMismatch"] * 2, marks=pytest.mark.exhaustive),
    ],
    ids=["hosts", "rails", "a rank and all others"],
)
def test_ranks_that_disagree_all_get_an_error(
    odd: tuple[int, ...], timeout: float, step: int, errors: list[str]
) -> None:
    found = run_ranks(_disagree, 4, odd, timeout, step)
    assert [{*of_rank} for of_rank in found] == [{error} for error in errors]


def _closed(comm: Communicator, late: tuple[int, ...]) -> tuple[int, ...]:
    two = on_hosts(Communicator(comm.group, timeout=1.5))
    all_reduce(torch.ones(5000), comm=two)
    comm.barrier()
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: two.close())
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        for _ in range(2):
            with pytest.raises(ThinwireError, match="communicator (is|was) closed"):
                all_reduce(torch.ones(5000), comm=two)
        return (0,)
    time.sleep(0.6 if comm.rank in late else 0.0)
    with pytest.raises(PeerTimeout) as caught:
        all_reduce(torch.ones(5000), comm=two)
    return caught.value.ranks


@pytest.mark.parametrize("late", [(2, 3), (1,)], ids=["between hosts", "within a host"])
def test_who_closes_it_in_a_wait_ends_that_and_its_peers_end_too(late: tuple[int, ...]) -> None:
    # A rank that hears from the network that rank 0 left may end before the others have agreed on that.
    assert {*run_ranks(_closed, 4, late)} <= {(0,), ()}


def _shrunk(comm: Communicator, lost: tuple[int, ...]) -> tuple[str, str]:
    two = _on_hosts(Communicator(comm.group, timeout=1.5), "aabb")
    all_reduce(torch.ones(5000), comm=two)
    if comm.rank in lost:
        return "", ""
    with pytest.raises(PeerTimeout) as caught:
        all_reduce(torch.ones(5000), comm=two)
    assert caught.value.ranks == lost
    left = two.shrink()
    x = torch.full((5000,), left.rank + 1.0)
    assert torch.equal(all_reduce(x, wire="none", comm=left), torch.full_like(x, sum(range(left.size + 1))))
    assert torch.equal(all_gather(x[:1], wire="none", comm=left), torch.arange(left.size) + 1.0)
    return str(left.hosts), left.explain()


def test_ranks_that_are_left_go_on() -> None:
    for lost, hosts, transport in (((2, 3), "((0, 1),)", "direct"), ((3,), "((0, 1), (2,))", "staged")):
        found = run_ranks(_shrunk, 4, lost)
        for rank in {0, 1, 2, 3} - {*lost}:
            assert found[rank][0] == hosts and f"collectives: {transport}" in found[rank][1], found
