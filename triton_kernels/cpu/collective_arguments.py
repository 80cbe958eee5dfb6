"""What the CPU's kernels of one-way collectives know of a job, and the small functions that they share."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from thinwire.triton_kernels.cpu.codec import dtype_code, element_bytes, quantize_row, record_layout
from thinwire.triton_kernels.cpu.compat import device
from thinwire.triton_kernels.cpu.exchange import publish_header, same_signature
from thinwire.triton_kernels.cpu.ir.fields import reader_of
from thinwire.triton_kernels.cpu.ir.intrinsics import (
    copy_bytes,
    load_int32,
    load_int64,
    store_int32,
    zero_bytes,
)
from thinwire.triton_kernels.cpu.signal import publish, signal_line
from thinwire.triton_kernels.exchange_layout import FIRST_LEG, Endpoint, ExchangeLayout, Job
from thinwire.triton_kernels.signal import CONTROL_EPOCH, REPORT_PEERS, SIGNAL_LINE_BYTES
from thinwire.wire import WireFormat


class CollectiveNumbers(NamedTuple):
    """What is the same in every chunk of a job, and in every call like it."""

    world: int
    rank: int
    slot_bytes: int
    stuck: int
    headers: int
    tails: int
    halves: int
    rings: int
    row: int
    dtype: int
    rows_per_chunk: int
    signature0: int
    signature1: int
    signature2: int
    signature3: int
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
    layout: ExchangeLayout,
    rank: int,
    signature: tuple[int, int, int, int],
    row: int,
    wire: WireFormat,
    gather_wire: WireFormat,
    dtype: torch.dtype,
    rows_per_chunk: int,
) -> tuple[np.ndarray, int]:
    numbers = CollectiveNumbers(
        layout.WORLD, rank, layout.SLOT_BYTES, layout.STUCK, layout.HEADERS, layout.TAILS, layout.HALVES,
        layout.RINGS, row, dtype_code(dtype), rows_per_chunk, *signature, *record_layout(wire, row, dtype),
        *record_layout(gather_wire, row, dtype),
    )  # fmt: skip
    words = np.array(numbers, dtype=np.int64)
    words.flags.writeable = False
    return words, words.ctypes.data


def numbers_of(end: Endpoint, job: Job) -> tuple[np.ndarray, int]:
    """The numbers, and their address. The caller holds on to both while a kernel reads from there."""
    return _numbers(
        end.layout, end.rank, job.signature, job.row, job.wire, job.gather_wire, job.dtype, job.rows_per_chunk
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
def slot_of(buffer_ptrs, job, peer, leg, epoch, source):
    """Address, at `peer`, of what `source` sends in a leg of an epoch: in a half, or in the ring of two slots."""
    half = job.halves + ((epoch & 1) * job.world + source) * job.slot_bytes
    slot = job.rings + (source * 2 + (epoch & 1)) * job.slot_bytes
    return load_int64(buffer_ptrs + 8 * peer) + (half if leg == FIRST_LEG else slot)


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
        publish_header(line, epoch, 0, 0, signature_of(job))


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
def copy_to_peers(buffer_ptrs, job, leg, epoch, record, place):
    """A record of what this rank sends itself in a leg, `place` bytes from its beginning, to the peers."""
    for step in range(1, job.world):
        peer = (job.rank + step) % job.world
        copy_bytes(slot_of(buffer_ptrs, job, peer, leg, epoch, job.rank) + place, record, job.gather_row_bytes)
