"""Rows of the collectives over peers' memory: which there are, where their records lie, and what is done with one.

A program has one row at a time. A part's last row may be short: it travels as a row filled up with +0.0.
"""

from __future__ import annotations

from thinwire.triton_kernels.blocks import rotated, rotated_back
from thinwire.triton_kernels.codec import (
    encode_tile,
    fill_row,
    group_amax,
    load_encoded_tile,
    load_record_tile,
    scaled_tile,
    store_encoded_tile,
    store_record_tail,
)
from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.floats import LARGEST_FLOAT32, rounded, widened
from thinwire.triton_kernels.legs import half_offset, header_line, publish_header
from thinwire.triton_kernels.put import base_of, put, record_at
from thinwire.triton_kernels.record import NONE
from thinwire.triton_kernels.rows import in_blocks, in_order, load_row_tile, row_length, store_row_tile, tile_columns
from thinwire.triton_kernels.signal import arrive, publish


@triton.jit
def first_peer(row, rank, WORLD: tl.constexpr):
    """Where a row of a chunk begins its way round the ranks: the right-hand neighbour, and one further with each row.

    So all links are busy from the start, and in every row.
    """
    return (rank + 1 + row) % WORLD


@triton.jit
def row_and_part(item, rank, WORLD: tl.constexpr):
    """Which row of a chunk, and of whose part; in each row all parts' turn comes.

    As rows begin with different parts, a grid that is a multiple of the world's size leaves no program with the rows of
    one part alone.
    """
    row = item // WORLD
    return row, (first_peer(row, rank, WORLD) + item) % WORLD


@triton.jit
def next_peer(peer, WORLD: tl.constexpr):
    """The next one round the ranks."""
    return tl.where(peer == WORLD - 1, 0, peer + 1)


@triton.jit
def length_and_start(parts_ptr, part, row, WORLD: tl.constexpr, HIDDEN: tl.constexpr):
    """Elements of a part from a row on, not positive where the row is not there; and where it begins in the tensor."""
    passed = row.to(tl.int64) * HIDDEN
    return tl.load(parts_ptr + part) - passed, tl.load(parts_ptr + WORLD + part) + passed


@triton.jit
def record_offset(leg, source, row, LEGS: tl.constexpr, LAYOUT: tl.constexpr):
    """Where in a rank's buffer a row of the chunk lies that rank `source` sends in a leg."""
    return half_offset(leg, source, LEGS) + row.to(tl.int64) * LAYOUT.ROW_BYTES


@triton.jit
def send_row(
    x_row, length, buffer_ptrs, peer, offset, PEERS: tl.constexpr, WORLD: tl.constexpr, LAYOUT: tl.constexpr
):  # fmt: skip
    """A row of `length` elements, if more are not there, into the record at `offset` of PEERS ranks from `peer` on.

    It is encoded once.
    """
    there = row_length(length, LAYOUT)
    row_amax = tl.zeros((1,), tl.int32)
    if LAYOUT.TWO_PASSES:
        for tile in range(LAYOUT.NUM_TILES):
            x = rotated(widened(load_row_tile(x_row, there, tile, LAYOUT)), LAYOUT)
            row_amax = tl.maximum(row_amax, group_amax(x, LAYOUT))
    for tile in range(LAYOUT.NUM_TILES):
        elements = load_row_tile(x_row, there, tile, LAYOUT)
        if LAYOUT.KIND == NONE:
            columns = tile_columns(tile, LAYOUT)
            target = peer
            for _ in range(PEERS):
                record = record_at(base_of(buffer_ptrs, target) + offset).to(tl.pointer_type(LAYOUT.DTYPE))
                put(record + columns, elements, columns < LAYOUT.ELEMENTS)
                target = next_peer(target, WORLD)
        else:
            x = rotated(widened(elements), LAYOUT)
            payload, scale_bits = encode_tile(x, row_amax if LAYOUT.TWO_PASSES else group_amax(x, LAYOUT), LAYOUT)
            target = peer
            for _ in range(PEERS):
                store_encoded_tile(record_at(base_of(buffer_ptrs, target) + offset), payload, scale_bits, tile, LAYOUT)
                target = next_peer(target, WORLD)
    if LAYOUT.TAIL_WORDS > 0:
        target = peer
        for _ in range(PEERS):
            store_record_tail(record_at(base_of(buffer_ptrs, target) + offset), LAYOUT)
            target = next_peer(target, WORLD)


