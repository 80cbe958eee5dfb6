"""The arguments of a collective: what it is given, checked before anything is sent, and which way it goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.comm import Communicator, Group, communicator_or_default
from thinwire.comm.exact.p2p import extent
from thinwire.comm.exact.reductions import Reduction
from thinwire.comm.recorder.flight_recorder import Call
from thinwire.comm.tensors import is_dense, overwrite, require_dense
from thinwire.comm.work import Work
from thinwire.errors import CountsError, TransportUnavailable, WireFormatError
from thinwire.fused.codec import FLOAT_DTYPES, require_float
from thinwire.fused.collective import DirectCollectives, open_collectives
from thinwire.fused.counts import Segments
from thinwire.fused.partition import traffic_of
from thinwire.fused.size_switch import is_auto, resolve_wires
from thinwire.fused.transport import Refusal, check_transport, choose
from thinwire.wire import WireFormat

#: Begins a call with its input and output, both flat; what it returns ends the call.
Way = Callable[[torch.Tensor, torch.Tensor], Callable[[], object]]

_NONE = object()  # not a reduction; None would be a wrong one


@dataclass
class Arguments:
    """What a collective is called with.

    Attributes:
        what: the collective's name.
        wires: of its legs; one, where they have the same.
        exactly: whether a reduction is torch.distributed's affair: no leg is quantised, and it is no sum of floats.
    """

    what: str
    x: torch.Tensor
    wires: list[WireFormat]
    comm: Communicator
    transport: str
    async_op: bool
    exactly: bool = False

    @classmethod
    def of(
        cls,
        function: Callable[..., object],
        x: torch.Tensor,
        wires: Sequence[str | WireFormat | None],
        comm: Group | None,
        transport: str,
        async_op: bool,
        *,
        op: object = _NONE,
        alike: bool = True,
    ) -> Arguments:
        """Refuses what cannot travel. `op` is a reduction's; `alike`: all ranks' tensors have one size."""
        comm = communicator_or_default(comm)
        check_transport(transport)
        comm.check_device("x", x)
        what = function.__name__
        if op is not _NONE and any(map(is_auto, wires)) and Reduction.of(op, x.dtype).name != "sum":
            wires = ["none" if is_auto(wire) else wire for wire in wires]  # only sums are quantised
        resolved = resolve_wires(comm, what, x, wires, alike)
        check_input(what, x, resolved, comm)
        exactly = op is not _NONE and _reduces_exactly(what, op, x, resolved)
        return cls(what, x, resolved, comm, transport, async_op, exactly)

    def call(self, details: tuple[Any, ...] = ()) -> Call:
        """Begins the call, once this rank refuses nothing any more."""
        x, legs = self.x, self.wires[-1:] if self.what.startswith("all_gather") else self.wires
        return self.comm.call(self.what, x.shape, x.dtype, legs, self.transport, details)

    def describe(self, parts: Segments, row: int) -> str:
        """All that the ranks must agree on, the same text on ranks that do."""
        return f"{self.what.removesuffix('_v')} of {parts.counts} {self.x.dtype} in rows of {row} as {self.wires}"

    def run(
        self,
        op: int,
        parts: Segments,
        row: int,
        out: torch.Tensor | None,
        shape: Sequence[int],
        staged: Way,
        exactly: Way | None = None,
        details: tuple[Any, ...] = (),
    ) -> torch.Tensor | Work[torch.Tensor]:
        """Carries the call out: directly, or the way that is `staged`, or torch.distributed's, `exactly`.

        Args:
            op: ALL_REDUCE, REDUCE_SCATTER or ALL_GATHER.
            parts: elements of every rank's part.
            row: elements of a row.
            shape: of the output.
            details: for the flight recorder.
        """
        comm, wires, x = self.comm, self.wires, self.x
        with self.call(details) as call, torch.no_grad():
            direct: DirectCollectives | Refusal | None = None
            if not self.exactly:
                direct = choose(self.what, self.transport, comm, wires, lambda: open_collectives(comm, wires=wires))
            call.takes("direct" if isinstance(direct, DirectCollectives) else "staged")
            target = comm.result_memory.new_empty(x, shape) if out is None else out
            finish = None
            if isinstance(direct, DirectCollectives):
                job = direct.job(op, parts, row, wires[0], wires[-1], x.dtype)
                direct.run(job, _flat(x.detach()), target.detach().view(-1))
            elif target.numel():
                way = exactly if self.exactly and exactly is not None else staged
                finish = way(_flat(x.detach()), target.detach().view(-1))

            def end() -> torch.Tensor:
                if finish is not None:
                    finish()
                return target

            if not self.exactly:
                comm.sent(traffic_of, op, parts, row, comm.rank, wires, x.dtype)
            return comm.deliver(call, end, target.device, self.async_op)


def check_input(what: str, x: torch.Tensor, wires: Sequence[WireFormat], comm: Communicator) -> None:
    """Refuses a tensor that cannot travel."""
    # check_device is asked only where the answer is not plain: small calls are over in microseconds.
    if not isinstance(x, torch.Tensor) or x.device != comm.device or not is_dense(x):
        comm.check_device("x", x)
    for wire in wires:
        require_float(x, wire, what)
    if x.dim() < 1:
        raise CountsError(f"{what} needs a tensor of at least 1 dimension; got a scalar")
    if x.requires_grad and torch.is_grad_enabled():
        raise WireFormatError(
            f"{what} has no backward: detach x, or call it under torch.no_grad() or torch.inference_mode()"
        )


def check_out(what: str, x: torch.Tensor, out: torch.Tensor | None, shape: Sequence[int], place: int | None) -> None:
    """Refuses an output that cannot be filled.

    If it shares memory with x, it must begin `place` bytes from where x begins; None: it must not.
    """
    if out is None:
        return
    if not isinstance(out, torch.Tensor) or out.device != x.device:
        raise TransportUnavailable(f"{what}: out must be a tensor on {x.device}; got {_describe(out)}")
    require_dense("out", out)
    if out.dtype != x.dtype or list(out.shape) != list(shape):
        raise CountsError(f"{what}: out is {_describe(out)}; it must be {x.dtype} {list(shape)}")
    if not out.is_contiguous() or out.is_conj() or out.is_neg():
        raise CountsError(
            f"{what}: out must be contiguous and hold its own values; it has strides {list(out.stride())}, conj "
            f"{out.is_conj()}, neg {out.is_neg()}"
        )
    overwrite(f"{what}: out", out)
    if place is not None and x.is_contiguous() and not (x.is_neg() or x.is_conj()):
        if out.data_ptr() == x.data_ptr() + place:
            return
    if x.numel() and out.numel() and overlap(x, out):
        raise CountsError(f"{what}: out overlaps x: it would be overwritten before it is sent")


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may share memory."""
    (first, stop), (start, last) = extent(a), extent(b)
    return start < stop and first < last and a.device == b.device


def _reduces_exactly(what: str, op: object, x: torch.Tensor, wires: Sequence[WireFormat]) -> bool:
    name = Reduction.of(op, x.dtype).name
    quantized = [wire for wire in wires if wire.quantized]
    if name != "sum" and quantized:
        raise WireFormatError(
            f'{what}: op {name!r} cannot be quantised ({quantized[0]}), only a sum can; pass wire="none" for it'
        )
    return not quantized and (name != "sum" or x.dtype not in FLOAT_DTYPES)


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    return f"a {type(value).__name__}"


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The elements in order: 1-D, contiguous; a copy only where they do not lie so."""
    return x.resolve_conj().resolve_neg().contiguous().view(-1)
