"""Collectives as operators of torch, which torch.compile keeps in its graphs and does not look into.

    thinwire::all_to_all_v, all_to_all_v_backward    thinwire::all_gather, all_gather_backward
    thinwire::all_reduce                             thinwire::reduce_scatter

An operator calls the function of its name, with the communicator whose number it was given, and returns a new tensor.
`in_graphs` has torch.compile trace, in place of that function, the one below that calls the operator. What no graph can
hold is called between two: an asynchronous call, a given output, and counts that are not known when a graph is made.
`thinwire.operators` says what keeps the order of operators, in forward and in backward. All-reduce is its own backward,
and reduce-scatter's is an all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.function import once_differentiable

from thinwire.comm import Communicator, communicator_or_default
from thinwire.comm.launch.bootstrap import find_communicator
from thinwire.comm.recorder.flight_recorder import FlightRecorder
from thinwire.compiler import compiled_as, opaque
from thinwire.errors import ThinwireError
from thinwire.fused.counts import Counts
from thinwire.operators import ANCHOR, OPS, ORDER, anchored, differentiable, operator, registered
from thinwire.wire import WireFormat

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Tensor = torch.Tensor
_Integers = Sequence[int] | None

_REASON = (
    "no graph can hold this call of a collective: it holds those that have neither out nor async_op, op as a string, "
    "and all counts and displacements as lists of ints, recv_counts too where send_counts is given"
)
_DEFAULT = 0  # the number of whatever is the default communicator at the time
_MOST_ROWS = 1 << 40  # that are tried to be allocated


def _recorder_of(*_: object, comm: Any = None, **__: object) -> FlightRecorder:
    return communicator_or_default(comm)._recorder


def on_communicator(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function that all ranks of `comm`, a keyword of its, call. See `opaque`."""
    return opaque(function, find_recorder=_recorder_of)


_functions: dict[str, Callable[..., Any]] = {}
_backwards: dict[str, Callable[..., Any]] = {}


