"""The direct all-to-all-v on the CPU: rows straight from one rank's memory into another's.

`move` is the only entry. What it must know of the exchange and of a call lies in two int64 arrays, `call` and `peers`,
and so does what it notes for itself: it may return to the host half-way (for instance, once all counts have come in)
and go on later. `docs/protocol.md` has the argument, "The exchange" and "The ring".

One thread sends and receives by turns, a piece at a time, and never waits for one peer alone: whatever the order in
which ranks reach their calls and fill each other's memory, someone can always go on. In a large call others share the
work of each piece with it (`move_in_team`; see `piece_team`).
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
from thinwire.triton_kernels.cpu.exchange_checksum import (
    header_fits,
    report_corruption,
)
from thinwire.triton_kernels.cpu.ir.atomics import load_acquire, monotonic_ns, store_release
from thinwire.triton_kernels.cpu.ir.fields import int64_rows, int64_words
from thinwire.triton_kernels.cpu.piece_team import help_with_pieces, pack_piece, unpack_piece
from thinwire.triton_kernels.cpu.pieces import (
    ANSWER,
    BUFFER_PTRS,
    CHECKSUMS,
    COUNTS_PER_ROW,
    DISCARD,
    END_IN,
    END_OUT,
    EPOCH,
    EXACT,
    GIVE_UP_BY,
    GRACE,
    HALF_BYTES,
    HALF_LINES,
    HEAD_HERE,
    HEAD_THERE,
    HEADER_HERE,
    HEADER_THERE,
    LIMIT,
    LOOKS,
    NEXT_IN,
    NEXT_OUT,
    PARITY_HERE,
    PARITY_THERE,
    PLACE,
    RANK,
    RECEIVED,
    RECV_COUNT,
    REGIONS,
    REPORT,
    RING_HERE,
    RING_THERE,
    SEND_COUNT,
    SEND_DISPL,
    SENT,
    SIGNATURE,
    SLOT_BYTES,
    SLOTS,
    STARTING,
    STATUS,
    STUCK,
    TAIL_HERE,
    TAIL_THERE,
    TEAM,
    TIMEOUT,
    TOLD,
    UNIT_BYTES,
    UNITS_PER_PIECE,
    UNITS_PER_TURN,
    WORLD,
    X_STEP,
    X,
    pieces_of,
    sums_of,
    units_of,
)
from thinwire.triton_kernels.cpu.pieces import (
    PEERS as PEERS,
)
from thinwire.triton_kernels.cpu.pieces import (
    SCALARS as SCALARS,
)
from thinwire.triton_kernels.cpu.signal import (
    GIVING_UP,
    SLICE_NS,
    give_up,
    let_others_run,
    signal_line,
    signalled,
    tell_stuck,
    write_report,
)
from thinwire.triton_kernels.cpu.straight import (
    REGION_PTRS as REGION_PTRS,
)
from thinwire.triton_kernels.cpu.straight import (
    came_straight,
    look_at_stores,
    mark_straight,
    place_is_gone,
    read_place,
    store_straight,
    stores_meanwhile,
    tell_places,
)
from thinwire.triton_kernels.cpu.team import dismiss, run_standing_team, team_at
from thinwire.triton_kernels.exchange_layout import MOST_ROWS
from thinwire.triton_kernels.signal import (
    CORRUPTED,
    LEFT_FLAG,
    MISMATCHED,
    RUNNING,
    TIMED_OUT,
)

# What `move` is to do, added up: send the parity part, wait for every header, wait for everything; go on with a wait,
# after it has returned PAUSED, which it does now and then for Python to see to a Ctrl-C. Or none of that, but end the
# use of the channel in the middle of a call.
POST, HEADERS, DRAIN, RESUME, LEAVE = 1, 2, 4, 8, 16
PAUSED, LEFT = 4, 5  # beside RUNNING, TIMED_OUT, MISMATCHED and CORRUPTED

# Values of `answer`: no header yet; one that says what was expected; one that says something else, so that all that
# comes from this peer in this call is taken in and dropped.
SILENT, AGREES, DIFFERS = 0, 1, 2

_PHASE_HEADERS, _PHASE_PIECES = np.int32(0), np.int32(1)
_ONE, _ZERO, _FIRST = np.int32(1), np.int32(0), np.int64(0)


# ---------------------------------------------------------------------------------------------------------------------
# Steps. None of them waits; they say whether they got anywhere. Towards this rank itself the same steps are taken, but
# for headers and the ring: quantised rows become records too, as placement shall not change results.


@device
def begin(call, peers):
    """Opens the next epoch."""
    own = call[RANK]
    if peers[RECV_COUNT, own] < 0:
        peers[RECV_COUNT, own] = peers[SEND_COUNT, own]
    call[EPOCH] = np.int32(call[EPOCH] + 1)  # wraps, as the flags do
    for peer in range(call[WORLD]):
        pieces = pieces_of(call, peers[SEND_COUNT, peer])
        peers[NEXT_OUT, peer], peers[END_OUT, peer] = 0, pieces
        peers[NEXT_IN, peer], peers[END_IN, peer] = 0, pieces  # of a peer: to be read in its header
        peers[ANSWER, peer] = AGREES if peer == own else SILENT
    if call[REGIONS]:
        tell_places(call, peers)
    call[STARTING] = 0


@device
def ring_has_room(call, peers, peer):
    """Whether the peer has taken enough of this rank's pieces that the next one may be stored."""
    under_way = np.int32(peers[SENT, peer] - np.int64(load_acquire(peers[HEAD_HERE, peer])))
    return 0 <= np.int64(under_way) < call[SLOTS]  # nobody takes what was not sent


