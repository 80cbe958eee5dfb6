"""Reduce-scatter: every rank gets the sum of all ranks' rows for it.

Quantise, all-to-all, dequantise and sum: each rank's rows for a peer travel as records, its own included, and the owner
adds them in ascending rank in float32. What is summed is what the records say, so the result does not depend on which
rank owns a row, nor on the transport.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from thinwire.comm import Communicator, Group, communicator_or_default
from thinwire.comm.work import Work
from thinwire.errors import CountsError
from thinwire.fused.all_gather import all_gather
from thinwire.fused.codec import named_wire
from thinwire.fused.gradients import Operation
from thinwire.fused.operations import in_graphs
from thinwire.fused.partition import gathered_parts
from thinwire.fused.prepared import named_op, prepared
from thinwire.fused.prepared_collective import PreparedCollective
from thinwire.fused.staged_collective import ScatterLeg
from thinwire.triton_kernels.leg_layout import REDUCE_SCATTER
from thinwire.wire import WireFormat


def _gather(shape: torch.Size, grad_wire: str | WireFormat, comm: Group | None, transport: str) -> Operation:
    """Backward: the gradients of all ranks' rows."""
    return partial(all_gather, wire=grad_wire, comm=comm, transport=transport)


@in_graphs(lambda num_rows, size, **_: num_rows // size, _gather)
def reduce_scatter(
    x: torch.Tensor,
    op: object = "sum",
    *,
    out: torch.Tensor | None = None,
    wire: str | WireFormat | None = None,
    comm: Group | None = None,
    transport: str = "auto",
    async_op: bool = False,
    grad_wire: str | WireFormat = "none",
) -> torch.Tensor | Work[torch.Tensor]:
    """Quantised in transit: sums x over the ranks, gives each its rows. `Communicator.reduce_scatter` is exact.

    Args:
        x: [size * rows, ...], the same shape on all ranks; rank r gets rows r * rows ... (r + 1) * rows - 1. Quantised
            wires take float32, float16 and bfloat16, as a flat sequence of elements; see `all_gather`.
        op: "sum"; with wire `none` also what `Communicator.reduce_scatter` takes. Sums of float32, float16 and
            bfloat16 are made in float32, in ascending rank, and rounded once; everything else is torch.distributed's.
        out: [rows, ...], filled in place; it may be this rank's own share of x.
        wire: the format in transit; None means THINWIRE_WIRE, else int8+h64.
        comm, transport, async_op: see `all_gather`.

        grad_wire: the format of what travels in backward; "none" sends gradients as they are. See
            `thinwire.fused.gradients`.

    Returns:
        The output, [rows, ...], or a Work.

    Raises:
        CountsError: rows that cannot be shared equally, or an `out` that does not fit.
        WireFormatError: a dtype or an operation that the wire cannot carry, or gradients wanted with `out`,
            `async_op` or another op than a sum.
        ConfigMismatch, PeerTimeout, TransportUnavailable: see `all_gather`.

    Source: the semantics of MPI_Reduce_scatter_block, MPI standard 4.1, section 6.10.

    >>> import thinwire as tw
    >>> comm = tw.init()
    >>> tw.reduce_scatter(torch.arange(4.0), wire="none", comm=comm)
    tensor([0., 1., 2., 3.])
    >>> comm.close()
    """
    comm = communicator_or_default(comm)
    op = named_op(comm, x, op)
    call = prepared(comm, PreparedReduceScatter, x, op, transport, named_wire(wire))
    return call(comm, x, out, async_op, grad_wire)


class PreparedReduceScatter(PreparedCollective):
    """A reduce-scatter but for its tensors."""

    def __init__(
        self, comm: Communicator, x: torch.Tensor, op: object, transport: str, wire: str | WireFormat | None
    ) -> None:
        super().__init__(comm, "reduce_scatter", REDUCE_SCATTER, x, [wire], transport, op)
        if x.shape[0] % comm.size:
            raise CountsError(f"reduce_scatter: x has {x.shape[0]} rows, which {comm.size} ranks cannot share equally")
        share = x.numel() // comm.size
        self.parts, self.row = gathered_parts([share] * comm.size)
        self.out_shape = (x.shape[0] // comm.size, *x.shape[1:])
        self.place = comm.rank * share * x.itemsize

    def back(self, comm: Communicator, grad_wire: str | WireFormat) -> Operation:
        """See `PreparedCall.back`."""
        return _gather(self.shape, grad_wire, comm, self.transport)

    def staged(self, comm: Communicator, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        """See `PreparedCollective.staged`."""
        leg = ScatterLeg(comm, source, self.parts, self.row, self.wires[0], self.described)
        return lambda: leg.sum_into(target)

    def reduced(self, comm: Communicator, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        """See `PreparedCollective.reduced`."""
        # x may be overwritten where out is a part of it, so the shares are copied.
        shares = list(source.clone().view(comm.size, -1).unbind())
        return comm.reduce_scatter(target, shares, self.reduction, async_op=True).wait
