"""What follows from a call's arguments is settled once, and kept for calls that differ in their tensors alone.

`find` looks a call up by its arguments. There is no other way into a collective, so calls give the same whether they
were made before or not. Transports read of a call what they need, and keep with it what they made of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from thinwire.comm import Communicator
from thinwire.comm.exact import Reduction, extent
from thinwire.comm.tensors import is_plain, overwrite, require_dense
from thinwire.errors import ArgumentError, CountsError, WireFormatError
from thinwire.fused.codec import FLOAT_DTYPES, require_float, resolve_wire, wire_of_rows
from thinwire.fused.counts import Segments, equal_split, parse_integers, receive_segments, send_segments
from thinwire.fused.transport import check_transport
from thinwire.triton_kernels.leg_layout import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from thinwire.wire import WireFormat

_MOST_KEPT = 1024  # of one communicator

#: Of a communicator, x's shape and the rows of every rank: the elements of every rank's part of the whole tensor, those
#: of a row, and the output's shape.
Cut = Callable[[Communicator, torch.Size, Sequence[int]], tuple[Segments, int, tuple[int, ...]]]

#: Arguments of all-to-all-v that have a number for each rank.
_NUMBERS = ("send_counts", "recv_counts", "send_displs", "recv_displs")

_C = TypeVar("_C", bound="Call")


class Call:
    """A call but for its tensors. It holds none, no communicator, and nothing that a caller could change.

    Args:
        name: the operation's.
        x: an input like those to come, on the communicator's device; it is not kept.
        wires: of its legs; one, where they have the same.

    Attributes:
        recorded: what `Communicator.call` takes.
        carrier: its transport, once one was chosen.

    Raises:
        ArgumentError, WireFormatError, CountsError, TransportUnavailable: nothing like x can travel.
    """

    recorded: tuple[Any, ...]
    carrier: Any = None

    def __init__(self, name: str, x: torch.Tensor, wires: Sequence[WireFormat], transport: str) -> None:
        check_transport(transport)
        self.name, self.wires, self.transport = name, wires, transport
        for wire in wires:
            require_float(x, wire, name)
        if x.dim() < 1:
            raise CountsError(f"{name} needs a tensor of at least 1 dimension; got a scalar")
        self.shape, self.dtype = x.shape, x.dtype


class CollectiveCall(Call):
    """A call of all-reduce, reduce-scatter or all-gather.

    Args:
        op: ALL_REDUCE, REDUCE_SCATTER or ALL_GATHER, which has a first leg that nothing travels on.
        reduction: what it does to the ranks' tensors, if anything.
        counts: rows of every rank; None: as many as of this one.

    Attributes:
        parts, row, out_shape: see `Cut`.
        place: bytes from where x begins to where an output may begin that shares its memory.
        exactly: whether it is torch.distributed's affair: a reduction without a quantised leg, and no sum of floats.
        job: what the direct transport made of it.
    """

    job: Any = None

    def __init__(
        self, name: str, op: int, cut: Cut, comm: Communicator, x: torch.Tensor, reduction: str, transport: str,
        counts: Sequence[int] | None, *wires: str | WireFormat | None,
    ) -> None:  # fmt: skip
        super().__init__(name, x, [resolve_wire(wire) for wire in wires], transport)
        self.op, self.reduction, self.counts = op, reduction, list(counts or [x.shape[0]] * comm.size)
        self.exactly = op != ALL_GATHER and self._reduces_exactly(Reduction.of(reduction, x.dtype).name)
        self.parts, self.row, self.out_shape = cut(comm, x.shape, self.counts)
        sign = {ALL_REDUCE: 0, REDUCE_SCATTER: 1, ALL_GATHER: -1}[op]  # a part of the other is: neither, out, x
        self.place = sign * self.parts.displs[comm.rank] * x.itemsize
        legs, details = self.wires[-1:] if op == ALL_GATHER else self.wires, ("counts", self.counts) if counts else ()
        self.recorded = name, self.shape, self.dtype, legs, transport, details

    def _reduces_exactly(self, reduction: str) -> bool:
        quantized = [wire for wire in self.wires if wire.quantized]
        if reduction != "sum" and quantized:
            raise WireFormatError(
                f"{self.name}: op {reduction!r} cannot be quantised ({quantized[0]}), only a sum can; "
                'pass wire="none" for it'
            )
        return not quantized and (reduction != "sum" or self.dtype not in FLOAT_DTYPES)

    @property
    def described(self) -> str:
        """All that ranks must agree on, the same text on ranks that do."""
        name = self.name.removesuffix("_v")
        return f"{name} of {self.parts.counts} {self.dtype} in rows of {self.row} as {self.wires}"


class RowCall(Call):
    """A call of all-to-all-v.

    Args:
        numbers: see `_NUMBERS`; each None, or a tuple.

    Attributes:
        tail: the shape of a row. rows: of the output, where this is known.
        sends, receives: rows for each rank, within x, and from each, within the output; None where these are not known.
        route: how contiguous rows go, once the direct transport knows: its own affair.
    """

    receives: Segments | None = None
    route: Any = None

    def __init__(
        self, comm: Communicator, x: torch.Tensor, wire: str | WireFormat | None, transport: str, check: bool,
        *numbers: Sequence[int] | None,
    ) -> None:  # fmt: skip
        super().__init__("all_to_all_v", x, [wire_of_rows(wire, x)], transport)
        sends, receives, self.send_displs, self.recv_displs = (
            None if values is None else parse_integers(values, comm.size, name)
            for values, name in zip(numbers, _NUMBERS, strict=True)
        )
        if sends is None:
            if any(values is not None for values in numbers):
                raise CountsError("recv_counts, send_displs and recv_displs need send_counts, which was not passed")
            sends = receives = equal_split(x.shape[0], comm.size)
        self.wire, self.check, self.tail, self.out_shape = self.wires[0], check, x.shape[1:], (-1, *x.shape[1:])
        self.sends = send_segments(sends, self.send_displs, x.shape[0])
        details: tuple[Any, ...] = ("send_counts", sends)
        if receives is not None:
            if not check and sends[comm.rank] != receives[comm.rank]:
                raise CountsError(
                    f"rank {comm.rank} sends itself {sends[comm.rank]} rows but expects {receives[comm.rank]}"
                )
            self.receives = receive_segments(receives, self.recv_displs, None)
            self.rows = self.receives.rows
            details += ("recv_counts", receives)
        self.recorded = self.name, self.shape, self.dtype, self.wire, transport, details


def find(comm: Communicator, make: Callable[..., _C], x: torch.Tensor, *arguments: Any) -> _C:
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
