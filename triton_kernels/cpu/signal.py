"""Publishing to peers and waiting for them, on the CPU: what `thinwire.triton_kernels.signal` is on GPUs.

`docs/protocol.md` has the argument, under "Signals" and "Waits end". A rank looks a few hundred times and then gives up
the processor between looks, since ranks may outnumber cores; and a wait that lasts is slept through, in naps of a tenth
of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from thinwire.first_run import Deadline
from thinwire.triton_kernels.cpu.compat import device, emits, ir
from thinwire.triton_kernels.cpu.ir.atomics import (
    load_acquire,
    monotonic_ns,
    sleep_microseconds,
    store_release,
    yield_processor,
)
from thinwire.triton_kernels.cpu.ir.intrinsics import load_int32, store_int32
from thinwire.triton_kernels.cpu.ir.vectors import constant, load
from thinwire.triton_kernels.end import End
from thinwire.triton_kernels.signal import (
    CONTROL_EPOCH,
    CONTROL_STATUS,
    LEFT_FLAG,
    REPORT_EPOCH,
    REPORT_PEERS,
    REPORT_PHASE,
    REPORT_STATUS,
    RUNNING,
    SAID_LEFT,
    SAID_STUCK,
    SAID_STUCK_ON_YOU,
    SIGNAL_FLAG,
    SIGNAL_LINE_BYTES,
    SIGNAL_STUCK_EPOCH,
    SIGNAL_STUCK_ON_YOU,
    SIGNAL_STUCK_PHASE,
)

#: How a wait ends: all flags came, it was given up, or neither within a slice of time, before or after it was told that
#: it will be given up.
ARRIVED, GAVE_UP, PAUSED, GIVING_UP = 0, 1, 2, 3

_FLAG_BYTES = 4
_MOST_AHEAD = 1  # of epochs, see `docs/protocol.md`
_LONGEST_NS = 2**62
SPINS = 200  # looks before the first yield, in a few microseconds
SLICE_NS = 100_000_000  # so long may a pending Ctrl-C wait for Python
LOOK_NS = 1_000_000_000  # between two looks at whether peers have ended
_YIELDING_NS, _NAPS_OF_A_WAIT, _LONGEST_NAP_NS = 200_000, 10, 1_000_000


# Intrinsics, as they are called in many places: numba takes a hundredth of a second to inline a function into another.


@emits("int64")
def signal_line(builder, buffer_ptrs, peer, lines, source):
    """Address of the line that `source` writes at `peer`, in the row of lines that begins at offset `lines`."""
    word = ir.IntType(64)
    base = load(builder, builder.add(buffer_ptrs, builder.mul(peer, constant(8))), word, 8)
    return builder.add(base, builder.add(lines, builder.mul(source, constant(SIGNAL_LINE_BYTES))))


@emits("boolean")
def signalled(builder, line, epoch):
    """Whether the flag of a line has come to `epoch`, across the wrap of 32 bits too.

    A flag that is further ahead than any peer can be was not written by the protocol, and says nothing.
    """
    flag = builder.load_atomic(builder.inttoptr(line, ir.IntType(32).as_pointer()), "acquire", _FLAG_BYTES)
    ahead = builder.sub(flag, builder.trunc(epoch, ir.IntType(32)))  # wraps
    return builder.icmp_unsigned("<=", ahead, ir.Constant(ahead.type, _MOST_AHEAD))


# `own` is what a kernel knows of its rank's memory: numbers of a lane or a job, or a call's words, without `control`.


@device
def is_running(own):
    """Whether the memory is in use; otherwise nothing is sent, and outputs become NaN."""
    return load_int32(own.control + 4 * CONTROL_STATUS) == RUNNING


@device
def epoch_of(own):
    """The number of the epoch under way, as an int64; of a lane, the round's."""
    return np.int64(load_int32(own.control + 4 * CONTROL_EPOCH))


@device
def own_line(own, lines, source):
    """Address of the line that `source` writes at this rank."""
    return signal_line(own.buffer_ptrs, own.rank, lines, source)


@device
def publish(own, lines, epoch):
    """Sets this rank's flag at every peer, itself included, to `epoch`; what was stored before it is then visible."""
    for step in range(1, own.world + 1):
        # The right-hand neighbour first, so that not everyone's first store goes to rank 0.
        store_release(signal_line(own.buffer_ptrs, (own.rank + step) % own.world, lines, own.rank), epoch)


