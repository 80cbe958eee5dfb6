"""The direct all-to-all-v on the CPU: rows straight from one rank's memory into another's.

`move` is the only entry. What it must know of the memory and of a call lies in `call` and `peers` (see `pieces`),
and so does what it notes for itself: it may return to the host half-way (for instance, once all counts have come in)
and go on later. `docs/protocol.md` has the argument, "Legs" and "The ring".

One thread sends and receives by turns, a piece at a time, and never waits for one peer alone: whatever the order in
which ranks reach their calls and fill each other's memory, someone can always go on. In a large call others share the
work of each piece with it (`move_in_team`; see `piece_team`).
"""

from __future__ import annotations

import numpy as np

from thinwire.triton_kernels.cpu import legs, signal, straight
from thinwire.triton_kernels.cpu.compat import device, kernel
from thinwire.triton_kernels.cpu.ir.atomics import load_acquire, monotonic_ns, store_release
from thinwire.triton_kernels.cpu.ir.fields import int64_rows
from thinwire.triton_kernels.cpu.piece_team import help_with_pieces, pack_piece, unpack_piece
from thinwire.triton_kernels.cpu.pieces import PEERS, SCALARS, P, call_at, pieces_of
from thinwire.triton_kernels.cpu.team import dismiss, run_standing_team, team_at
from thinwire.triton_kernels.leg_layout import MOST_ROWS
from thinwire.triton_kernels.signal import LEFT_FLAG, MISMATCHED, RUNNING, TIMED_OUT

# What `move` is to do, added up: send the parity part, wait for every header, wait for everything; go on with a wait,
# after it has returned PAUSED, which it does now and then for Python to see to a Ctrl-C. Or none of that, but end the
# use of the channel in the middle of a call.
POST, HEADERS, DRAIN, RESUME, LEAVE = 1, 2, 4, 8, 16
PAUSED, LEFT = 3, 4  # beside RUNNING, TIMED_OUT and MISMATCHED

# Where these are in `call`, for the host, and each rank's address in a region of its table.
STATUS, STARTING, REGION_PTRS = SCALARS.index("status"), SCALARS.index("starting"), straight.REGION_PTRS

# Values of `answer`: no header yet; one that says what was expected; one that says something else, so that all that
# comes from this peer in this call is taken in and dropped.
SILENT, AGREES, DIFFERS = 0, 1, 2

_PHASE_HEADERS, _PHASE_PIECES = np.int32(0), np.int32(1)


# ---------------------------------------------------------------------------------------------------------------------
# Steps. None of them waits; they say whether they got anywhere. Towards this rank itself the same steps are taken, but
# for headers and the ring: quantised rows become records too, as placement shall not change results.


@device
def begin(call, peers):
    """Opens the next epoch."""
    own = call.rank
    if peers[P.RECV_COUNT, own] < 0:
        peers[P.RECV_COUNT, own] = peers[P.SEND_COUNT, own]
    call.epoch = np.int32(call.epoch + 1)  # wraps, as the flags do
    for peer in range(call.world):
        pieces = pieces_of(call, peers[P.SEND_COUNT, peer])
        peers[P.NEXT_OUT, peer], peers[P.END_OUT, peer] = 0, pieces
        peers[P.NEXT_IN, peer], peers[P.END_IN, peer] = 0, pieces  # of a peer: to be read in its header
        peers[P.ANSWER, peer] = AGREES if peer == own else SILENT
    if call.regions:
        straight.tell_places(call, peers)
    call.starting = 0


@device
def ring_has_room(call, peers, peer):
    """Whether the peer has taken enough of this rank's pieces that the next one may be stored."""
    under_way = np.int32(peers[P.SENT, peer] - np.int64(load_acquire(peers[P.HEAD_HERE, peer])))
    return 0 <= np.int64(under_way) < call.slots  # nobody takes what was not sent


@device
def ring_has_piece(call, peers, peer):
    """Whether the peer has stored a piece that this rank has not taken."""
    stored = np.int32(np.int64(load_acquire(peers[P.TAIL_HERE, peer])) - peers[P.RECEIVED, peer])
    return 0 < np.int64(stored) <= call.slots  # a ring holds no more, whatever the tail says


