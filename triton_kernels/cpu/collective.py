"""All-reduce, reduce-scatter and all-gather on the CPU: rows into the peers' memory, and sums out of one's own.

The memory of `thinwire.triton_kernels.leg_layout`, with the contracts of `thinwire.triton_kernels.collective` and
the same bits. A kernel of the CPU is one thread, as other ranks want the other cores, so `num_programs` is not looked
at; and a leg waits in a kernel of its own, which Python can interrupt. Launchers raise `TransportUnavailable` without
numba.

>>> import inspect
>>> list(inspect.signature(gather_recv).parameters)
['end', 'job', 'out', 'chunk', 'timeout', 'grace', 'num_programs']
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from thinwire.triton_kernels.cpu import codec, signal
from thinwire.triton_kernels.cpu.compat import device, kernel
from thinwire.triton_kernels.cpu.ir.atomics import monotonic_ns
from thinwire.triton_kernels.cpu.ir.fields import in_memory, reader_of
from thinwire.triton_kernels.cpu.ir.intrinsics import (
    copy_bytes,
    load_int64,
    stack_buffer,
    store_int32,
    store_int64,
    zero_bytes,
)
from thinwire.triton_kernels.cpu.ir.vectors import FLOAT32, NONE
from thinwire.triton_kernels.cpu.launch import addresses, scratch_of
from thinwire.triton_kernels.cpu.legs import publish_header, same_signature
from thinwire.triton_kernels.cpu.peer_stores import goes_aside, store
from thinwire.triton_kernels.cpu.sums import record_sum, scratch_bytes
from thinwire.triton_kernels.leg_layout import (
    ALL_GATHER,
    ALL_REDUCE,
    DONE,
    FIRST_LEG,
    SECOND_LEG,
    SENT,
    TAKEN,
    Endpoint,
    Job,
)
from thinwire.triton_kernels.signal import (
    CONTROL_EPOCH,
    MISMATCHED,
    REPORT_PEERS,
    RUNNING,
    SIGNAL_LINE_BYTES,
    TIMED_OUT,
)

_LONGEST_NS = 2**62
_SCRATCH_RECORD = 16384  # bytes of a record that is made before it is stored: an exact one of float32
_PATIENCE_NS = 1_000_000  # of `whole`; what has to be waited for longer is worth a few calls more

#: What is the same in every chunk of a job, and in every call like it.
numbers_at = reader_of(
    "buffer_ptrs", "control", "report", "parts",  # addresses of these tensors,
    "seen",  # of an int64 for each peer, see `peer_stores`,
    "ranks",  # and of the ranks 0 ... world - 1
    "world", "rank", "slot_bytes", "stuck", "headers", "halves", "row", "dtype", "out_dtype", "rows_per_chunk",
    "signature0", "signature1", "signature2", "signature3",
    # the layouts of a scattered record and of a gathered one, as the codec has them
    *codec.LAYOUT_FIELDS, *(f"gather_{name}" for name in codec.LAYOUT_FIELDS),
)  # fmt: skip


def _memory(end: Endpoint, job: Job) -> tuple[int, int]:
    """Addresses of a job's numbers, and of what its kernels need for themselves."""
    kept: tuple[int, int, object] | None = end.kept.get(job)
    if kept is None:
        layout, row = end.layout, job.row
        num_bytes = max(scratch_bytes(row, layout.WORLD), row * job.dtype.itemsize)
        seen: np.ndarray = end.kept.setdefault("seen", np.zeros(layout.WORLD, np.int64))
        ranks = np.arange(layout.WORLD, dtype=np.int64)
        numbers, address = in_memory(
            *addresses(end, "buffer_ptrs", "control", "report"), job.parts.data_ptr(), seen.ctypes.data,
            ranks.ctypes.data, layout.WORLD, end.rank, layout.SLOT_BYTES, layout.STUCK, layout.HEADERS,
            layout.HALVES, row, *map(codec.dtype_code, (job.dtype, job.out_dtype or job.dtype)), job.rows_per_chunk,
            *job.signature,
            *codec.record_layout(job.wire, row, job.dtype), *codec.record_layout(job.gather_wire, row, job.dtype),
        )  # fmt: skip
        kept = end.kept[job] = address, num_bytes, (numbers, seen, ranks)
    address, num_bytes, _ = kept
    return address, scratch_of(end, num_bytes)