@device
def ring_has_piece(call, peers, peer):
    """Whether the peer has stored a piece that this rank has not taken."""
    stored = np.int32(np.int64(load_acquire(peers[TAIL_HERE, peer])) - peers[RECEIVED, peer])
    return 0 < np.int64(stored) <= call[SLOTS]  # a ring holds no more, whatever the tail says


@device
def send_next(call, peers, peer, draining):
    """Stores the next piece for a peer, where there is one and room for it."""
    number, sent, own = peers[NEXT_OUT, peer], peers[SENT, peer], peer == call[RANK]
    if number >= peers[END_OUT, peer]:
        return False
    half = call[EPOCH] & 1
    if own:
        if not draining or number > peers[NEXT_IN, peer]:
            return False
        target = peers[PARITY_HERE, peer]
    elif number == 0:
        target = peers[PARITY_THERE, peer] + half * call[HALF_BYTES]
    elif call[REGIONS] and peers[ANSWER, peer] == SILENT:
        return False  # the peer says with its header where it wants the rest
    elif place_is_gone(call, peers, peer):
        return False
    elif peers[PLACE, peer]:
        store_straight(call, peers, peer, number)
        peers[NEXT_OUT, peer] = number + 1
        if number + 1 == peers[END_OUT, peer]:
            mark_straight(peers, peer, sent + 1)
            peers[SENT, peer] = sent + 1
            publish_tail(peers[TAIL_THERE, peer], np.int32(sent + 1))
        return True
    elif ring_has_room(call, peers, peer):
        target = peers[RING_THERE, peer] + sent % call[SLOTS] * call[SLOT_BYTES]
    else:
        return False
    if not own or not (call[EXACT] or call[DISCARD]):
        pack_piece(call, peers, peer, number, target, sums_of(call, peer, target))
    peers[NEXT_OUT, peer] = number + 1
    if own:
        return True
    if number > 0:
        peers[SENT, peer] = sent + 1
        publish_tail(peers[TAIL_THERE, peer], np.int32(sent + 1))
        return True
    line = peers[HEADER_THERE, peer] + half * call[HALF_LINES]
    pieces = np.int32(peers[END_OUT, peer] - 1)
    count, summed = peers[SEND_COUNT, peer], call[CHECKSUMS] != 0
    publish_header(line, np.int32(call[EPOCH]), call[RANK], pieces, count, call[SIGNATURE:], summed)
    return True


@device
def header_line(call, peers, peer):
    """The address of the peer's header line of this call."""
    return peers[HEADER_HERE, peer] + (call[EPOCH] & 1) * call[HALF_LINES]


@device
def believable(call, count, pieces):
    """Whether so many rows can be, and take so many pieces. Any numbers: no product of theirs overflows."""
    room = pieces * call[UNITS_PER_PIECE]  # of 31 bits and of a slot's bytes
    too_many = call[EXACT] and call[UNIT_BYTES] > 0 and count > room // call[UNIT_BYTES]
    return 0 <= count <= MOST_ROWS and not too_many and pieces_of(call, count) == pieces


