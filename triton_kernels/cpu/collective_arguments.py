"""What the CPU's kernels of one-way collectives know of a job, and the small functions that they share."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from thinwire.triton_kernels.collective_layout import (
    HEADER_SIGNATURE,
    SIGNATURE_WORDS,
    CollectiveLane,
    CollectiveLayout,
    Job,
)
from thinwire.triton_kernels.cpu.codec import dtype_code, element_bytes, quantize_row, record_layout
from thinwire.triton_kernels.cpu.compat import device
from thinwire.triton_kernels.cpu.ir.fields import reader_of
from thinwire.triton_kernels.cpu.ir.intrinsics import (
    copy_bytes,
    load_int32,
    load_int64,
    store_int32,
    store_int64,
    zero_bytes,
)
from thinwire.triton_kernels.cpu.signal import publish, signal_line
from thinwire.triton_kernels.signal import CONTROL_EPOCH, REPORT_PEERS, SIGNAL_LINE_BYTES
from thinwire.wire import WireFormat

__all__ = [
    "CollectiveNumbers",
    "all_do_the_same",
    "begin_epoch",
    "copy_to_peers",
    "first_lines",
    "gathered_layout",
    "numbers_at",
    "numbers_of",
    "pack_row",
    "part_of",
    "row_span",
    "scattered_layout",
    "slot_of",
]


class CollectiveNumbers(NamedTuple):
    """What is the same in every chunk of a job, and in every call like it."""

    world: int
    rank: int
    slot_bytes: int
    stuck: int
    first: int
    second: int
    scattered: int
    gathered: int
    row: int
    dtype: int
    rows_per_chunk: int
    signature0: int
    what1: int
    what2: int
    what3: int
    kind: int  # the layout of a scattered record, as the codec has it
    group: int
    row_scale: int
    hidden: int
    scales_offset: int
    row_bytes: int
    gather_kind: int  # of a gathered one
    gather_group: int
    gather_row_scale: int
    gather_hidden: int
    gather_scales_offset: int
    gather_row_bytes: int


numbers_at = reader_of(CollectiveNumbers)


@lru_cache(maxsize=512)
def _numbers(
    layout: CollectiveLayout,
    rank: int,
    signature: tuple[int, int, int, int],
    row: int,
    wire: WireFormat,
    gather_wire: WireFormat,
    dtype: torch.dtype,
    rows_per_chunk: int,
) -> tuple[np.ndarray, int]:
    numbers = CollectiveNumbers(
        layout.WORLD, rank, layout.SLOT_BYTES, layout.STUCK, layout.FIRST, layout.SECOND, layout.SCATTERED,
        layout.GATHERED, row, dtype_code(dtype), rows_per_chunk, *signature, *record_layout(wire, row, dtype),
        *record_layout(gather_wire, row, dtype),
    )  # fmt: skip
    words = np.array(numbers, dtype=np.int64)
    words.flags.writeable = False
    return words, words.ctypes.data


def numbers_of(lane: CollectiveLane, job: Job) -> tuple[np.ndarray, int]:
    """The numbers, and their address. The caller holds on to both while a kernel reads from there."""
    return _numbers(
        lane.layout, lane.rank, job.signature, job.row, job.wire, job.gather_wire, job.dtype, job.rows_per_chunk
    )


# ---------------------------------------------------------------------------------------------------------------------
# In kernels


@device
def scattered_layout(job):
    """What the codec's row functions must know of a scattered record: a `Layout`."""
    return job.kind, job.group, job.row_scale, job.hidden, job.scales_offset, job.row_bytes


@device
def gathered_layout(job):
    """The same of a gathered record."""
    return (
        job.gather_kind,
        job.gather_group,
        job.gather_row_scale,
        job.gather_hidden,
        job.gather_scales_offset,
        job.gather_row_bytes,
    )


@device
def slot_of(buffer_ptrs, job, peer, slots, epoch, source):
    """Address, at `peer`, of the slot of `source` in the half of an epoch; `slots` is the offset of all."""
    return load_int64(buffer_ptrs + 8 * peer) + slots + ((epoch & 1) * job.world + source) * job.slot_bytes


@device
def first_lines(job, epoch):
    """Offset of the first lines of an epoch's half."""
    return job.first + (epoch & 1) * job.world * SIGNAL_LINE_BYTES


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
    # Collectives of one leg leave the second flag behind. Nobody looks at it now, and it shall never be half of all
    # numbers behind, or a later all-reduce would take it for one that is ahead.
    own = load_int32(signal_line(buffer_ptrs, job.rank, job.second, job.rank))
    if np.int32(own) != np.int32(epoch - 1):
        publish(buffer_ptrs, job.world, job.rank, job.second, epoch - 1)
    lines = first_lines(job, epoch)
    for peer in range(job.world):
        line = signal_line(buffer_ptrs, peer, lines, job.rank) + 4 * HEADER_SIGNATURE
        store_int64(line, job.signature0)
        store_int64(line + 8, job.what1)
        store_int64(line + 16, job.what2)
        store_int64(line + 24, job.what3)
    store_int32(control + 4 * CONTROL_EPOCH, epoch)
    publish(buffer_ptrs, job.world, job.rank, lines, epoch)


@device
def all_do_the_same(buffer_ptrs, job, lines, report):
    """Whether all ranks said what this one says; notes those that did not."""
    agree = True
    own = signal_line(buffer_ptrs, job.rank, lines, job.rank) + 4 * HEADER_SIGNATURE
    for peer in range(job.world):
        line = signal_line(buffer_ptrs, job.rank, lines, peer) + 4 * HEADER_SIGNATURE
        differs = 0
        for word in range(SIGNATURE_WORDS):
            if load_int64(line + 8 * word) != load_int64(own + 8 * word):
                differs = 1
        store_int32(report + 4 * (REPORT_PEERS + peer), differs)
        agree = agree and differs == 0
    return agree


@device
def copy_to_peers(buffer_ptrs, job, epoch, record, place):
    """A record of this rank's own gathered slot, `place` bytes from its beginning, into those at the peers."""
    for step in range(1, job.world):
        peer = (job.rank + step) % job.world
        copy_bytes(slot_of(buffer_ptrs, job, peer, job.gathered, epoch, job.rank) + place, record, job.gather_row_bytes)
