"""All-to-all-v: every rank sends each peer its own number of rows, exactly or quantised.

On the *direct* transport CPU ranks read rows and records in each other's memory (`thinwire.fused.pulled_legs`), and
GPUs store them there (`thinwire.fused.device_channel`); the counts come with them. On the *staged* one bytes travel
through the process group: `none` straight out of the input and into the output, quantised rows as records
(`thinwire.fused.staged`). Both give the same bits.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from thinwire.comm import Communicator, Group, communicator_or_default, on_communicator
from thinwire.comm.host_collectives import Setting
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.comm.work import Work
from thinwire.errors import CountsError
from thinwire.fields import OneOf
from thinwire.fused.backend import select_backend
from thinwire.fused.call import RowCall, check_out, find
from thinwire.fused.channel import PIECES, RecvBuffer, channel_layout
from thinwire.fused.codec import named_wire
from thinwire.fused.counts import Counts, new_rows, parse_integers, receive_segments, send_segments
from thinwire.fused.device_channel import DeviceChannel
from thinwire.fused.gradients import Operation, require_linear, with_gradient
from thinwire.fused.staged_collective import StagedRows
from thinwire.fused.transport import Staged, choose, open_direct, uses_triton
from thinwire.wire import WireFormat

if TYPE_CHECKING:
    from thinwire.fused.pulled_legs import PulledRows

_KEY = "all_to_all_v"  # under which a communicator keeps its channel
_INTS = frozenset([int])


def _backward(
    shape: torch.Size, send_counts: list[int] | None, recv_counts: Counts | None, send_displs: Counts | None,
    recv_displs: Counts | None, grad_wire: str | WireFormat, comm: Group, transport: str, check: bool,
) -> Operation:  # fmt: skip
    """Backward: the gradients of x, of `shape`; of a row that was sent twice both, and of one that was not zero."""

    def back(dy: torch.Tensor) -> torch.Tensor:
        arrived: Any = all_to_all_v(
            dy, recv_counts, send_counts, send_displs=recv_displs, wire=grad_wire, comm=comm, transport=transport,
            check=check,
        )  # fmt: skip
        if send_counts is None or (send_displs is None and sum(send_counts) == shape[0]):
            gradient: torch.Tensor = arrived
            return gradient
        index = send_segments(send_counts, send_displs, shape[0]).row_index(0, shape[0], dy.device)
        dx = arrived.new_zeros(shape, dtype=torch.promote_types(dy.dtype, torch.float32))
        return dx.index_add_(0, index, arrived.to(dx.dtype)).to(dy.dtype)

    return back


@on_communicator
def all_to_all_v(
    x: torch.Tensor,
    send_counts: Counts | None = None,
    recv_counts: Counts | None = None,
    *,
    send_displs: Counts | None = None,
    recv_displs: Counts | None = None,
    out: torch.Tensor | None = None,
    wire: str | WireFormat | None = None,
    comm: Group | None = None,
    transport: str = "auto",
    async_op: bool = False,
    check: bool = False,
    grad_wire: str | WireFormat = "none",
) -> torch.Tensor | Work[torch.Tensor]:
    """Quantised in transit: sends each rank r `send_counts[r]` rows. `Communicator.all_to_all_v` is exact.

    Returns the rows that all ranks sent here.

    Args:
        x: [rows, ...]; a row is everything but dim 0. In a 1-D tensor counts are in elements, as in MPI's Alltoallv;
            quantised, its segments travel in rows of 1024 elements. Quantised wires take float32, float16 and bfloat16;
            `none` any dtype.
        send_counts: rows for each rank, list of ints or integer tensor [size]. Neither this nor recv_counts: the rows
            are split equally.
        recv_counts: rows from each rank. None with send_counts given: what the peers send is taken. The direct
            transport learns it with the rows; the staged one exchanges counts first, and on CUDA blocks the host.
        send_displs: first row of x for each rank; None means one after the other.
        recv_displs: first row of the output for each rank; None means one after the other.
        out: filled in place; rows that no segment covers stay as they are. Without it the output has
            `max(displ + count)` rows, and gaps are zero.
        wire: the format in transit; None means THINWIRE_WIRE, else int8+h64, or int8 where a row is no multiple of 64.
        comm: a communicator, a process group, or a DeviceMesh of one axis; None means the one that `init` made.
        transport: "direct", "staged", or "auto": direct where every rank can map every peer's memory, else staged. That
            is settled in a communicator's first call, alike on all ranks; `comm.explain()` says how and why. On CUDA,
            with recv_counts, direct never waits for the device, and can be captured in a CUDA graph; what goes wrong
            there is raised by a later call.
        async_op: return a Work whose `wait()` gives the tensor. x and out must not be touched before. On the direct
            transport long segments move only while their ranks are in `wait()`, or in a later call on the communicator,
            which ends this one first. So all ranks should come to `wait()` at the same place among their calls to
            anything else that waits for peers.
        check: also compare counts, row shape, dtype and wire with every peer, at the cost of one small exchange. All
            ranks then raise, before a row moves.
        grad_wire: the format of what travels in backward; "none" sends gradients as they are. See
            `thinwire.fused.gradients`.

    Returns:
        The output, or a Work.

    Raises:
        CountsError: counts or displacements that do not fit the tensors or overlap; with check, on every rank, those
            that disagree between two ranks. On the direct transport also without check, but only on the rank that
            expected something else than it was sent: its output is then undefined, and all ranks may go on.
        CapacityError: more rows than there is memory for an output of.
        WireFormatError: a dtype that the wire cannot carry, or gradients wanted with `out` or
            `async_op`.
        ArgumentError: x or out is no dense tensor with values of its own.
        PeerTimeout: a peer did not answer within the communicator's timeout.
        TransportUnavailable: the direct transport was asked for and cannot be had, and why.

    Source: the semantics of MPI_Alltoallv, MPI standard 4.1, section 6.8.

    >>> import thinwire as tw
    >>> comm = tw.init()
    >>> tw.all_to_all_v(torch.arange(6.0).view(3, 2), [2], recv_displs=[1], wire="none", comm=comm).tolist()
    [[0.0, 0.0], [0.0, 1.0], [2.0, 3.0]]
    >>> comm.close()
    """
    comm = comm if type(comm) is Communicator else communicator_or_default(comm)
    size = comm.size
    numbers = [
        None if send_counts is None else _parsed(send_counts, size, "send_counts"),
        None if recv_counts is None else _parsed(recv_counts, size, "recv_counts"),
        None if send_displs is None else _parsed(send_displs, size, "send_displs"),
        None if recv_displs is None else _parsed(recv_displs, size, "recv_displs"),
    ]
    call = find(comm, RowCall, x, named_wire(wire), transport, bool(check), *numbers)
    if not x.requires_grad or not torch.is_grad_enabled():
        return _run(comm, call, x, out, async_op)
    require_linear("all_to_all_v", out, async_op)
    if call.receives is None:  # backward has to know how many rows come
        numbers[1] = tuple(comm.exchange_counts(call.sends.counts))
        call = find(comm, RowCall, x, call.wire, transport, call.check, *numbers)
        assert call.receives is not None
    displs = call.send_displs, call.recv_displs
    back = _backward(x.shape, call.sends.counts, call.receives.counts, *displs, grad_wire, comm, transport, call.check)
    return with_gradient(x, partial(_run, comm, call, out=None, async_op=False), back)


def _parsed(values: Counts, size: int, name: str) -> tuple[int, ...]:
    if type(values) is list and _INTS.issuperset(map(type, values)):
        return tuple(values)  # the usual case; how many and how large is asked where a call is made
    return tuple(parse_integers(values, size, name))


def _run(
    comm: Communicator, call: RowCall, x: torch.Tensor, out: torch.Tensor | None, async_op: bool
) -> torch.Tensor | Work[torch.Tensor]:
    if out is not None:
        check_out(call.name, x, out, call.out_shape, None)
    place = partial(_place, comm, call, x, out)
    placed = None if call.receives is None else place(call.receives.counts)
    with comm.call(*call.recorded) as recorded:
        carrier: DeviceChannel | PulledRows | StagedRows = call.carrier or _choose(comm, call)
        recorded.takes(carrier.name)
        if call.check:
            counts = _compare_with_peers(comm, call)
            placed = placed or place(counts)
        finish = carrier.begin(comm, call, x, placed, None if placed else place, not async_op)
        return comm.deliver(recorded, finish, x.device, async_op)


def _choose(comm: Communicator, call: RowCall) -> DeviceChannel | PulledRows | StagedRows:
    """The call's transport from now on."""
    quantized, opened = [call.wire] if call.wire.quantized else [], partial(open_channel, comm, call.wire)
    carrier = choose(call.name, call.transport, comm, quantized, opened, StagedRows)
    call.carrier = carrier
    return carrier


