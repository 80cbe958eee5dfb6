"""All-reduce, reduce-scatter and all-gather on the CPU: rows into the peers' memory, and sums out of one's own.

The memory of `thinwire.triton_kernels.exchange_layout`, with the contracts of `thinwire.triton_kernels.collective` and
the same bits. A kernel of the CPU is one thread, as other ranks want the other cores, so `num_programs` is not looked
at; and a leg waits in a kernel of its own, which Python can interrupt. Launchers raise `TransportUnavailable` without
numba.

>>> import inspect
>>> list(inspect.signature(gather_recv).parameters)
['end', 'job', 'out', 'chunk', 'timeout', 'grace', 'num_programs']
"""

from __future__ import annotations

from functools import lru_cache, partial

import numpy as np
import torch

from thinwire.triton_kernels.checksum_seed import CHECKSUM_BYTES
from thinwire.triton_kernels.cpu.codec import (
    LAYOUT_FIELDS,
    dequantize_row,
    dtype_code,
    element_bytes,
    quantize_row,
    record_layout,
    round_row,
)
from thinwire.triton_kernels.cpu.compat import FINGERPRINT, device, kernel
from thinwire.triton_kernels.cpu.exchange import publish_header, same_signature
from thinwire.triton_kernels.cpu.exchange_checksum import (
    header_fits,
    put_row_sums,
    report_corruption,
    row_fits,
    slot_seed,
)
from thinwire.triton_kernels.cpu.ir.atomics import monotonic_ns
from thinwire.triton_kernels.cpu.ir.fields import in_memory, reader_of
from thinwire.triton_kernels.cpu.ir.intrinsics import (
    copy_bytes,
    load_int32,
    load_int64,
    stack_buffer,
    store_int32,
    store_int64,
    zero_bytes,
)
from thinwire.triton_kernels.cpu.ir.vectors import FLOAT32, NONE
from thinwire.triton_kernels.cpu.launch import addresses, scratch_of
from thinwire.triton_kernels.cpu.peer_stores import goes_aside, store
from thinwire.triton_kernels.cpu.signal import (
    ARRIVED,
    GAVE_UP,
    poison,
    publish,
    run_wait,
    signal_line,
    wait_for_all,
    wait_or_give_up,
)
from thinwire.triton_kernels.cpu.sums import record_sum, scratch_bytes
from thinwire.triton_kernels.exchange_layout import (
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
    CONTROL_STATUS,
    CORRUPTED,
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
    "world", "rank", "slot_bytes", "stuck", "headers", "tails", "halves", "rings", "row", "dtype", "rows_per_chunk",
    "checksums", "slot_checksum_bytes",
    "seen",  # an address: int64 for each peer, see `peer_stores`
    "signature0", "signature1", "signature2", "signature3",
    # the layouts of a scattered record and of a gathered one, as the codec has them
    *LAYOUT_FIELDS, *(f"gather_{name}" for name in LAYOUT_FIELDS),
)  # fmt: skip


def _numbers(end: Endpoint, job: Job) -> tuple[np.ndarray, int]:
    layout, row = end.layout, job.row
    seen: np.ndarray = end.kept.setdefault("seen", np.zeros(layout.WORLD, np.int64))
    return in_memory(
        layout.WORLD, end.rank, layout.SLOT_BYTES, layout.STUCK, layout.HEADERS, layout.TAILS, layout.HALVES,
        layout.RINGS, row, dtype_code(job.dtype), job.rows_per_chunk, layout.CHECKSUMS,
        layout.SLOT_ROWS * CHECKSUM_BYTES, seen.ctypes.data, *job.signature,
        *record_layout(job.wire, row, job.dtype), *record_layout(job.gather_wire, row, job.dtype),
    )  # fmt: skip


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
def slot_of(buffer_ptrs, job, peer, leg, epoch, source):
    """Address, at `peer`, of what `source` sends in a leg of an epoch: in a half, or in the ring of two slots."""
    half = job.halves + ((epoch & 1) * job.world + source) * job.slot_bytes
    slot = job.rings + (source * 2 + (epoch & 1)) * job.slot_bytes
    return load_int64(buffer_ptrs + 8 * peer) + (half if leg == FIRST_LEG else slot)


@device
def sums_of(buffer_ptrs, job, peer, leg, epoch, source):
    """Address of the sums of such a slot's rows."""
    base = load_int64(buffer_ptrs + 8 * peer)
    slot = slot_of(buffer_ptrs, job, peer, leg, epoch, source) - base - job.halves  # rings follow halves
    return base + job.checksums + slot // job.slot_bytes * job.slot_checksum_bytes


