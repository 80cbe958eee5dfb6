"""What the quantised collectives are given, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.comm import Communicator
from thinwire.comm.p2p import extent
from thinwire.comm.reductions import Reduction
from thinwire.errors import CountsError, TransportUnavailable, WireFormatError
from thinwire.fused.codec import FLOAT_DTYPES, require_float
from thinwire.fused.collective import DirectCollectives, open_collectives
from thinwire.fused.transport import Refusal, choose
from thinwire.wire import WireFormat

__all__ = ["check_input", "check_out", "choose_collectives", "flat", "reduces_exactly"]


def check_input(what: str, x: torch.Tensor, wires: Sequence[WireFormat], comm: Communicator) -> None:
    """Refuses a tensor that cannot travel.

    Raises:
        WireFormatError: a dtype that a quantised wire cannot carry, or a tensor that wants a gradient.
        CountsError: a scalar.
        TransportUnavailable: no tensor, or one on another device.
    """
    comm.check_device("x", x)
    for wire in wires:
        require_float(x, wire, what)
    if x.dim() < 1:
        raise CountsError(f"{what} needs a tensor of at least 1 dimension; got a scalar")
    if x.requires_grad and torch.is_grad_enabled():
        raise WireFormatError(
            f"{what} has no backward: detach x, or call it under torch.no_grad() or torch.inference_mode()"
        )


def reduces_exactly(what: str, op: object, x: torch.Tensor, wires: Sequence[WireFormat]) -> bool:
    """Whether a reduction is torch.distributed's affair: no leg is quantised, and it is no sum of floats.

    Raises:
        WireFormatError: an operation other than the sum, with a quantised leg.
        ArgumentError: an unknown operation, or one that does not take the dtype.
    """
    name = Reduction.of(op, x.dtype).name
    quantized = [wire for wire in wires if wire.quantized]
    if name != "sum" and quantized:
        raise WireFormatError(
            f'{what}: op {name!r} cannot be quantised ({quantized[0]}), only a sum can; pass wire="none" for it'
        )
    return not quantized and (name != "sum" or x.dtype not in FLOAT_DTYPES)


def check_out(what: str, out: torch.Tensor | None, x: torch.Tensor, shape: Sequence[int], place: int) -> None:
    """Refuses an output that cannot be filled.

    Args:
        shape: that it must have.
        place: bytes from where x begins to where an output may begin that shares memory with it.

    Raises:
        CountsError: another shape, dtype or layout, or memory that overlaps x's otherwise.
        TransportUnavailable: another device.
    """
    if out is None:
        return
    if not isinstance(out, torch.Tensor) or out.device != x.device:
        raise TransportUnavailable(f"{what}: out must be a tensor on {x.device}; got {_describe(out)}")
    if out.dtype != x.dtype or list(out.shape) != list(shape):
        raise CountsError(f"{what}: out is {_describe(out)}; it must be {x.dtype} {list(shape)}")
    if not out.is_contiguous() or out.is_conj() or out.is_neg():
        raise CountsError(
            f"{what}: out must be contiguous and hold its own values; it has strides {list(out.stride())}, conj "
            f"{out.is_conj()}, neg {out.is_neg()}"
        )
    if out.requires_grad and out.is_leaf and torch.is_grad_enabled():
        raise WireFormatError(f"{what}: out is a leaf that wants a gradient, and cannot be overwritten; detach it")
    if x.is_contiguous() and not (x.is_neg() or x.is_conj()) and out.data_ptr() == x.data_ptr() + place:
        return
    if x.numel() and out.numel():
        first, last = extent(x)
        start, stop = extent(out)
        if start < last and first < stop:
            raise CountsError(f"{what}: out overlaps x: it would be overwritten before it is sent")


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    return f"a {type(value).__name__}"


def flat(x: torch.Tensor) -> torch.Tensor:
    """The elements in order: 1-D, contiguous; a copy only where they do not lie so."""
    return x.resolve_conj().resolve_neg().contiguous().view(-1)


def choose_collectives(
    what: str, transport: str, wires: Sequence[WireFormat], comm: Communicator
) -> DirectCollectives | None:
    """What the direct transport works with; None for the staged one.

    Raises:
        TransportUnavailable: the transport was asked for and cannot be had, and why.
    """
    found = choose(what, transport, comm, wires, lambda: open_collectives(comm, wires=wires))
    if isinstance(found, Refusal):
        return None
    comm._settle()  # peers may wait for what is under way here, and this call waits for them
    return found
