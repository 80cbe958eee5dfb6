"""Prepared calls give what their functions give: values, gradients, errors; eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thinwire as tw
from tests.helpers.wires import assert_same_bits
from thinwire.comm.communicator import Communicator
from thinwire.errors import ArgumentError, CountsError, ThinwireError, WireFormatError
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
        plan.back(x[:1])
    with pytest.raises(ArgumentError, match="without recv_counts"):
        tw.prepare(tw.all_to_all_v, x, sends, comm=comm).back(x)


def test_rows_go_there_and_come_back_any_number_of_times() -> None:
    run_ranks(there_and_back, WORLD, mode="thread")


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
    for wrong in (torch.ones(3, 3), torch.ones(4, 3, dtype=torch.bfloat16), [1.0]):
        with pytest.raises(ArgumentError, match=r"all_to_all_v was prepared for torch.float32 \[4, 3\]"):
            prepared(wrong)  # type: ignore[arg-type]
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