@device
def corrupt(call, phase, source, first, units):
    """Ends the use of the channel, for units of a rank that do not fit; none: its header."""
    # The rows, or elements, which these are.
    if call[EXACT]:
        each = max(np.int64(1), call[UNIT_BYTES])
        begin, end_of = first // each, -(-(first + units) // each)
    else:
        begin, end_of = first * call[COUNTS_PER_ROW], (first + units) * call[COUNTS_PER_ROW]
    buffer_ptrs, world, rank, stuck, report = call[BUFFER_PTRS], call[WORLD], call[RANK], call[STUCK], call[REPORT]
    report_corruption(buffer_ptrs, world, rank, stuck, call[EPOCH], phase, report, source, begin, end_of - begin)
    call[STATUS] = CORRUPTED


@kernel
def read_header(call, peers, peer, fingerprint=FINGERPRINT):
    """Compares a header, once it is there, with what this rank expects; an unknown count is taken from it."""
    line = header_line(call, peers, peer)
    if not signalled(line, call[EPOCH]):
        return False
    if call[CHECKSUMS] and not header_fits(line, call[EPOCH], peer):
        corrupt(call, _PHASE_HEADERS, peer, np.int64(0), np.int64(0))
        return False
    # Each word is read once: what follows from it shall not change with it.
    pieces, count = header_pieces(line) + 1, header_count(line)
    answer = AGREES if same_signature(line, call[SIGNATURE:]) and believable(call, count, pieces) else DIFFERS
    if answer == AGREES and peers[RECV_COUNT, peer] < 0:
        peers[RECV_COUNT, peer] = count
    # The number of pieces follows from the rest; it is told for the sake of those that expect something else.
    if peers[RECV_COUNT, peer] != count:
        answer = DIFFERS
    peers[END_IN, peer] = max(pieces, np.int64(1))
    peers[ANSWER, peer] = answer
    if call[REGIONS] and answer == AGREES and peers[END_OUT, peer] > 1:
        read_place(call, peers, peer)
    return True


@device
def recv_next(call, peers, peer):
    """Takes in the next piece from a peer that has answered, where it is there."""
    number, received, own = peers[NEXT_IN, peer], peers[RECEIVED, peer], peer == call[RANK]
    straight = False
    if number >= peers[END_IN, peer]:
        return False
    if own:
        source = peers[PARITY_HERE, peer]
        if call[EXACT]:
            rows = call[X] + peers[SEND_DISPL, peer] * call[X_STEP]
            source = rows + number * call[UNITS_PER_PIECE]
    elif number == 0:
        source = peers[PARITY_HERE, peer] + (call[EPOCH] & 1) * call[HALF_BYTES]
    elif ring_has_piece(call, peers, peer):
        source = peers[RING_HERE, peer] + received % call[SLOTS] * call[SLOT_BYTES]
        straight = came_straight(peers, peer, received + 1)
    else:
        return False
    if straight:
        number = peers[END_IN, peer] - 1
    elif peers[ANSWER, peer] == AGREES and not call[DISCARD]:
        # A rank's own exact rows take no slot.
        sums = np.int64(0) if own and call[EXACT] else sums_of(call, call[RANK], source)
        wrong = unpack_piece(call, peers, peer, number, source, sums)
        if wrong >= 0:
            last = units_of(call, peers[RECV_COUNT, peer])
            corrupt(call, _PHASE_PIECES, peer, wrong, min(call[UNITS_PER_TURN], last - wrong))
            return False
    peers[NEXT_IN, peer] = number + 1
    if number > 0 and not own:
        peers[RECEIVED, peer] = received + 1
        publish_head(peers[HEAD_THERE, peer], np.int32(received + 1))
    return True


@kernel
def unfinished(call, peers, peer, draining, fingerprint=FINGERPRINT):
    """Whether something is left to do with a peer; without `draining`, only its header counts."""
    if peers[ANSWER, peer] == SILENT or not draining:
        return peers[ANSWER, peer] == SILENT
    return peers[NEXT_IN, peer] < peers[END_IN, peer] or peers[NEXT_OUT, peer] < peers[END_OUT, peer]


