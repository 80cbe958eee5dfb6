"""What torch.compile must not look into.

Kernels get addresses, and torch.compile frees a tensor of which only the address is still used: then kernels would work
on freed memory. So it calls the operations of the library as they are, between two graphs, but for those that have
another form for it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

_P = ParamSpec("_P")
_T = TypeVar("_T")

_REASON = "thinwire's kernels get addresses of tensors, which torch.compile does not see"


def nothing_compiles() -> bool:
    """Whether neither this is traced by torch.compile nor what is called from here would be."""
    if "torch._dynamo" not in sys.modules:  # nothing compiles without it, and importing it takes seconds
        return True
    return not torch.compiler.is_compiling() and get_eval_frame_callback() is None


def opaque(function: Callable[_P, _T], reason: str = _REASON) -> Callable[_P, _T]:
    """The function, which torch.compile calls and does not trace; neither does it trace what the function calls.

    Compiling with `fullgraph=True`, which allows no calls between graphs, fails with the reason.
    """
    disabled: Callable[_P, _T] | None = None

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:  # nothing compiles without it, and importing it takes seconds
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function, reason=reason)
            # Or it would be compiled for each function again, as all share its code.
            torch._dynamo.decorators.skip(call)
        return disabled(*args, **kwargs)

    marked: Any = call  # as `skip` does, which is there only then
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, reason
    return call


def compiled_as(traced: Callable[..., Any], reason: str = _REASON) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Makes a function opaque, and has torch.compile trace `traced` in its place, with the same arguments.

    Where `traced` returns NotImplemented, the function is called as an opaque one is, for this reason.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        hidden = opaque(function, reason)
        disabled: Callable[_P, _T] | None = None

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            nonlocal disabled
            if torch.compiler.is_compiling():
                found: _T = traced(*args, **kwargs)
                return hidden(*args, **kwargs) if found is NotImplemented else found
            # As `hidden`, which would be a call more.
            if disabled is None:
                if "torch._dynamo" not in sys.modules:
                    return function(*args, **kwargs)
                disabled = torch.compiler.disable(function, reason=reason)
            return disabled(*args, **kwargs)

        return call

    return decorate