def _place(
    comm: Communicator, call: RowCall, x: torch.Tensor, out: torch.Tensor | None, counts: list[int]
) -> RecvBuffer:
    """Where so many rows of each rank go."""
    receives = call.receives or receive_segments(counts, call.recv_displs, None)
    rows = receives.rows if call.receives is None else call.rows
    if out is None:
        # Segments do not overlap: they leave gaps, which are zero, if the rows outnumber theirs.
        zero = call.recv_displs is not None and rows != sum(receives.counts)
        out = new_rows(x, rows, call.tail, zero, comm.result_memory)
    elif rows > out.shape[0]:
        receive_segments(receives.counts, call.recv_displs, out.shape[0])  # says which one does not fit
    return RecvBuffer(receives, out)


def _compare_with_peers(comm: Communicator, call: RowCall) -> list[int]:
    """Raises on every rank if two ranks disagree, else returns the receive counts."""
    expected = None if call.receives is None else call.receives.counts
    row = (list(call.tail), str(call.dtype), repr(call.wire))
    everyone = comm.all_gather_data((call.sends.counts, expected, row), ([int], OneOf([int], None), ([int], str, str)))
    for source, (sent, received, _) in enumerate(everyone):
        for told in (sent, received):
            if told is not None and (len(told) != comm.size or min(told) < 0):
                raise CountsError(
                    f"rank {source} told {len(told)} counts, the least {min(told, default=None)}; expected "
                    f"{comm.size}, each at least 0"
                )
    for source, (sent, _, source_row) in enumerate(everyone):
        if source_row != everyone[0][2]:
            raise CountsError(
                f"rank {source} moves rows of {tuple(source_row[0])} {source_row[1]} as {source_row[2]}, rank 0 rows "
                f"of {tuple(everyone[0][2][0])} {everyone[0][2][1]} as {everyone[0][2][2]}"
            )
        for target, (_, received, _) in enumerate(everyone):
            if received is not None and sent[target] != received[source]:
                raise CountsError(
                    f"rank {source} sends rank {target} {sent[target]} rows, but rank {target} expects "
                    f"{received[source]} from rank {source}"
                )
    return [sent[comm.rank] for sent, _, _ in everyone]