@device
def fits(buffer_ptrs, job, leg, epoch, source, record, num_bytes, number):
    """Whether row `number` of what a source sent here in a leg, which lies at the address `record`, fits its sums."""
    sums = sums_of(buffer_ptrs, job, job.rank, leg, epoch, source)
    return row_fits(sums, record, num_bytes, slot_seed(epoch, source, leg), number)


@device
def corrupt(buffer_ptrs, control, job, report, leg, epoch, source, first, rows):
    """Ends the use of the memory, for rows of a source that do not fit; none: its header."""
    report_corruption(buffer_ptrs, job.world, job.rank, job.stuck, epoch, leg, report, source, first, np.int64(rows))
    store_int32(control + 4 * CONTROL_STATUS, CORRUPTED)


@device
def header_lines(job, epoch):
    """Offset of the headers of an epoch's half."""
    return job.headers + (epoch & 1) * job.world * SIGNAL_LINE_BYTES


@device
def signature_of(job):
    """The four numbers that say what this rank is doing."""
    return job.signature0, job.signature1, job.signature2, job.signature3


@device
def part_of(job, parts, peer):
    """Elements of a part, and where it begins."""
    return load_int64(parts + 8 * peer), load_int64(parts + 8 * (job.world + peer))


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
        size = element_bytes(job.dtype)
        copy_bytes(padded, x, elements * size)
        zero_bytes(padded + elements * size, (job.row - elements) * size)
        x = padded
    quantize_row(x, job.dtype, record, layout)


@device
def begin_epoch(buffer_ptrs, control, job, epoch):
    """Says what this rank is doing, and signals the first leg."""
    # An epoch of one leg leaves the tail behind, which shall never be half of all numbers behind: see
    # `docs/protocol.md`.
    own = load_int32(signal_line(buffer_ptrs, job.rank, job.tails, job.rank))
    if np.int32(own) != np.int32(epoch - 1):
        publish(buffer_ptrs, job.world, job.rank, job.tails, epoch - 1)
    lines = header_lines(job, epoch)
    store_int32(control + 4 * CONTROL_EPOCH, epoch)
    for step in range(1, job.world + 1):
        # The right-hand neighbour first, so that not everyone's first store goes to rank 0.
        line = signal_line(buffer_ptrs, (job.rank + step) % job.world, lines, job.rank)
        publish_header(line, epoch, job.rank, 0, 0, signature_of(job), job.checksums != 0)


@device
def all_do_the_same(buffer_ptrs, job, lines, report):
    """Whether all ranks said what this one says; notes those that did not."""
    agree = True
    for peer in range(job.world):
        same = same_signature(signal_line(buffer_ptrs, job.rank, lines, peer), signature_of(job))
        store_int32(report + 4 * (REPORT_PEERS + peer), 0 if same else 1)
        agree &= same
    return agree


@device
def put_sums(buffer_ptrs, job, peer, leg, epoch, record, num_bytes, number):
    """Writes the sums of row `number` of what this rank sends to a peer in a leg."""
    sums = sums_of(buffer_ptrs, job, peer, leg, epoch, job.rank)
    put_row_sums(sums, record, num_bytes, slot_seed(epoch, job.rank, leg), number)


@device
def store_at(job, peer, target, source, count):
    """Copies bytes to a peer, near or far."""
    store_int64(job.seen + 8 * peer, store(target, source, count, load_int64(job.seen + 8 * peer)))


@device
def copy_to_peers(buffer_ptrs, job, leg, epoch, record, number):
    """Row `number` of what this rank sends itself in a leg, to the peers, with its sums."""
    if job.checksums:
        put_sums(buffer_ptrs, job, job.rank, leg, epoch, record, job.gather_row_bytes, number)
        own = sums_of(buffer_ptrs, job, job.rank, leg, epoch, job.rank) + CHECKSUM_BYTES * number
    for step in range(1, job.world):
        peer = (job.rank + step) % job.world
        slot = slot_of(buffer_ptrs, job, peer, leg, epoch, job.rank)
        store_at(job, peer, slot + number * job.gather_row_bytes, record, job.gather_row_bytes)
        if job.checksums:
            there = sums_of(buffer_ptrs, job, peer, leg, epoch, job.rank) + CHECKSUM_BYTES * number
            copy_bytes(there, own, CHECKSUM_BYTES)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels


