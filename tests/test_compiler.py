"""torch.compile around the library's operations: it must not look into them, as kernels get addresses.

Compiled rounds have more tests in tests/moe/test_compiled_round.py.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import thinwire
from tests.helpers.speeds import exhaustive_but
from thinwire.compiler import opaque
from thinwire.testing import run_ranks

EXPERTS, TOP_K, HIDDEN, MOST_TOKENS = 8, 2, 64, 32
SIZES = (16, 16, 24)  # of which compiled code has to follow the changes


LIBRARY = str(Path(thinwire.__file__).parent)


def _compiled(function: Callable[..., torch.Tensor], backend: str) -> Callable[..., torch.Tensor]:
    """Compiled code, in whose graphs nothing of the library may be but operators, and shapes of their arguments.

    What it did to memory shows only now and then.
    """

    def backend_of(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if LIBRARY in (node.stack_trace or "") and isinstance(node.meta.get("example_value"), torch.Tensor):
                operator = node.args[0].target if "getitem" in str(node.target) else node.target
                assert node.op == "placeholder" or str(operator).startswith("thinwire."), node.stack_trace
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    return torch.compile(function, backend=backend_of)


def _rounds(comm: thinwire.Communicator, transport: str, backend: str) -> None:
    experts = thinwire.ExpertParallel(comm, EXPERTS, TOP_K, HIDDEN, MOST_TOKENS, wire="int8", transport=transport)

    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        # What kernels get are intermediate values, which nothing else holds.
        d = experts.dispatch(x * 2, ids + 0, weights * 0.5)
        return experts.combine(d.tokens * 1.5, d) + x

    generator = torch.Generator().manual_seed(comm.rank)
    compiled = _compiled(layer, backend)
    for size in SIZES:
        x = torch.randn(size, HIDDEN, generator=generator)
        ids = torch.rand(size, EXPERTS, generator=generator).topk(TOP_K).indices
        weights = torch.rand(size, TOP_K, generator=generator)
        torch.testing.assert_close(compiled(x, ids, weights), layer(x, ids, weights), rtol=1e-6, atol=1e-6)
        found = []
        for function in (layer, compiled):
            inputs = [tensor.clone().requires_grad_() for tensor in (x, weights)]
            function(inputs[0], ids, inputs[1]).square().sum().backward()
            found.append([tensor.grad for tensor in inputs])
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def _collectives(comm: thinwire.Communicator, transport: str, backend: str) -> None:
    named: dict[str, Any] = {"comm": comm, "transport": transport}

    def chain(x: torch.Tensor) -> torch.Tensor:
        y = thinwire.all_reduce(x * 2, **named)
        rows = thinwire.all_to_all_v(y + 1, [len(x) // comm.size] * comm.size, **named)
        parts = thinwire.reduce_scatter(rows * 3 - y, grad_wire="int8", **named)
        # Its backward runs its two collectives anew.
        parts = checkpoint(lambda part: thinwire.all_reduce(part * 0.5, **named).sin(), parts, use_reentrant=False)
        gathered = thinwire.all_gather(parts * 2, **named)
        return thinwire.all_gather_v(gathered[comm.rank :], **named)

    def without_gradients(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        work = thinwire.all_to_all_v(x * 2, out=out, async_op=True, **named)
        rows = thinwire.quantize(work.wait() * 3, "int8")
        comm.all_reduce(out)
        return thinwire.dequantize(rows) + thinwire.all_reduce(out * 2, "max", wire="none", **named)

    functions = chain, _compiled(chain, backend)
    others = without_gradients, _compiled(without_gradients, backend)
    generator = torch.Generator().manual_seed(comm.rank)
    for size in SIZES:
        x = torch.randn(size, HIDDEN, generator=generator)
        found = [(each(x).detach(), *_gradients(each, x)) for each in functions]
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(*(each(x) for each in others), rtol=1e-6, atol=1e-6)


def _gradients(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the gradient of x."""
    wanted = x.clone().requires_grad_()
    y = function(wanted)
    y.square().sum().backward()
    assert wanted.grad is not None
    return y.detach(), wanted.grad


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("check", "transport", "backend"),
    [(_rounds, "direct", "inductor"), *((each, "staged", "eager") for each in (_rounds, _collectives))]
    + [(_collectives, "direct", "eager")],
)
def test_compiled_code_gives_what_python_gives(check: object, transport: str, backend: str, tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run_ranks(check, 2, transport, backend, timeout=300, env=env)  # type: ignore[arg-type]


def _many_calls(ep: thinwire.ExpertParallel, options: dict[str, Any], x: torch.Tensor, ids: torch.Tensor) -> Any:
    """Rounds and collectives, of which each call has a size of its own, by which it is known."""
    options = {"comm": ep.comm, **options}
    weights = torch.ones(ids.shape)

    def layer(first: int, scale: float) -> torch.Tensor:
        d = ep.dispatch(x[first:], ids[first:], weights[first:])
        return ep.combine(d.gather(2 * MOST_TOKENS)[0] * scale, d)

    # Of what rounding gets nothing is made, and this call's backward is the last.
    rounded = thinwire.all_reduce(x[:2].round(), **options).square().sum()
    identical = thinwire.all_reduce(x[:3], **options) * thinwire.all_reduce(x[:3], **options)
    thinwire.all_gather(x[:4], **options)  # unused
    independent = layer(1, 2.0).square().sum() + thinwire.reduce_scatter(x[:6], **options).square().sum()
    gathered = thinwire.all_gather(x[:5] * 2, **options)
    d = ep.dispatch(x[2:], ids[2:], weights[2:])
    between = thinwire.all_to_all_v(x[:8] * 3, **options)  # in a round
    both = ep.combine(d.gather(2 * MOST_TOKENS)[0] * 3, d).square().sum() + between.square().sum()
    layer(3, 1.0)  # unused
    scattered = thinwire.reduce_scatter(gathered, **options)
    chained = thinwire.all_to_all_v(scattered[:4], [2, 2], [2, 2], **options)
    return rounded + identical.sum() + independent + both + chained.square().sum() + layer(4, 0.5).square().sum()


def _orders(comm: thinwire.Communicator, transport: str, backend: str) -> list[tuple[str, tuple[int, ...]]]:
    ep = thinwire.ExpertParallel(comm, EXPERTS, TOP_K, HIDDEN, MOST_TOKENS, wire="none", transport=transport)
    options = {"wire": "none", "transport": transport}
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(9, HIDDEN, generator=generator)
    ids = torch.rand(9, EXPERTS, generator=generator).topk(TOP_K).indices

    def function(x: torch.Tensor) -> torch.Tensor:
        return _many_calls(ep, options, x, ids)

    _gradients(function, x)  # settles transports, which is recorded too
    runs = []
    for each in (function, _compiled(function, backend)):
        begun = comm.recorder.begun
        # The second forward comes before the first one's backward, on what both of them were compiled to.
        found = [*_gradients(lambda x, each=each: torch.stack([each(x), each(x)]), x)]
        with torch.no_grad():
            found.append(each(x))
        calls = [(entry[1], tuple(entry[2] or ())) for entry in comm.recorder.entries()]
        runs.append((calls[begun - comm.recorder.begun :], found))
    assert runs[1][0] == runs[0][0]
    torch.testing.assert_close(runs[1][1], runs[0][1], rtol=1e-5, atol=1e-5)
    return runs[0][0]


@pytest.mark.parametrize(
    ("transport", "backend"),
    exhaustive_but(
        [("direct", "aot_eager")],
        [(transport, backend) for transport in ("direct", "staged") for backend in ("aot_eager", "inductor")],
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


def _in_whole_graphs(comm: thinwire.Communicator) -> None:
    x = torch.ones(2, 3)
    layout = thinwire.Layout((1,), ("ranks",))("ranks", "None")
    calls: list[Callable[[torch.Tensor], Any]] = [
        lambda x: thinwire.all_reduce(x * 2, comm=comm),
        lambda x: thinwire.all_gather(x * 2, comm=comm),
        lambda x: thinwire.all_gather_v(x * 2, comm=comm),
        lambda x: thinwire.reduce_scatter(x * 2, comm=comm),
        lambda x: thinwire.all_to_all_v(x * 2, comm=comm),
        lambda x: thinwire.redistribute(x * 2, layout, layout, comm=comm),
        lambda x: comm.all_reduce(x * 2),
    ]
    for call in calls:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="ends a graph: compile without fullgraph=True"):
            torch.compile(call, backend="eager", fullgraph=True)(x)


def test_a_collective_in_a_whole_graph_is_refused_with_what_to_do() -> None:
    run_ranks(_in_whole_graphs, 1, timeout=300)


def _looks(comm: thinwire.Communicator) -> None:
    @opaque
    def address(x: torch.Tensor, *, offset: int = 0) -> int:
        """Of its memory."""
        assert not torch.compiler.is_compiling()
        return inner(x) + offset

    def inner(x: torch.Tensor) -> int:
        assert not torch.compiler.is_compiling()
        return x.data_ptr()

    assert address.__doc__ == "Of its memory." and address.__name__ == "address"
    x = torch.ones(3)
    assert address(x, offset=1) == x.data_ptr() + 1
    assert "torch._dynamo" not in sys.modules, "which takes seconds to import"

    compiled = torch.compile(lambda x: (x + 1, address(x, offset=1)), backend="eager")
    for size in range(1, 20):  # more than torch.compile compiles one frame for
        x = torch.ones(size)
        y, found = compiled(x)
        assert torch.equal(y, x + 1) and found == x.data_ptr() + 1
    with pytest.raises(torch._dynamo.exc.Unsupported, match="kernels get addresses of tensors"):
        torch.compile(lambda x: address(x) + 1, backend="eager", fullgraph=True)(torch.ones(3))


@pytest.mark.exhaustive
def test_an_opaque_function_is_not_traced() -> None:
    run_ranks(_looks, 1, env={"TORCHDYNAMO_VERBOSE": "0"}, timeout=300)


def test_what_is_traced_as_something_else_shows_its_own_parameters() -> None:
    ep = thinwire.ExpertParallel
    for function in (thinwire.all_gather, thinwire.all_reduce, thinwire.reduce_scatter, ep.dispatch, ep.combine):
        shown: Any = inspect.signature(function, follow_wrapped=False)
        assert shown == inspect.signature(inspect.unwrap(function)), function
        assert not any(each.kind is each.VAR_KEYWORD for each in shown.parameters.values()), function


def test_a_second_interrupt_does_not_keep_the_first_from_ending_the_communicator() -> None:
    class Recorder:
        begun, tries, ended_with = 0, 0, ""

        def ended_by(self, error: BaseException) -> None:
            self.tries += 1
            if self.tries == 1:
                raise KeyboardInterrupt("second")
            self.ended_with = str(error)

    recorder = Recorder()

    def interrupted() -> None:
        recorder.begun += 1
        raise KeyboardInterrupt("first")

    with pytest.raises(KeyboardInterrupt, match="second"):
        opaque(interrupted, find_recorder=lambda *_: recorder)()
    assert recorder.ended_with == "second"


def test_an_interrupt_at_the_end_of_no_grad_leaves_gradients_as_they_were() -> None:
    def interrupted() -> None:
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opaque(interrupted)()
    assert torch.is_grad_enabled()
