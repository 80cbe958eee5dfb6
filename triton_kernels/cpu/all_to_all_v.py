"""The direct all-to-all-v on the CPU: rows straight from one rank's memory into another's.

`move` is the only entry. What it must know of the exchange and of a call lies in two int64 arrays, `call` and `peers`,
and so does what it notes for itself: it may return to the host half-way (for instance, once all counts have come in)
and go on later. `docs/protocol.md` has the argument, "The exchange" and "The ring".

One thread sends and receives by turns, a piece at a time, and never waits for one peer alone: whatever the order in
which ranks reach their calls and fill each other's memory, someone can always go on.
"""

from __future__ import annotations

import numpy as np

from thinwire.triton_kernels.cpu.compat import FINGERPRINT, device, kernel
from thinwire.triton_kernels.cpu.exchange import (
    header_count,
    header_pieces,
    publish_head,
    publish_header,
    publish_tail,
    same_signature,
)
from thinwire.triton_kernels.cpu.ir.atomics import load_acquire, monotonic_ns, sleep_microseconds, yield_processor
from thinwire.triton_kernels.cpu.ir.intrinsics import (
    copy_bytes,
    stack_buffer,
    zero_bytes,
)
from thinwire.triton_kernels.cpu.ir.streaming import stream_bytes
from thinwire.triton_kernels.cpu.pack import pack_kernel, unpack_kernel
from thinwire.triton_kernels.cpu.signal import GIVING_UP, give_up, signalled, someone_is_stuck, tell_stuck, write_report
from thinwire.triton_kernels.exchange_layout import MOST_ROWS
from thinwire.triton_kernels.signal import (
    MISMATCHED,
    RUNNING,
    TIMED_OUT,
)

# What `move` is to do, added up: send the parity part, wait for every header, wait for everything; go on with a wait,
# after it has returned PAUSED, which it does now and then for Python to see to a Ctrl-C; and first look at the counts.
POST, HEADERS, DRAIN, RESUME, CHECK = 1, 2, 4, 8, 16
PAUSED, REFUSED = 3, 4  # beside RUNNING, TIMED_OUT and MISMATCHED
_SLICE_NS = 100_000_000

#: Words of `call`: first what stays for as long as the channel lives, ...
SCALARS = (
    "world", "rank", "half_lines", "half_bytes", "slot_bytes", "slots",
    "timeout", "grace", "report", "buffer_ptrs", "stuck", "status", "epoch", "give_up_by",
    # ... from here on what a call brings: addresses of two tensors, bytes from one of what is counted to the next, and
    # (for CHECK) how many there are,
    "discard", "x", "x_step", "out", "out_step", "x_rows", "out_rows",
    # the form of the rows, and what the header says of it.
    "exact", "counts_per_row", "unit_bytes", "units_per_piece", "dtype",
    "kind", "group", "row_scale", "hidden", "scales_offset", "record_bytes",
    "signature0", "signature1", "signature2", "signature3",
)  # fmt: skip
(
    _WORLD, _RANK, _HALF_LINES, _HALF_BYTES, _SLOT_BYTES, _SLOTS,
    _TIMEOUT, _GRACE, _REPORT, _BUFFER_PTRS, _STUCK, _STATUS, _EPOCH, _GIVE_UP_BY,
    _DISCARD, _X, _X_STEP, _OUT, _OUT_STEP, _X_ROWS, _OUT_ROWS,
    _EXACT, _COUNTS_PER_ROW, _UNIT_BYTES, _UNITS_PER_PIECE, _DTYPE,
    _KIND, _GROUP, _ROW_SCALE, _HIDDEN, _SCALES_OFFSET, _RECORD_BYTES,
    _SIGNATURE, _, _, _,
) = range(len(SCALARS))  # fmt: skip

#: Rows of `peers`, which has a column for each rank: what a call brings, ...
PEERS = (
    "send_count", "send_displ", "recv_count", "recv_displ",
    # what the kernel notes of the call (pieces, the parity piece being number 0; times), and for good (ring pieces),
    "next_out", "end_out", "next_in", "end_in", "answer", "limit", "sent", "received",
    # and where a line or slot of this rank lies at the peer ("there"), or of the peer in this rank's memory ("here").
    "header_there", "header_here", "parity_there", "parity_here", "ring_there", "ring_here",
    "tail_there", "tail_here", "head_there", "head_here",
)  # fmt: skip
(
    _SEND_COUNT, _SEND_DISPL, _RECV_COUNT, _RECV_DISPL,
    _NEXT_OUT, _END_OUT, _NEXT_IN, _END_IN, _ANSWER, _LIMIT, _SENT, _RECEIVED,
    _HEADER_THERE, _HEADER_HERE, _PARITY_THERE, _PARITY_HERE, _RING_THERE, _RING_HERE,
    _TAIL_THERE, _TAIL_HERE, _HEAD_THERE, _HEAD_HERE,
) = range(len(PEERS))  # fmt: skip