@kernel
def send_kernel(numbers, buffer_ptrs, control, parts, x, sends_to_all, chunk, padded, fingerprint=FINGERPRINT):
    """Rows of every part to its owner, or if it `sends_to_all` those of the own part to everyone; then the first flag.

    The whole tensor begins at `x`, or the own part. One kernel for both, as each would take its time to compile.
    """
    if load_int32(control + 4 * CONTROL_STATUS) != RUNNING:
        return
    job = numbers_at(numbers)
    epoch = np.int64(load_int32(control + 4 * CONTROL_EPOCH)) + 1
    layout = gathered_layout(job) if sends_to_all else scattered_layout(job)
    size = element_bytes(job.dtype)
    made = stack_buffer(_SCRATCH_RECORD)
    # The own part comes last, and when spreading alone.
    for step in range(job.world if sends_to_all else 1, job.world + 1):
        peer = (job.rank + step) % job.world
        count, start = part_of(job, parts, peer)
        first, last = row_span(job, count, chunk)
        slot = slot_of(buffer_ptrs, job, peer, FIRST_LEG, epoch, job.rank)
        if sends_to_all:
            start = 0
        aside = layout[5] <= _SCRATCH_RECORD and goes_aside(layout[5], load_int64(job.seen + 8 * peer))
        aside = aside and peer != job.rank
        for row in range(first, last):
            done = row * job.row
            there = slot + (row - first) * layout[5]
            record = made if aside else there
            pack_row(x + (start + done) * size, job, min(count - done, job.row), record, layout, padded)
            if sends_to_all:
                copy_to_peers(buffer_ptrs, job, np.int64(FIRST_LEG), epoch, record, row - first)
            elif job.checksums:
                put_sums(buffer_ptrs, job, peer, np.int64(FIRST_LEG), epoch, record, layout[5], row - first)
            if aside:
                store_at(job, peer, there, made, layout[5])
    begin_epoch(buffer_ptrs, control, job, epoch)


@kernel
def reduce_kernel(
    numbers, buffer_ptrs, control, parts, report, out, sends_to_all, chunk, terms, scratch, fingerprint=FINGERPRINT
):
    """Sums of the own part into `out`, or if it `sends_to_all` to everyone, with the second flag.

    `terms` is the address of the ranks 0 ... world - 1. Returns whether all rows fit their sums.
    """
    if load_int32(control + 4 * CONTROL_STATUS) != RUNNING:
        return False
    job = numbers_at(numbers)
    epoch = np.int64(load_int32(control + 4 * CONTROL_EPOCH))
    layout, gather = scattered_layout(job), gathered_layout(job)
    saturate = 0 if job.kind == NONE else 1
    size = element_bytes(job.dtype)
    count, start = part_of(job, parts, job.rank)
    first, last = row_span(job, count, chunk)
    records = slot_of(buffer_ptrs, job, job.rank, FIRST_LEG, epoch, 0)
    own = slot_of(buffer_ptrs, job, job.rank, SECOND_LEG, epoch, job.rank)
    for row in range(first, last):
        if job.checksums:
            for source in range(job.world):
                record = records + source * job.slot_bytes
                leg = np.int64(FIRST_LEG)
                if not fits(buffer_ptrs, job, leg, epoch, source, record, job.row_bytes, row - first):
                    corrupt(buffer_ptrs, control, job, report, leg, epoch, source, row, 1)
                    return False
        total = record_sum(records, job.slot_bytes, terms, job.world, job.dtype, layout, scratch)
        records += job.row_bytes
        place = (row - first) * job.gather_row_bytes
        columns, target, dtype = job.row, own + place, job.dtype
        if sends_to_all == 0:
            columns, target = min(count - row * job.row, job.row), out + row * job.row * size
        elif job.gather_kind != NONE:
            # In place: a sum past the largest float32 would make its whole group not-a-number.
            target, dtype = total, FLOAT32
        round_row(total, columns, target, dtype, saturate)
        if sends_to_all == 0:
            continue
        if job.gather_kind == NONE:
            zero_bytes(own + place + job.row * size, job.gather_row_bytes - job.row * size)
        else:
            quantize_row(total, FLOAT32, own + place, gather)
        copy_to_peers(buffer_ptrs, job, np.int64(SECOND_LEG), epoch, own + place, row - first)
    if sends_to_all != 0:
        publish(buffer_ptrs, job.world, job.rank, job.tails, epoch)
    return True