# ---------------------------------------------------------------------------------------------------------------------
# In kernels


@device
def scattered_layout(job):
    """What the codec's row functions must know of a scattered record: a `Layout`."""
    return job[-12:-6]


@device
def gathered_layout(job):
    """The same of a gathered record."""
    return job[-6:]


@device
def slot_of(job, peer, leg, source):
    """Address, at `peer`, of what `source` sends in a leg."""
    return load_int64(job.buffer_ptrs + 8 * peer) + job.halves + ((leg & 1) * job.world + source) * job.slot_bytes


@device
def header_lines(job, leg):
    """Offset of the headers of a leg's half."""
    return job.headers + (leg & 1) * job.world * SIGNAL_LINE_BYTES


@device
def part_of(job, peer):
    """Elements of a part, and where it begins."""
    return load_int64(job.parts + 8 * peer), load_int64(job.parts + 8 * (job.world + peer))


@device
def row_span(job, count, chunk):
    """The rows of a part of `count` elements that belong to a chunk: from the first of them to behind the last."""
    rows = (count + job.row - 1) // job.row
    first = min(chunk * job.rows_per_chunk, rows)
    return first, min(first + job.rows_per_chunk, rows)


@device
def pack_row(x, job, elements, record, layout, padded):
    """A row of `elements` elements into a record. A short one is padded at `padded`, with room for a whole one."""
    # One call for both: each is inlined, with the whole codec.
    if elements < job.row:
        size = codec.element_bytes(job.dtype)
        copy_bytes(padded, x, elements * size)
        zero_bytes(padded + elements * size, (job.row - elements) * size)
        x = padded
    codec.quantize_row(x, job.dtype, record, layout)


@device
def publish_first(job, leg):
    """Signals a chunk's first leg, and says what this rank is doing."""
    store_int32(job.control + 4 * CONTROL_EPOCH, leg)
    for step in range(1, job.world + 1):
        # The right-hand neighbour first, so that not everyone's first store goes to rank 0.
        line = signal.signal_line(job.buffer_ptrs, (job.rank + step) % job.world, header_lines(job, leg), job.rank)
        publish_header(line, leg, job, 0, 0)


@device
def all_do_the_same(job, lines):
    """Whether all ranks said what this one says; notes those that did not."""
    agree = True
    for peer in range(job.world):
        same = same_signature(signal.own_line(job, lines, peer), job)
        store_int32(job.report + 4 * (REPORT_PEERS + peer), 0 if same else 1)
        agree &= same
    return agree


@device
def store_at(job, peer, target, source, count):
    """Copies bytes to a peer, near or far."""
    store_int64(job.seen + 8 * peer, store(target, source, count, load_int64(job.seen + 8 * peer)))


@device
def copy_to_peers(job, leg, record, place):
    """A record of what this rank sends itself in a leg, `place` bytes from its beginning, to the peers."""
    for step in range(1, job.world):
        peer = (job.rank + step) % job.world
        slot = slot_of(job, peer, leg, job.rank)
        store_at(job, peer, slot + place, record, job.gather_row_bytes)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels


@kernel
def send_kernel(numbers, padded, x, sends_to_all, chunk):
    """Rows of every part to its owner, or if it `sends_to_all` those of the own part to everyone; then the header.

    The whole tensor begins at `x`, or the own part. One kernel for both, as each would take its time to compile.
    """
    job = numbers_at(numbers)
    if not signal.is_running(job):
        return
    leg = signal.epoch_of(job) + 1
    layout = gathered_layout(job) if sends_to_all else scattered_layout(job)
    row_bytes = job.gather_row_bytes if sends_to_all else job.row_bytes
    size = codec.element_bytes(job.dtype)
    made = stack_buffer(_SCRATCH_RECORD)
    # The own part comes last, and when spreading alone.
    for step in range(job.world if sends_to_all else 1, job.world + 1):
        peer = (job.rank + step) % job.world
        count, start = part_of(job, peer)
        first, last = row_span(job, count, chunk)
        slot = slot_of(job, peer, leg, job.rank)
        if sends_to_all:
            start = 0
        aside = row_bytes <= _SCRATCH_RECORD and goes_aside(row_bytes, load_int64(job.seen + 8 * peer))
        aside = aside and peer != job.rank
        for row in range(first, last):
            done = row * job.row
            place = (row - first) * row_bytes
            record = made if aside else slot + place
            pack_row(x + (start + done) * size, job, min(count - done, job.row), record, layout, padded)
            if sends_to_all:
                copy_to_peers(job, leg, record, place)
            if aside:
                store_at(job, peer, slot + place, made, row_bytes)
    publish_first(job, leg)