@device
def send_next(call, peers, peer, draining):
    """Stores the next piece for a peer, where there is one and room for it."""
    number, sent, own = peers[P.NEXT_OUT, peer], peers[P.SENT, peer], peer == call.rank
    if number >= peers[P.END_OUT, peer]:
        return False
    half = call.epoch & 1
    if own:
        if not draining or number > peers[P.NEXT_IN, peer]:
            return False
        target = peers[P.PARITY_HERE, peer]
    elif number == 0:
        target = peers[P.PARITY_THERE, peer] + half * call.half_bytes
    elif call.regions and peers[P.ANSWER, peer] == SILENT:
        return False  # the peer says with its header where it wants the rest
    elif straight.place_is_gone(call, peers, peer):
        return False
    elif peers[P.PLACE, peer]:
        straight.store_straight(call, peers, peer, number)
        peers[P.NEXT_OUT, peer] = number + 1
        if number + 1 == peers[P.END_OUT, peer]:
            straight.mark_straight(peers, peer, sent + 1)
            peers[P.SENT, peer] = sent + 1
            legs.publish_tail(peers[P.TAIL_THERE, peer], np.int32(sent + 1))
        return True
    elif ring_has_room(call, peers, peer):
        target = peers[P.RING_THERE, peer] + sent % call.slots * call.slot_bytes
    else:
        return False
    if not own or not (call.exact or call.discard):
        pack_piece(call, peers, peer, number, target)
    peers[P.NEXT_OUT, peer] = number + 1
    if own:
        return True
    if number > 0:
        peers[P.SENT, peer] = sent + 1
        legs.publish_tail(peers[P.TAIL_THERE, peer], np.int32(sent + 1))
        return True
    line = peers[P.HEADER_THERE, peer] + half * call.half_lines
    pieces = np.int32(peers[P.END_OUT, peer] - 1)
    legs.publish_header(line, np.int32(call.epoch), call, pieces, peers[P.SEND_COUNT, peer])
    return True


@device
def header_line(call, peers, peer):
    """The address of the peer's header line of this call."""
    return peers[P.HEADER_HERE, peer] + (call.epoch & 1) * call.half_lines


@device
def believable(call, count, pieces):
    """Whether so many rows can be, and take so many pieces. Any numbers: no product of theirs overflows."""
    room = pieces * call.units_per_piece  # of 31 bits and of a slot's bytes
    too_many = call.exact and call.unit_bytes > 0 and count > room // call.unit_bytes
    return 0 <= count <= MOST_ROWS and not too_many and pieces_of(call, count) == pieces


@kernel
def read_header(call, peers, peer):
    """Compares a header, once it is there, with what this rank expects; an unknown count is taken from it."""
    line = header_line(call, peers, peer)
    if not signal.signalled(line, call.epoch):
        return False
    # Each word is read once: what follows from it shall not change with it.
    pieces, count = legs.header_pieces(line) + 1, legs.header_count(line)
    answer = AGREES if legs.same_signature(line, call) and believable(call, count, pieces) else DIFFERS
    if answer == AGREES and peers[P.RECV_COUNT, peer] < 0:
        peers[P.RECV_COUNT, peer] = count
    # The number of pieces follows from the rest; it is told for the sake of those that expect something else.
    if peers[P.RECV_COUNT, peer] != count:
        answer = DIFFERS
    peers[P.END_IN, peer] = max(pieces, np.int64(1))
    peers[P.ANSWER, peer] = answer
    if call.regions and answer == AGREES and peers[P.END_OUT, peer] > 1:
        straight.read_place(call, peers, peer)
    return True


@device
def recv_next(call, peers, peer):
    """Takes in the next piece from a peer that has answered, where it is there."""
    number, received, own = peers[P.NEXT_IN, peer], peers[P.RECEIVED, peer], peer == call.rank
    in_place = False
    if number >= peers[P.END_IN, peer]:
        return False
    if own:
        source = peers[P.PARITY_HERE, peer]
        if call.exact:
            rows = call.x + peers[P.SEND_DISPL, peer] * call.x_step
            source = rows + number * call.units_per_piece
    elif number == 0:
        source = peers[P.PARITY_HERE, peer] + (call.epoch & 1) * call.half_bytes
    elif ring_has_piece(call, peers, peer):
        source = peers[P.RING_HERE, peer] + received % call.slots * call.slot_bytes
        in_place = straight.came_straight(peers, peer, received + 1)
    else:
        return False
    if in_place:
        number = peers[P.END_IN, peer] - 1
    elif peers[P.ANSWER, peer] == AGREES and not call.discard:
        unpack_piece(call, peers, peer, number, source)
    peers[P.NEXT_IN, peer] = number + 1
    if number > 0 and not own:
        peers[P.RECEIVED, peer] = received + 1
        legs.publish_head(peers[P.HEAD_THERE, peer], np.int32(received + 1))
    return True


