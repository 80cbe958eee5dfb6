"""All-to-all-v: every rank sends each peer its own number of rows, exactly or quantised.

On the *direct* transport (`thinwire.fused.channel`) ranks store rows and records into each other's memory, and the
counts come with them. On the *staged* one bytes travel through the process group: `none` straight out of the input and
into the output, quantised rows as records (`thinwire.fused.staged`). Both give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from thinwire.comm import Communicator, Group, communicator_or_default
from thinwire.comm.integrity import Rows
from thinwire.comm.shaped_json import OneOf
from thinwire.comm.tensors import is_dense, is_transforming, overwrite
from thinwire.comm.work import Work
from thinwire.compiler import nothing_compiles
from thinwire.errors import CountsError
from thinwire.fused.backend import select_backend
from thinwire.fused.channel import FLAT_ROW, RecvBuffer, traffic_of
from thinwire.fused.codec import default_wire, require_float, resolve_wire
from thinwire.fused.collective_arguments import check_input, overlap
from thinwire.fused.counts import (
    Counts,
    Segments,
    dense_segments,
    equal_split,
    new_rows,
    parse_integers,
    receive_segments,
    send_segments,
)
from thinwire.fused.direct import open_channel, send_rows
from thinwire.fused.gradients import Operation, require_linear, wants_gradient, with_gradient
from thinwire.fused.host_channel import HostChannel
from thinwire.fused.operations import in_graphs
from thinwire.fused.size_switch import is_auto, resolve_wires
from thinwire.fused.staged import StagedExchange
from thinwire.fused.transport import Refusal, check_transport, choose
from thinwire.octets import as_bytes
from thinwire.wire import WireFormat

_NOT_STAGED = ("auto", "direct")
_NAMES = (str, WireFormat)
_MOST_ROWS = 1 << 40  # that are tried to be allocated


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


def _num_rows(
    num_rows: int, size: int, recv_counts: Sequence[int] | None, recv_displs: Sequence[int] | None, **_: object
) -> int:
    """Of the result, as a graph knows it while it is made."""
    if recv_counts is None:
        return num_rows // size * size
    rows = torch.sym_max(0, sum(recv_counts))
    for count, displ in zip(recv_counts, recv_displs or (), strict=False):
        rows = torch.sym_max(rows, count + displ)
    # What the operator refuses is no size either.
    return 0 if isinstance(rows, int) and rows > _MOST_ROWS else rows


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
            `max(displ + count)` rows, and gaps are zero. Exact rows between CPU ranks are copied once less into a
            tensor of `thinwire.empty`.
        wire: the format in transit; None means THINWIRE_WIRE, else int8. "auto", for equal splits alone, sends small
            messages exactly.
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
    if nothing_compiles():
        if type(comm) is not Communicator:
            comm = communicator_or_default(comm)
        recorder = comm.recorder
        begun = recorder.begun
        try:
            if is_auto(wire):
                comm.check_device("x", x)
                (wire,) = resolve_wires(comm, "all_to_all_v", x, [wire], alike=send_counts is None)
            # A small call takes microseconds: what `send_plainly` needs comes before all that tells errors apart.
            if (
                send_displs is None
                and recv_displs is None
                and (send_counts is None) == (recv_counts is None)
                and not (async_op or check)
                and type(transport) is str
                and transport in _NOT_STAGED
                and not is_transforming()
            ):
                named = default_wire() if wire is None else wire
                plain = comm.at_once("all_to_all_v")
                if type(named) in _NAMES and type(plain) is HostChannel:
                    moved = plain.send_plainly(x, send_counts, recv_counts, out, named, comm)
                    if moved is not None:
                        return moved
        except BaseException as error:
            if recorder.begun != begun:  # the call is made, and its caller has no result; see `opaque`
                recorder.ended_by(error)
            raise
    return _thoroughly(
        x, send_counts, recv_counts, send_displs=send_displs, recv_displs=recv_displs, out=out, wire=wire, comm=comm,
        transport=transport, async_op=async_op, check=check, grad_wire=grad_wire,
    )  # fmt: skip


@in_graphs(_num_rows, _backward, all_to_all_v)
def _thoroughly(
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
    comm = communicator_or_default(comm)
    check_transport(transport)
    if is_auto(wire):
        comm.check_device("x", x)
        (wire,) = resolve_wires(comm, "all_to_all_v", x, [wire], alike=send_counts is None)
    wire = resolve_wire(wire)
    if wants_gradient(x):
        require_linear("all_to_all_v", out, async_op)
        if send_counts is not None:
            send_counts = parse_integers(send_counts, comm.size, "send_counts")
            if recv_counts is None:  # backward needs to know them
                send_segments(send_counts, send_displs, x.shape[0])
                require_float(x, wire, "all_to_all_v")
                recv_counts = comm.exchange_counts(send_counts)
        there = partial(
            all_to_all_v, send_counts=send_counts, recv_counts=recv_counts, send_displs=send_displs,
            recv_displs=recv_displs, wire=wire, comm=comm, transport=transport, check=check,
        )  # fmt: skip
        back = _backward(x.shape, send_counts, recv_counts, send_displs, recv_displs, grad_wire, comm, transport, check)
        return with_gradient(x, there, back)
    tail = _check_tensors(x, out, wire, comm)
    counts: list[int] | None = None
    if send_counts is None:
        if recv_counts is not None or send_displs is not None or recv_displs is not None:
            raise CountsError("recv_counts, send_displs and recv_displs need send_counts, which was not passed")
        counts = equal_split(x.shape[0], comm.size)
        sends = send_segments(counts, None, x.shape[0])
    else:
        sends = send_segments(parse_integers(send_counts, comm.size, "send_counts"), send_displs, x.shape[0])
        if recv_displs is not None:
            parse_integers(recv_displs, comm.size, "recv_displs")
        if recv_counts is not None:
            counts = parse_integers(recv_counts, comm.size, "recv_counts")

    def place(counts: list[int]) -> RecvBuffer:
        receives = receive_segments(counts, recv_displs, None if out is None else out.shape[0])
        if out is not None:
            return RecvBuffer(receives, out)
        # Segments do not overlap: they leave gaps, which are zero, if the rows outnumber theirs.
        zero = sum(counts) != receives.rows
        return RecvBuffer(receives, new_rows(x, receives.rows, tail, zero, comm.result_memory))

    placed = None
    if counts is not None:
        placed, rank = place(counts), comm.rank
        if not check and sends.counts[rank] != counts[rank]:
            raise CountsError(f"rank {rank} sends itself {sends.counts[rank]} rows but expects {counts[rank]}")
    quantized = [wire] if wire.quantized else []
    details = ("send_counts", sends.counts, *(() if counts is None else ("recv_counts", counts)))
    with comm.call("all_to_all_v", x.shape, x.dtype, wire, transport, details) as call:
        channel = choose("all_to_all_v", transport, comm, quantized, lambda: open_channel(comm, wire))
        call.takes("staged" if isinstance(channel, Refusal) else "direct")
        comm.sent(traffic_of, x, sends.counts, comm.rank, wire)
        if check:
            counts = _compare_with_peers(x, sends, counts, wire, comm)
            placed = placed or place(counts)
        if not isinstance(channel, Refusal):
            transfer = send_rows(channel, x, tail, sends, placed, place, wire, wait=not async_op)
            return comm.deliver(call, transfer.wait, comm.device, async_op)
        placed = placed or place(comm.exchange_counts(sends.counts))
        with torch.no_grad():
            finish = placed.output
            if math.prod(tail) and wire.quantized:
                finish = _post_quantized(x.resolve_neg(), sends, placed, wire, comm)
            elif math.prod(tail):
                finish = _post_exact(x, sends, placed, comm)
            return comm.deliver(call, finish, placed.memory.device, async_op)


def _check_tensors(x: torch.Tensor, out: torch.Tensor | None, wire: WireFormat, comm: Communicator) -> torch.Size:
    """All that can be refused of tensors before peers hear of this call. Returns the shape of a row."""
    check_input("all_to_all_v", x, [wire], comm)
    tail = x.shape[1:]
    if out is None:
        return tail
    if not isinstance(out, torch.Tensor) or out.device != comm.device or not is_dense(out):
        comm.check_device("out", out)
    if out.dtype != x.dtype or out.dim() != x.dim() or out.shape[1:] != tail:
        raise CountsError(
            f"out is {out.dtype} {list(out.shape)}; it needs x's dtype, {x.dtype}, and row shape, {list(tail)}"
        )
    if not out.is_contiguous() or out.is_conj() or out.is_neg():
        raise CountsError(
            f"out must be contiguous and hold its own values; it has strides {list(out.stride())} for shape "
            f"{list(out.shape)}, conj {out.is_conj()}, neg {out.is_neg()}"
        )
    if overlap(x, out):
        raise CountsError("out shares memory with x: rows would be overwritten before they are sent")
    overwrite("out", out)
    return tail


def _compare_with_peers(
    x: torch.Tensor, sends: Segments, counts: list[int] | None, wire: WireFormat, comm: Communicator
) -> list[int]:
    """Raises on every rank if two ranks disagree, else returns the receive counts."""
    row = (list(x.shape[1:]), str(x.dtype), repr(wire))
    everyone = comm.all_gather_data((sends.counts, counts, row), ([int], OneOf([int], None), ([int], str, str)))
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


def _post_exact(x: torch.Tensor, sends: Segments, placed: RecvBuffer, comm: Communicator) -> Callable[[], torch.Tensor]:
    """Rows travel as the bytes they are, straight out of x and into the output."""
    sent = sends.cut(x.resolve_conj().resolve_neg().contiguous())
    received = placed.segments.cut(placed.memory)

    def byte_views(views: list[torch.Tensor]) -> list[torch.Tensor | None]:
        return [as_bytes(rows) if len(rows) and peer != comm.rank else None for peer, rows in enumerate(views)]

    received[comm.rank].copy_(sent[comm.rank])
    rows, label = Rows(x.itemsize * math.prod(x.shape[1:])), f"all_to_all_v {x.dtype} {list(x.shape[1:])}"
    work = comm.post(byte_views(sent), byte_views(received), label, rows=rows)

    def finish() -> torch.Tensor:
        work.wait()
        return placed.memory

    return finish


def _post_quantized(
    x: torch.Tensor, sends: Segments, placed: RecvBuffer, wire: WireFormat, comm: Communicator
) -> Callable[[], torch.Tensor]:
    """Rows travel as records; each segment of a 1-D tensor as rows of FLAT_ROW elements, the last padded with zeros."""
    flat, out, row_sends, row_receives = x.dim() == 1, placed.memory, sends, placed.segments
    if flat:
        row_sends, row_receives = (
            dense_segments([-(-count // FLAT_ROW) for count in segments.counts])
            for segments in (sends, placed.segments)
        )
        rows, row_out = x.new_zeros((row_sends.rows, FLAT_ROW)), x.new_empty((row_receives.rows, FLAT_ROW))
        for part, first in zip(sends.cut(x), row_sends.displs, strict=True):
            rows[first:].view(-1)[: len(part)] = part
    else:
        rows, row_out = (tensor.reshape(len(tensor), math.prod(x.shape[1:])) for tensor in (x, out))
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
    backend = select_backend(x.device, wire, comm.cpu_share.threads)

    def pack(start: int, stop: int, records: torch.Tensor) -> None:
        picked, row_index = row_sends.pick(rows, start, stop)
        backend.pack_rows(picked, wire, row_index, records)

    row_bytes, label = wire.row_bytes(rows.shape[1], x.dtype), f"all_to_all_v {wire!r} {x.dtype} {list(x.shape[1:])}"
    sizes = sends.counts, placed.segments.counts
    exchange = StagedExchange.post(comm, row_sends.counts, row_receives.counts, row_bytes, pack, label, sizes=sizes)
    slots = dense_segments(row_receives.counts)

    def finish() -> torch.Tensor:
        for start, stop in exchange.arrivals():
            records, record_index = slots.pick(exchange.received, start, stop)
            picked, row_index = row_receives.pick(row_out, start, stop)
            backend.unpack_rows(records, wire, record_index, row_index, picked)
        if flat:
            for part, first in zip(placed.segments.cut(out), row_receives.displs, strict=True):
                part.copy_(row_out[first:].view(-1)[: len(part)])
        return out

    return finish