@kernel
def reduce_kernel(numbers, scratch, out, sends_to_all, chunk):
    """Sums of the own part into `out`, or if it `sends_to_all` to everyone, in the next leg.

    Returns whether it did: not if the memory is poisoned.
    """
    job = numbers_at(numbers)
    if not signal.is_running(job):
        return False
    leg = signal.epoch_of(job)
    layout, gather = scattered_layout(job), gathered_layout(job)
    saturate = 0 if job.kind == NONE else 1
    size = codec.element_bytes(job.dtype)
    count, start = part_of(job, job.rank)
    first, last = row_span(job, count, chunk)
    records = slot_of(job, job.rank, leg, 0)
    own = slot_of(job, job.rank, leg + 1, job.rank)
    for row in range(first, last):
        total = record_sum(records, job.slot_bytes, job.ranks, job.world, job.dtype, layout, scratch)
        records += job.row_bytes
        place = (row - first) * job.gather_row_bytes
        columns, target, dtype = job.row, own + place, job.dtype
        if sends_to_all == 0:
            columns, dtype = min(count - row * job.row, job.row), job.out_dtype
            target = out + row * job.row * codec.element_bytes(dtype)
        elif job.gather_kind != NONE:
            # In place: a sum past the largest float32 would make its whole group not-a-number.
            target, dtype = total, FLOAT32
        codec.round_row(total, columns, target, dtype, saturate)
        if sends_to_all == 0:
            continue
        if job.gather_kind == NONE:
            zero_bytes(own + place + job.row * size, job.gather_row_bytes - job.row * size)
        else:
            codec.quantize_row(total, FLOAT32, own + place, gather)
        copy_to_peers(job, leg + 1, own + place, place)
    if sends_to_all != 0:
        store_int32(job.control + 4 * CONTROL_EPOCH, leg + 1)
        signal.publish(job, header_lines(job, leg + 1), leg + 1)
    return True


@kernel
def gather_recv_kernel(numbers, padded, out, chunk):
    """Rows of all parts, as they came in the last leg. Returns whether it did: not if the memory is poisoned."""
    job = numbers_at(numbers)
    if not signal.is_running(job):
        return False
    leg = signal.epoch_of(job)
    layout = gathered_layout(job)
    size = codec.element_bytes(job.dtype)
    for source in range(job.world):
        count, start = part_of(job, source)
        first, last = row_span(job, count, chunk)
        record = slot_of(job, job.rank, leg, source)
        for row in range(first, last):
            done = row * job.row
            target = out + (start + done) * size
            short = count - done < job.row
            codec.dequantize_row(record, padded if short else target, job.dtype, layout)
            if short:
                copy_bytes(target, padded, (count - done) * size)
            record += job.gather_row_bytes
    return True


@kernel
def wait_kernel(numbers, phase, deadline, limit):
    """Waits for the flags of the leg that this rank has sent; times are in nanoseconds.

    Returns ARRIVED only if all ranks do the same, which a chunk's first leg says.
    """
    job = numbers_at(numbers)
    if not signal.is_running(job):
        return signal.GAVE_UP
    leg = signal.epoch_of(job)
    lines = header_lines(job, leg)
    ended = signal.wait_or_give_up(job, lines, leg, phase, deadline, limit)
    status = TIMED_OUT if ended == signal.GAVE_UP else RUNNING
    if ended == signal.ARRIVED and phase == FIRST_LEG and not all_do_the_same(job, lines):
        status, ended = MISMATCHED, signal.GAVE_UP
    if status != RUNNING:
        signal.poison(job, status, leg, phase)
    return ended