@triton.jit
def sum_tile(first_record, tile, LEGS: tl.constexpr, LAYOUT: tl.constexpr):
    """One tile of the sum of a row over all ranks, float32; `first_record` is the one from rank 0."""
    columns = tile_columns(tile, LAYOUT)
    total = tl.zeros(columns.shape, tl.float32)
    for source in tl.range(LEGS.WORLD, loop_unroll_factor=4):
        record = tl.multiple_of(first_record + tl.full((), LEGS.SLOT_BYTES, tl.int64) * source, 16)
        total = total + load_record_tile(record, tile, LAYOUT)
    total = rotated_back(total, LAYOUT)
    if LAYOUT.KIND != NONE:
        # Quantised rows that are finite have a finite sum: past the largest float32 a whole group would be NaN.
        total = tl.where(
            total > LARGEST_FLOAT32, LARGEST_FLOAT32, tl.where(total < -LARGEST_FLOAT32, -LARGEST_FLOAT32, total)
        )
    # Past its end a row of NaN has NaN.
    return tl.where(columns < LAYOUT.HIDDEN, total, 0.0)


@triton.jit
def send_sum(
    first_record, buffer_ptrs, peer, offset, LEGS: tl.constexpr, LAYOUT: tl.constexpr, GATHER: tl.constexpr
):  # fmt: skip
    """The sum of a row over all ranks into the record at `offset` of all ranks from `peer` on.

    It is encoded once, as GATHER.
    """
    world: tl.constexpr = LEGS.WORLD
    row_amax = tl.zeros((1,), tl.int32)
    if GATHER.TWO_PASSES:
        for tile in range(GATHER.NUM_TILES):
            total = in_blocks(in_order(sum_tile(first_record, tile, LEGS, LAYOUT), LAYOUT), GATHER)
            row_amax = tl.maximum(row_amax, group_amax(rotated(total, GATHER), GATHER))
    for tile in range(GATHER.NUM_TILES):
        columns = tile_columns(tile, GATHER)
        total = in_blocks(in_order(sum_tile(first_record, tile, LEGS, LAYOUT), LAYOUT), GATHER)
        if GATHER.KIND == NONE:
            target = peer
            for _ in range(world):
                record = record_at(base_of(buffer_ptrs, target) + offset).to(tl.pointer_type(GATHER.DTYPE))
                elements = rounded(total, GATHER.DTYPE, LAYOUT.KIND != NONE)
                put(record + columns, elements, columns < GATHER.ELEMENTS)
                target = next_peer(target, world)
        else:
            total = rotated(total, GATHER)
            amax = row_amax if GATHER.TWO_PASSES else group_amax(total, GATHER)
            payload, scale_bits = encode_tile(total, amax, GATHER)
            target = peer
            for _ in range(world):
                store_encoded_tile(record_at(base_of(buffer_ptrs, target) + offset), payload, scale_bits, tile, GATHER)
                target = next_peer(target, world)
    if GATHER.TAIL_WORDS > 0:
        target = peer
        for _ in range(world):
            store_record_tail(record_at(base_of(buffer_ptrs, target) + offset), GATHER)
            target = next_peer(target, world)


@triton.jit
def recv_sum(first_record, out_row, length, LEGS: tl.constexpr, LAYOUT: tl.constexpr):
    """The sum of a row over all ranks into a row of `length` elements."""
    for tile in range(LAYOUT.NUM_TILES):
        total = sum_tile(first_record, tile, LEGS, LAYOUT)
        row = rounded(total, out_row.dtype.element_ty, LAYOUT.KIND != NONE)
        store_row_tile(out_row, row, length, tile, LAYOUT)


@triton.jit
def recv_row(address, out_row, length, running, LAYOUT: tl.constexpr):
    """The record at an address into a row of `length` elements; NaN in poisoned memory."""
    record = record_at(address)
    if running:
        for tile in range(LAYOUT.NUM_TILES):
            payload, scale_bits = load_encoded_tile(record, tile, LAYOUT)
            if LAYOUT.KIND == NONE:
                elements = payload
            else:
                row = rotated_back(scaled_tile(payload, scale_bits, LAYOUT), LAYOUT)
                elements = rounded(row, out_row.dtype.element_ty, True)
            store_row_tile(out_row, elements, length, tile, LAYOUT)
    else:
        fill_row(out_row, length, float("nan"), LAYOUT)


