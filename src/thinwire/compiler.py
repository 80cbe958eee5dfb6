"""What torch.compile must not look into.

Kernels get addresses, and torch.compile frees a tensor of which only the address is still used: then kernels would work
on freed memory. So it calls the operations of the library as they are, between two graphs. Rounds alone have another
form for it, operators that stay in its graphs (`thinwire.moe.compiled_round`).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from thinwire.errors import ArgumentError

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Recorder(Protocol):
    """Knows of the calls of a communicator."""

    begun: int

    def ended_by(self, error: BaseException) -> None: ...


class GraphNode(torch.autograd.Function):
    """A node of autograd's graph, whose backward computes in the dtypes of its tensors also under autocast."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        backward = cls.backward

        @functools.wraps(backward)
        def exact(*args: Any) -> Any:
            with torch._C._DisableAutocast():
                return backward(*args)

        cls.backward = staticmethod(exact)  # type: ignore[assignment]


#: Of a function's positional and named arguments the recorder of the communicator that it is called on.
FindRecorder = Callable[[tuple[Any, ...], dict[str, Any]], Recorder]

_REASON = (
    "thinwire's kernels get addresses of tensors, which torch.compile does not see, so this call ends a graph: compile "
    "without fullgraph=True, or call it between two compiled functions"
)


def opaque(function: Callable[_P, _T], find_recorder: FindRecorder | None = None) -> Callable[_P, _T]:
    """The function, which torch.compile calls and does not trace; neither does it trace what the function calls.

    Compiling with `fullgraph=True`, which allows no calls between graphs, fails, and says why and what to do.

    Args:
        find_recorder: of a function that makes a call on a communicator. An exception from outside that comes when the
            call is made, and before its caller has the result, then ends the communicator: no other frame would see it.
    """
    disabled: Callable[_P, _T] | None = None
    code: Any = function.__code__
    names = enumerate(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    flags = [(place, name) for place, name in names if function.__annotations__.get(name) in (bool, "bool")]

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        nonlocal disabled
        for place, name in flags:
            value = args[place] if place < len(args) else kwargs.get(name, False)
            if value is not False and value is not True:
                require_flag(name, value)
        if torch._C._is_any_autocast_enabled():  # of which kernels know nothing
            with torch._C._DisableAutocast():
                return call(*args, **kwargs)
        recorder = None if find_recorder is None else find_recorder(args, kwargs)
        begun, gradients = 0 if recorder is None else recorder.begun, torch.is_grad_enabled()
        try:
            if "torch._dynamo" not in sys.modules:  # nothing compiles without it, and importing it takes seconds
                return function(*args, **kwargs)
            if disabled is None:
                disabled = torch.compiler.disable(function, reason=_REASON)
                # Or it would be compiled for each function again, as all share its code.
                torch._dynamo.decorators.skip(call)
            # Where nothing is compiled that is called from here, it takes ten microseconds less.
            return function(*args, **kwargs) if get_eval_frame_callback() is None else disabled(*args, **kwargs)
        except BaseException as error:
            # All of it in a `try`: a second one from outside may come before anything has ended.
            try:
                torch._C._set_grad_enabled(gradients)  # which an interrupted no_grad leaves off
                if recorder is not None and recorder.begun != begun:
                    recorder.ended_by(error)
            except BaseException as second:
                torch._C._set_grad_enabled(gradients)
                if recorder is not None and recorder.begun != begun:
                    recorder.ended_by(second)
                raise
            raise

    marked: Any = call  # as `skip` does, which is there only then
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, _REASON
    return _with_signature(call, function)


def require_flag(name: str, value: object) -> None:
    """Raises ArgumentError for what is neither True nor False, nor as much in numpy, in torch (0-dim), or as 1 or 0."""
    if isinstance(value, int | np.bool_) and value in (0, 1):
        return
    if not isinstance(value, torch.Tensor) or value.dtype != torch.bool or value.dim() or value.is_meta:
        raise ArgumentError(f"{name} is a {type(value).__name__}; accepted: True or False")


def _with_signature(call: Callable[_P, _T], function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The call, which says of itself what the function does, also to tools that do not follow `__wrapped__`."""
    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return call


def compiled_as(
    traced: Callable[..., Any], find_recorder: FindRecorder | None = None
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Makes a function opaque, and has torch.compile trace `traced` in its place, with the same arguments.

    Where `traced` returns NotImplemented, the function is called as an opaque one is.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        hidden = opaque(function, find_recorder)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:  # not that of `opaque`, whose code is not to be traced
            if torch.compiler.is_compiling():
                found: _T = traced(*args, **kwargs)
                if found is not NotImplemented:
                    return found
            return hidden(*args, **kwargs)

        return _with_signature(call, function)

    return decorate