@device
def came_soon(job):
    """Whether all flags of the leg come within a moment. Nobody is told if they do not."""
    leg = signal.epoch_of(job)
    return signal.wait_for_all(job, header_lines(job, leg), leg, monotonic_ns() + _PATIENCE_NS) == signal.ARRIVED


@kernel
def whole_kernel(numbers, scratch, op, x, out, chunk):
    """The other kernels, one after the other, as far as no peer lets this rank wait; returns how far."""
    sends_to_all = 1 if op == ALL_GATHER else 0
    send_kernel(numbers, scratch, x, sends_to_all, chunk)
    job = numbers_at(numbers)
    if not signal.is_running(job):
        return SENT
    # The wait is over when it begins: all that it does otherwise needs the host, too.
    if not came_soon(job):
        return SENT
    if wait_kernel(numbers, FIRST_LEG, _LONGEST_NS, 0) != signal.ARRIVED:
        return SENT
    if op != ALL_GATHER:
        on = 1 if op == ALL_REDUCE else 0
        if not reduce_kernel(numbers, scratch, out, on, chunk):
            return SENT
        if op != ALL_REDUCE:
            return DONE
        if not came_soon(job):
            return TAKEN
        if wait_kernel(numbers, SECOND_LEG, _LONGEST_NS, 0) != signal.ARRIVED:
            return TAKEN
    if not gather_recv_kernel(numbers, scratch, out, chunk):
        return SENT if op == ALL_GATHER else TAKEN
    return DONE


# ---------------------------------------------------------------------------------------------------------------------
# Launchers


def _wait(end: Endpoint, job: Job, leg: int, timeout: float, grace: float) -> bool:
    """Whether the leg is complete, and the memory still in use. Python's signal handlers run meanwhile."""

    def missed() -> list[int]:
        half = int(end.control[CONTROL_EPOCH]) & 1
        return signal.flags_behind(end, end.layout.HEADERS + half * end.layout.WORLD * SIGNAL_LINE_BYTES)

    kernel = partial(wait_kernel, _memory(end, job)[0], leg)
    return signal.run_wait(kernel, timeout, grace, end, missed) == signal.ARRIVED


def whole(end: Endpoint, job: Job, x: torch.Tensor, out: torch.Tensor, chunk: int) -> int:
    """All of a chunk in one launch, as far as no peer lets this rank wait: `SENT`, `TAKEN` or `DONE`.

    What is left is for `reduce` and `gather_recv`, in whose waits Python's signal handlers run, and so is what goes
    wrong. x and out are read and written at their addresses, whatever their shapes.
    """
    done: int = whole_kernel(*_memory(end, job), job.op, x.data_ptr(), out.data_ptr(), chunk)
    return done


def send(end: Endpoint, job: Job, x: torch.Tensor, chunk: int, num_programs: int | None = None) -> None:
    """`thinwire.triton_kernels.collective.send` for CPU tensors."""
    send_kernel(*_memory(end, job), x.data_ptr(), int(job.op == ALL_GATHER), chunk)


def reduce(
    end: Endpoint, job: Job, out: torch.Tensor | None, chunk: int, timeout: float, grace: float,
    num_programs: int | None = None,
) -> None:  # fmt: skip
    """`thinwire.triton_kernels.collective.reduce` for CPU tensors. A wait that ends otherwise gives NaN."""
    if not _wait(end, job, FIRST_LEG, timeout, grace):
        if out is not None:
            out.fill_(float("nan"))
        return
    target = 0 if out is None else out.data_ptr()
    if not reduce_kernel(*_memory(end, job), target, int(out is None), chunk) and out is not None:
        out.fill_(float("nan"))


def gather_recv(
    end: Endpoint, job: Job, out: torch.Tensor, chunk: int, timeout: float, grace: float,
    num_programs: int | None = None,
) -> None:  # fmt: skip
    """`thinwire.triton_kernels.collective.gather_recv` for CPU tensors. A wait that ends otherwise gives NaN."""
    leg = FIRST_LEG if job.op == ALL_GATHER else SECOND_LEG
    if not _wait(end, job, leg, timeout, grace):
        out.fill_(float("nan"))
        return
    if not gather_recv_kernel(*_memory(end, job), out.data_ptr(), chunk):
        out.fill_(float("nan"))
