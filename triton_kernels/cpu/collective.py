"""All-reduce, reduce-scatter and all-gather on the CPU: rows into the peers' memory, and sums out of one's own.

The memory of `thinwire.triton_kernels.exchange_layout`, with the contracts of `thinwire.triton_kernels.collective` and
the same bits. A kernel of the CPU is one thread, so a leg waits in a kernel of its own, which Python can interrupt.

>>> import inspect
>>> list(inspect.signature(gather_recv).parameters)
['end', 'job', 'out', 'chunk', 'timeout', 'grace', 'num_programs']
"""

from __future__ import annotations

from functools import lru_cache, partial

import numpy as np
import torch

from thinwire.triton_kernels.cpu.codec import dequantize_row, element_bytes, quantize_row, round_row
from thinwire.triton_kernels.cpu.collective_arguments import (
    all_do_the_same,
    begin_epoch,
    copy_to_peers,
    gathered_layout,
    header_lines,
    numbers_at,
    numbers_of,
    pack_row,
    part_of,
    row_span,
    scattered_layout,
    slot_of,
)
from thinwire.triton_kernels.cpu.compat import FINGERPRINT, kernel
from thinwire.triton_kernels.cpu.ir.intrinsics import copy_bytes, load_int32, zero_bytes
from thinwire.triton_kernels.cpu.ir.vectors import FLOAT32, NONE
from thinwire.triton_kernels.cpu.signal import ARRIVED, GAVE_UP, poison, publish, run_wait, wait_or_give_up
from thinwire.triton_kernels.cpu.sums import record_sum, scratch_bytes
from thinwire.triton_kernels.exchange_layout import ALL_GATHER, FIRST_LEG, SECOND_LEG, Endpoint, Job
from thinwire.triton_kernels.signal import (
    CONTROL_EPOCH,
    CONTROL_STATUS,
    MISMATCHED,
    RUNNING,
    TIMED_OUT,
)


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
    # The own part comes last, and when spreading alone.
    for step in range(job.world if sends_to_all else 1, job.world + 1):
        peer = (job.rank + step) % job.world
        count, start = part_of(job, parts, peer)
        first, last = row_span(job, count, chunk)
        slot = slot_of(buffer_ptrs, job, peer, FIRST_LEG, epoch, job.rank)
        if sends_to_all:
            start = 0
        for row in range(first, last):
            done = row * job.row
            place = (row - first) * layout[5]
            pack_row(x + (start + done) * size, job, min(count - done, job.row), slot + place, layout, padded)
            if sends_to_all:
                copy_to_peers(buffer_ptrs, job, FIRST_LEG, epoch, slot + place, place)
    begin_epoch(buffer_ptrs, control, job, epoch)


@kernel
def reduce_kernel(
    numbers, buffer_ptrs, control, parts, out, sends_to_all, chunk, terms, scratch, fingerprint=FINGERPRINT
):
    """Sums of the own part into `out`, or if it `sends_to_all` to everyone, with the second flag.

    `terms` is the address of the ranks 0 ... world - 1.
    """
    if load_int32(control + 4 * CONTROL_STATUS) != RUNNING:
        return
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
        copy_to_peers(buffer_ptrs, job, SECOND_LEG, epoch, own + place, place)
    if sends_to_all != 0:
        publish(buffer_ptrs, job.world, job.rank, job.tails, epoch)


@kernel
def gather_recv_kernel(numbers, buffer_ptrs, control, parts, out, leg, chunk, padded, fingerprint=FINGERPRINT):
    """Rows of all parts out of the own memory."""
    if load_int32(control + 4 * CONTROL_STATUS) != RUNNING:
        return
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
            target = out + (start + done) * size
            short = count - done < job.row
            dequantize_row(record, padded if short else target, job.dtype, layout)
            if short:
                copy_bytes(target, padded, (count - done) * size)
            record += job.gather_row_bytes


@kernel
def wait_kernel(numbers, buffer_ptrs, control, report, leg, deadline, grace, fingerprint=FINGERPRINT):
    """Waits for the flags of one leg; times are in nanoseconds. Returns ARRIVED only if all ranks do the same."""
    if load_int32(control + 4 * CONTROL_STATUS) != RUNNING:
        return GAVE_UP
    job = numbers_at(numbers)
    epoch = np.int64(load_int32(control + 4 * CONTROL_EPOCH))
    lines = header_lines(job, epoch) if leg == FIRST_LEG else job.tails
    ended = wait_or_give_up(buffer_ptrs, job.world, job.rank, lines, job.stuck, epoch, leg, deadline, grace, report)
    status = TIMED_OUT if ended == GAVE_UP else RUNNING
    if ended == ARRIVED and leg == FIRST_LEG and not all_do_the_same(buffer_ptrs, job, lines, report):
        status, ended = MISMATCHED, GAVE_UP
    if status != RUNNING:
        poison(control, report, status, epoch, leg)
    return ended


