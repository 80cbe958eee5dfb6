"""Prepared calls give what their functions give: values, gradients, errors; eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thinwire as tw
from tests.helpers.wires import assert_same_bits
from thinwire.comm.communicator import Communicator
from thinwire.comm.recorder.flight_recorder import NAME, TRANSPORT
from thinwire.errors import ArgumentError, CountsError, ThinwireError, TransportUnavailable, WireFormatError
from thinwire.testing import run_ranks

WORLD = 2


def calls(comm: Communicator) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    sends, receives = ([1, 3], [1, 2]) if comm.rank == 0 else ([2, 2], [3, 2])
    return [
        (tw.all_to_all_v, (), {"wire": "int8"}),
        (tw.all_to_all_v, (sends,), {"wire": "int4"}),
        (tw.all_to_all_v, (sends, receives), {"send_displs": [0, 1], "recv_displs": [2, 0], "wire": "none"}),
        (tw.all_reduce, (), {"wire": "int8", "gather_wire": "none"}),
        (tw.all_reduce, ("max",), {"wire": "none"}),
        (tw.reduce_scatter, (), {"wire": "int8"}),
        (tw.all_gather, (), {"wire": "int8"}),
        (tw.all_gather, (), {"wire": "none"}),
    ]


def compare(comm: Communicator, transport: str) -> None:
    generator = torch.Generator().manual_seed(comm.rank)
    for function, arguments, options in calls(comm):
        prepared = tw.prepare(
            function, torch.empty(4, 6), *arguments, comm=comm, transport=transport, grad_wire="int8", **options
        )
        for odd in (False, True, False):
            x = torch.randn(4, 6, generator=generator)
            x = torch._neg_view(x.t().contiguous().t()) if odd else x
            expected: Any = function(x, *arguments, comm=comm, transport=transport, **options)
            got: Any = prepared(x)
            assert_same_bits(function.__name__, expected, got)
            out = torch.zeros_like(expected)
            assert prepared(x, out) is out
            assert_same_bits(function.__name__, expected, out)
            pending: Any = prepared(x, async_op=True)
            assert_same_bits(function.__name__, expected, pending.wait())
        if "max" in arguments:
            continue
        gradients = []
        for call in (prepared, lambda x: function(x, *arguments, comm=comm, transport=transport, **options)):  # noqa: B023
            w = x.detach().clone().requires_grad_()
            y: Any = call(w)
            (y * torch.arange(1.0, 1 + y.numel()).view(y.shape)).sum().backward()
            assert w.grad is not None
            gradients.append(w.grad)
        assert torch.allclose(*gradients, rtol=0.02, atol=0.2) and not torch.equal(*gradients), "grad_wire is its own"


@pytest.mark.parametrize("transport", ["auto", "staged"])
def test_a_prepared_call_gives_what_its_function_gives(transport: str) -> None:
    run_ranks(compare, WORLD, transport, mode="thread")


def there_and_back(comm: Communicator) -> None:
    sends, receives = ([1, 2], [1, 3]) if comm.rank == 0 else ([3, 1], [2, 1])
    x = torch.arange(24.0).view(4, 6) + 100 * comm.rank
    plan = tw.prepare(tw.all_to_all_v, x, sends, receives, wire="none", comm=comm)
    for _ in range(2):
        y: Any = plan(x)
        z: Any = plan(x + 1)
        for result in (z, y):  # in any order
            expected = x.clone() + (result is z)
            expected[sum(sends) :] = 0
            assert torch.equal(plan.back(result), expected)
    assert plan.back(y, wire="int8").sub(plan.back(y)).abs().max() > 0
    twice = tw.prepare(tw.all_to_all_v, x, [4, 4], [4, 4], send_displs=[0, 0], wire="none", comm=comm, grad_wire="none")
    y = twice(x)
    assert torch.equal(twice.back(y), 2 * x), "rows that went to both ranks add up"
    with pytest.raises(CountsError):
        plan.back(y[:-1])
    with pytest.raises(ArgumentError, match="without recv_counts"):
        tw.prepare(tw.all_to_all_v, x, sends, comm=comm).back(x)


def test_rows_go_there_and_come_back_any_number_of_times() -> None:
    run_ranks(there_and_back, WORLD, mode="thread")


def test_a_way_back_is_checked_before_anything_is_sent() -> None:
    with tw.init() as comm:
        x = torch.ones(4, 6)
        for function, arguments in ((tw.all_to_all_v, ([3], [3])), (tw.all_gather, ()), (tw.reduce_scatter, ())):
            call = tw.prepare(function, x, *arguments, wire="none", comm=comm)
            result: Any = call(x)
            for wrong in (result[:, :5], result[:1], result.flatten(), result.double()):
                with pytest.raises(CountsError, match="y is torch.float.* what comes back of this"):
                    call.back(wrong)
            with pytest.raises(TransportUnavailable, match="y is a list"):
                call.back([1.0])  # type: ignore[arg-type]
            assert call.back(result).shape == x.shape
        with pytest.raises(WireFormatError, match="no backward with op 'max'"):
            tw.prepare(tw.all_reduce, x, "max", wire="none", comm=comm).back(x)


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


def test_what_is_refused_at_first_is_refused_later() -> None:
    maximum, total = torch.distributed.ReduceOp.MAX, torch.distributed.ReduceOp.SUM
    with tw.init() as comm:
        x = torch.ones(4)
        for op in (maximum, total, "sum"):
            tw.all_reduce(x, op, wire="none", comm=comm)
        for number in (int(maximum), int(total), False):  # which are equal to these, and hash like them
            with pytest.raises(ArgumentError, match="op is"):
                tw.all_reduce(x, number, wire="none", comm=comm)
        with pytest.raises(CountsError, match=r"out is torch.float32 \[\] on cpu"):
            tw.all_to_all_v(x, [2], out=torch.tensor(1.0), wire="none", comm=comm)
        version = x._version
        with pytest.raises(CountsError, match="shares memory"):
            tw.all_to_all_v(x, [2], [2], out=x, wire="none", comm=comm)
        assert x._version == version
        rows = torch.ones(4, 256)
        for function in (tw.all_to_all_v, tw.all_reduce, tw.reduce_scatter, tw.all_gather):
            function(rows, wire="int8", comm=comm)
            with pytest.raises(TransportUnavailable, match="x is a WireRows"):
                function(tw.quantize(rows), wire="int8", comm=comm)  # type: ignore[arg-type]
            with pytest.raises(ArgumentError, match="transform of torch.func"):
                torch.func.grad(lambda x: function(x, wire="int8", comm=comm).sum())(rows)  # noqa: B023


def transports_recorded(comm: Communicator) -> set[object]:
    x = torch.ones(4, 2)
    for _ in range(3):
        tw.all_gather(x, wire="none", comm=comm)
        tw.all_gather_v(x, wire="none", comm=comm)
    return {entry[TRANSPORT] for entry in comm.recorder._snapshot() if str(entry[NAME]).startswith("all_gather")}


def test_a_call_within_a_call_tells_its_transport_each_time() -> None:
    assert run_ranks(transports_recorded, WORLD, mode="thread") == [{"direct"}] * WORLD


def test_it_can_be_compiled() -> None:
    with tw.init() as comm:
        prepared = tw.prepare(tw.all_reduce, torch.empty(5), wire="none", comm=comm)
        compiled = torch.compile(lambda x: prepared(x * 2) + 1, backend="eager")
        for _ in range(2):
            x = torch.randn(5)
            assert torch.equal(compiled(x), x * 2 + 1)


def test_what_does_not_fit_is_refused() -> None:
    comm = tw.init()
    x = torch.ones(4, 3)
    prepared = tw.prepare(tw.all_to_all_v, x, [2], [2], comm=comm)
    for wrong in (torch.ones(3, 3), torch.ones(4, 3, dtype=torch.bfloat16)):
        with pytest.raises(ArgumentError, match=r"all_to_all_v was prepared for torch.float32 \[4, 3\]"):
            prepared(wrong)
    with pytest.raises(TransportUnavailable, match="x is a list"):
        prepared([1.0])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="sparse"):
        prepared(x.to_sparse())
    with pytest.raises(CountsError, match="past the end: out has 1 rows"):
        prepared(x, torch.ones(1, 3))
    with pytest.raises(WireFormatError, match="no backward with out"):
        prepared(x.clone().requires_grad_(), torch.ones(2, 3))
    with pytest.raises(CountsError, match="past the end: the input has 4 rows"):
        tw.prepare(tw.all_to_all_v, x, [5], [5], comm=comm)
    with pytest.raises(WireFormatError, match="int9"):
        tw.prepare(tw.all_reduce, x, wire="int9", comm=comm)
    with pytest.raises(ArgumentError, match="accepted: thinwire's all_to_all_v, all_reduce"):
        tw.prepare(torch.add, x, comm=comm)
    with pytest.raises(ArgumentError, match="accepted: thinwire's all_to_all_v, all_reduce"):
        tw.prepare([], x, comm=comm)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="all_gather: too many positional arguments"):
        tw.prepare(tw.all_gather, x, "none", comm=comm)
    with pytest.raises(ArgumentError, match="out was passed to prepare"):
        tw.prepare(tw.all_gather, x, out=x, comm=comm)
    with pytest.raises(WireFormatError, match="int9"):
        tw.prepare(tw.all_reduce, x, grad_wire="int9", comm=comm)
    with pytest.raises(ArgumentError, match="all_gather: .*'check'"):
        tw.prepare(tw.all_gather, x, check=True, comm=comm)
    assert isinstance(prepared(x), torch.Tensor)
    comm.close()
    with pytest.raises(ThinwireError, match="closed"):
        prepared(x)


def test_what_it_was_prepared_with_may_be_changed() -> None:
    with tw.init() as comm:
        x, counts = torch.randn(3, 2), [2]
        prepared = tw.prepare(tw.all_to_all_v, x, counts, counts, wire="none", comm=comm)
        counts[0] = 1
        got: Any = prepared(x)
        assert torch.equal(got, x[:2])
