"""All-reduce: every rank gets the sum of all ranks' tensors, the same bits everywhere.

A reduce-scatter and an all-gather, each leg in a wire format of its own: `gather_wire="none"` gathers the sums in the
tensor's dtype, `"int8"` quantises them once more, and a rank's own share with the rest: ranks would disagree otherwise.
On the direct transport the kernel that sums also sends, so three kernels, and two that wait, do all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from thinwire.comm import Group, communicator_or_default
from thinwire.comm.work import Work
from thinwire.fused.codec import default_wire
from thinwire.fused.collective import KEY, DirectCollectives
from thinwire.fused.collective_arguments import Arguments, check_out
from thinwire.fused.gradients import Operation, require_linear, wants_gradient, with_gradient
from thinwire.fused.operations import in_graphs
from thinwire.fused.partition import split_parts
from thinwire.fused.size_switch import is_auto
from thinwire.fused.staged_collective import GatherLeg, ScatterLeg
from thinwire.triton_kernels.exchange_layout import ALL_REDUCE
from thinwire.wire import WireFormat

_NOT_STAGED = ("auto", "direct")
_NAMES = (str, WireFormat)


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
    """Quantised in transit, int8 unless asked otherwise: sums x over the ranks. `Communicator.all_reduce` is exact.

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
        comm, transport, async_op: see `all_gather`. On CUDA, direct is five launches for each chunk of as many
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
    ordinary = type(op) is str and op == "sum" and type(transport) is str and transport in _NOT_STAGED
    if ordinary and async_op is False and not wants_gradient(x):
        comm = communicator_or_default(comm)
        direct = comm.at_once(KEY)
        first = default_wire() if wire is None else wire
        named = type(first) in _NAMES and (gather_wire is None or type(gather_wire) in _NAMES)
        if type(direct) is DirectCollectives and named:
            if not (is_auto(first) or is_auto(gather_wire)):
                summed = direct.sum_plainly(x, out, first, gather_wire, comm)
                if summed is not None:
                    return summed
    if wants_gradient(x):
        require_linear("all_reduce", out, async_op, op, x.dtype)
        there = partial(all_reduce, op=op, wire=wire, gather_wire=gather_wire, comm=comm, transport=transport)
        return with_gradient(x, there, _sum(x.shape, grad_wire, comm, transport))
    legs = [wire] if gather_wire is None else [wire, gather_wire]
    given = Arguments.of(all_reduce, x, legs, comm, transport, async_op, op=op)
    check_out(given.what, x, out, x.shape, 0)
    comm, wires = given.comm, given.wires
    parts, row = split_parts(x.numel(), comm.size)

    def exactly(source: torch.Tensor, whole: torch.Tensor) -> Callable[[], object]:
        if whole.data_ptr() != source.data_ptr():
            whole.copy_(source)
        return comm.all_reduce(whole, op, async_op=True).wait

    def staged(source: torch.Tensor, whole: torch.Tensor) -> Callable[[], object]:
        described = given.describe(parts, row)
        leg = ScatterLeg(comm, source, parts, row, wires[0], described)
        # Here and not in wait(): what a call sends, it sends in the order of the calls, wherever ranks wait.
        gather = GatherLeg(comm, parts, row, wires[-1], x.dtype, leg, described)
        return lambda: gather.recv_into(whole)

    return given.run(ALL_REDUCE, parts, row, out, x.shape, staged, exactly)
