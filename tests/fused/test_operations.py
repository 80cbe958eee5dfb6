"""Collectives in compiled code: what they are in Python, to the last bit, in the same order, and failing alike."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from tests.helpers.speeds import exhaustive_but
from thinwire import operators
from thinwire.testing import RankError, run_ranks

pytest.importorskip("numba", reason="CPU ranks need numba")

TRANSPORTS = ("direct", "staged")
ROW = 24
COUNTS = [[2, 3], [4, 1]]  # rows of rank r for rank s, of 6 or more
SIZES = (6, 8, 12, 8)
EXPERTS, TOP_K, HIDDEN, CAPACITY = 4, 2, 32, 24

Function = Callable[..., Any]


def _compiled(function: Function, backend: str, whole: bool = True) -> Function:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=whole)


def _assert_equal(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def _gradients(function: Function, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Results and gradients, of results that are all differentiated."""
    wanted = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    found = function(*wanted)
    sum((result.float().square().sum() for result in found), torch.zeros(())).backward()
    return [*(result.detach() for result in found), *(tensor.grad for tensor in wanted if tensor.grad is not None)]


def _collectives(comm: tw.Communicator, **options: Any) -> Function:
    """All four, each of an intermediate value, which nothing else holds; and their results.

    Factors are powers of two: of others in bfloat16 Inductor rounds a sum once, and Python each product.
    """
    sends, receives = COUNTS[comm.rank], [counts[comm.rank] for counts in COUNTS]

    def calls(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, e: torch.Tensor) -> Any:
        summed = tw.all_reduce(a * 2, comm=comm, **options) * 0.5
        gathered = tw.all_gather(b * 2, comm=comm, **options) * 0.5
        scattered = tw.reduce_scatter(c * 2, comm=comm, **options) * 0.5
        equal = tw.all_to_all_v(d * 2, comm=comm, **options) * 0.5
        rows = tw.all_to_all_v(e * 2, sends, receives, comm=comm, **options) * 0.5
        placed = tw.all_to_all_v(
            gathered * 4, sends, receives, send_displs=[1, 0], recv_displs=(1, 7), comm=comm, check=True, **options
        )
        elements = tw.all_to_all_v((e * 4).flatten(), sends, receives, comm=comm, **options) * 0.5
        return summed, gathered, scattered, equal, rows, placed, elements

    return calls


def _bits(comm: tw.Communicator, transport: str, backend: str) -> None:
    generator = torch.Generator().manual_seed(comm.rank)
    kinds = [("none", "none", torch.float32), ("int8", "int8", torch.bfloat16), ("int8", "none", torch.float32)]
    for wire, grad_wire, dtype in kinds[: 2 if backend == "inductor" else None]:
        calls = _collectives(comm, wire=wire, grad_wire=tw.WireFormat.parse(grad_wire), transport=transport)
        compiled = _compiled(calls, backend)
        for size in SIZES[: 2 if backend == "inductor" else None]:
            inputs = [torch.randn(size, ROW, generator=generator).to(dtype) for _ in range(5)]
            _assert_equal(_gradients(compiled, *inputs), _gradients(calls, *inputs))
            with torch.no_grad():
                _assert_equal(compiled(*inputs), calls(*inputs))