@device
def someone_is_stuck(own):
    """Whether a peer reported that it gave up."""
    for peer in range(own.world):
        if peer != own.rank and load_acquire(own_line(own, own.stuck, peer)) != 0:
            return True
    return False


@device
def nap_after(waited):
    """Microseconds of the nap that a rank takes after so many nanoseconds in which yielding has helped nothing, or 0.

    A yield may come back at once although the awaited rank is bound to the same core: the scheduler goes by who has had
    how much. A nap makes room, and leaves the core idle where nobody wants it. It adds a tenth to the wait, and what
    timers are late by, 50 us. To be woken instead, a rank that publishes would have to look each time whether a peer
    sleeps, after a fence: that costs every signal, and this costs those alone that wait for long.
    """
    return 0 if waited < _YIELDING_NS else min(waited // _NAPS_OF_A_WAIT, _LONGEST_NAP_NS) // 1000


@device
def let_others_run(waited):
    """Gives up the processor: for a moment, or after many nanoseconds of that for a nap."""
    nap = nap_after(waited)
    if nap == 0:
        yield_processor()
    else:
        sleep_microseconds(np.int32(nap))


@device
def wait_for_all(own, lines, epoch, deadline):
    """Waits until every peer's flag has come to `epoch`, and says how that ended.

    `lines` is an offset in the symmetric buffer, `deadline` a reading of `monotonic_ns`. After `GAVE_UP` the caller
    gives up; after `PAUSED` it comes back with the same deadline.
    """
    begun = monotonic_ns()
    pause = begun + SLICE_NS
    peer = 0
    looks = 0
    ended = ARRIVED
    while True:
        if looks >= SPINS:
            now = monotonic_ns()  # and reports: before the flags, see `docs/protocol.md`, "Waits end"
            if now > deadline or someone_is_stuck(own):
                ended = GAVE_UP
            elif now > pause:
                ended = PAUSED
        while peer < own.world and signalled(own_line(own, lines, peer), epoch):
            peer += 1
        if peer == own.world:
            return ARRIVED
        if ended != ARRIVED:
            return ended
        looks += 1
        if looks > SPINS:
            let_others_run(monotonic_ns() - begun)


@device
def flag_is_behind(where, peer):
    """Whether the flag of a peer has not come to an epoch; `where` is (own, lines, epoch)."""
    own, lines, epoch = where
    return not signalled(own_line(own, lines, peer), epoch)


@device
def tell_stuck(own, epoch, phase, owes, where):
    """Tells the peers that this rank is stuck, and on whom.

    `owes(where, peer)` says whether this rank misses something of a peer.
    """
    for peer in range(own.world):
        missing = 1 if owes(where, peer) else 0
        store_int32(own.report + 4 * (REPORT_PEERS + own.world + peer), missing)
        line = signal_line(own.buffer_ptrs, peer, own.stuck, own.rank)
        store_int32(line + 4 * SIGNAL_STUCK_EPOCH, epoch)
        store_int32(line + 4 * SIGNAL_STUCK_PHASE, phase)
        store_int32(line + 4 * SIGNAL_STUCK_ON_YOU, missing)
        store_release(line, 1)


@device
def give_up(own, owes, where, limit):
    """After `tell_stuck`: gives the peers until `limit` to say the same, and writes down who is to blame.

    Returns GAVE_UP, or GIVING_UP after a slice of time.
    """
    words, world = own.report + 4 * REPORT_PEERS, own.world
    begun = monotonic_ns()
    pause = begun + SLICE_NS
    while True:
        now = monotonic_ns()  # before the reports: those that came in time count
        silent = 0
        for peer in range(world):
            line = own_line(own, own.stuck, peer)
            said = 0
            flag = load_acquire(line)
            if flag == LEFT_FLAG:
                said = SAID_LEFT
            elif flag != 0:
                on_us = peer != own.rank and load_int32(line + 4 * SIGNAL_STUCK_ON_YOU) != 0
                said = SAID_STUCK_ON_YOU if on_us else SAID_STUCK
            blamed = 1 if (said == 0 or said == SAID_LEFT) and owes(where, peer) else 0
            store_int32(words + 4 * peer, blamed)
            store_int32(words + 4 * (2 * world + peer), said)
            silent += blamed if said == 0 else 0  # who has left will say nothing more
        if silent == 0 or now > limit:
            return GAVE_UP
        if now > pause:
            return GIVING_UP
        let_others_run(now - begun)


@device
def wait_or_give_up(own, lines, epoch, phase, deadline, limit):
    """`wait_for_all`, and where that gives up, `tell_stuck`; with a limit, `give_up`."""
    where = (own, lines, epoch)
    if limit != 0:
        return give_up(own, flag_is_behind, where, limit)
    ended = wait_for_all(own, lines, epoch, deadline)
    if ended != GAVE_UP:
        return ended
    tell_stuck(own, epoch, phase, flag_is_behind, where)
    return GIVING_UP


@device
def write_report(own, status, epoch, phase):
    """Says how a wait ended that did not go well. The host looks at the status."""
    store_int32(own.report + 4 * REPORT_EPOCH, epoch)
    store_int32(own.report + 4 * REPORT_PHASE, phase)
    store_int32(own.report + 4 * REPORT_STATUS, status)


@device
def poison(own, status, epoch, phase):
    """Ends the use of the memory: this rank's kernels that find this status send nothing, and give NaN."""
    write_report(own, status, epoch, phase)
    store_int32(own.control + 4 * CONTROL_STATUS, status)


def lines_of(end: End, offset: int) -> np.ndarray:
    """The signal lines that all ranks write at an offset of this rank's memory, int32 [world, words]."""
    world = end.layout.WORLD
    lines: np.ndarray = end.buffer[offset:][: world * SIGNAL_LINE_BYTES].numpy().view(np.int32).reshape(world, -1)
    return lines


def flags_behind(end: End, lines: int) -> list[int]:
    """Ranks whose flags in a row of lines have not come to the epoch under way."""
    ahead = (lines_of(end, lines)[:, SIGNAL_FLAG].astype(np.int64) - int(end.control[CONTROL_EPOCH])) & 0xFFFFFFFF
    found: list[int] = np.flatnonzero(ahead > _MOST_AHEAD).tolist()
    return found


def note_ended(end: End, missed: Callable[[], list[int]]) -> bool:
    """Whether a wait is in vain: somebody that is `missed` has ended, or the ranks agree elsewhere that some are lost.

    On who has ended notes in this rank's memory, in its place, that it has left.
    """
    asked = missed()
    lost = end.find_ended(asked)
    still = missed() if lost else ()  # it may have signalled before it ended
    for peer in still:
        if peer in lost:
            lines_of(end, end.layout.STUCK)[peer, SIGNAL_FLAG] = LEFT_FLAG
    return any(peer in still or peer not in asked for peer in lost)


def run_wait(
    kernel: Callable[[int, int], int], timeout: float, grace: float, end: End, missed: Callable[[], list[int]]
) -> int:
    """How a wait ends: what `kernel(deadline, limit)` says, in nanoseconds, after as many slices of time as it takes.

    Python's signal handlers run meanwhile. Peers that compile are waited for, see `thinwire.first_run`, unless one of
    those that are `missed`, which are looked for each second, has ended.
    """
    # The first slice has no deadline: the kernel may have to be compiled or loaded, and that is no time of the peers'.
    spent, limit, is_vain = SLICE_NS / 1e9, 0, False
    ended = kernel(_LONGEST_NS, 0) if timeout > spent else PAUSED
    if ended == ARRIVED:
        return ended
    deadline = Deadline(timeout, time.monotonic() + timeout - spent if timeout > spent else None)
    next_look = time.monotonic_ns() + LOOK_NS
    while ended in (PAUSED, GIVING_UP):
        if not is_vain and (now := time.monotonic_ns()) > next_look:
            next_look = now + LOOK_NS
            if is_vain := note_ended(end, missed):
                deadline.at, limit = min(deadline.at, now / 1e9), limit and min(limit, now + int(grace * 1e9))
        at = min(int(deadline.at * 1e9), _LONGEST_NS)
        if ended == GIVING_UP and limit == 0:
            # Who leaves early, because of another's report, still gives the others all the time that it had itself: a
            # live rank that is late by less than the timeout is then not named.
            limit = max(at, time.monotonic_ns()) + min(int(grace * 1e9), _LONGEST_NS)
        elif limit == 0 and not is_vain and deadline.look():
            continue
        ended = kernel(at, limit)
    return ended
