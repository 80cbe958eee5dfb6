"""Reduce-scatter: every rank gets the sum of all ranks' rows for it.

Quantise, all-to-all, dequantise and sum: each rank's rows for a peer travel as records, its own included, and the owner
adds them in ascending rank in float32. What is summed is what the records say, so the result does not depend on which
rank owns a row, nor on the transport.
"""

from __future__ import annotations

import torch

from thinwire.comm import Communicator, default_communicator
from thinwire.comm.reductions import Reduction
from thinwire.comm.work import Work, deliver
from thinwire.errors import CountsError
from thinwire.fused.collective_arguments import check_input, check_out, choose_collectives, flat, reduces_exactly
from thinwire.fused.partition import even_parts
from thinwire.fused.size_switch import AUTO, resolve_wires
from thinwire.fused.staged_collective import ScatterLeg
from thinwire.triton_kernels.exchange_layout import REDUCE_SCATTER
from thinwire.wire import WireFormat

__all__ = ["reduce_scatter"]


def reduce_scatter(
    x: torch.Tensor,
    op: object = "sum",
    *,
    out: torch.Tensor | None = None,
    wire: str | WireFormat | None = None,
    comm: Communicator | None = None,
    transport: str = "auto",
    async_op: bool = False,
) -> torch.Tensor | Work[torch.Tensor]:
    """Sums x over the ranks, and gives each rank its share of the rows.

    Args:
        x: [size * rows, ...], the same shape on all ranks; rank r gets rows r * rows ... (r + 1) * rows - 1. Quantised
            wires take float32, float16 and bfloat16, as a flat sequence of elements; see `all_gather`.
        op: "sum"; with wire `none` also what `Communicator.reduce_scatter` takes. Sums of float32, float16 and
            bfloat16 are made in float32, in ascending rank, and rounded once; everything else is torch.distributed's.
        out: [rows, ...], filled in place; it may be this rank's own share of x.
        wire: the format in transit; None means THINWIRE_WIRE, else int8. "auto" sends small messages exactly.
        comm, transport, async_op: see `all_gather`.

    Returns:
        The output, [rows, ...], or a Work.

    Raises:
        CountsError: rows that cannot be shared equally, or an `out` that does not fit.
        ConfigMismatch: on the direct transport, ranks that call something else, or with another size, dtype or
            quantised wire.
        WireFormatError: a dtype or an operation that the wire cannot carry, or a tensor that wants a gradient.
        PeerTimeout: a peer did not answer within the communicator's timeout.
        TransportUnavailable: the direct transport was asked for and cannot be had, and why.

    Source: the semantics of MPI_Reduce_scatter_block, MPI standard 4.1, section 6.10.

    >>> import thinwire as tw
    >>> comm = tw.init()
    >>> tw.reduce_scatter(torch.arange(4.0), wire="none", comm=comm)
    tensor([0., 1., 2., 3.])
    >>> comm.close()
    """
    comm = comm if comm is not None else default_communicator()
    comm.check_device("x", x)
    if wire == AUTO and Reduction.of(op, x.dtype).name != "sum":
        wire = "none"  # only sums are quantised
    (wire,) = resolve_wires(
        comm, "reduce_scatter", x, [wire], transport,
        lambda t, w: reduce_scatter(t, wire=w, comm=comm, transport=transport),
    )  # fmt: skip
    check_input("reduce_scatter", x, [wire], comm)
    exactly = reduces_exactly("reduce_scatter", op, x, [wire])
    if x.shape[0] % comm.size:
        raise CountsError(f"reduce_scatter: x has {x.shape[0]} rows, which {comm.size} ranks cannot share equally")
    rows = x.shape[0] // comm.size
    shape = [rows, *x.shape[1:]]
    share = x.numel() // comm.size
    check_out("reduce_scatter", out, x, shape, comm.rank * share * x.itemsize)
    collectives = None if exactly else choose_collectives("reduce_scatter", transport, [wire], comm)
    target = x.new_empty(shape) if out is None else out
    if collectives is None and not share:
        return deliver(lambda: target, target.device, async_op)
    with torch.no_grad():
        whole, own = flat(x.detach()), target.detach().view(-1)
        if exactly:
            # x may be overwritten where out is a part of it, so the shares are copied.
            shares = list(whole.clone().view(comm.size, share).unbind())
            work = comm.reduce_scatter(own, shares, op, async_op=True)

            def finish() -> torch.Tensor:
                work.wait()
                return target

            return deliver(finish, target.device, async_op)
        parts, length = even_parts(whole.numel(), comm.size)
        if collectives is not None:
            collectives.run(collectives.job(REDUCE_SCATTER, parts, length, wire, wire, x.dtype), whole, own)
            return deliver(lambda: target, target.device, async_op)
        leg = ScatterLeg(comm, whole, parts, length, wire)

        def finish_staged() -> torch.Tensor:
            leg.sum_into(own)
            return target

        return deliver(finish_staged, target.device, async_op)