# ---------------------------------------------------------------------------------------------------------------------
# Waiting


@kernel
def missing(where, peer, fingerprint=FINGERPRINT):
    """Whether this rank needs something of a peer that the peer has not done; `where` is (call, peers, draining)."""
    call, peers, draining = where
    if peer == call[RANK] or not unfinished(call, peers, peer, draining):
        return False
    if peers[ANSWER, peer] == SILENT:
        return not signalled(header_line(call, peers, peer), call[EPOCH])
    if 0 < peers[NEXT_IN, peer] < peers[END_IN, peer] and not ring_has_piece(call, peers, peer):
        return not stores_meanwhile(peers, peer)
    no_room = place_is_gone(call, peers, peer) or not ring_has_room(call, peers, peer)
    return peers[NEXT_OUT, peer] < peers[END_OUT, peer] and no_room


@device
def said_by(call, peer):
    """The flag of a peer's stuck line: 0, `LEFT_FLAG`, or another where it gave up."""
    return load_acquire(signal_line(call[BUFFER_PTRS], call[RANK], call[STUCK], peer))


@kernel
def late(call, peers, draining, now, fingerprint=FINGERPRINT):
    """Whether a peer has let this rank wait for over the timeout, or is missing and has left, or another gave up.

    `now`, and the reports, are read before the flags: see `docs/protocol.md`, "Waits end".
    """
    gave_up = False
    for peer in range(call[WORLD]):
        said = said_by(call, peer)
        gave_up |= peer != call[RANK] and said != 0 and said != LEFT_FLAG
    for peer in range(call[WORLD]):
        left = said_by(call, peer) == LEFT_FLAG
        if missing((call, peers, draining), peer):
            if peers[LIMIT, peer] == 0:
                peers[LIMIT, peer] = now + call[TIMEOUT]
            if left or gave_up or now > peers[LIMIT, peer]:
                return True
    return False


@kernel
def to_blame(where, peer, fingerprint=FINGERPRINT):
    """Whether a peer that does not say that it is stuck is to blame; `where` as for `missing`.

    Where somebody left, and this rank's own time was not up when it gave up, that is who has left, and nobody else:
    whoever is silent still had time.
    """
    call, peers, _ = where
    told = call[GIVE_UP_BY] - call[GRACE]
    left, waited = False, False
    for other in range(call[WORLD]):
        left |= said_by(call, other) == LEFT_FLAG
        waited |= 0 < peers[LIMIT, other] < told
    if left and not waited:
        return said_by(call, peer) == LEFT_FLAG
    return missing(where, peer)


@kernel
def end(call, peers, draining, fingerprint=FINGERPRINT):
    """Whether to give up is over; what is missing may be a header, a piece, or room for one.

    Not before the peers had the grace time to say that they are stuck as well: until then it is gone on with later.
    """
    phase = _PHASE_PIECES
    for peer in range(call[WORLD]):
        if peer != call[RANK] and peers[ANSWER, peer] == SILENT:
            phase = _PHASE_HEADERS
    where = (call, peers, draining)
    buffer_ptrs, world, rank, stuck, report = call[BUFFER_PTRS], call[WORLD], call[RANK], call[STUCK], call[REPORT]
    if call[GIVE_UP_BY] == 0:
        tell_stuck(buffer_ptrs, world, rank, stuck, call[EPOCH], phase, report, missing, where)
        call[GIVE_UP_BY] = monotonic_ns() + call[GRACE]
    if give_up(buffer_ptrs, world, rank, stuck, report, to_blame, where, call[GIVE_UP_BY]) == GIVING_UP:
        return False
    write_report(report, TIMED_OUT, call[EPOCH], phase)
    call[STATUS] = TIMED_OUT
    return True


@kernel
def verdict(call, peers, fingerprint=FINGERPRINT):
    """MISMATCHED if some peer's rows were not the expected ones, else RUNNING."""
    for peer in range(call[WORLD]):
        if peers[ANSWER, peer] == DIFFERS:
            return MISMATCHED
    return RUNNING


