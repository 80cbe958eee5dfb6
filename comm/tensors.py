"""Checks every tensor and number that callers pass, before anything is sent.

Kernels and transports use addresses. A tensor without an address, or with one that means something else, would give
errors from deep inside torch, or read memory that is not its own.
"""

from __future__ import annotations

import numbers
import re
from typing import Any

import torch
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad

from thinwire.errors import ArgumentError, ThinwireError, WireFormatError

#: Seconds; more overflow a clock of nanoseconds sooner than they pass.
MOST_SECONDS = 1e9

# str.isdigit takes "²" for a digit, which int does not, and int refuses thousands of digits.
_DIGITS = re.compile("[0-9]{1,18}")
_STRIDED = torch.strided
_NO_DISPATCH = torch.Tensor.__torch_dispatch__


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements of its dtype at places that its shape and strides give; fake ones may."""
    return tensor.layout is _STRIDED and not tensor.is_nested and not tensor.is_quantized


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided and its memory holds its elements; conjugates and negatives are not looked at."""
    # Of others, such as a FakeTensor or a DTensor, memory says nothing, if there is any.
    return (
        is_strided(tensor)
        and type(tensor).__torch_dispatch__ is _NO_DISPATCH
        and not (is_transforming() and _is_transformed(tensor))
    )


def is_plain(tensor: object, device: torch.device) -> bool:
    """Whether this is what nearly all tensors are: dense, on this very device, of no class of its own."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device == device
        and tensor.layout is _STRIDED
        and not (tensor.is_nested or tensor.is_quantized or is_transforming())
    )


def is_transforming() -> bool:
    """Whether this is called within a transform of torch.func, or within forward-mode differentiation."""
    return forward_ad._current_level >= 0 or maybe_current_level() is not None


def _is_transformed(tensor: torch.Tensor) -> bool:
    """Whether operations would have to carry on more than its values; torch.func takes in all that is made in it."""
    return maybe_current_level() is not None or forward_ad.unpack_dual(tensor).tangent is not None


def require_dense(name: str, tensor: object, in_memory: bool = True) -> None:
    """Raises ArgumentError for no tensor, a sparse, quantised or nested one; with `in_memory`, a fake or distributed
    one, or one on meta."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{name} is a {type(tensor).__name__}, expected a torch.Tensor")
    if not (is_dense(tensor) if in_memory else is_strided(tensor)):
        if is_transforming() and _is_transformed(tensor):
            raise ArgumentError(
                f"{name} is given in a transform of torch.func (grad, vmap, jvp and the like), or has a tangent of "
                "forward-mode differentiation, for which thinwire has no rules; expected a plain tensor: use "
                "torch.autograd.grad or backward, outside of such transforms"
            )
        nested = ", nested" if tensor.is_nested else ""
        raise ArgumentError(
            f"{name} is a {type(tensor).__name__} of layout {tensor.layout}, dtype {tensor.dtype}{nested}; expected a "
            "plain dense tensor"
        )
    if in_memory and tensor.is_meta:
        raise ArgumentError(f"{name} is on meta, where tensors have no values; expected a tensor in memory")


def require_writable(name: str, tensor: torch.Tensor) -> None:
    """Raises ArgumentError for a dense tensor that a call could not fill; its `copy_` would tell when all was sent."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError(
            f"{name} was made in inference mode, and can be written there only: pass {name}.clone(), or call this "
            "within torch.inference_mode()"
        )
    if tensor.numel() and not tensor.data_ptr():
        raise ArgumentError(f"{name} has no memory, as where its storage was freed; expected a tensor with values")
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)) if not tensor.is_contiguous() else ():
        if size > 1 and stride <= reach and tensor.numel():
            raise ArgumentError(
                f"{name} has strides {list(tensor.stride())} for shape {list(tensor.shape)}: elements share memory, "
                "and cannot be filled one by one; expected a tensor of its own, such as clone() gives"
            )
        reach += (size - 1) * stride


def overwrite(name: str, out: torch.Tensor | None) -> None:
    """Tells autograd that a call fills `out`, if it is given; kernels write where autograd does not see it.

    Raises:
        ArgumentError: it cannot be filled.
        WireFormatError: out wants a gradient, and autograd would not see its new history.
    """
    if out is None:
        return
    require_writable(name, out)
    if out.requires_grad and torch.is_grad_enabled():
        raise WireFormatError(f"{name} wants a gradient, and is overwritten: detach it, or call under torch.no_grad()")
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


def is_seconds(value: object) -> bool:
    """Whether a value is a valid wait in seconds: a number above 0, and at most `MOST_SECONDS`."""
    real: Any = value
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 < real <= MOST_SECONDS


def require_seconds(name: str, value: Any) -> float:
    """Gives a wait in seconds as a float; ThinwireError unless it is a valid one, see `is_seconds`."""
    if not is_seconds(value):
        raise ThinwireError(f"{name} is {value!r}, expected a finite number of seconds above 0, at most 1e9")
    return float(value)


def is_int(value: object, least: int, most: int = 2**31 - 1) -> bool:
    """Whether a value is an int within bounds; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def read_int(text: str) -> int | None:
    """The int that a text says in up to 18 decimal digits, with white space around them; None for any other text.

    >>> [read_int(text) for text in (" 7 ", "-7", "7.0", "²", "")]
    [7, None, None, None, None]
    """
    digits = text.strip()  # of more than what int() strips
    return int(digits) if _DIGITS.fullmatch(digits) else None
