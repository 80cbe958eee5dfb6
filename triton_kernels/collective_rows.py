"""Rows of the collectives over peers' memory: which there are, where their records lie, and what is done with one.

A program has one row at a time. A part's last row may be short: it travels as a row filled up with +0.0.
"""

from __future__ import annotations

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
from thinwire.triton_kernels.exchange import half_offset, slot_offset
from thinwire.triton_kernels.exchange_checksum import fits, note_corruption, slot_seed
from thinwire.triton_kernels.exchange_layout import FIRST_LEG
from thinwire.triton_kernels.floats import LARGEST_FLOAT32, rounded, saturated, store_float32, widened
from thinwire.triton_kernels.record import NONE
from thinwire.triton_kernels.record_checksum import tile_sums
from thinwire.triton_kernels.rows import load_row_tile, row_length, store_row_tile, tile_columns

_FIRST_LEG = tl.constexpr(FIRST_LEG)


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
def record_offset(LEG: tl.constexpr, epoch, source, row, EXCHANGE: tl.constexpr, LAYOUT: tl.constexpr):
    """Where in a rank's buffer a row of the chunk lies that rank `source` sends in a leg."""
    if LEG == _FIRST_LEG:
        offset = half_offset(epoch, source, EXCHANGE)
    else:
        offset = slot_offset(epoch & 1, source, EXCHANGE)
    return offset + row.to(tl.int64) * LAYOUT.ROW_BYTES


@triton.jit
def record_at(buffer_ptrs, peer, offset):
    """The record at `offset` of a rank's buffer, as int8."""
    return tl.multiple_of((tl.load(buffer_ptrs + peer) + offset).to(tl.pointer_type(tl.int8)), 16)


@triton.jit
def send_row(
    x_row, length, buffer_ptrs, peer, offset, PEERS: tl.constexpr, WORLD: tl.constexpr, LAYOUT: tl.constexpr,
    CHECKSUMS: tl.constexpr,
):  # fmt: skip
    """A row of `length` elements, if more are not there, into the record at `offset` of PEERS ranks from `peer` on.

    It is encoded once. Returns, if CHECKSUMS, the sums of the record's words, without seeds.
    """
    a = tl.zeros((), tl.int64)
    b = tl.zeros((), tl.int64)
    there = row_length(length, LAYOUT)
    row_amax = tl.zeros((1,), tl.int32)
    if LAYOUT.TWO_PASSES:
        for tile in range(LAYOUT.NUM_TILES):
            x = widened(load_row_tile(x_row, there, tile, LAYOUT))
            row_amax = tl.maximum(row_amax, group_amax(x))
    for tile in range(LAYOUT.NUM_TILES):
        elements = load_row_tile(x_row, there, tile, LAYOUT)
        if LAYOUT.KIND == NONE:
            columns = tile_columns(tile, LAYOUT)
            if CHECKSUMS:
                more_a, more_b = tile_sums(elements, None, tile, LAYOUT)
                a += more_a
                b += more_b
            target = peer
            for _ in range(PEERS):
                record = record_at(buffer_ptrs, target, offset).to(tl.pointer_type(LAYOUT.DTYPE))
                tl.store(record + columns, elements, mask=columns < LAYOUT.ELEMENTS)
                target = next_peer(target, WORLD)
        else:
            x = widened(elements)
            payload, scale_bits = encode_tile(x, row_amax if LAYOUT.TWO_PASSES else group_amax(x), LAYOUT)
            if CHECKSUMS:
                more_a, more_b = tile_sums(payload, scale_bits, tile, LAYOUT)
                a += more_a
                b += more_b
            target = peer
            for _ in range(PEERS):
                store_encoded_tile(record_at(buffer_ptrs, target, offset), payload, scale_bits, tile, LAYOUT)
                target = next_peer(target, WORLD)
    if LAYOUT.TAIL_WORDS > 0:
        target = peer
        for _ in range(PEERS):
            store_record_tail(record_at(buffer_ptrs, target, offset), LAYOUT)
            target = next_peer(target, WORLD)
    return a, b


@triton.jit
def sum_tile(first_record, tile, a, b, EXCHANGE: tl.constexpr, LAYOUT: tl.constexpr):
    """One tile of the sum of a row over all ranks, float32; `first_record` is the one from rank 0.

    Returns it with a and b [ranks or more]; with CHECKSUMS, what the tile adds to those of each rank's record is added.
    """
    columns = tile_columns(tile, LAYOUT)
    ranks = tl.arange(0, a.numel)
    total = tl.zeros(columns.shape, tl.float32)
    unrolled: tl.constexpr = 1 if EXCHANGE.CHECKSUMS > 0 else 4  # with sums more at a time would spill
    for source in tl.range(EXCHANGE.WORLD, loop_unroll_factor=unrolled):
        record = tl.multiple_of(first_record + tl.full((), EXCHANGE.SLOT_BYTES, tl.int64) * source, 16)
        if EXCHANGE.CHECKSUMS > 0:
            payload, scale_bits = load_encoded_tile(record, tile, LAYOUT, True)
            more_a, more_b = tile_sums(payload, scale_bits, tile, LAYOUT)
            a += tl.where(ranks == source, more_a, 0)
            b += tl.where(ranks == source, more_b, 0)
            total = total + scaled_tile(payload, scale_bits, LAYOUT)
        else:
            total = total + load_record_tile(record, tile, LAYOUT)
    if LAYOUT.KIND != NONE:
        # Quantised rows that are finite have a finite sum: past the largest float32 a whole group would be NaN.
        total = tl.where(
            total > LARGEST_FLOAT32, LARGEST_FLOAT32, tl.where(total < -LARGEST_FLOAT32, -LARGEST_FLOAT32, total)
        )
    # Past its end a row of NaN has NaN.
    return tl.where(columns < LAYOUT.HIDDEN, total, 0.0), a, b