@pytest.mark.parametrize(
    ("transport", "backend"),
    exhaustive_but(
        [("direct", "aot_eager")],
        [(transport, backend) for transport in TRANSPORTS for backend in ("eager", "aot_eager", "inductor")],
        several=True,
    ),
)
def test_compiled_collectives_are_pythons_to_the_last_bit(transport: str, backend: str, tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run_ranks(_bits, 2, transport, backend, timeout=600, env=env)


# ---------------------------------------------------------------------------------------------------------------------
# Order


def _many_calls(ep: tw.ExpertParallel, options: dict[str, Any], x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rounds and collectives, of which each call has a size of its own, by which it is known."""
    comm = ep.comm
    weights = torch.ones(ids.shape)

    def layer(first: int, scale: float) -> torch.Tensor:
        d = ep.dispatch(x[first:], ids[first:], weights[first:])
        return ep.combine(d.gather(CAPACITY)[0] * scale, d)

    # Of what rounding gets nothing is made, and this call's backward is the last.
    rounded = tw.all_reduce(x[:2].round(), comm=comm, **options).square().sum()
    identical = tw.all_reduce(x[:3], comm=comm, **options) * tw.all_reduce(x[:3], comm=comm, **options)
    tw.all_gather(x[:4], comm=comm, **options)  # unused
    independent = layer(1, 2.0).square().sum() + tw.reduce_scatter(x[:6], comm=comm, **options).square().sum()
    gathered = tw.all_gather(x[:5] * 2, comm=comm, **options)
    d = ep.dispatch(x[2:], ids[2:], weights[2:])
    between = tw.all_to_all_v(x[:8] * 3, comm=comm, **options)  # in a round
    both = ep.combine(d.gather(CAPACITY)[0] * 3, d).square().sum() + between.square().sum()
    layer(3, 1.0)  # unused
    scattered = tw.reduce_scatter(gathered, comm=comm, **options)
    chained = tw.all_to_all_v(scattered[:4], [2, 2], [2, 2], comm=comm, **options)
    return rounded + identical.sum() + independent + both + chained.square().sum() + layer(4, 0.5).square().sum()


def _orders(comm: tw.Communicator, transport: str, backend: str) -> list[tuple[str, tuple[int, ...]]]:
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "max_tokens": 16}
    ep = tw.ExpertParallel(comm, **sizes, transport=transport, timeout=60, wire="none")  # type: ignore[arg-type]
    options = {"wire": "none", "transport": transport}
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(9, HIDDEN, generator=generator)
    ids = torch.rand(9, EXPERTS, generator=generator).topk(TOP_K).indices

    def function(x: torch.Tensor) -> torch.Tensor:
        return _many_calls(ep, options, x, ids)

    function(x)  # settles transports, which is recorded too
    _gradients(lambda x: (function(x),), x)
    runs = []
    for each in (function, _compiled(function, backend)):
        begun = comm.recorder.begun
        # The second forward comes before the first one's backward, on what both of them were compiled to.
        found = _gradients(lambda x, each=each: (each(x), each(x)), x)
        with torch.no_grad():
            found.append(each(x))
        calls = [(entry[1], tuple(entry[2] or ())) for entry in comm.recorder.entries()]
        runs.append((calls[begun - comm.recorder.begun :], found))
    assert runs[1][0] == runs[0][0]
    for one, other in zip(runs[1][1], runs[0][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    return runs[0][0]


@pytest.mark.parametrize(
    ("transport", "backend"),
    exhaustive_but(
        [("direct", "aot_eager")],
        [(transport, backend) for transport in TRANSPORTS for backend in ("aot_eager", "inductor")],
        several=True,
    ),
)
def test_compiled_collectives_and_rounds_keep_pythons_order(transport: str, backend: str) -> None:
    env = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    first, second = run_ranks(_orders, 2, transport, backend, timeout=600, env=env)
    assert first == second
    assert 3 * 17 + 2 * 14 <= len(first) < 256, "of forward and of backward, and none pushed out of the ring"
    assert first.count(("all_reduce", (2, HIDDEN))) == 3 + 2, "the one of rounded values has a backward"
    assert first.count(("all_gather", (4, HIDDEN))) == 3, "the unused one has none"


# ---------------------------------------------------------------------------------------------------------------------
# Between graphs, checkpoints, counts, groups


def _between(comm: tw.Communicator) -> None:
    x = torch.randn(6, ROW, generator=torch.Generator().manual_seed(comm.rank))
    sends, receives = COUNTS[comm.rank], [counts[comm.rank] for counts in COUNTS]
    named: dict[str, Any] = {"wire": "none", "comm": comm}
    cases: list[Function] = [
        lambda x: tw.all_reduce(x * 2, async_op=True, **named).wait() + 1,
        lambda x: tw.all_reduce(x * 2, out=torch.empty_like(x), **named) + 1,
        lambda x: tw.all_reduce(x * 2, dist.ReduceOp.SUM, **named) + 1,
        lambda x: tw.all_to_all_v(x * 2, sends, **named) + 1,
        lambda x: tw.all_to_all_v(x * 2, torch.tensor(sends), receives, **named) + 1,
        lambda x: tw.all_gather(x * 2, wire=tw.WireFormat.parse("int8"), comm=dist.group.WORLD) + 1,
        lambda x: tw.reduce_scatter(x * 2, "max", **named) + 1,
    ]
    with torch.no_grad():
        for number, case in enumerate(cases):
            whole = number >= len(cases) - 2
            if not whole:
                with pytest.raises(torch._dynamo.exc.Unsupported, match="no graph can hold this call"):
                    _compiled(case, "eager")(x)
            expected = case(x)  # makes the group's communicator
            _assert_equal([_compiled(case, "aot_eager", whole)(x)], [expected])

    def found(x: torch.Tensor) -> tuple[torch.Tensor]:  # counts that are not known when the graph is made
        counts = torch.tensor(sends)[:].tolist(), torch.tensor(receives)[:].tolist()
        return (tw.all_to_all_v(x * 2, *counts, **named) * 2,)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        _assert_equal(_gradients(_compiled(found, "aot_eager"), x), _gradients(found, x))

    def kept(x: torch.Tensor) -> torch.Tensor:
        return tw.all_gather(tw.all_reduce(x * 2, **named).sin(), **named)

    def layers(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (tw.reduce_scatter(checkpoint(kept, x, use_reentrant=False) * 2, **named),)

    begun = comm.recorder.begun
    _assert_equal(_gradients(_compiled(layers, "aot_eager"), x), _gradients(layers, x))
    assert comm.recorder.begun - begun == 6 + 7, "a graph keeps what operators have given"


@pytest.mark.exhaustive
def test_what_no_graph_can_hold_is_called_between_two() -> None:
    run_ranks(_between, 2, timeout=300)


def _exported(comm: tw.Communicator) -> None:
    class Doubled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return tw.all_reduce(x * 2, comm=comm)

    x = torch.arange(4.0)
    program = torch.export.export(Doubled(), (x,), strict=True)
    assert torch.equal(program.module()(x), tw.all_reduce(x * 2, comm=comm))
    with pytest.raises(tw.ArgumentError, match="x is a FakeTensor .* strict=True"):
        torch.export.export(Doubled(), (x,), strict=False)


@pytest.mark.exhaustive
def test_what_is_exported_strictly_has_collectives_and_else_it_is_told() -> None:
    run_ranks(_exported, 2)


def _default() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return tw.all_gather(x * 2, wire="none") + 1

    compiled = _compiled(function, "eager")
    x = torch.ones(2, 3)
    with tw.init():
        for domain in (None, "other", None):
            group = tw.init(domain=domain)
            function(x)
            begun = group.recorder.begun
            assert torch.equal(compiled(x), function(x))
            assert group.recorder.begun == begun + 2, "the default communicator of the time"
        begun = group.recorder.begun
        (found,) = run_ranks(lambda comm: compiled(x), 1, mode="thread")
        assert torch.equal(found, x * 2 + 1) and group.recorder.begun == begun, "and of the thread"
        with pytest.raises(RankError, match="compiled for 1 ranks, and the communicator has 2"):
            run_ranks(lambda comm: compiled(x), 2, mode="thread")
        mesh = init_device_mesh("cpu", (1,))
        tw.all_gather(x, comm=mesh)
        assert torch.equal(_compiled(lambda x: tw.all_gather(x, wire="none", comm=mesh), "eager")(x), x)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="no graph can hold"):
        compiled(x)
    with pytest.raises(tw.ThinwireError, match="no default communicator"):
        _compiled(function, "eager", whole=False)(x)


@pytest.mark.exhaustive
def test_a_graph_of_the_default_communicator_is_made_anew_when_it_is_another() -> None:
    code = "from tests.fused.test_operations import _default; _default()"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True, timeout=300)


def _in_thread(comm: tw.Communicator) -> torch.Tensor:
    return _shared(torch.full((2, 3), comm.rank + 1.0))


@torch.compile(backend="eager", fullgraph=True)
def _shared(x: torch.Tensor) -> torch.Tensor:
    return tw.all_gather(x * 2, wire="none") + 1


@pytest.mark.exhaustive
def test_ranks_that_are_threads_share_a_graph_each_with_its_own_communicator() -> None:
    expected = torch.tensor([3.0, 3.0, 5.0, 5.0]).unsqueeze(1).expand(4, 3)
    for found in run_ranks(_in_thread, 2, mode="thread", timeout=300):
        assert torch.equal(found, expected)


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def _errors(comm: tw.Communicator, transport: str) -> None:
    x = torch.randn(6, ROW)
    named: dict[str, Any] = {"comm": comm, "transport": transport}
    too_many = [2**62, 2**62]
    too_many[comm.rank] = 1  # what it sends itself
    kinds: list[tuple[type[Exception], str, Function]] = [
        (tw.CountsError, "7 rows, which 2 ranks", lambda x: tw.reduce_scatter(torch.cat([x, x[:1]]), **named)),
        (tw.CountsError, "cannot be split equally", lambda x: tw.all_to_all_v(x[:5] * 2, **named)),
        (tw.CountsError, r"send_counts\[1\] is -2", lambda x: tw.all_to_all_v(x, [1, -2], [1, -2], **named)),
        (tw.CountsError, r"is past the end", lambda x: tw.all_to_all_v(x, [1, 9], [1, 9], **named)),
        (tw.CountsError, "has 3 entries", lambda x: tw.all_to_all_v(x, [1, 1, 1], [1, 1, 1], **named)),
        (tw.CountsError, "need send_counts", lambda x: tw.all_to_all_v(x, None, [3, 3], **named)),
        (tw.CountsError, "rows overlap", lambda x: tw.all_to_all_v(x, [2, 2], [2, 2], recv_displs=[0, 1], **named)),
        (tw.CapacityError, "cannot be allocated", lambda x: tw.all_to_all_v(x, [1, 1], too_many, **named)),
        (tw.CountsError, "2\\*\\*63 - 1", lambda x: tw.all_to_all_v(x, [1, 2**63], [1, 1], **named)),
        (tw.CountsError, "a scalar", lambda x: tw.all_reduce(x.sum(), **named)),
        (tw.WireFormatError, "'int9'", lambda x: tw.all_reduce(x * 2, wire="int9", **named)),
        (tw.WireFormatError, "torch.int64 tensor cannot", lambda x: tw.all_gather(x.long(), wire="int8", **named)),
        (tw.ArgumentError, "op is 'mean'", lambda x: tw.all_reduce(x * 2, "mean", **named)),
        (tw.ThinwireError, "'teleport'", lambda x: tw.all_reduce(x * 2, comm=comm, transport="teleport")),
        (tw.ArgumentError, "comm is 3", lambda x: tw.all_reduce(x * 2, comm=3)),
        (tw.ArgumentError, "x is a float", lambda x: tw.all_reduce(2.0, comm=comm)),
    ]  # fmt: skip
    for kind, match, function in kinds:
        for each in (function, _compiled(function, "aot_eager", whole=False)):
            with pytest.raises(kind, match=match):
                each(x)
    wanted = x.clone().requires_grad_()
    for function in (
        lambda x: tw.all_reduce(x * 2, "max", wire="none", **named),
        lambda x: tw.all_gather(x * 2, async_op=True, **named),
    ):
        for each in (function, _compiled(function, "aot_eager", whole=False)):
            with pytest.raises(tw.WireFormatError, match="has no backward"):
                each(wanted)

    # Errors of peers, after which all go on.
    def rows(x: torch.Tensor, send: int, receive: int) -> torch.Tensor:
        return tw.all_to_all_v(x * 2, [send, send], [receive, receive], check=True, wire="none", **named)

    compiled = _compiled(rows, "aot_eager")
    with pytest.raises(tw.CountsError, match="rank 0 sends rank 0 3 rows, but rank 0 expects 2"):
        compiled(x, 3 - comm.rank, 2)
    assert torch.equal(compiled(x, 2, 2), rows(x, 2, 2))

    y = compiled(wanted, 3, 3).sum()
    comm.close()
    with pytest.raises(tw.ThinwireError, match="closed"):
        y.backward()
    with pytest.raises(tw.ThinwireError, match="closed"):
        compiled(x, 3, 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_errors_come_out_of_compiled_code_as_themselves(transport: str) -> None:
    run_ranks(_errors, 2, transport, timeout=300)


def test_a_communicator_that_is_gone_or_has_another_size() -> None:
    class Gone:
        size = 2

    assert callable(tw.all_gather)  # which defines the operator
    handle = operators.register(Gone())
    gc.collect()
    with pytest.raises(tw.ThinwireError, match=f"no communicator {handle} in this process"):
        torch.ops.thinwire.all_gather(operators.ORDER, None, torch.ones(2), "none", "none", "auto", handle, 2)
    there = Gone()
    handle = operators.register(there)
    with pytest.raises(tw.ThinwireError, match="compiled for 3 ranks, and the communicator has 2"):
        torch.ops.thinwire.all_gather(operators.ORDER, None, torch.ones(2), "none", "none", "auto", handle, 3)


# ---------------------------------------------------------------------------------------------------------------------
# What torch asks of operators


def _opcheck(comm: tw.Communicator, transport: str) -> None:
    ops, order, x = torch.ops.thinwire, operators.ORDER.clone(), torch.randn(4, ROW)
    group = transport, comm._handle, comm.size
    counts = [3], [3], [1], [2]

    def check(operator: Any, *args: Any) -> None:
        """Of inputs without gradients, as torch has it for operators that write."""
        for part in ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"):
            torch.library.opcheck(operator, (order, *args), test_utils=part)

    for wire in ("none", "int8"):
        check(ops.all_reduce.default, None, x, "sum", wire, None, wire, *group)
        check(ops.reduce_scatter.default, None, x, "sum", wire, wire, *group)
        check(ops.all_gather.default, None, x, wire, wire, *group)
        for backward in (ops.all_reduce_backward, ops.reduce_scatter_backward, ops.all_gather_backward):
            check(backward.default, x, 4, wire, *group)
        check(ops.all_to_all_v.default, None, x, *counts, False, wire, wire, *group)
        check(ops.all_to_all_v.default, None, x, None, None, None, None, True, wire, wire, *group)
        dy = ops.all_to_all_v(order, None, x, *counts, False, wire, wire, *group)
        check(ops.all_to_all_v_backward.default, dy, 4, *counts, False, wire, *group)


@pytest.mark.parametrize("transport", exhaustive_but(["direct"], TRANSPORTS))
def test_opcheck(transport: str) -> None:
    run_ranks(_opcheck, 1, transport, timeout=300)
