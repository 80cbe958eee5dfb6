"""All-gather: every rank's rows to everyone, exactly or quantised once for all.

Quantised, a rank's rows are encoded once and the record is stored to every rank, its own included: what a row looks
like on arrival does not depend on whose it is, so all ranks end with the same bits. Exact rows take the way of
all_to_all_v.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from thinwire.comm import Group, communicator_or_default
from thinwire.comm.work import Work
from thinwire.errors import CountsError
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.codec import require_float, resolve_wire
from thinwire.fused.collective_arguments import Arguments, check_out
from thinwire.fused.counts import Counts, parse_integers
from thinwire.fused.gradients import Operation, require_linear, wants_gradient, with_gradient
from thinwire.fused.operations import in_graphs, on_communicator
from thinwire.fused.partition import gathered_parts
from thinwire.fused.staged_collective import GatherLeg
from thinwire.triton_kernels.exchange_layout import ALL_GATHER
from thinwire.wire import WireFormat


def _scatter(
    shape: torch.Size, grad_wire: str | WireFormat, comm: Group | None, transport: str, counts: list[int] | None = None
) -> Operation:
    """Backward: every rank's gradients of this rank's rows, summed in float32 or wider, in ascending rank."""
    rows = shape[0]

    def back(dy: torch.Tensor) -> torch.Tensor:
        group = communicator_or_default(comm)
        sends, receives = [rows] * group.size if counts is None else counts, [rows] * group.size
        arrived: Any = all_to_all_v(dy, sends, receives, wire=grad_wire, comm=group, transport=transport)
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
        wire: the format in transit; None means THINWIRE_WIRE, else int8. "auto" sends small messages exactly.
        comm: a communicator, a process group, or a DeviceMesh of one axis; None means the one that `init` made.
        transport: "direct", "staged", or "auto": direct where every rank can map every peer's memory, else staged; see
            `comm.explain()`. Both give the same bits. On CUDA, direct never waits for the device and can be captured in
            a CUDA graph; what goes wrong there is raised by a later call.
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
        TransportUnavailable: the direct transport was asked for and cannot be had, and why.

    Source: the semantics of MPI_Allgather, MPI standard 4.1, section 6.7.

    >>> import thinwire as tw
    >>> comm = tw.init()
    >>> tw.all_gather(torch.ones(2, 3), comm=comm).shape
    torch.Size([2, 3])
    >>> comm.close()
    """
    if wants_gradient(x) and x.dim():
        there = partial(all_gather, wire=wire, comm=comm, transport=transport)
        require_linear("all_gather", out, async_op)
        return with_gradient(x, there, _scatter(x.shape, grad_wire, comm, transport))
    given = Arguments.of(all_gather, x, ["none", wire], comm, transport, async_op)
    return _gather(given, [x.shape[0]] * given.comm.size, out)


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
    """Quantised in transit: as `all_gather`, each rank with its own number. `Communicator.all_gather_v` is exact.

    Args:
        x: [rows, ...].
        counts: rows of every rank, list of ints or integer tensor [size], the same on all ranks. None: they are
            exchanged first, which blocks the host.
        out: [sum of counts, ...].
        wire, comm, transport, async_op, grad_wire: see `all_gather`; "auto" is not for messages whose sizes differ.

    Returns:
        The output, [sum of counts, ...], or a Work.

    Raises:
        CountsError: counts that do not fit; else see `all_gather`.
    """
    if wants_gradient(x) and x.dim():
        require_linear("all_gather_v", out, async_op)
        require_float(x, resolve_wire(wire), "all_gather_v")
        here = communicator_or_default(comm)
        counts = here.exchange_counts([x.shape[0]] * here.size) if counts is None else counts
        there = partial(all_gather_v, counts=counts, wire=wire, comm=comm, transport=transport)
        back = _scatter(x.shape, grad_wire, comm, transport, parse_integers(counts, here.size, "counts"))
        return with_gradient(x, there, back)
    given = Arguments.of(all_gather_v, x, ["none", wire], comm, transport, async_op, alike=False)
    comm = given.comm
    if counts is None:
        with given.call() as call:
            parsed = comm.exchange_counts([x.shape[0]] * comm.size)
            call.tell("counts", parsed)
            return _gather(given, parsed, out)
    parsed = parse_integers(counts, comm.size, "counts")
    if parsed[comm.rank] != x.shape[0]:
        raise CountsError(f"counts[{comm.rank}] is {parsed[comm.rank]}, but x has {x.shape[0]} rows on that rank")
    return _gather(given, parsed, out)


def _gather(given: Arguments, counts: list[int], out: torch.Tensor | None) -> torch.Tensor | Work[torch.Tensor]:
    x, comm, wire = given.x, given.comm, given.wires[-1]
    shape, size, elements = [sum(counts), *x.shape[1:]], comm.size, math.prod(x.shape[1:])
    place = sum(counts[: comm.rank]) * elements * x.itemsize
    check_out(given.what, x, out, shape, -place)
    details = ("counts", counts) if given.what == "all_gather_v" else ()
    if not wire.quantized:
        if out is not None and x.numel() and out.data_ptr() + place == x.data_ptr():
            x = x.clone()  # all_to_all_v wants them apart
        with given.call(details):
            return all_to_all_v(
                x, [x.shape[0]] * size, counts, send_displs=[0] * size, out=out, wire=wire, comm=comm,
                transport=given.transport, async_op=given.async_op,
            )  # fmt: skip
    parts, row = gathered_parts([count * elements for count in counts])

    def staged(own: torch.Tensor, whole: torch.Tensor) -> Callable[[], object]:
        leg = GatherLeg(comm, parts, row, wire, x.dtype, own, given.describe(parts, row))
        return lambda: leg.recv_into(whole)

    return given.run(ALL_GATHER, parts, row, out, shape, staged, details=details)
