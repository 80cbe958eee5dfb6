"""All-gather: every rank's rows to everyone, exactly or quantised once for all.

Quantised, a rank's rows are encoded once and the record is stored to every rank, its own included: what a row looks
like on arrival does not depend on whose it is, so all ranks end with the same bits. Exact rows take the way of
all_to_all_v.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from thinwire.comm import Communicator, Group, communicator_or_default
from thinwire.comm.work import Work
from thinwire.errors import CountsError
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.codec import named_wire, resolve_wire
from thinwire.fused.counts import Counts, parse_integers
from thinwire.fused.gradients import Operation, require_linear, wants_gradient
from thinwire.fused.operations import in_graphs, on_communicator
from thinwire.fused.partition import gathered_parts
from thinwire.fused.prepared import check_out, overlap, prepared
from thinwire.fused.prepared_collective import PreparedCollective
from thinwire.fused.staged_collective import GatherLeg
from thinwire.triton_kernels.leg_layout import ALL_GATHER
from thinwire.wire import WireFormat


def _scatter(
    shape: torch.Size, grad_wire: str | WireFormat, comm: Group | None, transport: str, counts: list[int] | None = None
) -> Operation:
    """Backward: every rank's gradients of this rank's rows, summed in float32 or wider, in ascending rank."""
    rows = shape[0]

    def back(dy: torch.Tensor) -> torch.Tensor:
        group, through = communicator_or_default(comm), "auto" if transport == "two_level" else transport
        sends, receives = [rows] * group.size if counts is None else counts, [rows] * group.size
        arrived: Any = all_to_all_v(dy, sends, receives, wire=grad_wire, comm=group, transport=through)
        total = torch.zeros(shape, dtype=torch.promote_types(dy.dtype, torch.float32), device=dy.device)
        for part in arrived.split(rows) if rows else ():
            total += part
        return total.to(dy.dtype)

    return back


@in_graphs(lambda num_rows, size, **_: num_rows * size, _scatter)
def all_gather(
    x: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    wire: str | WireFormat | None = None,
    comm: Group | None = None,
    transport: str = "auto",
    async_op: bool = False,
    grad_wire: str | WireFormat = "none",
) -> torch.Tensor | Work[torch.Tensor]:
    """Quantised in transit: the rows of all ranks, in rank order. `Communicator.all_gather` is exact.

    Every rank has the same number of them, and gets the same bits.

    Args:
        x: [rows, ...]. Quantised wires take float32, float16 and bfloat16, as a flat sequence of elements in whose
            groups consecutive ones share a scale (`int8:row`: 4096 of them, or 1024 in short messages); `none` takes
            any dtype.
        out: [size * rows, ...], filled in place; x may be this rank's place in it.
        wire: the format in transit; None means THINWIRE_WIRE, else int8+h64.
        comm: a communicator, a process group, or a DeviceMesh of one axis; None means the one that `init` made.
        transport: "direct", "staged", "two_level", or "auto": direct where every rank can map every peer's memory; two
            levels on CPU ranks of several hosts with equally many ranks, more than one; else staged; see
            `comm.explain()`. All gather the same bits, and direct and staged sum to the same. Of two levels rows cross
            once a host, sums are made within hosts first, in float32, and only what crosses is quantised. On CUDA,
            direct never waits for the device and can be captured in a CUDA graph; what goes wrong there is raised by a
            later call.
        async_op: return a Work whose `wait()` gives the tensor. x and out must not be touched before.

        grad_wire: the format of what travels in backward; "none" sends gradients as they are. See
            `thinwire.fused.gradients`.

    Returns:
        The output, [size * rows, ...], or a Work.

    Raises:
        CountsError: a scalar, or an `out` that does not fit; on the direct transport also, with `none`, a peer that
            sends something else.
        ConfigMismatch: on the direct transport, ranks that call something else, or with another size, dtype or
            quantised wire.
        WireFormatError: a dtype that the wire cannot carry, or gradients wanted with `out` or `async_op`.
        PeerTimeout: a peer did not answer within the communicator's timeout.
        TransportUnavailable: the transport that was asked for cannot be had, and why.

    Source: the semantics of MPI_Allgather, MPI standard 4.1, section 6.7.

    >>> import thinwire as tw
    >>> comm = tw.init()
    >>> tw.all_gather(torch.ones(2, 3), comm=comm).shape
    torch.Size([2, 3])
    >>> comm.close()
    """
    comm = communicator_or_default(comm)
    call = prepared(comm, PreparedAllGather, x, "all_gather", transport, None, named_wire(wire))
    return call(comm, x, out, async_op, grad_wire)


@on_communicator
def all_gather_v(
    x: torch.Tensor,
    counts: Counts | None = None,
    *,
    out: torch.Tensor | None = None,
    wire: str | WireFormat | None = None,
    comm: Group | None = None,
    transport: str = "auto",
    async_op: bool = False,
    grad_wire: str | WireFormat = "none",
) -> torch.Tensor | Work[torch.Tensor]:
    """Quantised in transit: as `all_gather`, each rank with its own number of rows.

    Args:
        x: [rows, ...].
        counts: rows of every rank, list of ints or integer tensor [size], the same on all ranks. None: they are
            exchanged first, which blocks the host.
        out: [sum of counts, ...].
        wire, comm, transport, async_op, grad_wire: see `all_gather`.

    Returns:
        The output, [sum of counts, ...], or a Work.

    Raises:
        CountsError: counts that do not fit; else see `all_gather`.
    """
    comm = communicator_or_default(comm)
    wire = named_wire(wire)
    if counts is not None:
        counts = tuple(parse_integers(counts, comm.size, "counts"))
        call = prepared(comm, PreparedAllGather, x, "all_gather_v", transport, counts, wire)
        return call(comm, x, out, async_op, grad_wire)
    # What is refused is refused before ranks meet.
    prepared(comm, PreparedAllGather, x, "all_gather_v", transport, None, wire)
    if wants_gradient(x):
        require_linear("all_gather_v", out, async_op)
    with comm.call("all_gather_v", x.shape, x.dtype, resolve_wire(wire), transport) as recorded:
        counts = comm.exchange_counts([x.shape[0]] * comm.size)
        recorded.tell("counts", counts)
        call = PreparedAllGather(comm, x, "all_gather_v", transport, tuple(counts), wire)
        return call(comm, x, out, async_op, grad_wire)


class PreparedAllGather(PreparedCollective):
    """An all-gather but for its tensors.

    Args:
        counts: rows of every rank; None: all have as many as this one.
    """

    def __init__(
        self,
        comm: Communicator,
        x: torch.Tensor,
        what: str,
        transport: str,
        counts: tuple[int, ...] | None,
        wire: str | WireFormat | None,
    ) -> None:
        super().__init__(comm, what, ALL_GATHER, x, ["none", wire], transport)
        if counts is not None:
            if counts[comm.rank] != x.shape[0]:
                raise CountsError(
                    f"counts[{comm.rank}] is {counts[comm.rank]}, but x has {x.shape[0]} rows on that rank"
                )
            self.details = ("counts", list(counts))
        self._counts = [x.shape[0]] * comm.size if counts is None else list(counts)
        elements = math.prod(x.shape[1:])
        self.parts, self.row = gathered_parts([count * elements for count in self._counts])
        self.out_shape = (sum(self._counts), *x.shape[1:])
        self.place = -self.parts.displs[comm.rank] * x.itemsize

    def back(self, comm: Communicator, grad_wire: str | WireFormat) -> Operation:
        """See `PreparedCall.back`."""
        return _scatter(self.shape, grad_wire, comm, self.transport, self._counts)

    def run(
        self, comm: Communicator, x: torch.Tensor, out: torch.Tensor | None, async_op: bool
    ) -> torch.Tensor | Work[torch.Tensor]:
        """See `PreparedCall.run`. Exact rows take the way of all_to_all_v, on one level."""
        wire, several = self.wires[-1], len(comm.hosts) > 1 and self.transport in ("auto", "two_level")
        if wire.quantized or several and (self._carrier or self._choose(comm)).name == "two_level":
            return super().run(comm, x, out, async_op)
        if out is not None:
            check_out(self.what, x, out, self.out_shape, self.place)
            if overlap(x, out):
                x = x.clone()  # all_to_all_v wants them apart
        rows, size = x.shape[0], comm.size
        with comm.call(self.what, self.shape, self.dtype, [wire], self.transport, self.details):
            return all_to_all_v(
                x, [rows] * size, self._counts, send_displs=[0] * size, out=out, wire=wire, comm=comm,
                transport=self.transport, async_op=async_op,
            )  # fmt: skip

    def staged(self, comm: Communicator, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        """See `PreparedCollective.staged`."""
        leg = GatherLeg(comm, self.parts, self.row, self.wires[-1], self.dtype, source, self.described)
        return lambda: leg.recv_into(target)
