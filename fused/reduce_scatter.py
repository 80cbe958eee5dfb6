"""Reduce-scatter: every rank gets the sum of all ranks' rows for it.

Quantise, all-to-all, dequantise and sum: each rank's rows for a peer travel as records, its own included, and the owner
adds them in ascending rank in float32. What is summed is what the records say, so the result does not depend on which
rank owns a row, nor on the transport.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from thinwire.comm import Group
from thinwire.comm.work import Work
from thinwire.errors import CountsError
from thinwire.fused.all_gather import all_gather
from thinwire.fused.collective_arguments import Arguments, check_out
from thinwire.fused.gradients import Operation, require_linear, wants_gradient, with_gradient
from thinwire.fused.operations import in_graphs
from thinwire.fused.partition import gathered_parts
from thinwire.fused.staged_collective import ScatterLeg
from thinwire.triton_kernels.exchange_layout import REDUCE_SCATTER
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
        wire: the format in transit; None means THINWIRE_WIRE, else int8. "auto" sends small messages exactly.
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
    if wants_gradient(x):
        require_linear("reduce_scatter", out, async_op, op, x.dtype)
        there = partial(reduce_scatter, op=op, wire=wire, comm=comm, transport=transport)
        return with_gradient(x, there, _gather(x.shape, grad_wire, comm, transport))
    given = Arguments.of(reduce_scatter, x, [wire], comm, transport, async_op, op=op)
    comm = given.comm
    if x.shape[0] % comm.size:
        raise CountsError(f"reduce_scatter: x has {x.shape[0]} rows, which {comm.size} ranks cannot share equally")
    share = x.numel() // comm.size
    shape = [x.shape[0] // comm.size, *x.shape[1:]]
    check_out(given.what, x, out, shape, comm.rank * share * x.itemsize)
    parts, row = gathered_parts([share] * comm.size)

    def exactly(whole: torch.Tensor, own: torch.Tensor) -> Callable[[], object]:
        # x may be overwritten where out is a part of it, so the shares are copied.
        shares = list(whole.clone().view(comm.size, share).unbind())
        return comm.reduce_scatter(own, shares, op, async_op=True).wait

    def staged(whole: torch.Tensor, own: torch.Tensor) -> Callable[[], object]:
        leg = ScatterLeg(comm, whole, parts, row, given.wires[0], given.describe(parts, row))
        return lambda: leg.sum_into(own)

    return given.run(REDUCE_SCATTER, parts, row, out, shape, staged, exactly)
