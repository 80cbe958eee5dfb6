"""torch.compile around the library's operations: it must not look into them, as kernels get addresses."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
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
    def chain(x: torch.Tensor) -> torch.Tensor:
        y = thinwire.all_reduce(x * 2, comm=comm, transport=transport)
        counts = [len(x) // comm.size] * comm.size
        work = thinwire.all_to_all_v(y + 1, counts, counts, comm=comm, transport=transport, async_op=True)
        rows = thinwire.quantize(work.wait() * 3, "int8")
        parts = thinwire.reduce_scatter(thinwire.dequantize(rows) - y, comm=comm, transport=transport)
        total = parts + 1
        comm.all_reduce(total)
        return thinwire.all_gather(total * 2, comm=comm, transport=transport)

    compiled = _compiled(chain, backend)
    generator = torch.Generator().manual_seed(comm.rank)
    for size in SIZES:
        x = torch.randn(size, HIDDEN, generator=generator)
        torch.testing.assert_close(compiled(x), chain(x), rtol=1e-6, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("check", "transport", "backend"),
    [(_rounds, "direct", "inductor"), *((each, "staged", "eager") for each in (_rounds, _collectives))]
    + [(_collectives, "direct", "eager")],
)
def test_compiled_code_gives_what_python_gives(check: object, transport: str, backend: str, tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run_ranks(check, 2, transport, backend, timeout=300, env=env)  # type: ignore[arg-type]


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

    with pytest.raises(KeyboardInterrupt, match="first"):
        opaque(interrupted, find_recorder=lambda *_: recorder)()
    assert recorder.ended_with == "first"


def test_an_interrupt_at_the_end_of_no_grad_leaves_gradients_as_they_were() -> None:
    def interrupted() -> None:
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opaque(interrupted)()
    assert torch.is_grad_enabled()