@triton.jit
def send_sum(
    first_record, buffer_ptrs, peer, offset, EXCHANGE: tl.constexpr, LAYOUT: tl.constexpr, GATHER: tl.constexpr,
    LAUNCH: tl.constexpr,
):  # fmt: skip
    """The sum of a row over all ranks into the record at `offset` of all ranks from `peer` on.

    It is encoded once, as GATHER. Returns with CHECKSUMS, without seeds, those of the ranks' records, two of [BLOCK],
    and the two of the new one.
    """
    tl.static_assert(EXCHANGE.CHECKSUMS == 0 or not GATHER.TWO_PASSES, "the first pass would read what no sums cover")
    world: tl.constexpr = EXCHANGE.WORLD
    a, b = tl.full((LAUNCH.BLOCK,), 0, tl.int64), tl.full((LAUNCH.BLOCK,), 0, tl.int64)
    sent_a, sent_b = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    row_amax = tl.zeros((1,), tl.int32)
    if GATHER.TWO_PASSES:
        for tile in range(GATHER.NUM_TILES):
            columns = tile_columns(tile, GATHER)
            total, _, _ = sum_tile(first_record, tile, a, b, EXCHANGE, LAYOUT)
            row_amax = tl.maximum(row_amax, group_amax(tl.reshape(total, columns.shape)))
    for tile in range(GATHER.NUM_TILES):
        columns = tile_columns(tile, GATHER)
        total, a, b = sum_tile(first_record, tile, a, b, EXCHANGE, LAYOUT)
        total = tl.reshape(total, columns.shape)
        if GATHER.KIND == NONE:
            if EXCHANGE.CHECKSUMS > 0:
                stored = saturated(total, GATHER.DTYPE) if LAYOUT.KIND != NONE else total
                more_a, more_b = tile_sums(rounded(stored, GATHER.DTYPE), None, tile, GATHER)
                sent_a += more_a
                sent_b += more_b
            target = peer
            for _ in range(world):
                record = record_at(buffer_ptrs, target, offset).to(tl.pointer_type(GATHER.DTYPE))
                store_float32(record + columns, total, columns < GATHER.ELEMENTS, LAYOUT.KIND != NONE)
                target = next_peer(target, world)
        else:
            payload, scale_bits = encode_tile(total, row_amax if GATHER.TWO_PASSES else group_amax(total), GATHER)
            if EXCHANGE.CHECKSUMS > 0:
                more_a, more_b = tile_sums(payload, scale_bits, tile, GATHER)
                sent_a += more_a
                sent_b += more_b
            target = peer
            for _ in range(world):
                store_encoded_tile(record_at(buffer_ptrs, target, offset), payload, scale_bits, tile, GATHER)
                target = next_peer(target, world)
    if GATHER.TAIL_WORDS > 0:
        target = peer
        for _ in range(world):
            store_record_tail(record_at(buffer_ptrs, target, offset), GATHER)
            target = next_peer(target, world)
    return a, b, sent_a, sent_b


@triton.jit
def recv_sum(
    first_record, out_row, length, EXCHANGE: tl.constexpr, LAYOUT: tl.constexpr, LAUNCH: tl.constexpr
):  # fmt: skip
    """The sum of a row over all ranks into a row of `length` elements. Returns the ranks' records' sums, as above."""
    a, b = tl.full((LAUNCH.BLOCK,), 0, tl.int64), tl.full((LAUNCH.BLOCK,), 0, tl.int64)
    for tile in range(LAYOUT.NUM_TILES):
        total, a, b = sum_tile(first_record, tile, a, b, EXCHANGE, LAYOUT)
        row = rounded(total, out_row.dtype.element_ty, LAYOUT.KIND != NONE)
        store_row_tile(out_row, row, length, tile, LAYOUT)
    return a, b


@triton.jit
def recv_row(
    base, offset, out_row, length, running, control_ptr, report_ptr, source, number, row, first, each,
    EXCHANGE: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """The record at `offset` of the buffer `base` into a row of `length` elements; NaN in poisoned memory.

    With CHECKSUMS also where it is not what rank `source` put into its slot in the open epoch, under `number` and as
    row `row` of the slot. Then rows `first` and so on, `each` of them, are noted.
    """
    record = tl.multiple_of((base + offset).to(tl.pointer_type(tl.int8)), 16)
    intact = running
    if running:
        a = tl.full((), 0, tl.int64)
        b = tl.full((), 0, tl.int64)
        for tile in range(LAYOUT.NUM_TILES):
            payload, scale_bits = load_encoded_tile(record, tile, LAYOUT, EXCHANGE.CHECKSUMS > 0)
            if EXCHANGE.CHECKSUMS > 0:
                more_a, more_b = tile_sums(payload, scale_bits, tile, LAYOUT)
                a += more_a
                b += more_b
            if LAYOUT.KIND == NONE:
                elements = payload
            else:
                elements = rounded(scaled_tile(payload, scale_bits, LAYOUT), out_row.dtype.element_ty, True)
            store_row_tile(out_row, elements, length, tile, LAYOUT)
        if EXCHANGE.CHECKSUMS > 0:
            seed = slot_seed(tl.load(control_ptr + EXCHANGE.EPOCH), source, number)
            intact = fits(base, offset, seed, row, a, b, EXCHANGE)
            if not intact:
                note_corruption(control_ptr, report_ptr, source, first, each, EXCHANGE)
                tl.debug_barrier()  # the row's stores may be other threads'
    if not intact:
        fill_row(out_row, length, float("nan"), LAYOUT)