# Values of `answer`: no header yet; one that says what was expected; one that says something else, so that all that
# comes from this peer in this call is taken in and dropped.
SILENT, AGREES, DIFFERS = 0, 1, 2

_PHASE_HEADERS, _PHASE_PIECES = np.int32(0), np.int32(1)
_SCRATCH_ROW = 4096  # bytes of the largest row that a 1-D tensor is cut into
_STREAM_BYTES = 4 << 20  # of exact rows: the output is then larger than the cache that its reader could have it in
# Looks before the first yield, yields before the first nap, and microseconds of a nap. A yield may come back at once
# although the awaited rank wants this processor: the scheduler goes by who has had how much. A sleep always makes room.
_SPINS, _YIELDS, _NAP_MICROSECONDS = 200, 100, np.int32(50)
_ONE, _ZERO, _FIRST = np.int32(1), np.int32(0), np.int64(0)


# ---------------------------------------------------------------------------------------------------------------------
# Rows and pieces. A piece holds `units_per_piece` units: bytes of exact rows, or records of quantised ones.


@device
def units_of(call, count):
    """Units of so many rows (or elements, for a 1-D tensor)."""
    return count * call[_UNIT_BYTES] if call[_EXACT] else -(-count // call[_COUNTS_PER_ROW])


@device
def pieces_of(call, count):
    """Pieces of so many rows, the parity piece among them even where it is empty."""
    return max(np.int64(1), -(-units_of(call, count) // call[_UNITS_PER_PIECE]))


@device
def layout_of(call):
    """The record's layout as the codec takes it."""
    return call[_KIND], call[_GROUP], call[_ROW_SCALE], call[_HIDDEN], call[_SCALES_OFFSET], call[_RECORD_BYTES]


@device
def pack_piece(call, peers, peer, number, target):
    """Stores a piece of what goes to `peer` at the address `target`."""
    count = peers[_SEND_COUNT, peer]
    first = number * call[_UNITS_PER_PIECE]
    units = min(call[_UNITS_PER_PIECE], units_of(call, count) - first)
    source = call[_X] + peers[_SEND_DISPL, peer] * call[_X_STEP]
    if call[_EXACT]:
        copy_bytes(target, source + first, units)
        return
    layout, record_bytes, dtype, in_order = layout_of(call), call[_RECORD_BYTES], call[_DTYPE], np.int64(0)
    stride = call[_X_STEP] * call[_COUNTS_PER_ROW]
    whole = min(units, count // call[_COUNTS_PER_ROW] - first)
    pack_kernel(source + first * stride, stride, dtype, in_order, target, record_bytes, whole, layout)
    if whole < units:  # a 1-D segment ends within a row, which zeros complete
        row = stack_buffer(_SCRATCH_ROW)
        rest = count % call[_COUNTS_PER_ROW] * call[_X_STEP]
        copy_bytes(row, source + (first + whole) * stride, rest)
        zero_bytes(row + rest, stride - rest)
        record = target + whole * record_bytes
        pack_kernel(row, stride, dtype, in_order, record, record_bytes, units - whole, layout)


@device
def unpack_piece(call, peers, peer, number, source):
    """Puts a piece of what came from `peer`, at the address `source`, into its rows of the output."""
    count = peers[_RECV_COUNT, peer]
    first = number * call[_UNITS_PER_PIECE]
    units = min(call[_UNITS_PER_PIECE], units_of(call, count) - first)
    target = call[_OUT] + peers[_RECV_DISPL, peer] * call[_OUT_STEP]
    if call[_EXACT]:
        if units_of(call, count) >= _STREAM_BYTES:
            stream_bytes(target + first, source, units)
        else:
            copy_bytes(target + first, source, units)
        return
    layout, record_bytes, dtype, in_order = layout_of(call), call[_RECORD_BYTES], call[_DTYPE], np.int64(0)
    stride = call[_OUT_STEP] * call[_COUNTS_PER_ROW]
    whole = min(units, count // call[_COUNTS_PER_ROW] - first)
    target += first * stride
    unpack_kernel(source, record_bytes, in_order, target, stride, dtype, in_order, whole, layout)
    if whole < units:
        row = stack_buffer(_SCRATCH_ROW)
        record = source + whole * record_bytes
        unpack_kernel(record, record_bytes, in_order, row, stride, dtype, in_order, units - whole, layout)
        copy_bytes(target + whole * stride, row, count % call[_COUNTS_PER_ROW] * call[_OUT_STEP])


# ---------------------------------------------------------------------------------------------------------------------
# Steps. None of them waits; they say whether they got anywhere. Towards this rank itself the same steps are taken, but
# for headers and the ring: quantised rows become records too, as placement shall not change results.


@kernel
def acceptable(call, peers, fingerprint=FINGERPRINT):
    """Places segments one after the other. False if they do not fit, or what is read and what is written overlaps."""
    x_rows, out_rows = call[_X_ROWS], call[_OUT_ROWS]
    for peer in range(call[_WORLD]):
        sent, received = peers[_SEND_COUNT, peer], peers[_RECV_COUNT, peer]
        if sent < 0 or sent > x_rows or received < 0 or received > out_rows:
            return False
        peers[_SEND_DISPL, peer], peers[_RECV_DISPL, peer] = call[_X_ROWS] - x_rows, call[_OUT_ROWS] - out_rows
        x_rows -= sent
        out_rows -= received
    x_end, out_end = call[_X] + call[_X_ROWS] * call[_X_STEP], call[_OUT] + call[_OUT_ROWS] * call[_OUT_STEP]
    apart = x_end <= call[_OUT] or out_end <= call[_X] or x_end == call[_X] or out_end == call[_OUT]
    return apart and peers[_SEND_COUNT, call[_RANK]] == peers[_RECV_COUNT, call[_RANK]]


@device
def begin(call, peers):
    """Opens the next epoch."""
    own = call[_RANK]
    if peers[_RECV_COUNT, own] < 0:
        peers[_RECV_COUNT, own] = peers[_SEND_COUNT, own]
    call[_EPOCH] = np.int32(call[_EPOCH] + 1)  # wraps, as the flags do
    for peer in range(call[_WORLD]):
        pieces = pieces_of(call, peers[_SEND_COUNT, peer])
        peers[_NEXT_OUT, peer], peers[_END_OUT, peer] = 0, pieces
        peers[_NEXT_IN, peer], peers[_END_IN, peer] = 0, pieces  # of a peer: to be read in its header
        peers[_ANSWER, peer] = AGREES if peer == own else SILENT


@device
def ring_has_room(call, peers, peer):
    """Whether the peer has taken enough of this rank's pieces that the next one may be stored."""
    under_way = np.int32(peers[_SENT, peer] - np.int64(load_acquire(peers[_HEAD_HERE, peer])))
    return 0 <= np.int64(under_way) < call[_SLOTS]  # nobody takes what was not sent


@device
def ring_has_piece(call, peers, peer):
    """Whether the peer has stored a piece that this rank has not taken."""
    stored = np.int32(np.int64(load_acquire(peers[_TAIL_HERE, peer])) - peers[_RECEIVED, peer])
    return 0 < np.int64(stored) <= call[_SLOTS]  # a ring holds no more, whatever the tail says


@device
def send_next(call, peers, peer, draining):
    """Stores the next piece for a peer, where there is one and room for it."""
    number, sent, own = peers[_NEXT_OUT, peer], peers[_SENT, peer], peer == call[_RANK]
    if number >= peers[_END_OUT, peer]:
        return False
    half = call[_EPOCH] & 1
    if own:
        if not draining or number > peers[_NEXT_IN, peer]:
            return False
        target = peers[_PARITY_HERE, peer]
    elif number == 0:
        target = peers[_PARITY_THERE, peer] + half * call[_HALF_BYTES]
    elif ring_has_room(call, peers, peer):
        target = peers[_RING_THERE, peer] + sent % call[_SLOTS] * call[_SLOT_BYTES]
    else:
        return False
    if not own or not (call[_EXACT] or call[_DISCARD]):
        pack_piece(call, peers, peer, number, target)
    peers[_NEXT_OUT, peer] = number + 1
    if own:
        return True
    if number > 0:
        peers[_SENT, peer] = sent + 1
        publish_tail(peers[_TAIL_THERE, peer], np.int32(sent + 1))
        return True
    line = peers[_HEADER_THERE, peer] + half * call[_HALF_LINES]
    pieces = np.int32(peers[_END_OUT, peer] - 1)
    publish_header(line, np.int32(call[_EPOCH]), pieces, peers[_SEND_COUNT, peer], call[_SIGNATURE:])
    return True


@device
def header_line(call, peers, peer):
    """The address of the peer's header line of this call."""
    return peers[_HEADER_HERE, peer] + (call[_EPOCH] & 1) * call[_HALF_LINES]


@device
def believable(call, count, pieces):
    """Whether so many rows can be, and take so many pieces. Any numbers: no product of theirs overflows."""
    room = pieces * call[_UNITS_PER_PIECE]  # of 31 bits and of a slot's bytes
    too_many = call[_EXACT] and call[_UNIT_BYTES] > 0 and count > room // call[_UNIT_BYTES]
    return 0 <= count <= MOST_ROWS and not too_many and pieces_of(call, count) == pieces


@kernel
def read_header(call, peers, peer, fingerprint=FINGERPRINT):
    """Compares a header, once it is there, with what this rank expects; an unknown count is taken from it."""
    line = header_line(call, peers, peer)
    if not signalled(line, call[_EPOCH]):
        return False
    # Each word is read once: what follows from it shall not change with it.
    pieces, count = header_pieces(line) + 1, header_count(line)
    answer = AGREES if same_signature(line, call[_SIGNATURE:]) and believable(call, count, pieces) else DIFFERS
    if answer == AGREES and peers[_RECV_COUNT, peer] < 0:
        peers[_RECV_COUNT, peer] = count
    # The number of pieces follows from the rest; it is told for the sake of those that expect something else.
    if peers[_RECV_COUNT, peer] != count:
        answer = DIFFERS
    peers[_END_IN, peer] = max(pieces, np.int64(1))
    peers[_ANSWER, peer] = answer
    return True


@device
def recv_next(call, peers, peer):
    """Takes in the next piece from a peer that has answered, where it is there."""
    number, received, own = peers[_NEXT_IN, peer], peers[_RECEIVED, peer], peer == call[_RANK]
    if number >= peers[_END_IN, peer]:
        return False
    if own:
        source = peers[_PARITY_HERE, peer]
        if call[_EXACT]:
            rows = call[_X] + peers[_SEND_DISPL, peer] * call[_X_STEP]
            source = rows + number * call[_UNITS_PER_PIECE]
    elif number == 0:
        source = peers[_PARITY_HERE, peer] + (call[_EPOCH] & 1) * call[_HALF_BYTES]
    elif ring_has_piece(call, peers, peer):
        source = peers[_RING_HERE, peer] + received % call[_SLOTS] * call[_SLOT_BYTES]
    else:
        return False
    if peers[_ANSWER, peer] == AGREES and not call[_DISCARD]:
        unpack_piece(call, peers, peer, number, source)
    peers[_NEXT_IN, peer] = number + 1
    if number > 0 and not own:
        peers[_RECEIVED, peer] = received + 1
        publish_head(peers[_HEAD_THERE, peer], np.int32(received + 1))
    return True


@kernel
def unfinished(call, peers, peer, draining, fingerprint=FINGERPRINT):
    """Whether something is left to do with a peer; without `draining`, only its header counts."""
    if peers[_ANSWER, peer] == SILENT or not draining:
        return peers[_ANSWER, peer] == SILENT
    return peers[_NEXT_IN, peer] < peers[_END_IN, peer] or peers[_NEXT_OUT, peer] < peers[_END_OUT, peer]


# ---------------------------------------------------------------------------------------------------------------------
# Waiting


@kernel
def missing(where, peer, fingerprint=FINGERPRINT):
    """Whether this rank needs something of a peer that the peer has not done; `where` is (call, peers, draining)."""
    call, peers, draining = where
    if peer == call[_RANK] or not unfinished(call, peers, peer, draining):
        return False
    if peers[_ANSWER, peer] == SILENT:
        return not signalled(header_line(call, peers, peer), call[_EPOCH])
    if 0 < peers[_NEXT_IN, peer] < peers[_END_IN, peer] and not ring_has_piece(call, peers, peer):
        return True
    return peers[_NEXT_OUT, peer] < peers[_END_OUT, peer] and not ring_has_room(call, peers, peer)


@kernel
def late(call, peers, draining, now, fingerprint=FINGERPRINT):
    """Whether a peer has let this rank wait for longer than the timeout, or is missing while another gave up.

    `now`, and the reports, are read before the flags: see `docs/protocol.md`, "Waits end".
    """
    stuck = someone_is_stuck(call[_BUFFER_PTRS], call[_WORLD], call[_RANK], call[_STUCK])
    for peer in range(call[_WORLD]):
        if missing((call, peers, draining), peer):
            if peers[_LIMIT, peer] == 0:
                peers[_LIMIT, peer] = now + call[_TIMEOUT]
            if stuck or now > peers[_LIMIT, peer]:
                return True
    return False


@kernel
def end(call, peers, draining, fingerprint=FINGERPRINT):
    """Whether to give up is over; what is missing may be a header, a piece, or room for one.

    Not before the peers had the grace time to say that they are stuck as well: until then it is gone on with later.
    """
    phase = _PHASE_PIECES
    for peer in range(call[_WORLD]):
        if peer != call[_RANK] and peers[_ANSWER, peer] == SILENT:
            phase = _PHASE_HEADERS
    where = (call, peers, draining)
    buffer_ptrs, world, rank, stuck, report = call[_BUFFER_PTRS], call[_WORLD], call[_RANK], call[_STUCK], call[_REPORT]
    if call[_GIVE_UP_BY] == 0:
        tell_stuck(buffer_ptrs, world, rank, stuck, call[_EPOCH], phase, report, missing, where)
        call[_GIVE_UP_BY] = monotonic_ns() + call[_GRACE]
    if give_up(buffer_ptrs, world, rank, stuck, report, missing, where, call[_GIVE_UP_BY]) == GIVING_UP:
        return False
    write_report(report, TIMED_OUT, call[_EPOCH], phase)
    call[_STATUS] = TIMED_OUT
    return True


@kernel
def verdict(call, peers, fingerprint=FINGERPRINT):
    """MISMATCHED if some peer's rows were not the expected ones, else RUNNING."""
    for peer in range(call[_WORLD]):
        if peers[_ANSWER, peer] == DIFFERS:
            return MISMATCHED
    return RUNNING


@kernel
def move(call, peers, todo, fingerprint=FINGERPRINT):
    """Does what `todo` says of the call. Returns RUNNING; MISMATCHED, and the call goes on all the same; PAUSED;
    REFUSED, and nothing was done; or TIMED_OUT, and so will every later call."""
    if call[_STATUS] != RUNNING or todo == 0:
        return call[_STATUS]
    if todo & CHECK and not acceptable(call, peers):
        return np.int64(REFUSED)
    world, draining, opening = call[_WORLD], todo & DRAIN != 0, todo & POST != 0
    if call[_GIVE_UP_BY] != 0:
        return call[_STATUS] if end(call, peers, draining) else np.int64(PAUSED)
    if opening:
        begin(call, peers)
    if todo & RESUME == 0:
        for peer in range(world):
            peers[_LIMIT, peer] = 0  # a peer's clock starts when it is first missed
    pause = monotonic_ns() + _SLICE_NS
    looks = 0
    while True:
        moved, left = False, False
        for step in range(1, world + 1):
            # The right-hand neighbour first, so that not everyone's first store goes to rank 0.
            peer = (call[_RANK] + step) % world
            progress = send_next(call, peers, peer, draining)
            if not opening:  # every peer's part goes out before anything is taken in
                if peers[_ANSWER, peer] == SILENT:
                    progress |= read_header(call, peers, peer)
                if draining and peers[_ANSWER, peer] != SILENT:
                    progress |= recv_next(call, peers, peer)
            if progress:
                moved = True
                peers[_LIMIT, peer] = 0
            left |= unfinished(call, peers, peer, draining)
        opening = False
        if todo == POST or not left:
            return np.int64(verdict(call, peers))
        looks = 0 if moved else looks + 1
        if 0 < looks <= _SPINS:
            continue
        now = monotonic_ns()
        if late(call, peers, draining, now):
            return call[_STATUS] if end(call, peers, draining) else np.int64(PAUSED)
        if now > pause:
            return np.int64(PAUSED)
        if looks > _SPINS + _YIELDS:
            sleep_microseconds(_NAP_MICROSECONDS)
        elif not moved:
            yield_processor()