# ---------------------------------------------------------------------------------------------------------------------
# Launchers


@lru_cache(maxsize=8)
def _ranks(world: int) -> tuple[np.ndarray, int]:
    """The ranks 0 ... world - 1, and their address."""
    ranks = np.arange(world, dtype=np.int64)
    return ranks, ranks.ctypes.data


def _padded_row(job: Job) -> torch.Tensor:
    return torch.empty(job.row * job.dtype.itemsize, dtype=torch.uint8)


def _addresses(end: Endpoint) -> tuple[int, int]:
    return end.buffer_ptrs.data_ptr(), end.control.data_ptr()


def _wait(end: Endpoint, numbers: tuple[np.ndarray, int], leg: int, timeout: float, grace: float) -> bool:
    """Whether the leg is complete, and the memory still in use. Python's signal handlers run meanwhile."""
    kernel = partial(wait_kernel, numbers[1], *_addresses(end), end.report.data_ptr(), leg)
    return run_wait(kernel, timeout, grace) == ARRIVED


def scatter(end: Endpoint, job: Job, x: torch.Tensor, chunk: int, num_programs: int | None = None) -> None:
    """Begins an epoch: quantises a chunk's rows of every part into its owner's memory, and signals all ranks.

    Poisoned memory sends nothing.

    Args:
        x: the whole tensor, 1-D, contiguous, of the job's dtype.
        chunk: 0 to `job.num_chunks` - 1.
        num_programs: not looked at. A rank's kernel is one thread on the CPU, where other ranks want the other cores.

    Raises:
        TransportUnavailable: without numba.
    """
    numbers, padded = numbers_of(end, job), _padded_row(job)
    parts = job.parts.data_ptr()
    send_kernel(numbers[1], *_addresses(end), parts, x.data_ptr(), 0, chunk, padded.data_ptr())


def send_to_all(end: Endpoint, job: Job, x: torch.Tensor, chunk: int, num_programs: int | None = None) -> None:
    """Begins an epoch: quantises a chunk's rows of this rank's part into everyone's memory, and signals all ranks.

    Args:
        x: this rank's part, 1-D, contiguous, of the job's dtype.
        chunk, num_programs: as for `scatter`.

    Raises:
        TransportUnavailable: without numba.
    """
    numbers, padded = numbers_of(end, job), _padded_row(job)
    parts = job.parts.data_ptr()
    send_kernel(numbers[1], *_addresses(end), parts, x.data_ptr(), 1, chunk, padded.data_ptr())


def reduce(
    end: Endpoint,
    job: Job,
    out: torch.Tensor | None,
    chunk: int,
    timeout: float,
    grace: float,
    num_programs: int | None = None,
) -> None:
    """Waits for the scattered rows of all ranks and sums them, in ascending rank, in float32.

    Where the wait ends otherwise, the report says how, and `out` is filled with NaN.

    Args:
        out: this rank's part, 1-D, contiguous, of the job's dtype, whose rows of the chunk are written, rounded once;
            None quantises the sums into everyone's memory instead, and signals all ranks.
        timeout: seconds until the exchange is given up.
        grace: seconds that peers then get to say that they are stuck as well.
        chunk, num_programs: as for `scatter`.

    Raises:
        TransportUnavailable: without numba.
    """
    numbers = numbers_of(end, job)
    if not _wait(end, numbers, FIRST_LEG, timeout, grace):
        if out is not None:
            out.fill_(float("nan"))
        return
    scratch = torch.empty(scratch_bytes(job.row, end.layout.WORLD), dtype=torch.uint8)
    reduce_kernel(
        numbers[1],
        *_addresses(end),
        job.parts.data_ptr(),
        0 if out is None else out.data_ptr(),
        int(out is None),
        chunk,
        _ranks(end.layout.WORLD)[1],
        scratch.data_ptr(),
    )


def gather_recv(
    end: Endpoint,
    job: Job,
    out: torch.Tensor,
    chunk: int,
    timeout: float,
    grace: float,
    num_programs: int | None = None,
) -> None:
    """Waits for the rows that all ranks spread, and dequantises them.

    Where the wait ends otherwise, the report says how, and `out` is filled with NaN.

    Args:
        out: the whole tensor, 1-D, contiguous, of the job's dtype, whose rows of the chunk are written.
        timeout, grace: as for `reduce`.
        chunk, num_programs: as for `scatter`.

    Raises:
        TransportUnavailable: without numba.
    """
    numbers, padded = numbers_of(end, job), _padded_row(job)
    leg = FIRST_LEG if job.op == ALL_GATHER else SECOND_LEG
    if not _wait(end, numbers, leg, timeout, grace):
        out.fill_(float("nan"))
        return
    parts = job.parts.data_ptr()
    gather_recv_kernel(numbers[1], *_addresses(end), parts, out.data_ptr(), leg, chunk, padded.data_ptr())
