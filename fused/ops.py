"""All-gather, reduce-scatter and all-reduce: a table of operations, and the one way that all of their calls take.

In an all-gather a quantised row is encoded once, and the record is stored to every rank, its own included: what a row
looks like on arrival does not depend on whose it is, so all ranks end with the same bits. Exact rows take the way of
all_to_all_v.

In a reduce-scatter each rank's rows for a peer travel as records, its own included, and the owner adds them in
ascending rank in float32. What is summed is what the records say, so the result does not depend on which rank owns a
row, nor on the transport.

An all-reduce is the second and then the first, each leg in a wire format of its own: `gather_wire="none"` gathers the
sums in the tensor's dtype, `"int8"` quantises them once more, and a rank's own share with the rest: ranks would
disagree otherwise. On the direct transport the kernel that sums also sends, so three kernels, and two that wait, do all
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from thinwire.comm import Communicator, Group, communicator_or_default, on_communicator
from thinwire.comm.exact import Reduction
from thinwire.comm.work import Work
from thinwire.errors import CountsError
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.call import CollectiveCall, Cut, check_out, find, overlap
from thinwire.fused.codec import named_wire, resolve_wire
from thinwire.fused.collective import DirectCollectives, open_collectives
from thinwire.fused.counts import Counts, Segments, parse_integers
from thinwire.fused.gradients import Operation, require_linear, wants_gradient, with_gradient
from thinwire.fused.partition import gathered_parts, split_parts
from thinwire.fused.staged_collective import StagedCollectives
from thinwire.fused.transport import choose
from thinwire.fused.two_level import TwoLevelCollectives, open_two_levels
from thinwire.triton_kernels import leg_layout
from thinwire.wire import WireFormat

if TYPE_CHECKING:
    from thinwire.fused.pulled_legs import PulledLegs

    Carrier = DirectCollectives | PulledLegs | StagedCollectives | TwoLevelCollectives


class Op:
    """All-reduce, reduce-scatter, all-gather, or another collective with the legs of one of them.

    Args:
        name: of its function, for people.
        legs: ALL_REDUCE, REDUCE_SCATTER or ALL_GATHER.
        cut: see `Cut`; raises CountsError for a tensor that cannot be cut.
        transposed: the function that carries gradients back; None where `back` does.
    """

    def __init__(self, name: str, legs: int, cut: Cut, transposed: Callable[..., Any] | None = None) -> None:
        self.name, self.transposed, self.make = name, transposed, partial(CollectiveCall, name, legs, cut)

    def __call__(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None,
        wires: Sequence[str | WireFormat | None],
        comm: Group | None,
        transport: str,
        async_op: bool,
        grad_wire: str | WireFormat,
        reduction: object = "sum",
        counts: tuple[int, ...] | None = None,
    ) -> torch.Tensor | Work[torch.Tensor]:
        """The call with these tensors, and its gradients.

        Args:
            wires: of its legs; one, where they have the same.
            counts: rows of every rank, where they differ.
        """
        comm = comm if type(comm) is Communicator else communicator_or_default(comm)
        if type(reduction) is not str:  # torch's equal ints, and another text is for `Reduction.of` to refuse
            comm.check_device("x", x)
            reduction = Reduction.of(reduction, x.dtype).name
        call = find(comm, self.make, x, reduction, transport, counts, *map(named_wire, wires))
        if not x.requires_grad or not torch.is_grad_enabled():
            return self.run(comm, call, x, out, async_op)
        require_linear(self.name, out, async_op, reduction, x.dtype)
        back: Operation = partial(self.back, call, wire=grad_wire, comm=comm, transport=transport)
        return with_gradient(x, partial(self.run, comm, call, out=None, async_op=False), back)

    def run(
        self, comm: Communicator, call: CollectiveCall, x: torch.Tensor, out: torch.Tensor | None, async_op: bool
    ) -> torch.Tensor | Work[torch.Tensor]:
        """The call with these tensors. Of x all was asked."""
        if out is not None:
            check_out(self.name, x, out, call.out_shape, call.place)
        with comm.call(*call.recorded) as recorded:
            carrier: Carrier = call.carrier or self.choose(comm, call)
            recorded.takes(carrier.name)
            target = comm.result_memory.new_empty(x, call.out_shape) if out is None else out
            finish = carrier.begin(comm, call, x, target)

            def end() -> torch.Tensor:
                if finish is not None:
                    with torch.no_grad():
                        finish()
                return target

            return comm.deliver(recorded, end, target.device, async_op)

    def choose(self, comm: Communicator, call: CollectiveCall) -> Carrier:
        """The call's transport from now on."""
        if call.exactly:
            call.carrier = StagedCollectives(self.name, "torch.distributed reduces")
        else:
            open_, wires = open_two_levels if len(comm.hosts) > 1 else open_collectives, call.wires
            opened = partial(open_, comm, wires=wires)
            call.carrier = choose(self.name, call.transport, comm, wires, opened, StagedCollectives)
        carrier: Carrier = call.carrier
        return carrier

    def back(self, call: CollectiveCall, dy: torch.Tensor, **options: Any) -> Any:
        """The gradients of x, from those of the result. `options`: wire, comm and transport."""
        assert self.transposed is not None
        return self.transposed(dy, **options)


