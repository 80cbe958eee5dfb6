"""Collectives, all-to-all-v, plans and the codec refuse bad input before anything is sent. A refusal is one row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="CPU ranks need numba")

import torch
from torch.distributed import ReduceOp

import thinwire as tw
from tests.helpers.collectives import COLLECTIVES
from tests.helpers.refusals import Ground, Row, answers, check, expand
from thinwire.comm import Communicator
from thinwire.errors import (
    ArgumentError,
    CountsError,
    LayoutError,
    ThinwireError,
    TransportUnavailable,
    WireFormatError,
)
from thinwire.fused import counts, ddp
from thinwire.fused.backend import require_wire_support
from thinwire.fused.channel import channel_layout
from thinwire.triton_kernels.cpu import pack
from thinwire.triton_kernels.int8_weights import require_int8_sums

OPERATIONS = [function.__name__ for function in COLLECTIVES]

#: x is float32 [4, 8] on two ranks; `wants` wants a gradient; `ones` are counts of 1; `plan` has three rows.
ROWS = expand(
    ("all_to_all_v(x[:3])", CountsError, "3 rows cannot be split equally"),
    ("all_to_all_v(x, recv_counts=ones)", CountsError, "need send_counts"),
    ("all_to_all_v(x, [1])", CountsError, "send_counts has 1 entries; this group has"),
    ("all_to_all_v(_)", CountsError, "past the end: the input has 4 rows", "x, [5, 0], ones", "wants, [5, 0]"),
    ("all_to_all_v(x, [2**62] * 2, [2**62] * 2, out=x.clone())", CountsError, "past the end"),
    ("all_to_all_v(x, ones, ones, out=torch.zeros(1, 8))", CountsError, "past the end: out has 1 rows"),
    ("all_to_all_v(x, ones, out=x.double())", CountsError, "it must be torch.float32 [rows, 8]"),
    ("all_to_all_v(x, ones, ones, out=_)", CountsError, "it must be torch.float32 [rows, 8]",
     "x.double()", "torch.zeros(4, 9)", "torch.zeros(4, 8, 1)"),
    ("all_to_all_v(x, ones, wire='none', out=torch.tensor(1.0))", CountsError, "out is torch.float32 [] on cpu"),
    ("all_to_all_v(x, ones, ones, out=_)", CountsError, "contiguous", "x.view(8, 4).t()", "torch.zeros(4, 16)[:, ::2]"),
    ("all_to_all_v(x, ones, ones, out=_)", CountsError, "shares memory", "x", "x[2:]"),
    ("all_to_all_v(memory[:4], ones, ones, out=same_memory[3:7])", CountsError, "shares memory"),
    ("all_to_all_v(x, ones, ones, recv_displs=[0, 0])", CountsError, "overlap"),
    ("all_to_all_v(x, ones, [0, 2**63])", CountsError, "0 to 2**63 - 1"),
    ("all_to_all_v(x, ones, [2, -1])", CountsError, "recv_counts[1] is -1"),
    ("all_to_all_v(x, [-1, 2], ones)", CountsError, "send_counts[0] is -1"),
    ("all_to_all_v(x, [True, 1], ones)", CountsError, "send_counts[0] is True"),
    ("all_to_all_v(x, ones, [1.0, 1])", CountsError, "recv_counts[0] is 1.0"),
    ("all_to_all_v(x, ones, [1, 1, 1])", CountsError, "recv_counts has 3 entries"),
    ("all_to_all_v(x, [2 - rank, 1 + rank], ones)", CountsError, "sends itself 2 rows but expects 1"),
    ("all_to_all_v(x.long(), ones, ones)", WireFormatError, 'wire="none"'),
    ("all_to_all_v(x, ones, ones, wire='int3')", WireFormatError, "int3"),
    ("all_to_all_v(x, ones, transport='fast')", TransportUnavailable, "auto, direct, two_level, staged"),
    ("all_to_all_v(x, ones, ones, out=[x])", ArgumentError, "out is a list"),
    ("all_to_all_v(wants, ones, _)", WireFormatError, "no backward",
     "async_op=True", "ones, out=x", "out=x, wire='none'"),
    ("_(x, comm=closed)", ThinwireError, "communicator is closed", *OPERATIONS),
    ("all_to_all_v(x, ones, ones, wire='int9', comm=closed)", WireFormatError, "int9"),
    ("_(wants, async_op=True)", WireFormatError, "no backward with async_op", *OPERATIONS),
    ("_(wants, out=torch.empty(1))", WireFormatError, "no backward with out", *OPERATIONS),
    ("_(x.tolist())", ArgumentError, "x is a list", *OPERATIONS),
    ("_(torch.tensor(1.0))", CountsError, "at least 1 dimension", *OPERATIONS),
    ("_(wants[0, 0])", CountsError, "at least 1 dimension", *OPERATIONS),
    ("_(quantize(x), wire='int8')", ArgumentError, "x is a WireRows", *OPERATIONS),
    ("in_grad(lambda x: _(x, wire='int8').sum())", ArgumentError, "in a transform of torch.func", *OPERATIONS),
    ("_(wants, 'max', wire='none')", WireFormatError, "no backward with op 'max'", "all_reduce", "reduce_scatter"),
    ("all_reduce(x, _, wire='none')", ArgumentError, "op is", "int(MAX)", "int(SUM)", "False"),
    ("all_reduce(x.long())", WireFormatError, 'pass wire="none"'),
    ("all_reduce(x, 'max')", WireFormatError, "op 'max' cannot be quantised"),
    ("all_reduce(x, 'median')", ThinwireError, "op is 'median'"),
    ("all_reduce(x, out=torch.zeros(5, 8))", CountsError, "it must be torch.float32"),
    ("all_reduce(x, out=torch.zeros(8, 4).t())", CountsError, "contiguous"),
    ("all_reduce(x, transport='usb')", TransportUnavailable, "accepted: auto, direct, two_level, staged"),
    ("all_reduce(x, wire='int3')", WireFormatError, "unknown wire format"),
    ("z = torch.full((3,), 1 + 2j); all_reduce(z.conj(), out=z, wire='none')", CountsError, "shares memory with x"),
    ("all_reduce(memory[:5], out=same_memory[3:])", CountsError, "shares memory with x"),
    ("all_reduce(x, out=wants, transport=_)", WireFormatError, "out wants a gradient, and is", "'direct'", "'staged'"),
    ("reduce_scatter(x[:3])", CountsError, "cannot share equally"),
    ("all_gather(x[1:3], out=x)", CountsError, "shares memory with x"),
    ("all_gather_v(x, [5, 5])", CountsError, "but x has 4 rows"),
    # int8_all_to_all_reduce
    ("int8_all_to_all_reduce(x, 1.0)", WireFormatError, "takes int8; got torch.float32"),
    ("int8_all_to_all_reduce(i8, torch.ones(4))", CountsError, "scales have the shape [4], and x [4, 8]; ... or [8]"),
    ("int8_all_to_all_reduce(i8, torch.ones(1, 8))", CountsError, "scales have the shape [1, 8]"),
    ("int8_all_to_all_reduce(i8, [1.0, 2.0, 3.0])", CountsError, "scales have the shape [3]"),
    ("int8_all_to_all_reduce(i8[0, 0], 1.0)", CountsError, "at least 1 dimension"),
    ("int8_all_to_all_reduce(i8, 1.0, dtype=torch.int32)", WireFormatError, "asked for torch.int32"),
    # redistribute, from (2, 1) to (1, 2) but where it says otherwise
    ("cut(x, shape=(16, 8))", LayoutError, "x is [4, 8], which in ... is part of (8, 8), not of (16, 8)"),
    ("cut(x[:, :7])", LayoutError, "dimension 1 has 7 elements, which cannot be cut into 2 equal parts"),
    ("cut(x.long(), wire='int8')", WireFormatError, 'pass wire="none"'),
    ("cut(x, src=CUBE('mp', 'None'))", LayoutError, "for 8 ranks, but there are 2"),
    ("cut(x, out=x[:, :4].clone())", CountsError, "redistribute: out is torch.float32 [4, 4] on cpu; ... [8, 4]"),
    ("cut(x, dst=(2, 1), out=x)", CountsError, "out shares memory with x"),
    ("cut(wants, out=torch.ones(8, 4))", WireFormatError, "redistribute has no backward with out"),
    ("cut(wants, grad_layout=(2, 1))", LayoutError, "grad_layout is ... which does not cut as the result's layout"),
    # ExchangePlan, of these rows and counts
    ("ExchangePlan(rows, [1, 2])", CountsError, "num_rows is None; with rows, an int"),
    ("ExchangePlan(rows, [1, 2], num_rows=3.0)", CountsError, "num_rows is 3.0"),
    ("ExchangePlan(rows[:0], [0, 0], num_rows=-1)", CountsError, "num_rows is -1"),
    ("ExchangePlan(None, [1, 2], num_rows=5)", CountsError, "num_rows is 5 and send_counts add up to 3"),
    ("ExchangePlan(rows, ones, num_rows=3)", ArgumentError, "[3]; accepted: int64 or int32 [2]"),
    ("ExchangePlan(rows.float(), [1, 2], num_rows=3)", ArgumentError, "float32"),
    ("ExchangePlan(rows, [1, 2], num_rows=2)", ArgumentError, "0 ... 2; accepted: 0 ... 1"),
    ("ExchangePlan(rows - 1, [1, 2], num_rows=3)", ArgumentError, "-1 "),
    ("ExchangePlan(rows, [1, 2, 0], num_rows=3)", CountsError, "3 entries"),
    ("ExchangePlan(rows, [4, -1], num_rows=3)", CountsError, "-1"),
    ("ExchangePlan(rows, [1, 2], num_rows=3, recv_counts=[3, 3])", CountsError, "sends itself"),
    ("ExchangePlan(None, [1, 2], transport='fast')", ThinwireError, "fast"),
    ("plan.there(x[:2])", CountsError, "this plan is for [3, ...]"),
    ("plan.there(torch.tensor(1.0))", CountsError, "[3, ...]"),
    ("plan.there([1.0])", ThinwireError, "list"),
    ("plan.there(x[:3], wire='int9')", WireFormatError, "int9"),
    ("plan.there(x[:3].long(), wire='int8')", WireFormatError, "int64"),
    ("plan.there(wants[:3], _)", WireFormatError, "no backward", "async_op=True", "out=x"),
    ("plan.there(wants[:3].double(), wire='none')", WireFormatError, "x, which wants gradients"),
    ("plan.back(torch.ones(7, 4))", CountsError, "7"),
    ("plan.back(torch.ones(came, 4).long(), wire='int8')", WireFormatError, "int64"),
    ("plan.back(torch.ones(came, 4, requires_grad=True), async_op=True)", WireFormatError, "no backward"),
    ("closed_plan.there(x[:3])", ThinwireError, "close"),
    # all_reduce_hook
    ("hook_on(x.double())", WireFormatError, "float64 tensor cannot travel as int8"),
    ("AllReduceState(comm, num_programs=_)", ArgumentError, "num_programs is", "0", "2.0", "True", "'8'"),
    # counts, and where rows lie
    ("parse_integers([1, 2, 3], 2, 'send_counts')", CountsError, "send_counts has 3 entries; this group has 2 ranks"),
    ("parse_integers([1, -2], 2, 'send_counts')", CountsError, "send_counts[1] is -2"),
    ("parse_integers([1, 2.0], 2, 'send_counts')", CountsError, "send_counts[1] is 2.0"),
    ("parse_integers([True, 1], 2, 'send_counts')", CountsError, "send_counts[0] is True"),
    ("parse_integers('12', 2, 'send_counts')", CountsError, "got str"),
    ("parse_integers(7, 2, 'send_counts')", CountsError, "got int"),
    ("parse_integers(torch.tensor([1.0, 2.0]), 2, 'send_counts')", CountsError, "torch.float32"),
    ("parse_integers(torch.tensor([[1, 2]]), 2, 'send_counts')", CountsError, "[1, 2]"),
    ("parse_integers(torch.tensor([True, False]), 2, 'send_counts')", CountsError, "torch.bool"),
    ("send_segments([3, 2], None, 4)", CountsError, "send_displs[1] + send_counts[1] = 3 + 2 is past the end"),
    ("receive_segments([1, 1], [9, 0], 5)", CountsError, "recv_displs[0] + recv_counts[0] = 9 + 1"),
    ("receive_segments([2, 3], [2, 0], None)", CountsError, "overlap: 0:3 from rank 1 and 2:4 from rank 0"),
    ("equal_split(7, 3)", CountsError, "7 rows cannot be split equally among 3 ranks; pass send_counts"),
    ("channel_layout(2, _)", ThinwireError, "expected", "0, 4", "100, 4", "128, 0"),
    # the codec
    ("quantize(x.int())", WireFormatError, 'torch.int32 tensor cannot travel as int8 ... wire="none"'),
    ("quantize(torch.zeros(2, 0))", WireFormatError, "hidden must be at least 1"),
    ("quantize(x.to('meta'))", ArgumentError, "meta"),
    ("quantize(x, ['int8'])", WireFormatError, "accepted"),
    ("dequantize([1])", ArgumentError, "rows is a list, expected the WireRows"),
    ("dequantize(quantize(x), torch.float64)", WireFormatError, "torch.float64 is not possible"),
    ("dequantize(quantize(x, 'none'), torch.float16)", WireFormatError, "float32 (the wire is 'none')"),
    ("dequantize(replace(q, records=_))", WireFormatError, "are torch.uint8 [4, 288]",
     "q.records[:, :64]", "q.records[:2]", "q.records.view(torch.int16)", "q.records.float()"),
    ("require_wire_support(WireFormat.parse('fp8'), (8, 0))", TransportUnavailable, "8.9 or newer, this one has 8.0"),
    ("WireRows.zeros(_)", WireFormatError, "", "(3, 200), 'none'", "(), 'int8'", "(3, 0), 'int8'"),
    ("quantize(x, 'fp8').payload", WireFormatError, "fp8 ... accepted: int8"),
    ("pack_rows(x.double(), q.wire, None, q.records)", WireFormatError, "float64 ... accepted: torch.float32"),
    ("require_int8_sums(WireFormat.parse(_)", WireFormatError, "accepted: int8, int8:N",
     "'none'), 8", "'fp8'), 8", "'int4'), 8", "'int8:16'), 64", "'int8:row'), 132105"),
)  # fmt: skip


def ground(comm: Communicator, warm: bool) -> Ground:
    """Of calls that nobody made before, or of later ones, which look at their arguments in ways of their own."""
    x, ones = torch.zeros(4, 8), [1, 1]
    rows = torch.tensor([0, 2, 1])
    plan = tw.ExchangePlan(rows, [1, 2], comm, num_rows=3)
    rows.zero_()  # the plan has its own
    with comm.split(groups=[[0, 1]]) as closed:
        closed_plan = tw.ExchangePlan(None, [1, 2], closed)
        if warm:
            assert not torch.cat([*_operations(x, ones, "none", closed)]).any()
            closed_plan.there(x[:3], wire="none")
        comm.barrier()
    memory = np.zeros((8, 8), np.float32)
    state = tw.AllReduceState(comm)
    explained = comm.explain()

    def cut(x: torch.Tensor, src: Any = (2, 1), dst: Any = (1, 2), wire: str = "none", **more: Any) -> object:
        return tw.redistribute(x, src, dst, wire=wire, comm=comm, **more)

    names = vars(counts) | {name: getattr(tw, name) for name in tw.__all__} | {
        "torch": torch, "comm": comm, "rank": comm.rank, "x": x, "i8": x.to(torch.int8), "ones": ones,
        "wants": torch.zeros(4, 8, requires_grad=True), "q": tw.quantize(torch.randn(4, 256), "int8"),
        "memory": torch.from_numpy(memory), "same_memory": torch.from_numpy(memory), "rows": torch.tensor([0, 2, 1]),
        "plan": plan, "closed": closed, "closed_plan": closed_plan, "came": sum(plan.recv_counts), "cut": cut,
        "CUBE": tw.Layout((2, 2, 2), ("dp", "sp", "mp")), "MAX": ReduceOp.MAX, "SUM": ReduceOp.SUM, "replace": replace,
        "hook_on": lambda x: ddp.all_reduce_hook(state, type("Bucket", (), {"buffer": lambda _: x, "index": int})()),
        "in_grad": lambda call: torch.func.grad(call)(x), "require_wire_support": require_wire_support,
        "pack_rows": pack.pack_rows, "require_int8_sums": require_int8_sums, "channel_layout": channel_layout,
    }  # fmt: skip

    def go_on() -> None:
        version = x._version
        if not warm:
            assert comm.all_gather_data(comm.rank, int) == [0, 1]
            assert comm.explain() == explained  # the transport was not even chosen
        else:
            for wire in ("int8", "none"):
                assert not torch.cat([*_operations(x, ones, wire, comm)]).any()
            with torch.no_grad():
                assert not tw.all_reduce(names["wants"], comm=comm).requires_grad  # type: ignore[union-attr]
            there: Any = plan.there(x[:3], wire="none")
            assert torch.equal(plan.back(there, wire="none"), x[:3])
        assert x._version == version and not x.any()

    go_on()
    return Ground(names, go_on, alone=True)


def _operations(x: torch.Tensor, ones: list[int], wire: str, comm: Communicator) -> Iterator[torch.Tensor]:
    yield from (function(x, wire=wire, comm=comm) for function in COLLECTIVES)
    yield tw.all_to_all_v(x, ones, ones, wire=wire, comm=comm)  # type: ignore[misc]
    if wire == "none":
        yield from (tw.all_reduce(x, op, wire=wire, comm=comm) for op in (ReduceOp.MAX, ReduceOp.SUM, "sum"))  # type: ignore[misc]
        yield tw.all_to_all_v(x.long(), ones, ones, wire=wire, comm=comm).float()  # type: ignore[union-attr]


@pytest.fixture(scope="module", params=[False, True], ids=["first call", "later call"])
def found(request: pytest.FixtureRequest) -> list[Any]:
    return answers(ground, 2, ROWS, request.param, mode="thread")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_is_refused_before_anything_is_sent(row: Row, found: list[Any]) -> None:
    check(row, found)
