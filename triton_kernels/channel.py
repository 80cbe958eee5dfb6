"""The kernels of the direct all-to-all-v: rows straight into the peers' memory, whole or in pieces.

Memory and protocol are those of `thinwire.fused.channel`, which says why two halves are enough; ranks with these
kernels and ranks with the CPU's can share a group. A rank's own rows take the way of all others, through its own
memory.

*A call is steps*, each of them kernels on one stream. A GPU's kernels cannot take turns as the CPU's one thread does: a
program that spins may keep another from ever starting. So each wait is a kernel of one program of one warp, and the
next kernel does what it waited for::

    step 0   store the first piece of every pair and its header; wait for all headers; take the first pieces in
    step i   wait for room for piece i at each peer that gets one; store these pieces and publish the sequence numbers;
             wait for piece i of each peer that sends one; take these pieces in and publish how many were consumed

*No step waits for itself.* Piece i of a pair is stored in step i of one rank and taken in step i of the other, as both
know the pair's count; a rank that has no piece i of a pair does nothing for that pair. By induction on i all ranks
finish step i. Step 0 stores before it waits, and what it waits for, every rank's header, comes from step 0 of the same
call, which every rank reaches since it finishes the call before. In step i > 0 the wait for room is for the taking of
piece i - PIECES or an older one, so for a step before i of the peer, or a call before; it finishes by assumption. Then
all ranks store, and only then do they wait for pieces i, which have all been stored by ranks in step i. A rank with
fewer steps is one that neither sends nor receives in the later ones; nobody misses it there, and it may be a call
ahead.

*Calls may follow one another.* Epoch e + 1 is stored into the other half, and behind wait for the same stream's end of
e. A ring's slots are guarded by the numbers of pieces alone, whose counts go on from call to call.

*Everything that advances lies in device memory*: the epoch, how many pieces each ring has ever held, the status. What a
call brings from the host comes as kernel arguments. So a CUDA graph of a call can be replayed.

A rank that has given up, or that found a header which says something else than it expected, is poisoned: its kernels
store nothing to peers and fill the rows that they should have taken with bytes 0xFF, which as a float are NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.triton_kernels.codec import (
    dequantize_row,
    group_amax,
    load_record_tile,
    quantize_row,
    store_record_tail,
    store_record_tile,
    tile_columns,
)
from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.floats import load_float32, store_float32
from thinwire.triton_kernels.permute import fill_row
from thinwire.triton_kernels.record import RecordLayout
from thinwire.triton_kernels.signal import (
    CONTROL_WORDS,
    REPORT_PEERS,
    Launch,
    arrive,
    give_up,
    num_programs_for,
    poison,
    publish,
    store_signal_number,
    store_signal_words,
    wait_for_all,
)

__all__ = ["CHUNK_BYTES", "HEADERS", "PIECES", "ROOM", "SIGNATURE_WORDS", "Endpoint", "note", "recv", "send", "wait"]

#: What a wait is for: every peer's header, room in the rings of those that get a piece, a piece of those that send one.
HEADERS, ROOM, PIECES = 0, 1, 2
#: int64 words that say what a row is.
SIGNATURE_WORDS = 4
#: Exact rows are copied in chunks of this many bytes, one a program at a time.
CHUNK_BYTES = 16384
_COPY_WARPS = 4
_NOTED_PEERS = 8  # that one launch of `note` tells of

_HEADERS, _ROOM = tl.constexpr(HEADERS), tl.constexpr(ROOM)
_SIGNATURE_WORDS = tl.constexpr(SIGNATURE_WORDS)
# int32 words of a header line behind its flag: ring pieces that follow, and two words each: count, what a row is.
_HEADER_PIECES, _HEADER_COUNT, _HEADER_SIGNATURE = (tl.constexpr(w) for w in (1, 2, 4))
# Rows of an endpoint's table, and of its counters.
_SEND_COUNT, _SEND_DISPL, _SEND_PIECES, _RECV_COUNT, _RECV_DISPL, _RECV_PIECES, _EXPECTED = (
    tl.constexpr(r) for r in range(7)
)
_SENT, _RECEIVED = tl.constexpr(0), tl.constexpr(1)


# ---------------------------------------------------------------------------------------------------------------------
# What a call brings


@triton.jit
def note_peer(table_ptr, peer, send_count, send_displ, recv_count, recv_displ, unit, per_piece, WORLD: tl.constexpr):
    """Writes one peer's column of the table."""
    if peer < WORLD:
        sent, received = send_count.to(tl.int64), recv_count.to(tl.int64)
        dropped = received < 0  # so many pieces are to come, and none of them is kept
        kept = tl.where(dropped, 0, received)
        send_pieces = tl.maximum((sent * unit + (per_piece - 1)) // per_piece, 1)
        recv_pieces = tl.maximum((kept * unit + (per_piece - 1)) // per_piece, 1)
        column = table_ptr + peer
        tl.store(column + _SEND_COUNT * WORLD, sent)
        tl.store(column + _SEND_DISPL * WORLD, send_displ.to(tl.int64))
        tl.store(column + _SEND_PIECES * WORLD, send_pieces)
        tl.store(column + _RECV_COUNT * WORLD, kept)
        tl.store(column + _RECV_DISPL * WORLD, recv_displ.to(tl.int64))
        tl.store(column + _RECV_PIECES * WORLD, tl.where(dropped, 0 - received, recv_pieces))


_NUMBERS = [f"{letter}{peer}" for peer in range(_NOTED_PEERS) for letter in "abcd"]


@triton.jit(do_not_specialize=["first", "unit", "per_piece", *_NUMBERS])
def note_kernel(
    table_ptr,
    control_ptr,
    first,
    unit,
    per_piece,
    # Of eight peers: rows to send, the first of them, rows to receive, where the first of them goes.
    a0, b0, c0, d0, a1, b1, c1, d1, a2, b2, c2, d2, a3, b3, c3, d3,
    a4, b4, c4, d4, a5, b5, c5, d5, a6, b6, c6, d6, a7, b7, c7, d7,
    CHANNEL: tl.constexpr,
):  # fmt: skip
    """Writes eight peers' columns of the table. One program.

    The numbers are arguments, since a copy from the host would need memory there that lasts for as long as a graph.
    """
    # What made the rank give up is left to be read.
    if tl.load(control_ptr + CHANNEL.STATUS) == CHANNEL.RUNNING:
        wide_unit, wide_piece = unit.to(tl.int64), per_piece.to(tl.int64)
        note_peer(table_ptr, first, a0, b0, c0, d0, wide_unit, wide_piece, CHANNEL.WORLD)
        note_peer(table_ptr, first + 1, a1, b1, c1, d1, wide_unit, wide_piece, CHANNEL.WORLD)
        note_peer(table_ptr, first + 2, a2, b2, c2, d2, wide_unit, wide_piece, CHANNEL.WORLD)
        note_peer(table_ptr, first + 3, a3, b3, c3, d3, wide_unit, wide_piece, CHANNEL.WORLD)
        note_peer(table_ptr, first + 4, a4, b4, c4, d4, wide_unit, wide_piece, CHANNEL.WORLD)
        note_peer(table_ptr, first + 5, a5, b5, c5, d5, wide_unit, wide_piece, CHANNEL.WORLD)
        note_peer(table_ptr, first + 6, a6, b6, c6, d6, wide_unit, wide_piece, CHANNEL.WORLD)
        note_peer(table_ptr, first + 7, a7, b7, c7, d7, wide_unit, wide_piece, CHANNEL.WORLD)


# ---------------------------------------------------------------------------------------------------------------------
# Pieces


@triton.jit
def unit_and_peer(item, WORLD: tl.constexpr):
    """Which row or chunk of a piece, and for which peer; turned with each row, since peers differ in their rows."""
    unit = item // WORLD
    return unit, (item + unit) % WORLD


@triton.jit
def slot_address(base, owner, half, piece, FIRST: tl.constexpr, CHANNEL: tl.constexpr):
    """Where a piece from rank `owner` lies in the buffer at `base`: in a half, or in a slot of the ring."""
    if FIRST:
        slot = (half * CHANNEL.WORLD + owner).to(tl.int64)
        address = base + CHANNEL.HALVES + slot * CHANNEL.PIECE_BYTES
    else:
        slot = owner.to(tl.int64) * CHANNEL.PIECES + piece % CHANNEL.PIECES
        address = base + CHANNEL.RING + slot * CHANNEL.PIECE_BYTES
    return address


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
        tl.store(targets + words, values, mask=words < whole)
        start += block
    rest = size % step
    if rest > 0:
        places = tl.arange(0, 16)
        end = (size - rest).to(tl.int64)
        octets = tl.load((source + end).to(tl.pointer_type(tl.int8)) + places, mask=places < rest * loaded, other=-1)
        tl.store((target + end).to(tl.pointer_type(tl.int8)) + places, octets, mask=places < rest)


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
def chunk_size(count, step, number, unit, CHUNK: tl.constexpr, CHANNEL: tl.constexpr):
    """Bytes of chunk `unit` of piece `number` of `count` rows, int32, and where in the segment it begins, int64."""
    inside = unit.to(tl.int64) * CHUNK
    start = number.to(tl.int64) * CHANNEL.PIECE_BYTES + inside
    size = tl.minimum(count * step - start, CHANNEL.PIECE_BYTES - inside)
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
def publish_header(
    buffer_ptrs, control_ptr, counters_ptr, table_ptr, signature_ptr, rank, number, FIRST: tl.constexpr,
    CHANNEL: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Tells the peers that their pieces are there: the header of a new epoch, or sequence numbers."""
    world: tl.constexpr = CHANNEL.WORLD
    peers = tl.arange(0, LAUNCH.BLOCK)
    known = peers < world
    pieces = tl.load(table_ptr + _SEND_PIECES * world + peers, mask=known, other=0)
    if FIRST:
        epoch = tl.load(control_ptr + CHANNEL.EPOCH) + 1
        tl.store(control_ptr + CHANNEL.EPOCH, epoch)
        line = (epoch & 1) * world + rank  # the two halves' lines lie one behind the other
        counts = tl.load(table_ptr + _SEND_COUNT * world + peers, mask=known, other=0)
        rest = (pieces - 1).to(tl.int32)
        store_signal_words(buffer_ptrs, line, CHANNEL.HEADERS, _HEADER_PIECES, rest, CHANNEL, LAUNCH)
        store_signal_number(buffer_ptrs, line, CHANNEL.HEADERS, _HEADER_COUNT, counts, CHANNEL, LAUNCH)
        for word in tl.static_range(_SIGNATURE_WORDS):
            number = tl.load(signature_ptr + word)
            store_signal_number(
                buffer_ptrs, line, CHANNEL.HEADERS, _HEADER_SIGNATURE + 2 * word, number, CHANNEL, LAUNCH
            )
        publish(buffer_ptrs, line, CHANNEL.HEADERS, epoch, CHANNEL, LAUNCH)
    else:
        sent = tl.load(counters_ptr + _SENT * world + peers, mask=known, other=0) + tl.where(pieces > number, 1, 0)
        tl.store(counters_ptr + _SENT * world + peers, sent, mask=known)
        # To peers that got nothing it says what it said before.
        publish(buffer_ptrs, rank, CHANNEL.TAILS, sent.to(tl.int32), CHANNEL, LAUNCH)


@triton.jit
def publish_head(buffer_ptrs, counters_ptr, table_ptr, rank, number, CHANNEL: tl.constexpr, LAUNCH: tl.constexpr):
    """Tells the peers that the slots of their pieces are free again."""
    world: tl.constexpr = CHANNEL.WORLD
    peers = tl.arange(0, LAUNCH.BLOCK)
    known = peers < world
    pieces = tl.load(table_ptr + _RECV_PIECES * world + peers, mask=known, other=0)
    received = tl.load(counters_ptr + _RECEIVED * world + peers, mask=known, other=0) + tl.where(pieces > number, 1, 0)
    tl.store(counters_ptr + _RECEIVED * world + peers, received, mask=known)
    publish(buffer_ptrs, rank, CHANNEL.HEADS, received.to(tl.int32), CHANNEL, LAUNCH)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels. `items` is how many rows or chunks the largest of the pieces has.


@triton.jit(do_not_specialize=["rank", "number", "items"])
def send_rows_kernel(
    x_ptr,
    x_row_stride,
    buffer_ptrs,
    control_ptr,
    counters_ptr,
    table_ptr,
    signature_ptr,
    rank,
    number,
    items,
    FLAT: tl.constexpr,
    FIRST: tl.constexpr,
    LAYOUT: tl.constexpr,
    CHANNEL: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Quantises piece `number` of every pair into the peers' memory. Any number of programs."""
    per_piece: tl.constexpr = CHANNEL.PIECE_BYTES // LAYOUT.ROW_BYTES
    if tl.load(control_ptr + CHANNEL.STATUS) == CHANNEL.RUNNING:
        half = (tl.load(control_ptr + CHANNEL.EPOCH) + 1) & 1
        item = tl.program_id(0)
        while item < items * CHANNEL.WORLD:
            unit, peer = unit_and_peer(item, CHANNEL.WORLD)
            count = tl.load(table_ptr + _SEND_COUNT * CHANNEL.WORLD + peer)
            row = number.to(tl.int64) * per_piece + unit
            if row < rows_of(count, FLAT, LAYOUT):
                first = tl.load(table_ptr + _SEND_DISPL * CHANNEL.WORLD + peer)
                piece = tl.load(counters_ptr + _SENT * CHANNEL.WORLD + peer)
                slot = slot_address(tl.load(buffer_ptrs + peer), rank, half, piece, FIRST, CHANNEL)
                record = (slot + unit.to(tl.int64) * LAYOUT.ROW_BYTES).to(tl.pointer_type(tl.int8))
                record = tl.multiple_of(record, 16)
                if FLAT:  # one tile holds a row, whose last one zeros complete
                    columns = tile_columns(0, LAYOUT)
                    x_row = x_ptr + (first + row * LAYOUT.HIDDEN)
                    x = load_float32(x_row + columns, columns < tl.minimum(count - row * LAYOUT.HIDDEN, LAYOUT.HIDDEN))
                    store_record_tile(record, x, group_amax(x), 0, LAYOUT)
                    store_record_tail(record, LAYOUT)
                else:
                    quantize_row(x_ptr + (first + row) * x_row_stride, record, LAYOUT)
            item += tl.num_programs(0)
        if arrive(control_ptr, CHANNEL, LAUNCH):
            publish_header(
                buffer_ptrs,
                control_ptr,
                counters_ptr,
                table_ptr,
                signature_ptr,
                rank,
                number,
                FIRST,
                CHANNEL,
                LAUNCH,
            )


@triton.jit(do_not_specialize=["rank", "number", "items"])
def recv_rows_kernel(
    out_ptr,
    out_row_stride,
    buffer_ptrs,
    control_ptr,
    counters_ptr,
    table_ptr,
    rank,
    number,
    items,
    FLAT: tl.constexpr,
    FIRST: tl.constexpr,
    LAYOUT: tl.constexpr,
    CHANNEL: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Dequantises piece `number` of every pair into the output's rows. Any number of programs."""
    per_piece: tl.constexpr = CHANNEL.PIECE_BYTES // LAYOUT.ROW_BYTES
    running = tl.load(control_ptr + CHANNEL.STATUS) == CHANNEL.RUNNING
    half = tl.load(control_ptr + CHANNEL.EPOCH) & 1
    base = tl.load(buffer_ptrs + rank)
    item = tl.program_id(0)
    while item < items * CHANNEL.WORLD:
        unit, peer = unit_and_peer(item, CHANNEL.WORLD)
        count = tl.load(table_ptr + _RECV_COUNT * CHANNEL.WORLD + peer)
        row = number.to(tl.int64) * per_piece + unit
        if row < rows_of(count, FLAT, LAYOUT):
            first = tl.load(table_ptr + _RECV_DISPL * CHANNEL.WORLD + peer)
            piece = tl.load(counters_ptr + _RECEIVED * CHANNEL.WORLD + peer)
            slot = slot_address(base, peer, half, piece, FIRST, CHANNEL)
            record = (slot + unit.to(tl.int64) * LAYOUT.ROW_BYTES).to(tl.pointer_type(tl.int8))
            record = tl.multiple_of(record, 16)
            if FLAT:
                columns = tile_columns(0, LAYOUT)
                values = tl.full(columns.shape, float("nan"), tl.float32)
                if running:
                    values = load_record_tile(record, 0, LAYOUT)
                out_row = out_ptr + (first + row * LAYOUT.HIDDEN)
                wanted = columns < tl.minimum(count - row * LAYOUT.HIDDEN, LAYOUT.HIDDEN)
                store_float32(out_row + columns, values, wanted, True)
            else:
                out_row = out_ptr + (first + row) * out_row_stride
                if running:
                    dequantize_row(record, out_row, LAYOUT)
                else:
                    fill_row(out_row, float("nan"), LAYOUT)
        item += tl.num_programs(0)
    if not FIRST:
        if running:
            if arrive(control_ptr, CHANNEL, LAUNCH):
                publish_head(buffer_ptrs, counters_ptr, table_ptr, rank, number, CHANNEL, LAUNCH)


@triton.jit(do_not_specialize=["x_ptr", "step", "rank", "number", "items"])
def send_bytes_kernel(
    x_ptr,
    step,
    buffer_ptrs,
    control_ptr,
    counters_ptr,
    table_ptr,
    signature_ptr,
    rank,
    number,
    items,
    FIRST: tl.constexpr,
    CHUNK: tl.constexpr,
    CHANNEL: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Copies piece `number` of every pair, of rows of `step` bytes, into the peers' memory. Any number of programs."""
    if tl.load(control_ptr + CHANNEL.STATUS) == CHANNEL.RUNNING:
        half = (tl.load(control_ptr + CHANNEL.EPOCH) + 1) & 1
        wide_step = step.to(tl.int64)
        item = tl.program_id(0)
        while item < items * CHANNEL.WORLD:
            unit, peer = unit_and_peer(item, CHANNEL.WORLD)
            count = tl.load(table_ptr + _SEND_COUNT * CHANNEL.WORLD + peer)
            size, start = chunk_size(count, wide_step, number, unit, CHUNK, CHANNEL)
            if size > 0:
                first = tl.load(table_ptr + _SEND_DISPL * CHANNEL.WORLD + peer)
                piece = tl.load(counters_ptr + _SENT * CHANNEL.WORLD + peer)
                slot = slot_address(tl.load(buffer_ptrs + peer), rank, half, piece, FIRST, CHANNEL)
                source = x_ptr.to(tl.int64) + first * wide_step + start
                copy_bytes(slot + unit.to(tl.int64) * CHUNK, source, size, 1)
            item += tl.num_programs(0)
        if arrive(control_ptr, CHANNEL, LAUNCH):
            publish_header(
                buffer_ptrs,
                control_ptr,
                counters_ptr,
                table_ptr,
                signature_ptr,
                rank,
                number,
                FIRST,
                CHANNEL,
                LAUNCH,
            )


@triton.jit(do_not_specialize=["out_ptr", "step", "rank", "number", "items"])
def recv_bytes_kernel(
    out_ptr,
    step,
    buffer_ptrs,
    control_ptr,
    counters_ptr,
    table_ptr,
    rank,
    number,
    items,
    FIRST: tl.constexpr,
    CHUNK: tl.constexpr,
    CHANNEL: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Copies piece `number` of every pair, of rows of `step` bytes, into the output. Any number of programs."""
    loaded = tl.where(tl.load(control_ptr + CHANNEL.STATUS) == CHANNEL.RUNNING, 1, 0)
    half = tl.load(control_ptr + CHANNEL.EPOCH) & 1
    base = tl.load(buffer_ptrs + rank)
    wide_step = step.to(tl.int64)
    item = tl.program_id(0)
    while item < items * CHANNEL.WORLD:
        unit, peer = unit_and_peer(item, CHANNEL.WORLD)
        count = tl.load(table_ptr + _RECV_COUNT * CHANNEL.WORLD + peer)
        size, start = chunk_size(count, wide_step, number, unit, CHUNK, CHANNEL)
        if size > 0:
            first = tl.load(table_ptr + _RECV_DISPL * CHANNEL.WORLD + peer)
            piece = tl.load(counters_ptr + _RECEIVED * CHANNEL.WORLD + peer)
            slot = slot_address(base, peer, half, piece, FIRST, CHANNEL)
            target = out_ptr.to(tl.int64) + first * wide_step + start
            copy_bytes(target, slot + unit.to(tl.int64) * CHUNK, size, loaded)
        item += tl.num_programs(0)
    if not FIRST:
        if loaded > 0:
            if arrive(control_ptr, CHANNEL, LAUNCH):
                publish_head(buffer_ptrs, counters_ptr, table_ptr, rank, number, CHANNEL, LAUNCH)


@triton.jit
def header_differences(base, lines, table_ptr, signature_ptr, CHANNEL: tl.constexpr, LAUNCH: tl.constexpr):
    """1 for each peer whose header says something else than this rank expects, else 0: int32 [BLOCK]."""
    peers = tl.arange(0, LAUNCH.BLOCK)
    known = peers < CHANNEL.WORLD
    line = base + lines + peers.to(tl.int64) * CHANNEL.LINE_BYTES
    pieces = tl.load((line + 4 * _HEADER_PIECES).to(tl.pointer_type(tl.int32)), mask=known, other=0).to(tl.int64) + 1
    counts = tl.load((line + 4 * _HEADER_COUNT).to(tl.pointer_type(tl.int64)), mask=known, other=0)
    expected = tl.load(table_ptr + _RECV_COUNT * CHANNEL.WORLD + peers, mask=known, other=0)
    expected_pieces = tl.load(table_ptr + _RECV_PIECES * CHANNEL.WORLD + peers, mask=known, other=0)
    wrong = tl.where(counts != expected, 1, tl.where(pieces != expected_pieces, 1, 0))
    for word in tl.static_range(_SIGNATURE_WORDS):
        signature = tl.load(
            (line + (4 * _HEADER_SIGNATURE + 8 * word)).to(tl.pointer_type(tl.int64)), mask=known, other=0
        )
        wrong = tl.where(signature != tl.load(signature_ptr + word), 1, wrong)
    return tl.where(known, wrong, 0)


@triton.jit(do_not_specialize=["rank", "number", "timeout_ns", "grace_ns"])
def wait_kernel(
    buffer_ptrs,
    control_ptr,
    counters_ptr,
    table_ptr,
    signature_ptr,
    report_ptr,
    rank,
    number,
    timeout_ns,
    grace_ns,
    FOR: tl.constexpr,
    CHECK: tl.constexpr,
    CHANNEL: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Until every peer has done what this rank needs for step `number`. One program of one warp."""
    world: tl.constexpr = CHANNEL.WORLD
    phase: tl.constexpr = 0 if FOR == _HEADERS else 1
    if tl.load(control_ptr + CHANNEL.STATUS) == CHANNEL.RUNNING:
        base = tl.load(buffer_ptrs + rank)
        epoch = tl.load(control_ptr + CHANNEL.EPOCH)
        peers = tl.arange(0, LAUNCH.BLOCK)
        known = peers < world
        # Of peers that nothing is missing from the flag is never behind its target.
        if FOR == _HEADERS:
            lines = CHANNEL.HEADERS + (epoch & 1).to(tl.int64) * (world * CHANNEL.LINE_BYTES)
            targets = epoch + tl.zeros_like(peers)
        elif FOR == _ROOM:
            lines = tl.full((), CHANNEL.HEADS, tl.int64)
            more = tl.load(table_ptr + _SEND_PIECES * world + peers, mask=known, other=0) > number
            sent = tl.load(counters_ptr + _SENT * world + peers, mask=known, other=0)
            targets = (sent - CHANNEL.PIECES + tl.where(more, 1, 0)).to(tl.int32)
        else:
            lines = tl.full((), CHANNEL.TAILS, tl.int64)
            more = tl.load(table_ptr + _RECV_PIECES * world + peers, mask=known, other=0) > number
            received = tl.load(counters_ptr + _RECEIVED * world + peers, mask=known, other=0)
            targets = (received + tl.where(more, 1, 0)).to(tl.int32)
        late = wait_for_all(base, rank, lines, targets, timeout_ns, CHANNEL, LAUNCH)
        if late > 0:
            give_up(base, buffer_ptrs, report_ptr, rank, lines, targets, epoch, grace_ns, phase, CHANNEL, LAUNCH)
            poison(control_ptr, report_ptr, CHANNEL.TIMED_OUT, epoch, phase, CHANNEL)
        elif CHECK:
            wrong = header_differences(base, lines, table_ptr, signature_ptr, CHANNEL, LAUNCH)
            if tl.sum(wrong) > 0:
                tl.store(report_ptr + CHANNEL.REPORT_PEERS + peers, wrong, mask=known)
                for word in tl.static_range(_SIGNATURE_WORDS):
                    tl.store(table_ptr + _EXPECTED * world + word, tl.load(signature_ptr + word))
                # This rank takes part no more; nobody shall wait for it until time is up.
                store_signal_words(buffer_ptrs, rank, CHANNEL.STUCK, CHANNEL.STUCK_EPOCH, epoch, CHANNEL, LAUNCH)
                publish(buffer_ptrs, rank, CHANNEL.STUCK, 1, CHANNEL, LAUNCH)
                poison(control_ptr, report_ptr, CHANNEL.MISMATCHED, epoch, phase, CHANNEL)


# ---------------------------------------------------------------------------------------------------------------------
# Launchers


@dataclass(frozen=True)
class Endpoint:
    """One rank's end of a channel.

    Attributes:
        layout: the `thinwire.fused.channel.ChannelLayout` of every rank's symmetric buffer.
        rank: this rank.
        bases: int64 [world], the address of every rank's buffer, this rank's own included.
        control: int32 [CONTROL_WORDS]: status, epoch and arrivals, where `thinwire.triton_kernels.signal` says.
        counters: int64 [2, world], pieces ever put into the ring at each peer, and ever taken from each peer's ring.
        table: int64 [6 * world + WHAT_WORDS], what `note` wrote, a word for each rank: rows to send, the first of them,
            pieces to send, rows to receive, the first of them, pieces to receive; then, in a poisoned channel, what
            this rank expected a row to be.
        report: int32 [REPORT_PEERS + 3 * world], host memory that the device can write.
    """

    layout: Any
    rank: int
    buffer_ptrs: torch.Tensor
    control: torch.Tensor
    counters: torch.Tensor
    table: torch.Tensor
    report: torch.Tensor

    @classmethod
    def of(cls, layout: Any, rank: int, buffer_ptrs: torch.Tensor) -> Endpoint:
        """An end that has not sent anything yet."""
        device, world = buffer_ptrs.device, layout.WORLD
        return cls(
            layout=layout,
            rank=rank,
            buffer_ptrs=buffer_ptrs,
            control=torch.zeros(CONTROL_WORDS, dtype=torch.int32, device=device),
            counters=torch.zeros(2 * world, dtype=torch.int64, device=device),
            table=torch.zeros(6 * world + SIGNATURE_WORDS, dtype=torch.int64, device=device),
            report=torch.zeros(REPORT_PEERS + 3 * world, dtype=torch.int32, pin_memory=device.type == "cuda"),
        )


def note(
    end: Endpoint,
    sends: tuple[Sequence[int], Sequence[int]],
    receives: tuple[Sequence[int], Sequence[int]],
    unit: int,
    per_piece: int,
) -> None:
    """Tells the kernels that follow what passes between this rank and each peer.

    Args:
        sends, receives: counts and displacements for each rank. A receive count of -n stands for n pieces, the first
            one among them, none of which is kept.
        unit, per_piece: `count * unit` in steps of `per_piece` are pieces.
    """
    world = end.layout.WORLD
    columns = [*zip(*sends, *receives, strict=True)]
    for first in range(0, world, _NOTED_PEERS):
        chosen = columns[first : first + _NOTED_PEERS]
        numbers = [number for column in chosen for number in column] + [0] * (4 * (_NOTED_PEERS - len(chosen)))
        with torch.cuda.device_of(end.table):  # Triton launches on the current device
            note_kernel[(1,)](end.table, end.control, first, unit, per_piece, *numbers, CHANNEL=end.layout, num_warps=1)


def send(
    end: Endpoint,
    x: torch.Tensor,
    step: int,
    layout: RecordLayout | None,
    flat: bool,
    signature: torch.Tensor,
    number: int,
    items: int,
) -> None:
    """Stores piece `number` of what goes to each peer, and tells the peers.

    Args:
        x: exact rows as one row of uint8; else what is quantised, whose elements of a row lie side by side.
        step: from one row to the next: in bytes for exact rows, else in elements.
        layout: of the rows' records; None for exact rows.
        flat: quantise elements of a 1-D tensor in rows of `layout.HIDDEN`.
        what: int64 [WHAT_WORDS] on the device, what a row is.
        number: 0 opens a new epoch.
        items: at most so many rows, or chunks of CHUNK_BYTES, has a piece.
    """
    device = end.buffer_ptrs.device
    launch = Launch.of(end.layout, device)
    programs = num_programs_for(items * end.layout.WORLD, device, None)
    numbers = (end.buffer_ptrs, end.control, end.counters, end.table, signature, end.rank, number, items)
    with torch.cuda.device_of(end.buffer_ptrs):  # Triton launches on the current device
        if layout is None:
            send_bytes_kernel[(programs,)](
                x, step, *numbers, FIRST=number == 0, CHUNK=CHUNK_BYTES, CHANNEL=end.layout, LAUNCH=launch,
                num_warps=_COPY_WARPS,
            )  # fmt: skip
        else:
            send_rows_kernel[(programs,)](
                x, step, *numbers, FLAT=flat, FIRST=number == 0, LAYOUT=layout, CHANNEL=end.layout, LAUNCH=launch,
                num_warps=layout.num_warps, enable_fp_fusion=False,
            )  # fmt: skip


def wait(
    end: Endpoint, reason: int, number: int, signature: torch.Tensor, check: bool, timeout: float, grace: float
) -> None:
    """Waits until all peers have done what step `number` needs.

    Args:
        reason: HEADERS, ROOM or PIECES.
        what: see `send`.
        check: compare headers with what was noted, and poison the channel where they differ.
        timeout: seconds until the channel is given up.
        grace: seconds that peers then get to say that they are stuck as well.
    """
    if reason not in (HEADERS, ROOM, PIECES):
        raise ValueError(f"reason is {reason!r}; accepted: {HEADERS} (headers), {ROOM} (room), {PIECES} (pieces)")
    with torch.cuda.device_of(end.buffer_ptrs):  # Triton launches on the current device
        wait_kernel[(1,)](
            end.buffer_ptrs, end.control, end.counters, end.table, signature, end.report, end.rank, number,
            int(timeout * 1e9), int(grace * 1e9), FOR=reason, CHECK=check and reason == HEADERS, CHANNEL=end.layout,
            LAUNCH=Launch.of(end.layout, end.buffer_ptrs.device), num_warps=1,
        )  # fmt: skip


def recv(
    end: Endpoint, out: torch.Tensor, step: int, layout: RecordLayout | None, flat: bool, number: int, items: int
) -> None:
    """Puts piece `number` of what each peer sent into its rows of the output, and gives the ring's slots back.

    Args:
        out: exact rows as one row of uint8; else rows or elements, contiguous. A poisoned channel gives bytes 0xFF.
        step, layout, flat, number, items: see `send`.
    """
    device = end.buffer_ptrs.device
    launch = Launch.of(end.layout, device)
    programs = num_programs_for(items * end.layout.WORLD, device, None)
    numbers = (end.buffer_ptrs, end.control, end.counters, end.table, end.rank, number, items)
    with torch.cuda.device_of(end.buffer_ptrs):  # Triton launches on the current device
        if layout is None:
            recv_bytes_kernel[(programs,)](
                out, step, *numbers, FIRST=number == 0, CHUNK=CHUNK_BYTES, CHANNEL=end.layout, LAUNCH=launch,
                num_warps=_COPY_WARPS,
            )  # fmt: skip
        else:
            recv_rows_kernel[(programs,)](
                out, step, *numbers, FLAT=flat, FIRST=number == 0, LAYOUT=layout, CHANNEL=end.layout, LAUNCH=launch,
                num_warps=layout.num_warps, enable_fp_fusion=False,
            )  # fmt: skip
