"""All-reduce, reduce-scatter and all-gather over peers' memory: the kernels, which quantise, move and sum rows.

Memory is that of `thinwire.triton_kernels.leg_layout`. An all-reduce of one chunk is five launches::

    send         row i of part p -> the owner of p, as a record           flags of a leg
    reduce       wait; then sum over ranks of the dequantised rows of
                 my part, encoded once -> every rank                      flags of the next leg
    gather_recv  wait; then out[part p][row i] = dequantise(record from p)

A reduce-scatter is `send` and a `reduce` that rounds its sums into a tensor; an all-gather is a `send` that encodes
each own row once and stores it at every rank, and `gather_recv`. A wait is a kernel of one warp, so that the
registers of what follows are free for others until it can run.

Sums are explicit float32 loops from +0.0 in ascending rank, so they do not depend on timing, grid or backend; and as an
owner's sums are encoded once, all ranks decode the same bytes and hold the same bits after an all-reduce. Parts may
begin at any element.
"""

from __future__ import annotations

from typing import Any

import torch

from thinwire.triton_kernels.collective_rows import recv_rows, reduce_rows, send_rows
from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.launch import Launcher, kept, launcher_of
from thinwire.triton_kernels.leg_layout import ALL_GATHER, FIRST_LEG, SECOND_LEG, SIGNATURE_WORDS, Endpoint, Job
from thinwire.triton_kernels.legs import wait_leg
from thinwire.triton_kernels.record import RecordLayout
from thinwire.triton_kernels.signal import num_programs_for, register_limit
from thinwire.triton_kernels.sums import sum_warps
from thinwire.wire import WireFormat

# What the launch knows and the kernel must not be compiled for.
SIGNATURE = tuple(f"signature_{word}" for word in range(SIGNATURE_WORDS))
DYNAMIC = ["rank", "chunk", "rows", *SIGNATURE, "timeout_ns", "grace_ns"]
ROWS = ["x_ptr", "out_ptr"]  # where they begin is looked at row by row


# ---------------------------------------------------------------------------------------------------------------------
# Kernels, of any number of programs but for the one that waits. `rows` is how many the longest part has in the chunk.


