"""Collectives as operators of torch, which torch.compile keeps in its graphs and does not look into.

    thinwire::all_gather, all_reduce, all_to_all_v, reduce_scatter    and of each its backward: all_gather_backward ...

`in_graphs` makes them of a collective's own signature. An operator calls the collective with the communicator whose
number it was given, and returns a new tensor; its backward calls what carries gradients back. What no graph can hold is
called between two: an asynchronous call, a given output, and counts that are not known when a graph is made.
`thinwire.operators` says what keeps the order of operators, in forward and in backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from thinwire.comm import Communicator, communicator_or_default
from thinwire.comm.call import Recorder
from thinwire.comm.launch.bootstrap import find_communicator
from thinwire.compiler import compiled_as, opaque
from thinwire.errors import ThinwireError
from thinwire.fused.gradients import Operation
from thinwire.operators import ANCHOR, OPS, ORDER, differentiable, operator, registered
from thinwire.wire import WireFormat

_P = ParamSpec("_P")
_T = TypeVar("_T")

_REASON = (
    "no graph can hold this call of a collective: it holds those that have neither out nor async_op, op as a string, "
    "and all counts and displacements as lists of ints, recv_counts too where send_counts is given"
)
_DEFAULT = 0  # the number of whatever is the default communicator at the time

_OptionalText: Any = str | None
_Integers: Any = Sequence[int] | None
#: All that operators take, in this order: of a collective's parameters those that a graph can hold, and its group.
_TYPES: dict[str, Any] = {
    "anchor": torch.Tensor | None, "x": torch.Tensor,  # of forward
    "dy": torch.Tensor, "num_rows": int,  # of backward: x is [num_rows, ...]
    "op": str,
    "send_counts": _Integers, "recv_counts": _Integers, "send_displs": _Integers, "recv_displs": _Integers,
    "check": bool,
    "wire": _OptionalText, "gather_wire": _OptionalText, "grad_wire": _OptionalText,
    "transport": str, "handle": int, "size": int,
}  # fmt: skip
_NOT_HELD = {"comm", "out", "async_op"}  # by operators, which know the group by its number
_OF_FORWARD = ("anchor", "x", "op", "wire", "gather_wire")  # and not of backward


def _recorder_of(_: object, named: dict[str, Any]) -> Recorder:
    comm = named.get("comm")
    found: Communicator = comm if type(comm) is Communicator else communicator_or_default(comm)
    return found.recorder


def on_communicator(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function that all ranks of `comm`, a keyword of its, call. See `opaque`."""
    return opaque(function, find_recorder=_recorder_of)


def in_graphs(
    rows: Callable[..., int], back: Callable[..., Operation]
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Makes a collective what it is in Python, and in graphs an operator, of its name and parameters.

    Args:
        rows: how many the result has, of x's, `size` and what else the operator takes, by name.
        back: gives what carries gradients back to x, of its shape, `comm`, and those of the collective's parameters,
            by name, that are not of forward alone.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        name, parameters = function.__name__, inspect.signature(function).parameters
        names = [each for each in _TYPES if each in parameters or each in ("anchor", "handle", "size")]
        carried = [each for each in names if each not in _OF_FORWARD]
        call: Any = function

        def forward(anchor: object, grad_wire: object, handle: int, size: int, **arguments: Any) -> Any:
            return call(**arguments, comm=_communicator(handle, size))

        def backward(dy: torch.Tensor, num_rows: int, handle: int, size: int, **arguments: Any) -> Any:
            shape = torch.Size([num_rows, *dy.shape[1:]])
            return back(shape, comm=_communicator(handle, size), **arguments)(dy)

        def keep(ctx: Any, result: torch.Tensor, x: torch.Tensor, **arguments: Any) -> None:
            ctx.num_rows, ctx.carried = x.shape[0], [arguments[each] for each in carried]

        def gradients(ctx: Any, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
            return {"x": getattr(OPS, f"{name}_backward")(ctx.order, dy.contiguous(), ctx.num_rows, *ctx.carried)}

        _define(name, names, forward, lambda x, **rest: x.new_empty(rows(x.shape[0], **rest), *x.shape[1:]))
        _define(
            f"{name}_backward", ["dy", "num_rows", *carried], backward,
            lambda dy, num_rows, **_: dy.new_empty(num_rows, *dy.shape[1:]),
        )  # fmt: skip
        differentiable(name, lambda x, **_: x.requires_grad, keep, gradients)
        return compiled_as(_traced(getattr(OPS, name), names, parameters), _REASON, _recorder_of)(function)

    return decorate


def _define(name: str, names: list[str], function: Any, fake: Callable[..., torch.Tensor]) -> None:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(each, kind, annotation=_TYPES[each]) for each in names]
    function.__name__, function.__signature__ = name, inspect.Signature(parameters, return_annotation=torch.Tensor)
    operator(fake=fake)(function)


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


# ---------------------------------------------------------------------------------------------------------------------
# What torch.compile traces


def _traced(operator: Any, names: Sequence[str], parameters: Mapping[str, inspect.Parameter]) -> Callable[..., Any]:
    """The call of an operator in place of a function with these parameters; NotImplemented for what no graph can hold.

    Args:
        names: what the operator takes after ORDER.
    """
    unknown = set(parameters) - set(_TYPES) - _NOT_HELD
    assert not unknown, f"graphs would leave {unknown} out: add them to _TYPES"
    positional = tuple(name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD)
    defaults = {name: each.default for name, each in parameters.items() if name != "x"}
    held = tuple((each, _HELD[_TYPES[each]]) for each in names if each in defaults)

    def traced(*args: Any, **options: Any) -> Any:
        given = {**dict(zip(positional, args, strict=False)), **options}
        x = given.pop("x", None)
        if len(given) + 1 != len(args) + len(options) or any(name not in defaults for name in given):
            return NotImplemented  # for the function to refuse
        given = {**defaults, **given}
        if given["out"] is not None or given["async_op"] is not False:
            return NotImplemented
        if not isinstance(x, torch.Tensor) or type(x) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        if x.layout is not torch.strided or x.dim() < 1:
            return NotImplemented
        anchor = ANCHOR if torch.is_grad_enabled() and x.requires_grad else None
        values = {name: hold(given[name]) for name, hold in held}
        if any(value is NotImplemented for value in values.values()):
            return NotImplemented
        if anchor is not None and values.get("op", "sum") != "sum":
            return NotImplemented  # only sums have a backward
        if values.get("send_counts") is not None and values["recv_counts"] is None:
            return NotImplemented  # as many rows as come
        comm = given["comm"]
        found = find_communicator(comm)
        if found is None:
            return NotImplemented
        return operator(ORDER, anchor, x, *values.values(), _DEFAULT if comm is None else found._handle, found.size)

    return traced


def _text(value: object) -> Any:
    return value if isinstance(value, str) else NotImplemented


def _flag(value: object) -> Any:
    return value if value is True or value is False else NotImplemented


def _format(wire: object) -> Any:
    if isinstance(wire, WireFormat) and wire.alignment == WireFormat.alignment:  # which its name does not say
        return str(wire)
    return wire if wire is None or isinstance(wire, str) else NotImplemented


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


#: Of a parameter's type in an operator what a graph holds of a value; NotImplemented if it holds none.
_HELD: dict[Any, Callable[[object], Any]] = {
    str: _text, bool: _flag, _OptionalText: _format, _Integers: _integers
}  # fmt: skip