# ---------------------------------------------------------------------------------------------------------------------
# All rows of a leg, by any number of programs. `rows` is how many the longest part has from `first` on.


@triton.jit
def send_rows(
    x_ptr, parts_ptr, first, rows, leg, signature, buffer_ptrs, control_ptr, rank,
    TO_ALL: tl.constexpr, LAYOUT: tl.constexpr, LEGS: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Rows of every part to its owner, or TO_ALL those of the own part to everyone; then the leg's header.

    The whole tensor begins at `x_ptr`, or the own part.
    """
    world: tl.constexpr = LEGS.WORLD
    item = tl.program_id(0)
    while item < rows * (1 if TO_ALL else world):
        if TO_ALL:
            row, part = item, rank
        else:
            row, part = row_and_part(item, rank, world)
        length, start = length_and_start(parts_ptr, part, first + row, world, LAYOUT.HIDDEN)
        if length > 0:
            offset = record_offset(leg, rank, row, LEGS, LAYOUT)
            peers: tl.constexpr = world if TO_ALL else 1
            if TO_ALL:
                x_row, peer = x_ptr + (first + row) * LAYOUT.HIDDEN, first_peer(row, rank, world)
            else:
                x_row, peer = x_ptr + start, part
            send_row(x_row, length, buffer_ptrs, peer, offset, peers, world, LAYOUT)
        item += tl.num_programs(0)
    if arrive(control_ptr, LEGS, LAUNCH):
        tl.store(control_ptr + LEGS.EPOCH, leg)
        publish_header(buffer_ptrs, rank, leg, signature, LEGS, LAUNCH)


@triton.jit
def reduce_rows(
    out_ptr, parts_ptr, first, rows, leg, running, buffer_ptr, buffer_ptrs, control_ptr, rank,
    LAYOUT: tl.constexpr, GATHER: tl.constexpr, LEGS: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Sums of the own part's rows into the tensor at `out_ptr`.

    Or, where there is a GATHER, as such records to everyone in the next leg, and then its flag.
    """
    world: tl.constexpr = LEGS.WORLD
    if True if GATHER is None else running:  # poisoned memory sends nothing, and gives NaN
        row = tl.program_id(0)
        while row < rows:
            left, _ = length_and_start(parts_ptr, rank, first + row, world, LAYOUT.HIDDEN)
            if left > 0:
                record = buffer_ptr + record_offset(leg, 0, row, LEGS, LAYOUT)
                if GATHER is None:
                    length = row_length(left, LAYOUT)
                    if running:
                        recv_sum(record, out_ptr + (first + row) * LAYOUT.HIDDEN, length, LEGS, LAYOUT)
                    else:
                        fill_row(out_ptr + (first + row) * LAYOUT.HIDDEN, length, float("nan"), LAYOUT)
                else:
                    offset = record_offset(leg + 1, rank, row, LEGS, GATHER)
                    send_sum(record, buffer_ptrs, first_peer(row, rank, world), offset, LEGS, LAYOUT, GATHER)
            row += tl.num_programs(0)
        if GATHER is not None:
            if arrive(control_ptr, LEGS, LAUNCH):
                tl.store(control_ptr + LEGS.EPOCH, leg + 1)
                line = header_line(leg + 1, rank, LEGS)
                publish(buffer_ptrs, line, LEGS.HEADERS, leg + 1, LEGS, LAUNCH)


@triton.jit
def recv_rows(
    out_ptr, parts_ptr, first, rows, leg, running, buffer_ptr, rank, LAYOUT: tl.constexpr, LEGS: tl.constexpr
):
    """The gathered rows of all parts into the tensor at `out_ptr`."""
    world: tl.constexpr = LEGS.WORLD
    item = tl.program_id(0)
    while item < rows * world:
        row, part = row_and_part(item, rank, world)
        length, start = length_and_start(parts_ptr, part, first + row, world, LAYOUT.HIDDEN)
        if length > 0:
            address = buffer_ptr.to(tl.int64) + record_offset(leg, part, row, LEGS, LAYOUT)
            recv_row(address, out_ptr + start, row_length(length, LAYOUT), running, LAYOUT)
        item += tl.num_programs(0)