@kernel
def gather_recv_kernel(numbers, buffer_ptrs, control, parts, report, out, leg, chunk, padded, fingerprint=FINGERPRINT):
    """Rows of all parts out of the own memory. Returns whether all of them fit their sums."""
    if load_int32(control + 4 * CONTROL_STATUS) != RUNNING:
        return False
    job = numbers_at(numbers)
    epoch = np.int64(load_int32(control + 4 * CONTROL_EPOCH))
    layout = gathered_layout(job)
    size = element_bytes(job.dtype)
    for source in range(job.world):
        count, start = part_of(job, parts, source)
        first, last = row_span(job, count, chunk)
        record = slot_of(buffer_ptrs, job, job.rank, leg, epoch, source)
        for row in range(first, last):
            done = row * job.row
            if job.checksums and not fits(
                buffer_ptrs, job, leg, epoch, source, record, job.gather_row_bytes, row - first
            ):
                corrupt(buffer_ptrs, control, job, report, leg, epoch, source, row, 1)
                return False
            target = out + (start + done) * size
            short = count - done < job.row
            dequantize_row(record, padded if short else target, job.dtype, layout)
            if short:
                copy_bytes(target, padded, (count - done) * size)
            record += job.gather_row_bytes
    return True


@kernel
def wait_kernel(numbers, buffer_ptrs, control, report, leg, deadline, limit, fingerprint=FINGERPRINT):
    """Waits for the flags of one leg; times are in nanoseconds. Returns ARRIVED only if all ranks do the same."""
    if load_int32(control + 4 * CONTROL_STATUS) != RUNNING:
        return GAVE_UP
    job = numbers_at(numbers)
    epoch = np.int64(load_int32(control + 4 * CONTROL_EPOCH))
    lines = header_lines(job, epoch) if leg == FIRST_LEG else job.tails
    ended = wait_or_give_up(buffer_ptrs, job.world, job.rank, lines, job.stuck, epoch, leg, deadline, limit, report)
    status = TIMED_OUT if ended == GAVE_UP else RUNNING
    if ended == ARRIVED and leg == FIRST_LEG and job.checksums:
        for source in range(job.world):
            if not header_fits(signal_line(buffer_ptrs, job.rank, lines, source), epoch, source):
                corrupt(buffer_ptrs, control, job, report, np.int64(leg), epoch, source, np.int64(0), 0)
                return GAVE_UP
    if ended == ARRIVED and leg == FIRST_LEG and not all_do_the_same(buffer_ptrs, job, lines, report):
        status, ended = MISMATCHED, GAVE_UP
    if status != RUNNING:
        poison(control, report, status, epoch, leg)
    return ended


@device
def came_soon(buffer_ptrs, control, job, leg):
    """Whether all flags of a leg come within a moment. Nobody is told if they do not."""
    epoch = np.int64(load_int32(control + 4 * CONTROL_EPOCH))
    lines = header_lines(job, epoch) if leg == FIRST_LEG else job.tails
    until = monotonic_ns() + _PATIENCE_NS
    return wait_for_all(buffer_ptrs, job.world, job.rank, lines, job.stuck, epoch, until) == ARRIVED


@kernel
def whole_kernel(
    numbers, buffer_ptrs, control, parts, report, terms, op, scratch, x, out, chunk, fingerprint=FINGERPRINT
):
    """The other kernels, one after the other, as far as no peer lets this rank wait; returns how far."""
    sends_to_all = 1 if op == ALL_GATHER else 0
    send_kernel(numbers, buffer_ptrs, control, parts, x, sends_to_all, chunk, scratch)
    if load_int32(control + 4 * CONTROL_STATUS) != RUNNING:
        return SENT
    job = numbers_at(numbers)
    # The wait is over when it begins: all that it does otherwise needs the host, too.
    if not came_soon(buffer_ptrs, control, job, FIRST_LEG):
        return SENT
    if wait_kernel(numbers, buffer_ptrs, control, report, FIRST_LEG, _LONGEST_NS, 0) != ARRIVED:
        return SENT
    leg = FIRST_LEG
    if op != ALL_GATHER:
        on = 1 if op == ALL_REDUCE else 0
        if not reduce_kernel(numbers, buffer_ptrs, control, parts, report, out, on, chunk, terms, scratch):
            return SENT
        if op != ALL_REDUCE:
            return DONE
        leg = SECOND_LEG
        if not came_soon(buffer_ptrs, control, job, leg):
            return TAKEN
        if wait_kernel(numbers, buffer_ptrs, control, report, leg, _LONGEST_NS, 0) != ARRIVED:
            return TAKEN
    if not gather_recv_kernel(numbers, buffer_ptrs, control, parts, report, out, leg, chunk, scratch):
        return SENT if op == ALL_GATHER else TAKEN
    return DONE


# ---------------------------------------------------------------------------------------------------------------------
# Launchers


