"""Pieces of an all-to-all-v: rows into the peers' memory and out of the own, quantised or byte by byte, and the ring.

`docs/protocol.md`, "The ring", says when a slot may be written.
"""

from __future__ import annotations

from thinwire.triton_kernels.collective_rows import recv_row, send_row
from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.legs import half_offset, header_line, publish_header, slot_offset
from thinwire.triton_kernels.put import base_of, put
from thinwire.triton_kernels.rows import row_length
from thinwire.triton_kernels.signal import advance, arrive, publish, store_signal_number, store_signal_words

# Rows of an endpoint's table, and of its counters.
SEND_COUNT, SEND_DISPL, SEND_PIECES, RECV_COUNT, RECV_DISPL, RECV_PIECES, EXPECTED = (tl.constexpr(r) for r in range(7))
SENT, RECEIVED = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def load_signature(signature_ptr):
    """The four numbers that say what a row is."""
    return tl.load(signature_ptr), tl.load(signature_ptr + 1), tl.load(signature_ptr + 2), tl.load(signature_ptr + 3)


@triton.jit
def unit_and_peer(item, WORLD: tl.constexpr):
    """Which row or chunk of a piece, and for which peer; turned with each row, since peers differ in their rows."""
    unit = item // WORLD
    return unit, (item + unit) % WORLD


@triton.jit
def slot_address(base, owner, half, piece, FIRST: tl.constexpr, LEGS: tl.constexpr):
    """Where a piece from rank `owner` lies in the buffer at `base`: in a half, or in a slot of the ring."""
    if FIRST:
        offset = half_offset(half, owner, LEGS)
    else:
        offset = slot_offset(piece, owner, LEGS)
    return base + offset


@triton.jit
def copy_words(target, source, size, loaded, WORD: tl.constexpr, BYTES: tl.constexpr, VECTOR: tl.constexpr):
    """`copy_bytes` in words of VECTOR times BYTES bytes, and what is left of `size` byte by byte."""
    step: tl.constexpr = VECTOR * BYTES
    # Few enough words at a time for the registers: 4 of 16 bytes for each of 128 lanes, or 8 narrower ones.
    block: tl.constexpr = 512 * VECTOR if VECTOR > 1 else 1024
    whole = size // step * VECTOR
    sources = tl.multiple_of(source.to(tl.pointer_type(WORD)), step)
    targets = tl.multiple_of(target.to(tl.pointer_type(WORD)), step)
    start = whole * 0
    while start < whole:
        words = start + tl.arange(0, block)
        values = tl.load(sources + words, mask=words < whole * loaded, other=-1)
        put(targets + words, values, words < whole)
        start += block
    rest = size % step
    if rest > 0:
        places = tl.arange(0, 16)
        end = (size - rest).to(tl.int64)
        octets = tl.load((source + end).to(tl.pointer_type(tl.int8)) + places, mask=places < rest * loaded, other=-1)
        put((target + end).to(tl.pointer_type(tl.int8)) + places, octets, places < rest)


@triton.jit
def copy_bytes(target, source, size, loaded):
    """Copies int32 `size` bytes between two addresses, in the widest words that both allow.

    Where `loaded` is 0 nothing is read, and 0xFF is written.
    """
    bits = source | target
    if bits % 16 == 0:
        copy_words(target, source, size, loaded, tl.int32, 4, 4)
    elif bits % 4 == 0:
        copy_words(target, source, size, loaded, tl.int32, 4, 1)
    elif bits % 2 == 0:
        copy_words(target, source, size, loaded, tl.int16, 2, 1)
    else:
        copy_words(target, source, size, loaded, tl.int8, 1, 1)


@triton.jit
def chunk_size(count, step, number, unit, CHUNK: tl.constexpr, LEGS: tl.constexpr):
    """Bytes of chunk `unit` of piece `number` of `count` rows, int32, and where in the segment it begins, int64."""
    inside = unit.to(tl.int64) * CHUNK
    start = number.to(tl.int64) * LEGS.SLOT_BYTES + inside
    size = tl.minimum(count * step - start, LEGS.SLOT_BYTES - inside)
    return tl.maximum(tl.minimum(size, CHUNK), 0).to(tl.int32), start


@triton.jit
def rows_of(count, FLAT: tl.constexpr, LAYOUT: tl.constexpr):
    """Rows in which `count` rows, or elements of a 1-D tensor, travel."""
    if FLAT:
        rows = (count + (LAYOUT.HIDDEN - 1)) // LAYOUT.HIDDEN
    else:
        rows = count
    return rows


@triton.jit
def publish_tail(
    buffer_ptrs, counters_ptr, table_ptr, rank, number, LEGS: tl.constexpr, LAUNCH: tl.constexpr
):  # fmt: skip
    """Tells the peers that their pieces are in the ring; to those that got nothing it says what it said before."""
    world: tl.constexpr = LEGS.WORLD
    peers = tl.arange(0, LAUNCH.BLOCK)
    known = peers < world
    pieces = tl.load(table_ptr + SEND_PIECES * world + peers, mask=known, other=0)
    sent = advance(counters_ptr + SENT * world + peers, tl.where(pieces > number, 1, 0), known)
    publish(buffer_ptrs, rank, LEGS.TAILS, sent.to(tl.int32), LEGS, LAUNCH)