def in_graphs(
    backward: Callable[..., Any] | None = None, public: Callable[..., Any] | None = None
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Makes a collective what it is in Python, and in graphs the operator of its name.

    Args:
        backward: gives what carries gradients back, if that is no other collective.
        public: what users call, if that is not the function itself but calls it. The operator calls the function: what
            is public asks whether anything is traced, by another thread too, and would come back here.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        name = (public or function).__name__
        _functions[name] = function
        if backward is not None:
            _backwards[name] = backward
        return compiled_as(_TRACED[name], _REASON, _recorder_of)(function)

    return decorate


# ---------------------------------------------------------------------------------------------------------------------
# Operators


def _communicator(handle: int, size: int) -> Communicator:
    found: Communicator | None = registered(handle) if handle != _DEFAULT else communicator_or_default(None)
    if found is None:
        raise ThinwireError(
            f"there is no communicator {handle} in this process: it was dropped, or the code was compiled elsewhere"
        )
    if found.size != size:
        raise ThinwireError(
            f"this code was compiled for {size} ranks, and the communicator has {found.size}: pass comm=, or compile "
            "it anew"
        )
    return found


def _fake_all_reduce(order: _Tensor, anchor: _Tensor | None, x: _Tensor, *args: Any) -> _Tensor:
    return x.new_empty(x.shape)


@operator(fake=_fake_all_reduce)
def all_reduce(
    order: _Tensor,
    anchor: _Tensor | None,
    x: _Tensor,
    op: str,
    wire: str | None,
    gather_wire: str | None,
    grad_wire: str | None,
    transport: str,
    handle: int,
    size: int,
) -> _Tensor:
    """`tw.all_reduce`, of the communicator with this number; `anchor` and `grad_wire` are for backward."""
    comm = _communicator(handle, size)
    return _functions["all_reduce"](x, op, wire=wire, gather_wire=gather_wire, comm=comm, transport=transport)


def _fake_reduce_scatter(order: _Tensor, anchor: _Tensor | None, x: _Tensor, *args: Any) -> _Tensor:
    return x.new_empty(x.shape[0] // args[-1], *x.shape[1:])


@operator(fake=_fake_reduce_scatter)
def reduce_scatter(
    order: _Tensor,
    anchor: _Tensor | None,
    x: _Tensor,
    op: str,
    wire: str | None,
    grad_wire: str | None,
    transport: str,
    handle: int,
    size: int,
) -> _Tensor:
    """`tw.reduce_scatter`, of the communicator with this number; `anchor` and `grad_wire` are for backward."""
    return _functions["reduce_scatter"](x, op, wire=wire, comm=_communicator(handle, size), transport=transport)


def _fake_all_gather(order: _Tensor, anchor: _Tensor | None, x: _Tensor, *args: Any) -> _Tensor:
    return x.new_empty(x.shape[0] * args[-1], *x.shape[1:])


@operator(fake=_fake_all_gather)
def all_gather(
    order: _Tensor,
    anchor: _Tensor | None,
    x: _Tensor,
    wire: str | None,
    grad_wire: str | None,
    transport: str,
    handle: int,
    size: int,
) -> _Tensor:
    """`tw.all_gather`, of the communicator with this number; `anchor` and `grad_wire` are for backward."""
    return _functions["all_gather"](x, wire=wire, comm=_communicator(handle, size), transport=transport)


def _fake_backward(order: _Tensor, dy: _Tensor, num_rows: int, *args: Any) -> _Tensor:
    return dy.new_empty(num_rows, *dy.shape[1:])


@operator(fake=_fake_backward)
def all_gather_backward(
    order: _Tensor, dy: _Tensor, num_rows: int, grad_wire: str | None, transport: str, handle: int, size: int
) -> _Tensor:
    """The gradient of x [num_rows, ...]."""
    shape, comm = torch.Size([num_rows, *dy.shape[1:]]), _communicator(handle, size)
    return _backwards["all_gather"](shape, None, grad_wire, comm, transport)(dy)


def _fake_all_to_all_v(
    order: _Tensor,
    anchor: _Tensor | None,
    x: _Tensor,
    send_counts: _Integers,
    recv_counts: _Integers,
    send_displs: _Integers,
    recv_displs: _Integers,
    *args: Any,
) -> _Tensor:
    size = args[-1]
    if recv_counts is None:
        return x.new_empty(x.shape[0] // size * size, *x.shape[1:])
    rows = torch.sym_max(0, sum(recv_counts))
    for count, displ in zip(recv_counts, recv_displs or (), strict=False):
        rows = torch.sym_max(rows, count + displ)
    # What the operator refuses is no size either.
    return x.new_empty(0 if isinstance(rows, int) and rows > _MOST_ROWS else rows, *x.shape[1:])


@operator(fake=_fake_all_to_all_v)
def all_to_all_v(
    order: _Tensor,
    anchor: _Tensor | None,
    x: _Tensor,
    send_counts: Sequence[int] | None,
    recv_counts: Sequence[int] | None,
    send_displs: Sequence[int] | None,
    recv_displs: Sequence[int] | None,
    check: bool,
    wire: str | None,
    grad_wire: str | None,
    transport: str,
    handle: int,
    size: int,
) -> _Tensor:
    """`tw.all_to_all_v`, of the communicator with this number; `anchor` and `grad_wire` are for backward."""
    comm = _communicator(handle, size)
    return _functions["all_to_all_v"](
        x, send_counts, recv_counts, send_displs=send_displs, recv_displs=recv_displs, wire=wire, comm=comm,
        transport=transport, check=check,
    )  # fmt: skip


@operator(fake=_fake_backward)
def all_to_all_v_backward(
    order: _Tensor,
    dy: _Tensor,
    num_rows: int,
    send_counts: Sequence[int] | None,
    recv_counts: Sequence[int] | None,
    send_displs: Sequence[int] | None,
    recv_displs: Sequence[int] | None,
    check: bool,
    grad_wire: str | None,
    transport: str,
    handle: int,
    size: int,
) -> _Tensor:
    """The gradient of x [num_rows, ...]."""
    shape, comm = torch.Size([num_rows, *dy.shape[1:]]), _communicator(handle, size)
    counts = send_counts, recv_counts, send_displs, recv_displs
    return _backwards["all_to_all_v"](shape, *counts, grad_wire, comm, transport, check)(dy)


def _linear(name: str, back: Callable[..., _Tensor]) -> None:
    """Differentiates a collective: `back` is called with order, dy, the number of x's rows, and its own arguments."""

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, order: _Tensor, order_of_backward: _Tensor, anchor: _Tensor, x: _Tensor, *args: Any
        ) -> _Tensor:
            ctx.order, ctx.num_rows, ctx.args = order_of_backward, x.shape[0], args
            result: _Tensor = getattr(OPS, name)(order, anchor, x, *args)
            return result

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: _Tensor) -> tuple[_Tensor | None, ...]:
            dx = back(ctx.order, grads[0].contiguous(), ctx.num_rows, *ctx.args)
            return None, None, anchored(ctx), dx, *(None for _ in ctx.args)

    differentiable(name, Linear, lambda anchor, x, *args: x.requires_grad)


def _all_reduce_backward(order: _Tensor, dy: _Tensor, num_rows: int, *args: Any) -> Any:
    _, _, _, grad_wire, *group = args
    return OPS.all_reduce(order, None, dy, "sum", grad_wire, None, grad_wire, *group)


def _reduce_scatter_backward(order: _Tensor, dy: _Tensor, num_rows: int, *args: Any) -> Any:
    _, _, grad_wire, *group = args
    return OPS.all_gather(order, None, dy, grad_wire, grad_wire, *group)


def _all_gather_backward(order: _Tensor, dy: _Tensor, num_rows: int, wire: str | None, *args: Any) -> Any:
    return OPS.all_gather_backward(order, dy, num_rows, *args)


def _all_to_all_v_backward(order: _Tensor, dy: _Tensor, num_rows: int, *args: Any) -> Any:
    *counts_and_check, _, grad_wire, transport, handle, size = args
    return OPS.all_to_all_v_backward(order, dy, num_rows, *counts_and_check, grad_wire, transport, handle, size)


_linear("all_reduce", _all_reduce_backward)
_linear("reduce_scatter", _reduce_scatter_backward)
_linear("all_gather", _all_gather_backward)
_linear("all_to_all_v", _all_to_all_v_backward)


# ---------------------------------------------------------------------------------------------------------------------
# What torch.compile traces


def _arguments(x: object, options: dict[str, Any], *wires: str) -> Any:
    """The anchor, the formats, and what an operator finds its group by; None for what no graph can hold.

    Args:
        options: of a call, by keyword.
        wires: which of them are formats.
    """
    out, async_op = options.pop("out", None), options.pop("async_op", False)
    comm, transport = options.pop("comm", None), options.pop("transport", "auto")
    formats = [options.pop(name, "none" if name == "grad_wire" else None) for name in wires]
    if options or out is not None or async_op is not False or not isinstance(transport, str):
        return None
    if not isinstance(x, torch.Tensor) or type(x) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if x.layout is not torch.strided or x.dim() < 1:
        return None
    names: list[str | None] = []
    for wire in formats:
        if isinstance(wire, WireFormat) and wire.alignment == WireFormat.alignment:  # which its name does not say
            names.append(str(wire))
        elif wire is None or isinstance(wire, str):
            names.append(wire)
        else:
            return None
    found = find_communicator(comm)
    if found is None:
        return None
    anchor = ANCHOR if torch.is_grad_enabled() and x.requires_grad else None
    return anchor, names, (transport, _DEFAULT if comm is None else found._handle, found.size)


def _trace_all_reduce(x: _Tensor, op: object = "sum", **options: Any) -> Any:
    found = _arguments(x, options, "wire", "gather_wire", "grad_wire")
    if found is None or not _is_operation(op, found[0]):
        return NotImplemented
    anchor, wires, group = found
    return OPS.all_reduce(ORDER, anchor, x, op, *wires, *group)


def _trace_reduce_scatter(x: _Tensor, op: object = "sum", **options: Any) -> Any:
    found = _arguments(x, options, "wire", "grad_wire")
    if found is None or not _is_operation(op, found[0]):
        return NotImplemented
    anchor, wires, group = found
    return OPS.reduce_scatter(ORDER, anchor, x, op, *wires, *group)


def _is_operation(op: object, anchor: _Tensor | None) -> bool:
    return isinstance(op, str) and (op == "sum" or anchor is None)  # only sums have a backward


def _trace_all_gather(x: _Tensor, **options: Any) -> Any:
    found = _arguments(x, options, "wire", "grad_wire")
    if found is None:
        return NotImplemented
    anchor, wires, group = found
    return OPS.all_gather(ORDER, anchor, x, *wires, *group)


def _trace_all_to_all_v(
    x: _Tensor,
    send_counts: Counts | None = None,
    recv_counts: Counts | None = None,
    *,
    send_displs: Counts | None = None,
    recv_displs: Counts | None = None,
    check: object = False,
    **options: Any,
) -> Any:
    found = _arguments(x, options, "wire", "grad_wire")
    if found is None or (check is not False and check is not True):
        return NotImplemented
    if send_counts is not None and recv_counts is None:
        return NotImplemented  # as many rows as come
    integers = [_integers(values) for values in (send_counts, recv_counts, send_displs, recv_displs)]
    if any(values is NotImplemented for values in integers):
        return NotImplemented
    anchor, wires, group = found
    return OPS.all_to_all_v(ORDER, anchor, x, *integers, check, *wires, *group)


def _integers(values: object) -> Any:
    """A list of what a graph can hold as ints, or None for None."""
    # Here, as it takes long, and nothing but the compiler comes here.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if values is None:
        return None
    if not isinstance(values, list | tuple):
        return NotImplemented
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            return NotImplemented
        if statically_known_true(value >= 2**63) or statically_known_true(value < -(2**63)):
            return NotImplemented
    return list(values)


_TRACED = {
    "all_gather": _trace_all_gather,
    "all_reduce": _trace_all_reduce,
    "all_to_all_v": _trace_all_to_all_v,
    "reduce_scatter": _trace_reduce_scatter,
}