@triton.jit(do_not_specialize=DYNAMIC, do_not_specialize_on_alignment=ROWS)
def send_kernel(
    x_ptr, parts_ptr, chunk, rows, signature_0: tl.int64, signature_1: tl.int64, signature_2: tl.int64,
    signature_3: tl.int64, buffer_ptrs, control_ptr, rank, TO_ALL: tl.constexpr, ROWS_PER_CHUNK: tl.constexpr,
    LAYOUT: tl.constexpr, LEGS: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """See `send_rows`."""
    signature = (signature_0, signature_1, signature_2, signature_3)
    if tl.load(control_ptr + LEGS.STATUS) == LEGS.RUNNING:
        leg = tl.load(control_ptr + LEGS.EPOCH) + 1
        first = chunk.to(tl.int64) * ROWS_PER_CHUNK
        send_rows(
            x_ptr, parts_ptr, first, rows, leg, signature, buffer_ptrs, control_ptr, rank, TO_ALL, LAYOUT, LEGS, LAUNCH
        )


@triton.jit(do_not_specialize=DYNAMIC)
def wait_kernel(
    signature_0: tl.int64, signature_1: tl.int64, signature_2: tl.int64, signature_3: tl.int64,
    buffer_ptrs, control_ptr, report_ptr, rank, timeout_ns: tl.int64, grace_ns: tl.int64,
    LEG: tl.constexpr, LEGS: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Until every rank has signalled a leg, or the memory is poisoned. One program of one warp."""
    signature = (signature_0, signature_1, signature_2, signature_3)
    if tl.load(control_ptr + LEGS.STATUS) == LEGS.RUNNING:
        leg = tl.load(control_ptr + LEGS.EPOCH)
        wait_leg(
            buffer_ptrs, control_ptr, report_ptr, rank, leg, signature, timeout_ns, grace_ns, LEG, False, LEGS, LAUNCH
        )


@triton.jit(do_not_specialize=DYNAMIC, do_not_specialize_on_alignment=ROWS)
def reduce_kernel(
    out_ptr, parts_ptr, chunk, rows, buffer_ptr, buffer_ptrs, control_ptr, rank, ROWS_PER_CHUNK: tl.constexpr,
    LAYOUT: tl.constexpr, GATHER: tl.constexpr, LEGS: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """See `reduce_rows`."""
    running = tl.load(control_ptr + LEGS.STATUS) == LEGS.RUNNING
    leg = tl.load(control_ptr + LEGS.EPOCH)
    first = chunk.to(tl.int64) * ROWS_PER_CHUNK
    reduce_rows(
        out_ptr, parts_ptr, first, rows, leg, running, buffer_ptr, buffer_ptrs, control_ptr, rank,
        LAYOUT, GATHER, LEGS, LAUNCH,
    )  # fmt: skip


@triton.jit(do_not_specialize=DYNAMIC, do_not_specialize_on_alignment=ROWS)
def gather_recv_kernel(
    out_ptr, parts_ptr, chunk, rows, buffer_ptr, control_ptr, rank, ROWS_PER_CHUNK: tl.constexpr,
    LAYOUT: tl.constexpr, LEGS: tl.constexpr,
):  # fmt: skip
    """See `recv_rows`, of the last leg."""
    running = tl.load(control_ptr + LEGS.STATUS) == LEGS.RUNNING
    leg = tl.load(control_ptr + LEGS.EPOCH)
    first = chunk.to(tl.int64) * ROWS_PER_CHUNK
    recv_rows(out_ptr, parts_ptr, first, rows, leg, running, buffer_ptr, rank, LAYOUT, LEGS)


# ---------------------------------------------------------------------------------------------------------------------
# Launchers


def send(end: Endpoint, job: Job, x: torch.Tensor, chunk: int, num_programs: int | None = None) -> None:
    """Sends a leg: a chunk of rows of every part, quantised into the memory of the part's owner.

    Of an ALL_GATHER: a chunk of this rank's own rows, each encoded once and stored at every rank.

    Args:
        end: of the memory, whose last leg is over on this rank's stream. In poisoned memory nothing is done.
        x: [elements] of `job.dtype`, contiguous: the whole tensor, or of an ALL_GATHER the own part.
        chunk: rows `chunk * job.rows_per_chunk` and so on of each part; the first is 0.
        num_programs: programs of the launch; None means enough to fill the GPU.
    """
    rows, to_all = job.rows_in_chunk(chunk), job.op == ALL_GATHER
    programs = num_programs_for(rows * (1 if to_all else end.layout.WORLD), x.device, num_programs)
    wire = job.gather_wire if to_all else job.wire
    launch = kept(end, _sending, to_all, wire, job.row, job.dtype, job.rows_per_chunk)
    launch(programs, 1, (x, job.parts), (), (chunk, rows, *job.signature))


def _sending(
    end: Endpoint, to_all: bool, wire: WireFormat, row: int, dtype: torch.dtype, rows_per_chunk: int
) -> Launcher:
    layout = RecordLayout.of(wire, row, dtype)
    return launcher_of(
        end, send_kernel, {"LAYOUT": layout, "TO_ALL": to_all, "ROWS_PER_CHUNK": rows_per_chunk},
        ("x_ptr", "parts_ptr"), (), ("chunk", "rows", *SIGNATURE),
        num_warps=layout.num_warps, enable_fp_fusion=False,
    )  # fmt: skip


def _wait(end: Endpoint, job: Job, leg: int, timeout: float, grace: float) -> None:
    kept(end, _waiting, leg, timeout, grace)(1, 1, (), (), job.signature)


def _waiting(end: Endpoint, leg: int, timeout: float, grace: float) -> Launcher:
    times = {"timeout_ns": int(timeout * 1e9), "grace_ns": int(grace * 1e9)}
    return launcher_of(end, wait_kernel, {**times, "LEG": leg}, counts=SIGNATURE, num_warps=1)


def reduce(
    end: Endpoint, job: Job, out: torch.Tensor | None, chunk: int, timeout: float, grace: float,
    num_programs: int | None = None,
) -> None:  # fmt: skip
    """Waits for everyone's rows of a chunk of the own part and sums them over all ranks, in float32.

    Args:
        end, chunk: see `send`, which sent the leg.
        job: of op REDUCE_SCATTER where `out` is a tensor, ALL_REDUCE where it is None.
        out: [elements of the own part] of `job.out_dtype`, or else `job.dtype`, contiguous: sums rounded once,
            saturating at the largest finite value unless `job.wire` is `none`; NaN in poisoned memory. None: each row
            of sums is encoded once in `job.gather_wire` (`none` rounds it as above), stored at every rank, in the next
            leg.
        timeout: seconds until the memory is given up.
        grace: seconds that peers then get to report that they are stuck too.
        num_programs: programs of the launch that follows the wait; None means enough to fill the GPU.

    Raises:
        ValueError: a row is shorter than one format's group of elements, and the other format's tiles are not as long.
    """
    rows = job.rows_in_chunk(chunk)
    programs = num_programs_for(rows, end.buffer.device, num_programs)
    gather_wire = job.gather_wire if out is None else None
    launch = kept(end, _reducing, job.wire, gather_wire, job.row, job.dtype, job.rows_per_chunk)
    _wait(end, job, FIRST_LEG, timeout, grace)
    launch(programs, 1, (out, job.parts), (), (chunk, rows))


def _reducing(
    end: Endpoint, wire: WireFormat, gather_wire: WireFormat | None, row: int, dtype: torch.dtype, rows_per_chunk: int
) -> Launcher:
    layout, gathered, num_warps = sum_layouts(wire, gather_wire, row, dtype)
    return _receiving(end, reduce_kernel, rows_per_chunk, num_warps, LAYOUT=layout, GATHER=gathered)


def sum_layouts(
    wire: WireFormat, gather_wire: WireFormat | None, row: int, dtype: torch.dtype
) -> tuple[RecordLayout, RecordLayout | None, int]:
    """Of the summands' records and of those of the sums, if they are gathered; and warps of a program that sums.

    Raises:
        ValueError: see `reduce`.
    """
    layout, gathered = RecordLayout.of(wire, row, dtype), None
    num_warps = sum_warps(wire, layout)
    if gather_wire is not None:
        gathered = RecordLayout.of(gather_wire, row, dtype)
        num_warps = max(num_warps, gathered.num_warps)
        if layout.GROUP * layout.TILE_GROUPS != gathered.GROUP * gathered.TILE_GROUPS:
            raise ValueError(
                f"rows of {row} elements, of which {wire} makes {layout.GROUP * layout.TILE_GROUPS} and {gather_wire} "
                f"{gathered.GROUP * gathered.TILE_GROUPS}; expected rows of at least a group of either"
            )
    return layout, gathered, num_warps


def _receiving(end: Endpoint, kernel: Any, rows_per_chunk: int, num_warps: int, **constants: Any) -> Launcher:
    return launcher_of(
        end, kernel, {**constants, "ROWS_PER_CHUNK": rows_per_chunk}, ("out_ptr", "parts_ptr"), (), ("chunk", "rows"),
        num_warps=num_warps, enable_fp_fusion=False, **register_limit(end.buffer_ptrs.device, num_warps),
    )  # fmt: skip


def gather_recv(
    end: Endpoint, job: Job, out: torch.Tensor, chunk: int, timeout: float, grace: float,
    num_programs: int | None = None,
) -> None:  # fmt: skip
    """Waits for everyone's gathered rows of a chunk and decodes those of all parts.

    Args:
        end, chunk, timeout, grace, num_programs: see `reduce`.
        job: of op ALL_REDUCE, after `reduce`; or ALL_GATHER, after `send`.
        out: [elements] of `job.dtype`, contiguous, the whole tensor. NaN in poisoned memory.
    """
    rows = job.rows_in_chunk(chunk)
    programs = num_programs_for(rows * end.layout.WORLD, out.device, num_programs)
    _wait(end, job, FIRST_LEG if job.op == ALL_GATHER else SECOND_LEG, timeout, grace)
    launch = kept(end, _gathering, job.gather_wire, job.row, job.dtype, job.rows_per_chunk)
    launch(programs, 1, (out, job.parts), (), (chunk, rows))


def _gathering(end: Endpoint, wire: WireFormat, row: int, dtype: torch.dtype, rows_per_chunk: int) -> Launcher:
    layout = RecordLayout.of(wire, row, dtype)
    return _receiving(end, gather_recv_kernel, rows_per_chunk, layout.num_warps, LAYOUT=layout)
