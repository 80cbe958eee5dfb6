"""What follows from a call's arguments is settled once, and kept for calls that differ in their tensors alone.

Each collective looks its arguments up (`prepared`), and runs what it finds there with its tensors. There is no other
way into a collective, so calls give the same whether they were made before or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from thinwire.comm import Communicator
from thinwire.comm.exact import Reduction, extent
from thinwire.comm.tensors import is_plain, overwrite, require_dense
from thinwire.comm.work import Work
from thinwire.errors import ArgumentError, CountsError
from thinwire.fused.codec import require_float
from thinwire.fused.gradients import Operation, require_linear, with_gradient
from thinwire.fused.transport import check_transport
from thinwire.wire import WireFormat

_MOST_KEPT = 1024  # of one communicator


_C = TypeVar("_C", bound="PreparedCall")


class PreparedCall(ABC):
    """A call but for its tensors. It holds none, no communicator, and nothing that a caller could change.

    Attributes:
        reduction: what it does to the ranks' tensors, if anything.

    Args:
        what: the collective's name.
        x: an input like those to come, on the communicator's device; it is not kept.
        wires: of its legs; one, where they have the same.

    Raises:
        ArgumentError, WireFormatError, CountsError: nothing like x can travel.
    """

    reduction: object = "sum"

    def __init__(
        self, comm: Communicator, what: str, x: torch.Tensor, wires: Sequence[WireFormat], transport: str
    ) -> None:
        check_transport(transport)
        self.what, self.wires, self.transport = what, wires, transport
        for wire in wires:
            require_float(x, wire, what)
        if x.dim() < 1:
            raise CountsError(f"{what} needs a tensor of at least 1 dimension; got a scalar")
        self.shape, self.dtype = x.shape, x.dtype

    def __call__(
        self, comm: Communicator, x: torch.Tensor, out: torch.Tensor | None, async_op: bool, grad_wire: Any
    ) -> torch.Tensor | Work[torch.Tensor]:
        """The call with these tensors, and its gradients. x was checked, and has the shape and dtype of `prepared`.

        Raises:
            WireFormatError: gradients are wanted of what has none.
        """
        if not x.requires_grad or not torch.is_grad_enabled():
            return self.run(comm, x, out, async_op)
        require_linear(self.what, out, async_op, self.reduction, self.dtype)
        call = self.reversible(comm, x)
        return with_gradient(x, partial(call.run, comm, out=None, async_op=False), call.back(comm, grad_wire))

    def reversible(self, comm: Communicator, x: torch.Tensor) -> PreparedCall:
        """The same call, with all that its way back has to know."""
        return self

    @abstractmethod
    def back(self, comm: Communicator, grad_wire: Any) -> Operation:
        """What carries gradients of the result back to x."""

    @abstractmethod
    def run(
        self, comm: Communicator, x: torch.Tensor, out: torch.Tensor | None, async_op: bool
    ) -> torch.Tensor | Work[torch.Tensor]:
        """The call with these tensors. Of x all was asked; `out` is checked."""


def prepared(comm: Communicator, make: Callable[..., _C], x: torch.Tensor, *arguments: Any) -> _C:
    """`make(comm, x, *arguments)`, or what that gave before for a tensor of this shape and dtype.

    Arguments are looked up by equality: where equal ones differ, as 1, 1.0 and True do, pass what they stand for.

    Raises:
        ArgumentError: x is no dense tensor on the communicator's device.
    """
    comm.check_device("x", x)
    key = make, x.shape, x.dtype, *arguments
    try:
        found: _C | None = comm.prepared.get(key)
    except TypeError:  # an argument cannot be looked up
        return make(comm, x, *arguments)
    if found is None:
        found = make(comm, x, *arguments)
        if len(comm.prepared) >= _MOST_KEPT:
            comm.prepared.clear()
        comm.prepared[key] = found
    return found


def named_op(comm: Communicator, x: torch.Tensor, op: object) -> object:
    """A reduction's name, where one of torch's was passed: those equal ints. Another text is for `Reduction.of`."""
    if type(op) is str:
        return op
    comm.check_device("x", x)
    return Reduction.of(op, x.dtype).name


def check_out(what: str, x: torch.Tensor, out: torch.Tensor, shape: Sequence[int], place: int | None) -> None:
    """Refuses an output that cannot be filled.

    Args:
        shape: that it must have; -1 rows are any number.
        place: bytes from where x begins to where `out` must begin if they share memory; None: they must not.
    """
    if not is_plain(out, x.device):
        if not isinstance(out, torch.Tensor) or out.device != x.device:
            raise ArgumentError(f"{what}: out is {_describe(out)}; it must be a tensor on {x.device}")
        require_dense("out", out)
    given = out.shape
    if out.dtype != x.dtype or given[1:] != shape[1:] or len(given) != len(shape) or shape[0] not in (-1, given[0]):
        sizes = ", ".join("rows" if size == -1 else str(size) for size in shape)
        raise CountsError(f"{what}: out is {_describe(out)}; it must be {x.dtype} [{sizes}]")
    if not in_memory(out):
        raise CountsError(
            f"{what}: out must be contiguous and hold its own values; it has strides {list(out.stride())}, conj "
            f"{out.is_conj()}, neg {out.is_neg()}"
        )
    if overlap(x, out) and not (place is not None and out.data_ptr() == x.data_ptr() + place and in_memory(x)):
        raise CountsError(f"{what}: out shares memory with x: it would be overwritten before it is sent")
    overwrite("out", out)


def in_memory(x: torch.Tensor) -> bool:
    """Whether a tensor's values lie one after the other where it begins."""
    return x.is_contiguous() and not x.is_neg() and not x.is_conj()


def flat(x: torch.Tensor) -> torch.Tensor:
    """The elements in order: 1-D, contiguous; a copy only where they do not lie so."""
    return x.resolve_conj().resolve_neg().contiguous().view(-1)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one device may share memory."""
    (first, stop), (start, last) = extent(a), extent(b)
    return max(first, start) < min(stop, last)


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    return f"a {type(value).__name__}"
