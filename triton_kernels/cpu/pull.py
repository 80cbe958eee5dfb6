"""Legs that pull: a rank packs records into a slot of its own memory, and its peers unpack or sum them there.

A leg takes parts of a tensor to peers, a part to each; a part travels in pieces of as many bytes as fit into a slot's
share for a peer. A line (`lines`) says of a piece how many rows the part has, where the piece lies in the sender's
memory, and what the sender is doing. A slot is used again once all its lines are taken.

What a line says is checked against what this rank expects and against the bounds of that rank's memory before anything
is read through it. How much is read, this rank reckons from its own numbers.
"""

from __future__ import annotations

import numpy as np

from thinwire.triton_kernels.cpu.codec import LAYOUT_FIELDS, element_bytes, pack_row, round_row
from thinwire.triton_kernels.cpu.compat import device, kernel
from thinwire.triton_kernels.cpu.ir.memory import (
    copy_bytes,
    finish_stores,
    load_int64,
    stack_buffer,
    store_int64,
    stream_bytes,
    struct_of,
    zero_bytes,
)
from thinwire.triton_kernels.cpu.ir.vectors import FLOAT32, NONE
from thinwire.triton_kernels.cpu.lines import (
    LINE_BYTES,
    RING,
    board_at,
    heap,
    look_far,
    next_line,
    number_in,
    open_line,
    poll,
    put_line,
    put_word,
    take_line,
    untaken,
    wake,
)
from thinwire.triton_kernels.cpu.pack import unpack_kernel
from thinwire.triton_kernels.cpu.sums import pack_sum_row, record_sum

#: The channel of legs, and slots of a rank's memory: as many lines of a pair as can be under way at once.
CHANNEL, SLOTS = 0, 4
assert SLOTS <= RING

#: What is known of the memory: the board's address, where the slots begin, bytes of a peer's share of a slot, the slot
#: that is filled next, bytes of the whole memory. Behind it lie, for each peer, how many lines it must have taken
#: before a slot is free, or -1; and for each slot and peer, how many lines had been put when it was last filled.
POOL = ("board", "slots", "piece", "slot", "num_bytes")
pool_at = struct_of(*POOL)

#: What a leg is: addresses of two tensors; bytes from one of what is counted to the next, in either; whether rows
#: travel as they are; how many are one record; bytes or records of a piece; dtypes; the form of a record; what lines
#: say; whether all get the same; the leg behind this one, if there is one; memory for sums. Behind it lies a matrix of
#: a number for each peer.
LEG = (
    "x", "out", "step", "size", "exact", "each", "units", "dtype", "out_dtype", *LAYOUT_FIELDS,
    "promise", "signature0", "signature1", "signature2", "signature3", "once", "then", "scratch",
)  # fmt: skip
leg_at = struct_of(*LEG)
#: Rows of the matrix: what is sent, what is expected, and of whom everything is dropped.
SEND_COUNT, SEND_PLACE, RECV_COUNT, RECV_PLACE, DROPPED = range(5)
#: Numbers of a line: rows of the part, where the piece lies, what is promised (see `publish`), and from here on what
#: the sender does.
COUNT, PLACE, PROMISE, SIGNATURE = range(4)
#: Where `promise` has what kind of call it is.
KIND_BITS = 48
STREAM_BYTES = 4 << 20  # of exact rows: the output is then larger than the cache that its reader could have it in
_ROW_BYTES = 16384  # of the longest row that a part's last elements are padded to
_RANKS_BYTES = 8 * 128
#: What `sum_kernel` and `take_kernel` return; and `whole_kernel`.
DONE, BUSY, DIFFERS = 0, 1, 2
NOTHING, PACKED, TAKEN, ALL = 0, 1, 2, 3


@device
def of_peer(pool, leg, row, peer):
    """A number of a leg's matrix."""
    return load_int64(leg + 8 * (len(LEG) + row * board_at(pool_at(pool).board).world + peer))


@device
def layout_of(leg):
    """The form of a leg's records, as the codec takes it."""
    c = leg_at(leg)
    return c.kind, c.group, c.row_scale, c.hidden, c.scales_offset, c.row_bytes


