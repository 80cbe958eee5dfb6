"""Backward of all-to-all-v and the collectives: each is another of them, with the counts of the two sides exchanged.

They are linear in x, so backward needs nothing of it. The loss is the sum of what the ranks differentiate: a rank's
gradient is what its x does to the losses of all ranks. Quantisation counts as the identity (straight through).

Backward is collective. Autograd runs it in the reverse of the order of the forward calls, on one device; all ranks must
want gradients of the same calls, and differentiate all of them. Ranks that do not call the same get the errors that
they get in forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from thinwire.comm.exact import Reduction
from thinwire.compiler import GraphNode
from thinwire.errors import WireFormatError

Operation = Callable[[torch.Tensor], Any]  # that gives a tensor, as it is waited for


def wants_gradient(x: object) -> bool:
    """Whether what is made of x has a gradient."""
    return isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled()


def require_linear(
    what: str, out: object, async_op: bool, op: object = "sum", dtype: torch.dtype = torch.float32
) -> None:
    """Raises WireFormatError for what has no backward: a given output, an asynchronous call, no sum."""
    refused = "with out" if out is not None else "with async_op=True" if async_op else None
    if refused is None and Reduction.of(op, dtype).name != "sum":
        refused = f"with op {op!r}"
    if refused is not None:
        raise WireFormatError(
            f"{what} has no backward {refused}: leave that away, detach x, or call it under torch.no_grad() or "
            "torch.inference_mode()"
        )


def with_gradient(x: torch.Tensor, there: Operation, back: Operation) -> torch.Tensor:
    """`there(x)`, whose gradients come back through `back`."""
    result: torch.Tensor = _Linear.apply(x, there, back)
    return result


class _Linear(GraphNode):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Operation, back: Operation) -> torch.Tensor:
        ctx.back = back
        result: torch.Tensor = there(x.detach())
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.back(grads[0].contiguous()), None, None