@kernel
def unfinished(call, peers, peer, draining):
    """Whether something is left to do with a peer; without `draining`, only its header counts."""
    if peers[P.ANSWER, peer] == SILENT or not draining:
        return peers[P.ANSWER, peer] == SILENT
    return peers[P.NEXT_IN, peer] < peers[P.END_IN, peer] or peers[P.NEXT_OUT, peer] < peers[P.END_OUT, peer]


# ---------------------------------------------------------------------------------------------------------------------
# Waiting


@kernel
def missing(where, peer):
    """Whether this rank needs something of a peer that the peer has not done; `where` is (call, peers, draining)."""
    call, peers, draining = where
    if peer == call.rank or not unfinished(call, peers, peer, draining):
        return False
    if peers[P.ANSWER, peer] == SILENT:
        return not signal.signalled(header_line(call, peers, peer), call.epoch)
    if 0 < peers[P.NEXT_IN, peer] < peers[P.END_IN, peer] and not ring_has_piece(call, peers, peer):
        return not straight.stores_meanwhile(peers, peer)
    no_room = straight.place_is_gone(call, peers, peer) or not ring_has_room(call, peers, peer)
    return peers[P.NEXT_OUT, peer] < peers[P.END_OUT, peer] and no_room


@device
def said_by(call, peer):
    """The flag of a peer's stuck line: 0, `LEFT_FLAG`, or another where it gave up."""
    return load_acquire(signal.own_line(call, call.stuck, peer))


@kernel
def late(call, peers, draining, now):
    """Whether a peer has let this rank wait for over the timeout, or is missing and has left, or another gave up.

    `now`, and the reports, are read before the flags: see `docs/protocol.md`, "Waits end".
    """
    gave_up = False
    for peer in range(call.world):
        said = said_by(call, peer)
        gave_up |= peer != call.rank and said != 0 and said != LEFT_FLAG
    for peer in range(call.world):
        left = said_by(call, peer) == LEFT_FLAG
        if missing((call, peers, draining), peer):
            if peers[P.LIMIT, peer] == 0:
                peers[P.LIMIT, peer] = now + call.timeout
            if left or gave_up or now > peers[P.LIMIT, peer]:
                return True
    return False


@kernel
def to_blame(where, peer):
    """Whether a peer that does not say that it is stuck is to blame; `where` as for `missing`.

    Where somebody left, and this rank's own time was not up when it gave up, that is who has left, and nobody else:
    whoever is silent still had time.
    """
    call, peers, _ = where
    told = call.give_up_by - call.grace
    left, waited = False, False
    for other in range(call.world):
        left |= said_by(call, other) == LEFT_FLAG
        waited |= 0 < peers[P.LIMIT, other] < told
    if left and not waited:
        return said_by(call, peer) == LEFT_FLAG
    return missing(where, peer)


@kernel
def end(call, peers, draining):
    """Whether to give up is over; what is missing may be a header, a piece, or room for one.

    Not before the peers had the grace time to say that they are stuck as well: until then it is gone on with later.
    """
    phase = _PHASE_PIECES
    for peer in range(call.world):
        if peer != call.rank and peers[P.ANSWER, peer] == SILENT:
            phase = _PHASE_HEADERS
    where = (call, peers, draining)
    if call.give_up_by == 0:
        signal.tell_stuck(call, call.epoch, phase, missing, where)
        call.give_up_by = monotonic_ns() + call.grace
    if signal.give_up(call, to_blame, where, call.give_up_by) == signal.GIVING_UP:
        return False
    signal.write_report(call, TIMED_OUT, call.epoch, phase)
    call.status = TIMED_OUT
    return True


@kernel
def verdict(call, peers):
    """MISMATCHED if some peer's rows were not the expected ones, else RUNNING."""
    for peer in range(call.world):
        if peers[P.ANSWER, peer] == DIFFERS:
            return MISMATCHED
    return RUNNING