@lru_cache(maxsize=8)
def _ranks(world: int) -> tuple[np.ndarray, int]:
    """The ranks 0 ... world - 1, and their address."""
    return in_memory(*range(world))


def _memory(end: Endpoint, job: Job) -> tuple[int, ...]:
    """Addresses: of the numbers, the buffers, the control block and the parts."""
    kept = end.kept.get(job)
    if kept is None:
        numbers, address = _numbers(end, job)
        memory = address, *addresses(end, "buffer_ptrs", "control"), job.parts.data_ptr()
        kept = end.kept[job] = memory, numbers
    found: tuple[int, ...] = kept[0]
    return found


def _padded_row(end: Endpoint, job: Job) -> int:
    return scratch_of(end, job.row * job.dtype.itemsize)


def _wait(end: Endpoint, job: Job, leg: int, timeout: float, grace: float) -> bool:
    """Whether the leg is complete, and the memory still in use. Python's signal handlers run meanwhile."""
    kernel = partial(wait_kernel, *_memory(end, job)[:3], *addresses(end, "report"), leg)
    return run_wait(kernel, timeout, grace) == ARRIVED


def _send(end: Endpoint, job: Job, x: torch.Tensor, sends_to_all: int, chunk: int) -> None:
    send_kernel(*_memory(end, job), x.data_ptr(), sends_to_all, chunk, _padded_row(end, job))


def whole(end: Endpoint, job: Job, x: torch.Tensor, out: torch.Tensor, chunk: int) -> int:
    """All of a chunk in one launch, as far as no peer lets this rank wait: `SENT`, `TAKEN` or `DONE`.

    What is left is for `reduce` and `gather_recv`, in whose waits Python's signal handlers run, and so is what goes
    wrong. x and out are read and written at their addresses, whatever their shapes.
    """
    kept: tuple[tuple[int, ...], int, np.ndarray] | None = end.kept.get((job, "whole"))
    if kept is None:
        ranks, terms = _ranks(end.layout.WORLD)
        memory = *_memory(end, job), *addresses(end, "report"), terms, job.op
        num_bytes = max(scratch_bytes(job.row, end.layout.WORLD), job.row * job.dtype.itemsize)
        kept = end.kept[job, "whole"] = memory, num_bytes, ranks  # whose address is among memory
    memory, num_bytes, _ = kept
    done: int = whole_kernel(*memory, scratch_of(end, num_bytes), x.data_ptr(), out.data_ptr(), chunk)
    return done


def scatter(end: Endpoint, job: Job, x: torch.Tensor, chunk: int, num_programs: int | None = None) -> None:
    """`thinwire.triton_kernels.collective.scatter` for CPU tensors."""
    _send(end, job, x, 0, chunk)


def send_to_all(end: Endpoint, job: Job, x: torch.Tensor, chunk: int, num_programs: int | None = None) -> None:
    """`thinwire.triton_kernels.collective.send_to_all` for CPU tensors."""
    _send(end, job, x, 1, chunk)


def reduce(
    end: Endpoint,
    job: Job,
    out: torch.Tensor | None,
    chunk: int,
    timeout: float,
    grace: float,
    num_programs: int | None = None,
) -> None:
    """`thinwire.triton_kernels.collective.reduce` for CPU tensors.

    A wait that ends otherwise gives NaN, as does a row that does not fit.
    """
    if not _wait(end, job, FIRST_LEG, timeout, grace):
        if out is not None:
            out.fill_(float("nan"))
        return
    world = end.layout.WORLD
    target, terms = 0 if out is None else out.data_ptr(), _ranks(world)[1]
    scratch = scratch_of(end, scratch_bytes(job.row, world))
    memory = *_memory(end, job), *addresses(end, "report")
    if not reduce_kernel(*memory, target, int(out is None), chunk, terms, scratch) and out is not None:
        out.fill_(float("nan"))


def gather_recv(
    end: Endpoint,
    job: Job,
    out: torch.Tensor,
    chunk: int,
    timeout: float,
    grace: float,
    num_programs: int | None = None,
) -> None:
    """`thinwire.triton_kernels.collective.gather_recv` for CPU tensors.

    A wait that ends otherwise gives NaN, as does a row that does not fit.
    """
    leg = FIRST_LEG if job.op == ALL_GATHER else SECOND_LEG
    if not _wait(end, job, leg, timeout, grace):
        out.fill_(float("nan"))
        return
    memory = *_memory(end, job), *addresses(end, "report")
    if not gather_recv_kernel(*memory, out.data_ptr(), leg, chunk, _padded_row(end, job)):
        out.fill_(float("nan"))
