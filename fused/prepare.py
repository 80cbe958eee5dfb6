"""Prepared calls for callers: a collective whose arguments are settled once, to be called with tensors alone.

    prepared = thinwire.prepare(thinwire.all_reduce, x, wire="int8", comm=comm)
    y = prepared(x)

As MPI's persistent operations, and what a loop wants that makes the same small call at each step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from thinwire.comm import Communicator, Group, communicator_or_default
from thinwire.comm.work import Work
from thinwire.compiler import opaque
from thinwire.errors import ArgumentError, CountsError
from thinwire.fused.all_gather import all_gather, find_all_gather
from thinwire.fused.all_reduce import all_reduce, find_all_reduce
from thinwire.fused.all_to_all import all_to_all_v, find_all_to_all_v
from thinwire.fused.codec import resolve_wire
from thinwire.fused.gradients import require_linear
from thinwire.fused.prepared import PreparedCall
from thinwire.fused.reduce_scatter import find_reduce_scatter, reduce_scatter
from thinwire.wire import WireFormat

_C = TypeVar("_C", bound=Callable[..., Any])

_FIND: dict[Callable[..., Any], Callable[..., PreparedCall]] = {
    all_to_all_v: find_all_to_all_v,
    all_reduce: find_all_reduce,
    reduce_scatter: find_reduce_scatter,
    all_gather: find_all_gather,
}


def _opaque(call: _C) -> _C:
    return opaque(call, find_recorder=lambda arguments, _: arguments[0]._comm.recorder)  # type: ignore[return-value]


class Prepared:
    """A collective with all of its arguments but the tensors. Made by `prepare`.

    Attributes:
        shape, dtype: of x.
    """

    def __init__(self, comm: Communicator, call: PreparedCall, grad_wire: str | WireFormat) -> None:
        self._comm, self._call, self._grad_wire = comm, call, grad_wire
        self.shape, self.dtype = call.shape, call.dtype

    @_opaque
    def __call__(
        self, x: torch.Tensor, out: torch.Tensor | None = None, async_op: bool = False
    ) -> torch.Tensor | Work[torch.Tensor]:
        """The function's result for x, filled into `out` if that is given, or a Work; with gradients, as the function.

        torch.compile calls it between two graphs; the function itself can be part of one.

        Raises:
            ArgumentError: x has another shape or dtype than the call was prepared for, or is no dense tensor.
            TransportUnavailable: x is no tensor, or is on another kind of device.
        """
        comm, call = self._comm, self._call
        comm.check_device("x", x)
        if x.shape != call.shape or x.dtype != call.dtype:
            got, wanted = f"{x.dtype} {list(x.shape)}", f"{call.dtype} {list(call.shape)}"
            raise ArgumentError(f"x is {got}; this {call.what} was prepared for {wanted}")
        return call(comm, x, out, async_op, self._grad_wire)

    @_opaque
    def back(self, y: torch.Tensor, wire: str | WireFormat | None = None) -> torch.Tensor:
        """The way back of the same rows: the transpose, which is what gradients take.

        Rows of an all-to-all-v return to where they came from, and add up there if one was sent to several ranks; an
        all-gather's are summed at their owner, a reduce-scatter's are gathered, an all-reduce's are summed. It can be
        called any number of times, before and after calls of the way there.

        Args:
            y: of the result's shape and dtype.
            wire: the format in transit; None means the `grad_wire` that was passed to `prepare`.

        Returns:
            A tensor of x's shape. Rows that were not sent are zero.

        Raises:
            ArgumentError: an all-to-all-v that was prepared without recv_counts.
            CountsError: y does not have the shape and dtype of a result.
            WireFormatError: the way back of what is no sum.
        """
        call, comm = self._call, self._comm
        comm.check_device("y", y)
        carry = call.back(comm, self._grad_wire if wire is None else wire)
        require_linear(call.what, None, False, call.reduction, call.dtype)
        if y.dtype != call.dtype or y.shape != call.out_shape:
            raise CountsError(
                f"y is {y.dtype} {list(y.shape)}; what comes back of this {call.what} is {call.dtype} "
                f"{list(call.out_shape or ())}"
            )
        result: torch.Tensor = carry(y)
        return result


def prepare(
    function: Callable[..., Any],
    x: torch.Tensor,
    *arguments: Any,
    comm: Group | None = None,
    grad_wire: str | WireFormat = "none",
    **options: Any,
) -> Prepared:
    """A collective whose arguments are settled now: `prepared(x)` is `function(x, *arguments, **options)`.

    It sends nothing. All ranks make the prepared call, or the function's, as they would the function's alone.

    Args:
        function: `all_to_all_v`, `all_reduce`, `reduce_scatter` or `all_gather`.
        x: a tensor of the shape, dtype and device of those to come; its values are not looked at.
        arguments, options: the function's, but for `out` and `async_op`, which are passed with each call.
        comm, grad_wire: the function's.

    Raises:
        ArgumentError: another function, or an argument that it does not have.
        CountsError, WireFormatError, TransportUnavailable: as the function.

    >>> import thinwire as tw
    >>> with tw.init() as comm:
    ...     double = tw.prepare(tw.all_reduce, torch.empty(3), wire="none", comm=comm)
    ...     double(torch.ones(3))
    tensor([1., 1., 1.])
    """
    find = next((find for known, find in _FIND.items() if known is function), None)
    if find is None:
        known = ", ".join(each.__name__ for each in _FIND)
        raise ArgumentError(f"function is {function!r}; accepted: thinwire's {known}")
    comm = communicator_or_default(comm)
    try:
        given = inspect.signature(function).bind(x, *arguments, **options).arguments
    except TypeError as error:
        raise ArgumentError(f"{function.__name__}: {error}") from error
    for name in ("out", "async_op"):
        if name in given:
            raise ArgumentError(f"{name} was passed to prepare; pass it to the prepared call")
    return Prepared(comm, find(comm, **given), resolve_wire(grad_wire))
