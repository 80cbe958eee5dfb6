"""Operations as operators of torch, which torch.compile keeps in its graphs and does not look into: what they share.

Rounds are in `moe/operations.py`, and collectives in `fused/operations.py`. Tensors and numbers are all that a graph
holds, so operators find objects by a number that those were given when they were made (`register`).

The order of operations. A compiler drops, merges and moves operators that look like functions. These are declared to
write into a tensor, `ORDER`, one for all operators and objects of a process: so in a graph each reads what the one
before it has written, and all of them, in the order in which Python called them, lie on the way to ORDER's last value,
which the graph's caller gets. Ranks whose programs call the same operations therefore run them in the same order,
whatever each of them compiled, and wherever its graphs end.

Backward has an order tensor of its own, one for each graph, made in it: backward would otherwise write into ORDER, into
which every other forward has written meanwhile, and autograd refuses that. The compiler differentiates a graph by
running autograd over its operators, in the order that `moe/gradients.py` argues for, the reverse of forward's, and each
operator reads what the one before it has written. What the last one has written is on the way to a gradient, that of
`ANCHOR`, which goes into every operator that has a backward: a graph computes the gradients of all its inputs, and so
drops no operator, not even one of whose own gradient nothing is made, such as that of a tensor that was rounded. To
autograd a graph is one node, made when its forward ran, and stands for a row of operations that nothing came between:
the reverse of the graphs, each in reverse, is the reverse of the operations.

Where it is not eager's: a graph runs the backward of all that leads to any of its results, with zeros for those results
that have no gradient, where autograd alone would leave out an operation of which no result is differentiated; and
`torch.utils.checkpoint` within a graph keeps what operators have given, where eager's runs them anew. A rank that
compiles such code, and another that does not, would run different operations.

Autograd is told by kernels of its own key (`differentiable`), since `register_autograd` refuses what writes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointPolicy

from thinwire.compiler import GraphNode, opaque

with torch.inference_mode(False):
    #: What all operators are declared to write into. Nobody does: what counts is what a compiler thinks.
    ORDER = torch.zeros(1, dtype=torch.int64, device="cpu")
    #: What has a gradient, zero, that is known when all operators of a graph's backward have been run.
    ANCHOR = torch.zeros(1, dtype=torch.float64, device="cpu", requires_grad=True)

_LIBRARY = torch.library.Library("thinwire", "DEF")
OPS: Any = torch.ops.thinwire

_numbers = itertools.count(1)
_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register(found_by_operators: object) -> int:
    """The number by which operators find an object, for as long as somebody holds it. To be called when it is whole."""
    handle = next(_numbers)
    _objects[handle] = found_by_operators
    return handle


def registered(handle: int) -> Any:
    """The object of a number; None if it is gone, or the number another process's."""
    return _objects.get(handle)


_parameters: dict[str, list[str]] = {}


def operator(*writes: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Defines a function as an operator of its name and signature, before whose arguments it gets ORDER.

    Args:
        writes: arguments into which it writes; that it writes into ORDER is understood.
        fake: gives empty tensors as the operator's, of its arguments by name.
    """

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        names = _parameters[name] = list(inspect.signature(function).parameters)
        schema = torch.library.infer_schema(function, mutates_args=writes).removeprefix("(")
        # A CUDA graph's replay would call no Python, which has to know of every round.
        _LIBRARY.define(f"{name}(Tensor(order!) order, {schema}", tags=(torch.Tag.cudagraph_unsafe,))

        @opaque  # or it is compiled where graphs end, and called as it is
        @functools.wraps(function)
        def kernel(order: torch.Tensor, *args: Any) -> Any:
            with torch.no_grad():
                return function(**dict(zip(names, args, strict=True)))

        def fake_kernel(order: torch.Tensor, *args: Any) -> Any:
            return fake(**dict(zip(names, args, strict=True)))

        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"thinwire::{name}", fake_kernel, lib=_LIBRARY)
        return function

    return define


def _order_of_backward(order: torch.Tensor) -> torch.Tensor:
    """The tensor that the operators of backward are declared to write into: one for each graph, as `order` is there."""
    found: torch.Tensor | None = getattr(order, "_order_of_backward", None)
    if found is None:
        found = torch.zeros(1, dtype=torch.float64, device="cpu")
        order._order_of_backward = found  # type: ignore[attr-defined]
    return found


@contextlib.contextmanager
def _kept_by_checkpoints() -> Iterator[None]:
    """Marks what a graph being made gets meanwhile, so that a checkpoint in it keeps that."""
    tracing = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if tracing is None:
        yield
        return
    nodes = tracing.tracer.graph.nodes
    before = len(nodes)
    yield
    for node in itertools.islice(reversed(nodes), len(nodes) - before):
        if "recompute" in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def differentiable(
    name: str,
    wanted: Callable[..., bool],
    keep: Callable[..., None],
    gradients: Callable[..., dict[str, torch.Tensor | None]],
    once: Callable[[Callable[..., Any]], Any] = once_differentiable,
) -> None:
    """Has autograd see a node in place of an operator.

    Args:
        wanted: of the operator's arguments, by name: whether there is a node.
        keep: puts into the node's context what backward needs, as torch's `setup_context`: of the context, the
            operator's result, and its arguments by name.
        gradients: of the context and the result's gradients: those of arguments by name. It calls operators with
            `ctx.order`. ANCHOR's is none of its business.
        once: makes of a backward one that refuses to be differentiated itself.
    """
    operator, names = getattr(OPS, name), _parameters[name]

    class Node(GraphNode):
        @staticmethod
        def forward(ctx: Any, order: torch.Tensor, order_of_backward: torch.Tensor, *args: Any) -> Any:
            ctx.order = order_of_backward
            result = operator(order, *args)
            keep(ctx, result, **dict(zip(names, args, strict=True)))
            return result

        @staticmethod
        @once
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            found = gradients(ctx, *grads)
            needed = [each for each, needs in zip(names, ctx.needs_input_grad[2:], strict=True) if needs]
            if "anchor" in needed:
                found["anchor"] = ctx.order.clone()  # known when this backward has written into it
            return None, None, *(found[each] if each in needed else None for each in names)

    @opaque
    def kernel(order: torch.Tensor, *args: Any) -> Any:
        if torch.is_grad_enabled() and wanted(**dict(zip(names, args, strict=True))):
            with _kept_by_checkpoints():
                return Node.apply(order, _order_of_backward(order), *args)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(order, *args)

    _LIBRARY.impl(name, kernel, "Autograd")