@on_communicator
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
    return ALL_GATHER(x, out, ("none", wire), comm, transport, async_op, grad_wire)


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
    comm, wires = communicator_or_default(comm), ("none", named_wire(wire))
    if counts is not None:
        counts = tuple(parse_integers(counts, comm.size, "counts"))
        return ALL_GATHER_V(x, out, wires, comm, transport, async_op, grad_wire, counts=counts)
    find(comm, ALL_GATHER_V.make, x, "sum", transport, None, *wires)  # what is refused is refused before ranks meet
    if wants_gradient(x):
        require_linear("all_gather_v", out, async_op)
    with comm.call("all_gather_v", x.shape, x.dtype, resolve_wire(wires[1]), transport) as recorded:
        counts = comm.exchange_counts([x.shape[0]] * comm.size)
        recorded.tell("counts", counts)
        return ALL_GATHER_V(x, out, wires, comm, transport, async_op, grad_wire, counts=tuple(counts))


@on_communicator
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
    return REDUCE_SCATTER(x, out, (wire,), comm, transport, async_op, grad_wire, reduction=op)


@on_communicator
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
    wires = (wire,) if gather_wire is None else (wire, gather_wire)
    return ALL_REDUCE(x, out, wires, comm, transport, async_op, grad_wire, reduction=op)


class _Gather(Op):
    def run(
        self, comm: Communicator, call: CollectiveCall, x: torch.Tensor, out: torch.Tensor | None, async_op: bool
    ) -> torch.Tensor | Work[torch.Tensor]:
        """See `Op.run`. Exact rows take the way of all_to_all_v, on one level."""
        wire, several = call.wires[-1], len(comm.hosts) > 1 and call.transport in ("auto", "two_level")
        if wire.quantized or several and (call.carrier or self.choose(comm, call)).name == "two_level":
            return super().run(comm, call, x, out, async_op)
        if out is not None:
            check_out(self.name, x, out, call.out_shape, call.place)
            if overlap(x, out):
                x = x.clone()  # all_to_all_v wants them apart
        rows, size = x.shape[0], comm.size
        with comm.call(*call.recorded):
            return all_to_all_v(
                x, [rows] * size, call.counts, send_displs=[0] * size, out=out, wire=wire, comm=comm,
                transport=call.transport, async_op=async_op,
            )  # fmt: skip

    def back(self, call: CollectiveCall, dy: torch.Tensor, **options: Any) -> torch.Tensor:
        """Every rank's gradients of this rank's rows, summed in float32 or wider, in ascending rank."""
        rows, size = call.shape[0], len(call.counts)
        if options["transport"] == "two_level":
            options["transport"] = "auto"
        arrived: Any = all_to_all_v(dy, call.counts, [rows] * size, **options)
        total = torch.zeros(call.shape, dtype=torch.promote_types(dy.dtype, torch.float32), device=dy.device)
        for part in arrived.split(rows) if rows else ():
            total += part
        return total.to(dy.dtype)


def _cut_gathered(
    comm: Communicator, shape: torch.Size, counts: Sequence[int]
) -> tuple[Segments, int, tuple[int, ...]]:
    if counts[comm.rank] != shape[0]:
        raise CountsError(f"counts[{comm.rank}] is {counts[comm.rank]}, but x has {shape[0]} rows on that rank")
    return *gathered_parts([count * shape[1:].numel() for count in counts]), (sum(counts), *shape[1:])


def _cut_scattered(comm: Communicator, shape: torch.Size, _: object) -> tuple[Segments, int, tuple[int, ...]]:
    rows, rest = divmod(shape[0], comm.size)
    if rest:
        raise CountsError(f"reduce_scatter: x has {shape[0]} rows, which {comm.size} ranks cannot share equally")
    return *gathered_parts([shape.numel() // comm.size] * comm.size), (rows, *shape[1:])


def _cut_reduced(comm: Communicator, shape: torch.Size, _: object) -> tuple[Segments, int, tuple[int, ...]]:
    return *split_parts(shape.numel(), comm.size), tuple(shape)


#: The table. A row whose legs are no other's has a number in `leg_layout`, too, and a name in `partition`.
ALL_GATHER = _Gather("all_gather", leg_layout.ALL_GATHER, _cut_gathered)
ALL_GATHER_V = _Gather("all_gather_v", leg_layout.ALL_GATHER, _cut_gathered)
REDUCE_SCATTER = Op("reduce_scatter", leg_layout.REDUCE_SCATTER, _cut_scattered, all_gather)
ALL_REDUCE = Op("all_reduce", leg_layout.ALL_REDUCE, _cut_reduced, all_reduce)