@device
def needs_this_rank(call, peers, peer):
    """Whether a peer still needs something of this rank in the call under way: rows, room, or an output to store to."""
    if peers[NEXT_OUT, peer] < peers[END_OUT, peer]:
        return True
    pieces, expected = peers[END_IN, peer], peers[RECV_COUNT, peer]
    if peers[TOLD, peer] and peers[NEXT_IN, peer] < pieces:
        return True
    if peers[ANSWER, peer] == SILENT:
        if expected < 0:
            return True  # it may have any number of rows
        pieces = pieces_of(call, expected)
    return pieces - max(np.int64(1), peers[NEXT_IN, peer]) > call[SLOTS]


@kernel
def leave(call, peers, fingerprint=FINGERPRINT):
    """Tells the peers that this rank goes no further, if one of them waits for that, or will. To be called whenever it
    likes, also while another thread is in the call or before one: that call finds the new status."""
    rank = call[RANK]
    for peer in range(call[WORLD]):
        if peer != rank and (call[STARTING] or needs_this_rank(call, peers, peer)):
            for told in range(call[WORLD]):
                if told != rank:
                    store_release(signal_line(call[BUFFER_PTRS], told, call[STUCK], rank), LEFT_FLAG)
            break
    call[STATUS] = LEFT


@kernel
def move(words, todo, fingerprint=FINGERPRINT):
    """Does what `todo` says of the call. Returns RUNNING; MISMATCHED, and the call goes on all the same; PAUSED;
    or TIMED_OUT, CORRUPTED or LEFT, and so will every later call.

    `words` is the address of `call`, behind which `peers` lies: numba looks at each array that it is given.
    """
    call = int64_words(words, len(SCALARS))
    peers = int64_rows(words + 8 * len(SCALARS), len(PEERS), call[WORLD])
    if call[STATUS] != RUNNING or todo == 0:
        return call[STATUS]
    if todo & LEAVE:
        leave(call, peers)
        return call[STATUS]
    world, draining, opening = call[WORLD], todo & DRAIN != 0, todo & POST != 0
    if call[GIVE_UP_BY] != 0:
        return call[STATUS] if end(call, peers, draining) else np.int64(PAUSED)
    if opening:
        begin(call, peers)
    if todo & RESUME == 0:
        for peer in range(world):
            peers[LIMIT, peer] = 0  # a peer's clock starts when it is first missed
    idle_since = monotonic_ns()
    pause = idle_since + SLICE_NS
    looks = 0
    while True:
        moved, left = False, False
        for step in range(1, world + 1):
            # The right-hand neighbour first, so that not everyone's first store goes to rank 0.
            peer = (call[RANK] + step) % world
            progress = send_next(call, peers, peer, draining)
            if not opening:  # every peer's part goes out before anything is taken in
                if peers[ANSWER, peer] == SILENT:
                    progress |= read_header(call, peers, peer)
                if draining and peers[ANSWER, peer] != SILENT:
                    progress |= recv_next(call, peers, peer)
                    look_at_stores(peers, peer)
                if call[STATUS] != RUNNING:
                    return call[STATUS]
            if progress:
                moved = True
                peers[LIMIT, peer] = 0
            left |= unfinished(call, peers, peer, draining)
        opening = False
        if todo == POST or not left:
            return np.int64(verdict(call, peers))
        looks = 0 if moved else looks + 1
        if 0 < looks <= call[LOOKS]:
            continue
        now = monotonic_ns()
        if looks <= call[LOOKS] + 1:
            idle_since = now
        if late(call, peers, draining, now):
            return call[STATUS] if end(call, peers, draining) else np.int64(PAUSED)
        if now > pause:
            return np.int64(PAUSED)
        if not moved:
            let_others_run(now - idle_since)


@kernel
def move_in_team_kernel(call, peers, todo, words, member, fingerprint=FINGERPRINT):
    """`move` in the thread that leads a team, while the others share the pieces."""
    team = team_at(words)
    if member > 0:
        help_with_pieces(call, peers, team)
        return np.int64(RUNNING)
    call[TEAM] = team
    status = move(np.int64(call.ctypes.data), todo)
    call[TEAM] = 0
    dismiss(team)
    return status


def move_in_team(threads: int, call: np.ndarray, peers: np.ndarray, todo: int) -> int:
    """What `move` returns, run in so many threads; a call with one thread compiles the kernel, and comes first."""
    status: int = run_standing_team(threads, move_in_team_kernel, call, peers, todo)
    return status
