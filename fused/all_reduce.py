"""All-reduce: every rank gets the sum of all ranks' tensors, the same bits everywhere.

A reduce-scatter and an all-gather, each leg in a wire format of its own: `gather_wire="none"` gathers the sums in the
tensor's dtype, `"int8"` quantises them once more, and a rank's own share with the rest: ranks would disagree otherwise.
On the direct transport the kernel that sums also sends, so three launches do all of it.
"""

from __future__ import annotations

import torch

from thinwire.comm import Communicator, default_communicator
from thinwire.comm.reductions import Reduction
from thinwire.comm.work import Work, deliver
from thinwire.fused.collective_arguments import check_input, check_out, choose_collectives, flat, reduces_exactly
from thinwire.fused.partition import split_parts
from thinwire.fused.size_switch import AUTO, resolve_wires
from thinwire.fused.staged_collective import GatherLeg, ScatterLeg
from thinwire.triton_kernels.exchange_layout import ALL_REDUCE
from thinwire.wire import WireFormat

__all__ = ["all_reduce"]


def all_reduce(
    x: torch.Tensor,
    op: object = "sum",
    *,
    out: torch.Tensor | None = None,
    wire: str | WireFormat | None = None,
    gather_wire: str | WireFormat | None = None,
    comm: Communicator | None = None,
    transport: str = "auto",
    async_op: bool = False,
) -> torch.Tensor | Work[torch.Tensor]:
    """Sums x over the ranks.

    Args:
        x: any shape but a scalar, the same on all ranks, of any number of elements; it need not be contiguous.
            Quantised wires take float32, float16 and bfloat16, as a flat sequence of elements; see `all_gather`.
        op: "sum"; with both wires `none` also what `Communicator.all_reduce` takes. Sums of float32, float16 and
            bfloat16 are made in float32, in ascending rank, and rounded once; everything else is torch.distributed's.
        out: of x's shape, contiguous, filled in place; x itself is accepted.
        wire: the format of the first leg, in which the summands travel; None means THINWIRE_WIRE, else int8. "auto"
            sends small messages exactly, on both legs.
        gather_wire: the format of the second leg, in which the sums travel; None means `wire`. "none" is about a third
            more accurate, and the second leg takes 16 bits an element.
        comm, transport, async_op: see `all_gather`. On CUDA, direct is three launches for each chunk of as many
            elements as the slots hold. Staged, an asynchronous call returns when the first leg is over.

    Returns:
        The output, of x's shape, or a Work.

    Raises:
        CountsError: a scalar, or an `out` that does not fit.
        ConfigMismatch: on the direct transport, ranks that call something else, or with another size, dtype or
            quantised wire.
        WireFormatError: a dtype or an operation that the wire cannot carry, or a tensor that wants a gradient.
        PeerTimeout: a peer did not answer within the communicator's timeout.
        TransportUnavailable: the direct transport was asked for and cannot be had, and why.

    Source: the semantics of MPI_Allreduce, MPI standard 4.1, section 6.9.

    >>> import thinwire as tw
    >>> comm = tw.init()
    >>> tw.all_reduce(torch.arange(4.0), wire="none", comm=comm)
    tensor([0., 1., 2., 3.])
    >>> comm.close()
    """
    comm = comm if comm is not None else default_communicator()
    comm.check_device("x", x)
    if wire == AUTO and Reduction.of(op, x.dtype).name != "sum":
        wire = "none"  # only sums are quantised
    wires = resolve_wires(
        comm, "all_reduce", x, [wire, wire if gather_wire is None else gather_wire], transport,
        lambda t, w: all_reduce(t, wire=w, comm=comm, transport=transport),
    )  # fmt: skip
    check_input("all_reduce", x, wires, comm)
    exactly = reduces_exactly("all_reduce", op, x, wires)
    check_out("all_reduce", out, x, x.shape, 0)
    collectives = None if exactly else choose_collectives("all_reduce", transport, wires, comm)
    target = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if collectives is None and not x.numel():
        return deliver(lambda: target, target.device, async_op)
    with torch.no_grad():
        source, whole = flat(x.detach()), target.detach().view(-1)
        if exactly:
            if whole.data_ptr() != source.data_ptr():
                whole.copy_(source)
            work = comm.all_reduce(whole, op, async_op=True)

            def finish() -> torch.Tensor:
                work.wait()
                return target

            return deliver(finish, target.device, async_op)
        parts, length = split_parts(source.numel(), comm.size)
        if collectives is not None:
            collectives.run(collectives.job(ALL_REDUCE, parts, length, wires[0], wires[1], x.dtype), source, whole)
            return deliver(lambda: target, target.device, async_op)
        leg = ScatterLeg(comm, source, parts, length, wires[0])
        gather = GatherLeg(comm, parts, length, wires[1], x.dtype)
        # Here and not in wait(): what a call sends, it sends in the order of the calls, wherever ranks wait.
        gather.post_sums(leg)

        def finish_staged() -> torch.Tensor:
            gather.recv_into(whole)
            return target

        return deliver(finish_staged, target.device, async_op)