def open_channel(
    comm: Communicator, wire: WireFormat | None = None, piece_bytes: int | None = None, pieces: int = PIECES
) -> DeviceChannel | PulledRows | StagedRows:
    """The communicator's channel, or what does without. Made at the first call, which is collective.

    Args:
        wire: what the call at hand wants to send; looked at in the first call only, as are the others.
        piece_bytes, pieces: see `channel_layout`.

    Raises:
        TransportUnavailable: no backend can quantise for this wire, on any transport. Raised before peers are asked.
        ConfigMismatch, PeerTimeout: see `open_direct`.
    """

    if wire is not None and wire.quantized:
        select_backend(comm.device, wire)
    if not uses_triton(comm):
        from thinwire.fused.pulled_legs import open_legs  # here, as loading numba takes a while

        legs = open_legs(comm, piece=piece_bytes)
        return StagedRows.instead_of(_KEY, legs) if isinstance(legs, Staged) else legs.rows

    def new() -> DeviceChannel | StagedRows:
        layout = channel_layout(comm.size, piece_bytes, pieces, comm.device.type == "cuda")
        settings: dict[str, Setting] = {"kernels": "triton", "piece_bytes": layout.SLOT_BYTES, "pieces": layout.SLOTS}

        def make(memory: SymmetricMemory, _: bool) -> DeviceChannel:
            return DeviceChannel(memory, layout, comm.rank, comm.timeout, comm.voters)

        return open_direct(comm, _KEY, layout.NUM_BYTES, settings, make, StagedRows)

    return comm.attached(_KEY, new)