@device
def needs_this_rank(call, peers, peer):
    """Whether a peer still needs something of this rank in the call under way: rows, room, or an output to store to."""
    if peers[P.NEXT_OUT, peer] < peers[P.END_OUT, peer]:
        return True
    pieces, expected = peers[P.END_IN, peer], peers[P.RECV_COUNT, peer]
    if peers[P.TOLD, peer] and peers[P.NEXT_IN, peer] < pieces:
        return True
    if peers[P.ANSWER, peer] == SILENT:
        if expected < 0:
            return True  # it may have any number of rows
        pieces = pieces_of(call, expected)
    return pieces - max(np.int64(1), peers[P.NEXT_IN, peer]) > call.slots


@kernel
def leave(call, peers):
    """Tells the peers that this rank goes no further, if one of them waits for that, or will. To be called whenever it
    likes, also while another thread is in the call or before one: that call finds the new status."""
    rank = call.rank
    for peer in range(call.world):
        if peer != rank and (call.starting or needs_this_rank(call, peers, peer)):
            for told in range(call.world):
                if told != rank:
                    store_release(signal.signal_line(call.buffer_ptrs, told, call.stuck, rank), LEFT_FLAG)
            break
    call.status = LEFT


@kernel
def move(words, todo):
    """Does what `todo` says of the call. Returns RUNNING; MISMATCHED, and the call goes on all the same; PAUSED; or
    TIMED_OUT or LEFT, and so will every later call.

    `words` is the address of `call`, behind which `peers` lies: numba looks at each array that it is given.
    """
    call = call_at(words)
    peers = int64_rows(words + 8 * len(SCALARS), len(PEERS), call.world)
    if call.status != RUNNING or todo == 0:
        return call.status
    if todo & LEAVE:
        leave(call, peers)
        return call.status
    world, draining, opening = call.world, todo & DRAIN != 0, todo & POST != 0
    if call.give_up_by != 0:
        return call.status if end(call, peers, draining) else np.int64(PAUSED)
    if opening:
        begin(call, peers)
    if todo & RESUME == 0:
        for peer in range(world):
            peers[P.LIMIT, peer] = 0  # a peer's clock starts when it is first missed
    idle_since = monotonic_ns()
    pause = idle_since + signal.SLICE_NS
    looks = 0
    while True:
        moved, left = False, False
        for step in range(1, world + 1):
            # The right-hand neighbour first, so that not everyone's first store goes to rank 0.
            peer = (call.rank + step) % world
            progress = send_next(call, peers, peer, draining)
            if not opening:  # every peer's part goes out before anything is taken in
                if peers[P.ANSWER, peer] == SILENT:
                    progress |= read_header(call, peers, peer)
                if draining and peers[P.ANSWER, peer] != SILENT:
                    progress |= recv_next(call, peers, peer)
                    straight.look_at_stores(peers, peer)
                if call.status != RUNNING:  # left meanwhile, by another thread
                    return call.status
            if progress:
                moved = True
                peers[P.LIMIT, peer] = 0
            left |= unfinished(call, peers, peer, draining)
        opening = False
        if todo == POST or not left:
            return np.int64(verdict(call, peers))
        looks = 0 if moved else looks + 1
        if 0 < looks <= call.looks:
            continue
        now = monotonic_ns()
        if looks <= call.looks + 1:
            idle_since = now
        if late(call, peers, draining, now):
            return call.status if end(call, peers, draining) else np.int64(PAUSED)
        if now > pause:
            return np.int64(PAUSED)
        if not moved:
            signal.let_others_run(now - idle_since)


@kernel
def move_in_team_kernel(call, peers, todo, words, member):
    """`move` in the thread that leads a team, while the others share the pieces."""
    team = team_at(words)
    if member > 0:
        help_with_pieces(call_at(call.ctypes.data), peers, team)
        return np.int64(RUNNING)
    words = np.int64(call.ctypes.data)
    call_at(words).team = team
    status = move(words, todo)
    call_at(words).team = 0
    dismiss(team)
    return status


def move_in_team(threads: int, call: np.ndarray, peers: np.ndarray, todo: int) -> int:
    """What `move` returns, run in so many threads; a call with one thread compiles the kernel, and comes first."""
    status: int = run_standing_team(threads, move_in_team_kernel, call, peers, todo)
    return status