@device
def units_in(leg, count):
    """Bytes or records of a part."""
    c = leg_at(leg)
    return count * c.size if c.exact else -(-count // c.each)


@device
def span(leg, count, number):
    """First and last byte or record of a piece."""
    c, everything = leg_at(leg), units_in(leg, count)
    first = min(number * c.units, everything)
    return first, min(first + c.units, everything)


@device
def pack_span(leg, rows, count, first, last, far, records):
    """Packs records `first` to before `last` of so many elements; zeros fill up a row that ends early."""
    c = leg_at(leg)
    stride, whole, n = c.step * c.each, min(last, count // c.each), c.row_bytes
    for row in range(first, whole):
        pack_row(rows + row * stride, c.dtype, records + (row - first) * n, layout_of(leg), far)
    if last > max(first, whole):
        row, rest = stack_buffer(_ROW_BYTES), count % c.each * c.step
        copy_bytes(row, rows + whole * stride, rest)
        zero_bytes(row + rest, stride - rest)
        pack_row(row, c.dtype, records + (whole - first) * n, layout_of(leg), far)


@device
def unpack_span(leg, records, count, first, last, rows):
    """Unpacks records `first` to before `last` of a part; of a row that ends early, what there is."""
    c, zero = leg_at(leg), np.int64(0)
    stride, whole, n = c.size * c.each, min(last, count // c.each), c.row_bytes
    unpack_kernel(records, n, zero, rows + first * stride, stride, c.dtype, zero, whole - first, layout_of(leg))
    if last > max(first, whole):
        row = stack_buffer(_ROW_BYTES)
        end = records + (whole - first) * n
        unpack_kernel(end, n, zero, row, stride, c.dtype, zero, last - whole, layout_of(leg))
        copy_bytes(rows + whole * stride, row, count % c.each * c.size)


@device
def needed_word(pool, peer):
    """Where this rank notes how many lines a peer must have taken before the next slot is free."""
    return pool + 8 * (len(POOL) + peer)


@device
def mark_word(pool, slot, peer):
    """Where this rank notes how many lines it had put at a peer when it last filled a slot."""
    return pool + 8 * (len(POOL) + (1 + slot) * board_at(pool_at(pool).board).world + peer)


@device
def find_slot(pool):
    """Chooses the first slot that peers have read, as its memory is the likeliest to lie in a cache.

    Returns whether there is one. If not, it notes which lines must be taken until the one filled first is free.
    """
    p = pool_at(pool)
    world, least, oldest = board_at(p.board).world, np.int64(0), 0
    for slot in range(SLOTS):
        late, marks = False, np.int64(0)
        for peer in range(world):
            put, mark = load_int64(put_word(p.board, CHANNEL, peer)), load_int64(mark_word(pool, slot, peer))
            late |= put - untaken(p.board, CHANNEL, peer, put) < mark
            marks += mark
        if not late:
            p.slot = slot
            return True
        if slot == 0 or marks < least:  # marks never fall from one piece to the next; equal ones become free together
            least, oldest = marks, slot
    for peer in range(world):
        mark = load_int64(mark_word(pool, oldest, peer))
        store_int64(needed_word(pool, peer), mark if untaken(p.board, CHANNEL, peer, mark) > 0 else np.int64(-1))
    return False


@device
def slot_offset(pool):
    """Where the slot that is filled next lies in the memory."""
    p = pool_at(pool)
    return p.slots + p.slot * board_at(p.board).world * p.piece


@device
def publish(pool, leg, number, slot):
    """Tells all ranks, this one too, of a piece: those that have rows in it, and of the first one everyone.

    `promise`: how many lines of this leg a peer gets even if the ranks turn out to do different things; 0 stands for
    all that the leg has for it.
    """
    p, c = pool_at(pool), leg_at(leg)
    b = board_at(p.board)
    finish_stores()  # those past the caches
    for step in range(1, b.world + 1):
        peer = (b.rank + step) % b.world
        count = of_peer(pool, leg, SEND_COUNT, peer)
        first, last = span(leg, count, number)
        if number == 0 or first < last:
            line, promise = open_line(p.board, CHANNEL, peer) + 8, c.promise
            if promise & ((1 << KIND_BITS) - 1) == 0:
                promise += max(np.int64(1), -(-units_in(leg, count) // c.units))
            store_int64(line + 8 * COUNT, count)
            store_int64(line + 8 * PLACE, slot + (0 if c.once else peer * p.piece))
            store_int64(line + 8 * PROMISE, promise)
            store_int64(line + 8 * SIGNATURE, c.signature0)
            store_int64(line + 8 * (SIGNATURE + 1), c.signature1)
            store_int64(line + 8 * (SIGNATURE + 2), c.signature2)
            store_int64(line + 8 * (SIGNATURE + 3), c.signature3)
            put_line(p.board, CHANNEL, peer)
        store_int64(mark_word(pool, p.slot, peer), load_int64(put_word(p.board, CHANNEL, peer)))
    wake(p.board)


@kernel
def send_kernel(pool, leg, number):
    """Packs a piece for every rank, and publishes it. Returns BUSY if peers have to read something first."""
    p, c = pool_at(pool), leg_at(leg)
    if not find_slot(pool):
        return BUSY
    b, slot = board_at(p.board), slot_offset(pool)
    for step in range(b.world if c.once else 1, b.world + 1):  # the own part last, or alone
        peer = (b.rank + step) % b.world
        count, source = of_peer(pool, leg, SEND_COUNT, peer), c.x + of_peer(pool, leg, SEND_PLACE, peer) * c.step
        first, last = span(leg, count, number)
        target = heap(p.board, b.rank) + slot + (0 if c.once else peer * p.piece)
        far = (peer != b.rank or c.once) and look_far(p.board, peer, target, p.piece)
        if not c.exact:
            pack_span(leg, source, count, first, last, far, target)
        elif far:
            stream_bytes(target, source + first, last - first)
        elif peer != b.rank or c.once:
            copy_bytes(target, source + first, last - first)
    publish(pool, leg, number, slot)
    return DONE


@device
def is_expected(pool, leg, peer, number):
    """Whether a peer's line says what this rank expects of it, and names a place in that rank's memory."""
    p, c = pool_at(pool), leg_at(leg)
    line, count = next_line(p.board, CHANNEL, peer), of_peer(pool, leg, RECV_COUNT, peer)
    first, last = span(leg, count, number)
    room = last - first if c.exact else (last - first) * c.row_bytes
    place = number_in(line, PLACE)
    return (
        number_in(line, COUNT) == count
        and number_in(line, SIGNATURE) == c.signature0
        and number_in(line, SIGNATURE + 1) == c.signature1
        and number_in(line, SIGNATURE + 2) == c.signature2
        and number_in(line, SIGNATURE + 3) == c.signature3
        and p.slots <= place <= p.num_bytes - room
    )


@device
def all_expected(pool, leg, number, wanted):
    """Whether all lines of a piece are what is expected."""
    p, alike = pool_at(pool), True
    for peer in range(board_at(p.board).world):
        if load_int64(wanted + 8 * peer) == 0 and of_peer(pool, leg, DROPPED, peer) == 0:
            alike &= is_expected(pool, leg, peer, number)
    return alike


@kernel
def take_kernel(pool, leg, number, wanted):
    """Unpacks a piece of each rank that has one into the output, and acknowledges it.

    `wanted` is 0 for ranks that have one, else -1, see `Board.wait`.

    Returns DIFFERS, and takes nothing, if some line is not what was expected.
    """
    p, c = pool_at(pool), leg_at(leg)
    if not all_expected(pool, leg, number, wanted):
        return DIFFERS
    b = board_at(p.board)
    for step in range(1, b.world + 1):
        peer = (b.rank + step) % b.world
        if load_int64(wanted + 8 * peer) != 0:
            continue
        if of_peer(pool, leg, DROPPED, peer) == 0:
            count, target = of_peer(pool, leg, RECV_COUNT, peer), c.out + of_peer(pool, leg, RECV_PLACE, peer) * c.size
            first, last = span(leg, count, number)
            place = number_in(next_line(p.board, CHANNEL, peer), PLACE)  # once: what was checked may be another by now
            place = max(p.slots, min(place, p.num_bytes - (last - first) * (1 if c.exact else c.row_bytes)))
            source = heap(p.board, peer) + place
            if peer == b.rank and c.exact and c.x:
                source = c.x + of_peer(pool, leg, SEND_PLACE, peer) * c.step + first
            if not c.exact:
                unpack_span(leg, source, count, first, last, target)
            elif count * c.size >= STREAM_BYTES:
                stream_bytes(target + first, source, last - first)
            else:
                copy_bytes(target + first, source, last - first)
        take_line(p.board, CHANNEL, peer)
    wake(p.board)
    return DONE


@kernel
def sum_kernel(pool, leg, number, wanted):
    """Sums a piece of the own part into the output, or into a slot as a piece of the leg behind this one.

    Returns BUSY if peers have to read something first, or DIFFERS; then nothing was taken.
    """
    p, c = pool_at(pool), leg_at(leg)
    if c.then and not find_slot(pool):
        return BUSY
    b = board_at(p.board)
    count, sources = of_peer(pool, leg, RECV_COUNT, b.rank), stack_buffer(_RANKS_BYTES)
    first, last = span(leg, count, number)
    if load_int64(wanted + 8 * b.rank) != 0:
        return DONE
    if not all_expected(pool, leg, number, wanted):
        return DIFFERS
    slot = slot_offset(pool)
    target = heap(p.board, b.rank) + slot
    then, saturate = leg_at(c.then if c.then else leg), 0 if c.kind == NONE else 1
    far = c.then and look_far(p.board, b.rank, target, p.piece)
    for peer in range(b.world):
        place = number_in(next_line(p.board, CHANNEL, peer), PLACE)
        place = max(p.slots, min(place, p.num_bytes - (last - first) * c.row_bytes))
        store_int64(sources + 8 * peer, heap(p.board, peer) + place)
    size = element_bytes(c.out_dtype)
    for row in range(first, last):
        total = record_sum(np.int64(0), np.int64(1), sources, np.int64(b.world), c.dtype, layout_of(leg), c.scratch)
        if c.then == 0:
            round_row(total, min(count - row * c.each, c.each), c.out + row * c.each * size, c.out_dtype, saturate)
        else:
            if then.kind != NONE:  # in place: a sum past the largest float32 would make its whole group not-a-number
                round_row(total, c.each, total, FLOAT32, saturate)
            pack_sum_row(total, c.dtype, target, layout_of(c.then), saturate, far)
        target += then.row_bytes
        for peer in range(b.world):
            store_int64(sources + 8 * peer, load_int64(sources + 8 * peer) + c.row_bytes)
    for peer in range(b.world):
        take_line(p.board, CHANNEL, peer)
    if c.then:
        publish(pool, c.then, number, slot)
    else:
        wake(p.board)
    return DONE


@kernel
def whole_kernel(pool, leg, wanted, then_wanted, sums, looks):
    """A leg of one piece, and the one behind it, as long as no peer keeps this rank waiting and all is as expected.

    Returns how far: NOTHING, or the piece is PACKED, or TAKEN, or ALL.
    """
    p, c = pool_at(pool), leg_at(leg)
    if send_kernel(pool, leg, 0) != DONE:
        return NOTHING
    if poll(p.board, CHANNEL, wanted, looks) > 0:
        return PACKED
    if (sum_kernel(pool, leg, 0, wanted) if sums else take_kernel(pool, leg, 0, wanted)) != DONE:
        return PACKED
    if c.then == 0:
        return ALL
    if poll(p.board, CHANNEL, then_wanted, looks) > 0:
        return TAKEN
    return ALL if take_kernel(pool, c.then, 0, then_wanted) == DONE else TAKEN


@kernel
def drop_kernel(pool, wanted):
    """Takes the lines that are there (`wanted` is 0), and reads nothing."""
    p = pool_at(pool)
    for peer in range(board_at(p.board).world):
        if load_int64(wanted + 8 * peer) == 0:
            take_line(p.board, CHANNEL, peer)
    wake(p.board)


def pool_words(board: int, world: int, slots: int, piece: int, num_bytes: int) -> np.ndarray:
    """Makes the int64 words that kernels take the address of."""
    return np.array([board, slots, piece, 0, num_bytes, *[-1] * world, *[0] * (world * SLOTS)], np.int64)


def aligned_slots(board_bytes: int) -> int:
    """Where slots begin behind a board: at a page, so that no record shares one with lines."""
    return -(-board_bytes // 4096) * 4096


assert LINE_BYTES >= 8 + 8 * (SIGNATURE + 4)
