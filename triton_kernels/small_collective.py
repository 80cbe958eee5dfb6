"""All-reduce, reduce-scatter and all-gather of little data in one launch, whose programs wait for the peers themselves.

It does what the launches of `thinwire.triton_kernels.collective` do, one after the other, with the same records in the
same legs, so ranks with either can share a call. `docs/protocol.md`, "Waiting", says what stands in for the ends of
launches. All programs have to run at once, so the launch is a cooperative grid: the GPU starts all of them or none.
"""

from __future__ import annotations

import torch

from thinwire.triton_kernels import collective_launches
from thinwire.triton_kernels.collective import DYNAMIC, ROWS, SIGNATURE, sum_layouts
from thinwire.triton_kernels.collective_rows import recv_rows, reduce_rows, send_rows
from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.launch import Launcher, kept, launcher_of
from thinwire.triton_kernels.leg_layout import ALL_GATHER, ALL_REDUCE, Endpoint, Job
from thinwire.triton_kernels.legs import wait_leg
from thinwire.triton_kernels.record import RecordLayout
from thinwire.triton_kernels.signal import Launch, num_multiprocessors, register_limit, status_of
from thinwire.wire import WireFormat

_MOST_ROWS = 2  # that a program sends or unpacks; the more, the less one launch saves
_MOST_PROGRAMS = 16  # that wait at once: most of a GPU is left to others


@triton.jit(do_not_specialize=DYNAMIC, do_not_specialize_on_alignment=ROWS)
def small_kernel(
    x_ptr, out_ptr, parts_ptr, rows, signature_0: tl.int64, signature_1: tl.int64, signature_2: tl.int64,
    signature_3: tl.int64, buffer_ptr, buffer_ptrs, control_ptr, report_ptr, rank, timeout_ns: tl.int64,
    grace_ns: tl.int64, LAYOUT: tl.constexpr, GATHER: tl.constexpr, LEGS: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """A call of one chunk. Without a LAYOUT of summands it is an all-gather, without a GATHER a reduce-scatter."""
    signature = (signature_0, signature_1, signature_2, signature_3)
    running = status_of(control_ptr, LEGS) == LEGS.RUNNING
    leg = tl.load(control_ptr + LEGS.EPOCH) + 1
    first = tl.full((), 0, tl.int64)
    to_all: tl.constexpr = LAYOUT is None
    if running:
        send_rows(
            x_ptr, parts_ptr, first, rows, leg, signature, buffer_ptrs, control_ptr, rank,
            to_all, GATHER if to_all else LAYOUT, LEGS, LAUNCH,
        )  # fmt: skip
        running = wait_leg(
            buffer_ptrs, control_ptr, report_ptr, rank, leg, signature, timeout_ns, grace_ns,
            LEGS.FIRST_LEG, True, LEGS, LAUNCH,
        )  # fmt: skip
    if not to_all:
        reduce_rows(
            out_ptr, parts_ptr, first, rows, leg, running, buffer_ptr, buffer_ptrs, control_ptr, rank,
            LAYOUT, GATHER, LEGS, LAUNCH,
        )  # fmt: skip
        if GATHER is not None:
            leg += 1
            if running:
                running = wait_leg(
                    buffer_ptrs, control_ptr, report_ptr, rank, leg, signature, timeout_ns, grace_ns,
                    LEGS.SECOND_LEG, True, LEGS, LAUNCH,
                )  # fmt: skip
    if GATHER is not None:
        recv_rows(out_ptr, parts_ptr, first, rows, leg, running, buffer_ptr, rank, GATHER, LEGS)


def programs_at_once(end: Endpoint, job: Job) -> int:
    """Programs for a call by `in_one_launch`; 0: it is too large, not wanted, or not on an NVIDIA GPU."""
    device = end.buffer_ptrs.device
    if Launch.of(end.layout, device).PLATFORM != "cuda" or collective_launches() != "one":
        return 0
    return programs_that_fit(job, end.layout.WORLD, num_multiprocessors(device))


def programs_that_fit(job: Job, world: int, multiprocessors: int) -> int:
    """The same for so many multiprocessors. The driver takes one a multiprocessor, whatever a program needs."""
    most, items = min(_MOST_PROGRAMS, multiprocessors), job.most_rows * world
    return max(1, min(items, most)) if job.num_chunks == 1 and items <= _MOST_ROWS * most else 0


def in_one_launch(
    end: Endpoint, job: Job, x: torch.Tensor, out: torch.Tensor, timeout: float, grace: float, num_programs: int
) -> None:
    """A whole call of one chunk.

    Args:
        end, x, out, timeout, grace: as the launchers of `thinwire.triton_kernels.collective` have them.
        num_programs: of the launch, which all run at once: as many as `programs_at_once` says, or fewer.
    """
    launch = kept(end, _launching, job.op, job.wire, job.gather_wire, job.row, job.dtype, timeout, grace)
    launch(num_programs, 1, (x, out, job.parts), (), (job.rows_in_chunk(0), *job.signature))


def _launching(
    end: Endpoint, op: int, wire: WireFormat, gather_wire: WireFormat, row: int, dtype: torch.dtype,
    timeout: float, grace: float,
) -> Launcher:  # fmt: skip
    record = RecordLayout.of(gather_wire, row, dtype)
    layouts: tuple[RecordLayout | None, RecordLayout | None, int] = None, record, record.num_warps
    if op != ALL_GATHER:
        layouts = sum_layouts(wire, gather_wire if op == ALL_REDUCE else None, row, dtype)
    layout, gathered, num_warps = layouts
    times = {"timeout_ns": int(timeout * 1e9), "grace_ns": int(grace * 1e9)}
    return launcher_of(
        end, small_kernel, {**times, "LAYOUT": layout, "GATHER": gathered},
        ("x_ptr", "out_ptr", "parts_ptr"), (), ("rows", *SIGNATURE), num_warps=num_warps, enable_fp_fusion=False,
        launch_cooperative_grid=True,
        **register_limit(end.buffer_ptrs.device, num_warps, 1),  # all that a multiprocessor has
    )  # fmt: skip
