"""All-reduce: every rank gets the sum of all ranks' tensors, the same bits everywhere.

A reduce-scatter and an all-gather, each leg in a wire format of its own: `gather_wire="none"` gathers the sums in the
tensor's dtype, `"int8"` quantises them once more, and a rank's own share with the rest: ranks would disagree otherwise.
On the direct transport the kernel that sums also sends, so three kernels, and two that wait, do all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from thinwire.comm import Communicator, Group, communicator_or_default
from thinwire.comm.work import Work
from thinwire.fused.codec import named_wire
from thinwire.fused.gradients import Operation
from thinwire.fused.operations import in_graphs
from thinwire.fused.partition import split_parts
from thinwire.fused.prepared import named_op, prepared
from thinwire.fused.prepared_collective import PreparedCollective
from thinwire.fused.staged_collective import GatherLeg, ScatterLeg
from thinwire.triton_kernels.leg_layout import ALL_REDUCE
from thinwire.wire import WireFormat


def _sum(shape: torch.Size, grad_wire: str | WireFormat, comm: Group | None, transport: str) -> Operation:
    """Backward: the gradients of all ranks' results, summed in turn."""
    return partial(all_reduce, wire=grad_wire, comm=comm, transport=transport)


@in_graphs(lambda num_rows, **_: num_rows, _sum)
def all_reduce(
    x: torch.Tensor,
    op: object = "sum",
    *,
    out: torch.Tensor | None = None,
    wire: str | WireFormat | None = None,
    gather_wire: str | WireFormat | None = None,
    comm: Group | None = None,
    transport: str = "auto",
    async_op: bool = False,
    grad_wire: str | WireFormat = "none",
) -> torch.Tensor | Work[torch.Tensor]:
    """Quantised in transit unless asked otherwise: sums x over the ranks. `Communicator.all_reduce` is exact.

    Args:
        x: any shape but a scalar, the same on all ranks, of any number of elements; it need not be contiguous.
            Quantised wires take float32, float16 and bfloat16, as a flat sequence of elements; see `all_gather`.
        op: "sum"; with both wires `none` also what `Communicator.all_reduce` takes. Sums of float32, float16 and
            bfloat16 are made in float32, in ascending rank, and rounded once; everything else is torch.distributed's.
        out: of x's shape, contiguous, filled in place; x itself is accepted.
        wire: the format of the first leg, in which the summands travel; None means THINWIRE_WIRE, else int8+h64.
        gather_wire: the format of the second leg, in which the sums travel; None means `wire`. "none" is about a third
            more accurate, and the second leg takes 16 bits an element.
        comm, transport, async_op: see `all_gather`. On a GPU, direct is five launches for each chunk of as many
            elements as the slots hold. Staged, an asynchronous call returns when the first leg is over.

        grad_wire: the format of both legs of what travels in backward; "none" sends gradients as they are. See
            `thinwire.fused.gradients`.

    Returns:
        The output, of x's shape, or a Work.

    Raises:
        CountsError: a scalar, or an `out` that does not fit.
        WireFormatError: a dtype or an operation that the wire cannot carry, or gradients wanted with `out`,
            `async_op` or another op than a sum.
        ConfigMismatch, PeerTimeout, TransportUnavailable: see `all_gather`.

    Source: the semantics of MPI_Allreduce, MPI standard 4.1, section 6.9.

    >>> import thinwire as tw
    >>> comm = tw.init()
    >>> tw.all_reduce(torch.arange(4.0), wire="none", comm=comm)
    tensor([0., 1., 2., 3.])
    >>> comm.close()
    """
    comm = comm if type(comm) is Communicator else communicator_or_default(comm)
    op = named_op(comm, x, op)
    legs = [named_wire(wire)] if gather_wire is None else [named_wire(wire), gather_wire]
    call = prepared(comm, PreparedAllReduce, x, op, transport, *legs)
    return call(comm, x, out, async_op, grad_wire)


class PreparedAllReduce(PreparedCollective):
    """An all-reduce but for its tensors."""

    def __init__(
        self, comm: Communicator, x: torch.Tensor, op: object, transport: str, *wires: str | WireFormat | None
    ) -> None:
        super().__init__(comm, "all_reduce", ALL_REDUCE, x, wires, transport, op)
        self.parts, self.row = split_parts(x.numel(), comm.size)
        self.out_shape, self.place = tuple(x.shape), 0

    def back(self, comm: Communicator, grad_wire: str | WireFormat) -> Operation:
        """See `PreparedCall.back`."""
        return _sum(self.shape, grad_wire, comm, self.transport)

    def staged(self, comm: Communicator, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        """See `PreparedCollective.staged`."""
        leg = ScatterLeg(comm, source, self.parts, self.row, self.wires[0], self.described)
        # Here and not in wait(): what a call sends, it sends in the order of the calls, wherever ranks wait.
        gather = GatherLeg(comm, self.parts, self.row, self.wires[-1], self.dtype, leg, self.described)
        return lambda: gather.recv_into(target)

    def reduced(self, comm: Communicator, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        """See `PreparedCollective.reduced`."""
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)
        return comm.all_reduce(target, self.reduction, async_op=True).wait