@triton.jit
def publish_pieces(
    buffer_ptrs, control_ptr, counters_ptr, table_ptr, signature_ptr, rank, number, FIRST: tl.constexpr,
    LEGS: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Tells the peers that their pieces are there: the header of a new epoch, or tails."""
    if FIRST:
        world: tl.constexpr = LEGS.WORLD
        peers = tl.arange(0, LAUNCH.BLOCK)
        epoch = advance(control_ptr + LEGS.EPOCH, 1)
        line = header_line(epoch, rank, LEGS)
        pieces = tl.load(table_ptr + SEND_PIECES * world + peers, mask=peers < world, other=0)
        rest = (pieces - 1).to(tl.int32)
        counts = tl.load(table_ptr + SEND_COUNT * world + peers, mask=peers < world, other=0)
        store_signal_words(buffer_ptrs, line, LEGS.HEADERS, LEGS.HEADER_PIECES, rest, LEGS, LAUNCH)
        store_signal_number(buffer_ptrs, line, LEGS.HEADERS, LEGS.HEADER_COUNT, counts, LEGS, LAUNCH)
        publish_header(buffer_ptrs, rank, epoch, load_signature(signature_ptr), LEGS, LAUNCH)
    else:
        publish_tail(buffer_ptrs, counters_ptr, table_ptr, rank, number, LEGS, LAUNCH)


@triton.jit
def publish_head(buffer_ptrs, counters_ptr, table_ptr, rank, number, LEGS: tl.constexpr, LAUNCH: tl.constexpr):
    """Tells the peers that the slots of their pieces are free again."""
    world: tl.constexpr = LEGS.WORLD
    peers = tl.arange(0, LAUNCH.BLOCK)
    known = peers < world
    pieces = tl.load(table_ptr + RECV_PIECES * world + peers, mask=known, other=0)
    received = advance(counters_ptr + RECEIVED * world + peers, tl.where(pieces > number, 1, 0), known)
    publish(buffer_ptrs, rank, LEGS.HEADS, received.to(tl.int32), LEGS, LAUNCH)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels. `items` is how many rows or chunks the largest of the pieces has.


@triton.jit(do_not_specialize=["rank", "number", "items"])
def send_rows_kernel(
    x_ptr,
    signature_ptr,
    step,
    number,
    items,
    buffer_ptrs,
    control_ptr,
    counters_ptr,
    table_ptr,
    rank,
    FLAT: tl.constexpr,
    FIRST: tl.constexpr,
    LAYOUT: tl.constexpr,
    LEGS: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Quantises piece `number` of every pair into the peers' memory. Any number of programs."""
    per_piece: tl.constexpr = LEGS.SLOT_BYTES // LAYOUT.ROW_BYTES
    if tl.load(control_ptr + LEGS.STATUS) == LEGS.RUNNING:
        half = (tl.load(control_ptr + LEGS.EPOCH) + 1) & 1
        item = tl.program_id(0)
        while item < items * LEGS.WORLD:
            unit, peer = unit_and_peer(item, LEGS.WORLD)
            count = tl.load(table_ptr + SEND_COUNT * LEGS.WORLD + peer)
            row = number.to(tl.int64) * per_piece + unit
            if row < rows_of(count, FLAT, LAYOUT):
                first = tl.load(table_ptr + SEND_DISPL * LEGS.WORLD + peer)
                piece = tl.load(counters_ptr + SENT * LEGS.WORLD + peer)
                base = base_of(buffer_ptrs, peer)
                slot = slot_address(base, rank, half, piece, FIRST, LEGS)
                offset = slot - base + unit.to(tl.int64) * LAYOUT.ROW_BYTES
                if FLAT:
                    x_row, length = x_ptr + (first + row * LAYOUT.HIDDEN), count - row * LAYOUT.HIDDEN
                else:
                    x_row, length = x_ptr + (first + row) * step, LAYOUT.HIDDEN
                send_row(x_row, length, buffer_ptrs, peer, offset, 1, LEGS.WORLD, LAYOUT)
            item += tl.num_programs(0)
        if arrive(control_ptr, LEGS, LAUNCH):
            publish_pieces(
                buffer_ptrs, control_ptr, counters_ptr, table_ptr, signature_ptr, rank, number, FIRST, LEGS, LAUNCH
            )


@triton.jit(do_not_specialize=["rank", "number", "items"])
def recv_rows_kernel(
    out_ptr,
    step,
    number,
    items,
    buffer_ptrs,
    control_ptr,
    counters_ptr,
    table_ptr,
    rank,
    FLAT: tl.constexpr,
    FIRST: tl.constexpr,
    LAYOUT: tl.constexpr,
    LEGS: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Dequantises piece `number` of every pair into the output's rows. Any number of programs."""
    per_piece: tl.constexpr = LEGS.SLOT_BYTES // LAYOUT.ROW_BYTES
    running = tl.load(control_ptr + LEGS.STATUS) == LEGS.RUNNING
    half = tl.load(control_ptr + LEGS.EPOCH) & 1
    base = base_of(buffer_ptrs, rank)
    item = tl.program_id(0)
    while item < items * LEGS.WORLD:
        unit, peer = unit_and_peer(item, LEGS.WORLD)
        count = tl.load(table_ptr + RECV_COUNT * LEGS.WORLD + peer)
        row = number.to(tl.int64) * per_piece + unit
        if row < rows_of(count, FLAT, LAYOUT):
            first = tl.load(table_ptr + RECV_DISPL * LEGS.WORLD + peer)
            piece = tl.load(counters_ptr + RECEIVED * LEGS.WORLD + peer)
            slot = slot_address(base, peer, half, piece, FIRST, LEGS)
            if FLAT:
                length = row_length(count - row * LAYOUT.HIDDEN, LAYOUT)
                out_row = out_ptr + (first + row * LAYOUT.HIDDEN)
            else:
                length = LAYOUT.HIDDEN
                out_row = out_ptr + (first + row) * step
            recv_row(slot + unit.to(tl.int64) * LAYOUT.ROW_BYTES, out_row, length, running, LAYOUT)
        item += tl.num_programs(0)
    if not FIRST:
        if running:
            if arrive(control_ptr, LEGS, LAUNCH):
                publish_head(buffer_ptrs, counters_ptr, table_ptr, rank, number, LEGS, LAUNCH)


@triton.jit(do_not_specialize=["x_ptr", "step", "rank", "number", "items"])
def send_bytes_kernel(
    x_ptr,
    signature_ptr,
    step,
    number,
    items,
    buffer_ptrs,
    control_ptr,
    counters_ptr,
    table_ptr,
    rank,
    FIRST: tl.constexpr,
    CHUNK: tl.constexpr,
    LEGS: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Copies piece `number` of every pair, of rows of `step` bytes, into the peers' memory. Any number of programs."""
    if tl.load(control_ptr + LEGS.STATUS) == LEGS.RUNNING:
        half = (tl.load(control_ptr + LEGS.EPOCH) + 1) & 1
        wide_step = step.to(tl.int64)
        item = tl.program_id(0)
        while item < items * LEGS.WORLD:
            unit, peer = unit_and_peer(item, LEGS.WORLD)
            count = tl.load(table_ptr + SEND_COUNT * LEGS.WORLD + peer)
            size, start = chunk_size(count, wide_step, number, unit, CHUNK, LEGS)
            if size > 0:
                first = tl.load(table_ptr + SEND_DISPL * LEGS.WORLD + peer)
                piece = tl.load(counters_ptr + SENT * LEGS.WORLD + peer)
                slot = slot_address(base_of(buffer_ptrs, peer), rank, half, piece, FIRST, LEGS)
                source = x_ptr.to(tl.int64) + first * wide_step + start
                copy_bytes(slot + unit.to(tl.int64) * CHUNK, source, size, 1)
            item += tl.num_programs(0)
        if arrive(control_ptr, LEGS, LAUNCH):
            publish_pieces(
                buffer_ptrs, control_ptr, counters_ptr, table_ptr, signature_ptr, rank, number, FIRST, LEGS, LAUNCH
            )


@triton.jit(do_not_specialize=["out_ptr", "step", "rank", "number", "items"])
def recv_bytes_kernel(
    out_ptr,
    step,
    number,
    items,
    buffer_ptrs,
    control_ptr,
    counters_ptr,
    table_ptr,
    rank,
    FIRST: tl.constexpr,
    CHUNK: tl.constexpr,
    LEGS: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Copies piece `number` of every pair, of rows of `step` bytes, into the output. Any number of programs."""
    loaded = tl.where(tl.load(control_ptr + LEGS.STATUS) == LEGS.RUNNING, 1, 0)
    half = tl.load(control_ptr + LEGS.EPOCH) & 1
    base = base_of(buffer_ptrs, rank)
    wide_step = step.to(tl.int64)
    item = tl.program_id(0)
    while item < items * LEGS.WORLD:
        unit, peer = unit_and_peer(item, LEGS.WORLD)
        count = tl.load(table_ptr + RECV_COUNT * LEGS.WORLD + peer)
        size, start = chunk_size(count, wide_step, number, unit, CHUNK, LEGS)
        if size > 0:
            first = tl.load(table_ptr + RECV_DISPL * LEGS.WORLD + peer)
            piece = tl.load(counters_ptr + RECEIVED * LEGS.WORLD + peer)
            slot = slot_address(base, peer, half, piece, FIRST, LEGS)
            target = out_ptr.to(tl.int64) + first * wide_step + start
            copy_bytes(target, slot + unit.to(tl.int64) * CHUNK, size, loaded)
        item += tl.num_programs(0)
    if not FIRST:
        if loaded > 0:
            if arrive(control_ptr, LEGS, LAUNCH):
                publish_head(buffer_ptrs, counters_ptr, table_ptr, rank, number, LEGS, LAUNCH)
