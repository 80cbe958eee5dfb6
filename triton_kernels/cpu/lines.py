"""Lines between ranks that share memory on one host: one rank says what it has ready, its peers wait, read and say so.

Every rank has a *board* at the beginning of its shared memory, which its peers write into::

    asleep                                    how many peers this rank sleeps for; the word that wakes it
    ended    [source]                         that a peer gave up waiting, or left, and whether it waited for this rank
    awaited  [source]                         whether this rank sleeps for that peer
    taken    [channel][reader]                how many of this rank's lines a peer has taken
    lines    [channel][source][RING]          a flag, and seven numbers

A rank writes its records into its own memory and puts a line at each peer: where they are. Peers read them there and
take the line. On a channel, lines of a pair come in order; a flag is the line's number.

`docs/protocol.md`, "Pulling", says how flags and numbers are ordered, and why no rank sleeps while its last line is
there. A sleep ends after `sleep_ns` in any case, and with any signal.
"""

from __future__ import annotations

import numpy as np

from thinwire.triton_kernels.cpu.compat import device, kernel
from thinwire.triton_kernels.cpu.ir.memory import (
    add,
    copy_bytes,
    exchange,
    finish_stores,
    load_acquire,
    load_int64,
    monotonic_ns,
    sleep_on,
    store_int32,
    store_int64,
    store_release,
    struct_of,
    wake_sleeper,
    yield_processor,
)

LINE_BYTES = 64
#: Lines of a pair on a channel, which may be there at the same time.
RING = 4
#: What a wait ends with: all is there; something is late; a peer that is late has left, or any peer has given up.
ARRIVED, LATE, ENDED = 0, 1, 2
#: What a peer says in `ended`.
GAVE_UP, LEFT = 1, 3
#: For so long a rank gives way between looks, once in a kernel that finds a line missing and once before it sleeps: to
#: be woken takes some tens of microseconds.
YIELD_NS = 100_000

_LOOK_EVERY, _LOOK_BYTES = 32, 8192  # for `look_far`: calls, and bytes
_NEAR_BYTES_PER_NS = 3.5  # that near peers' cache lines can at least be overwritten with

#: What a rank knows of the boards. Behind these numbers lie, an int64 for each rank: which peers are late, for each
#: channel the lines put and the lines taken, and which are far.
FIELDS = ("heaps", "world", "rank", "channels")
board_at = struct_of(*FIELDS)


def board_bytes(world: int, channels: int) -> int:
    """Bytes of a rank's board, a multiple of a line.

    >>> board_bytes(2, 1)
    960
    """
    return LINE_BYTES * (1 + 2 * world + channels * world * (1 + RING))


def first_line(world: int, channels: int, channel: int) -> int:
    """The offset of a channel's lines."""
    return LINE_BYTES * (1 + (2 + channels) * world + channel * world * RING)


def board_words(heaps: int, world: int, rank: int, channels: int) -> np.ndarray:
    """Makes the int64 words that kernels take the address of. `heaps` is the address of all boards' addresses."""
    return np.array([heaps, world, rank, channels, *[0] * (world * (2 + 2 * channels))], np.int64)


@device
def heap(address, owner):
    """Where a rank's memory begins."""
    return load_int64(board_at(address).heaps + 8 * owner)


@device
def late_word(address, peer):
    """Where this rank notes whether a peer was late at the last look."""
    return address + 8 * (len(FIELDS) + peer)


@device
def put_word(address, channel, peer):
    """Where this rank counts the lines that it has put at a peer."""
    b = board_at(address)
    return address + 8 * (len(FIELDS) + (1 + 2 * channel) * b.world + peer)


@device
def taken_word(address, channel, peer):
    """Where this rank counts the lines that it has taken of a peer."""
    b = board_at(address)
    return address + 8 * (len(FIELDS) + (2 + 2 * channel) * b.world + peer)


@device
def far_word(address, peer):
    """Where this rank notes whether a peer is far, in the lowest bit, and above it how often it was asked."""
    b = board_at(address)
    return address + 8 * (len(FIELDS) + (1 + 2 * b.channels) * b.world + peer)


@device
def look_far(address, peer, target, room):
    """Whether a peer is far: it takes long to overwrite what it has read. Of this rank: whether any peer is.

    Cores with a cache in common do 5 GB/s or more, others 2, but 20 past the caches: slower to read for near peers. It
    is tried once in a while, at the first of `room` bytes that this rank is about to fill.
    """
    word = far_word(address, peer)
    asked = load_int64(word) + 2  # below 0: a test says who is far
    if asked > 0 and asked % (2 * _LOOK_EVERY) // 2 == 3 and room >= 2 * _LOOK_BYTES:
        now = monotonic_ns()
        copy_bytes(target, target + _LOOK_BYTES, _LOOK_BYTES)
        asked &= ~1
        asked |= (monotonic_ns() - now) * _NEAR_BYTES_PER_NS > _LOOK_BYTES
    store_int64(word, asked)
    return asked & 1 != 0


@device
def ended_line(address, owner, source):
    """Where `source` tells `owner` that it gave up, or left."""
    return heap(address, owner) + LINE_BYTES * (1 + source)


@device
def awaited_line(address, owner, source):
    """Where `owner` says whether it sleeps for `source`."""
    return heap(address, owner) + LINE_BYTES * (1 + board_at(address).world + source)


@device
def acknowledged(address, owner, channel, reader):
    """Where `reader` notes how many of `owner`'s lines it has taken."""
    b = board_at(address)
    return heap(address, owner) + LINE_BYTES * (1 + (2 + channel) * b.world + reader)


@device
def line_of(address, owner, channel, source, number):
    """Where the line of that number, which `source` puts, lies in the memory of `owner`."""
    b = board_at(address)
    first = 1 + (2 + b.channels) * b.world
    return heap(address, owner) + LINE_BYTES * (first + (channel * b.world + source) * RING + number % RING)


@device
def next_line(address, channel, peer):
    """The line of a peer that is to be taken next, whether it is there or not."""
    return line_of(address, board_at(address).rank, channel, peer, load_int64(taken_word(address, channel, peer)))


@device
def number_in(line, place):
    """One of a line's seven numbers."""
    return load_int64(line + 8 + 8 * place)


@device
def open_line(address, channel, peer):
    """The line at a peer that this rank puts next: its numbers are written there, then `put_line` is called."""
    return line_of(address, peer, channel, board_at(address).rank, load_int64(put_word(address, channel, peer)))


@device
def put_line(address, channel, peer):
    """Publishes the open line, and with it all that this rank stored before."""
    word, rank = put_word(address, channel, peer), board_at(address).rank
    number = load_int64(word)
    store_release(line_of(address, peer, channel, rank, number), np.int32(number + 1))
    store_int64(word, number + 1)


@device
def take_line(address, channel, peer):
    """Says that this rank has read a peer's next line, and all that it named."""
    word, rank = taken_word(address, channel, peer), board_at(address).rank
    number = load_int64(word) + 1
    store_int64(word, number)
    store_release(acknowledged(address, peer, channel, rank), np.int32(number))


@device
def untaken(address, channel, peer, number):
    """How many of the first so many of this rank's lines a peer has not taken; 0 or less: it has."""
    taken = load_acquire(acknowledged(address, board_at(address).rank, channel, peer))
    return np.int64(np.int32(np.int32(number) - taken))  # numbers of 32 bits, which begin anew


@device
def wake(address):
    """After lines were put or taken: wakes the peers that sleep for this rank alone, or for it last."""
    b = board_at(address)
    finish_stores()
    for peer in range(b.world):
        word = awaited_line(address, peer, b.rank)
        if peer != b.rank and load_acquire(word) != 0 and exchange(word, 0) != 0:
            if add(heap(address, peer), -1) == 1:
                wake_sleeper(heap(address, peer))


@device
def is_late(address, channel, peer, wanted):
    """Whether the next line of a peer is not there, if `wanted` is 0; or not so many of this rank's lines are taken."""
    if wanted > 0:
        return untaken(address, channel, peer, wanted) > 0
    flag = load_acquire(next_line(address, channel, peer))
    return flag != np.int32(load_int64(taken_word(address, channel, peer)) + 1)


@device
def count_late(address, channel, wanted):
    """Notes the peers that are late, and counts them. `wanted`: an int64 for each; -1: nothing is wanted."""
    count = 0
    for peer in range(board_at(address).world):
        number, late = load_int64(wanted + 8 * peer), np.int64(0)
        if number >= 0 and is_late(address, channel, peer, number):
            late = np.int64(1)
            count += 1
        store_int64(late_word(address, peer), late)
    return count


@device
def someone_ended(address, channel, wanted):
    """Whether a peer has given up, or one of the late ones has left.

    Who was late at the last look may have come and left since. So this looks again, once it knows that one has left.
    """
    b = board_at(address)
    for peer in range(b.world):
        said = load_acquire(ended_line(address, b.rank, peer))
        if said == GAVE_UP:
            return True
        if said == LEFT and load_int64(late_word(address, peer)) != 0:
            if is_late(address, channel, peer, load_int64(wanted + 8 * peer)):
                return True
    return False


@device
def poll(address, channel, wanted, looks):
    """Looks at peers' words until none is late or the time for that is up, and counts the late ones, see `count_late`.

    After so many `looks` it gives way to other processes between looks.
    """
    done, limit = 0, np.int64(0)
    count = count_late(address, channel, wanted)
    while count and looks:
        if done == looks:
            limit = monotonic_ns() + YIELD_NS
        if done >= looks:
            if monotonic_ns() > limit:
                break
            yield_processor()
        done += 1
        count = count_late(address, channel, wanted)
    return count


@kernel
def wait_kernel(address, channel, wanted, looks, sleep_ns):
    """Waits for peers, see `count_late`, for so long at most; returns ARRIVED, LATE or ENDED.

    It polls first; when that has helped nothing it sleeps.
    """
    b = board_at(address)
    count = poll(address, channel, wanted, looks)
    if count == 0:
        return ARRIVED
    asleep = heap(address, b.rank)
    store_int32(asleep, np.int32(count))
    for peer in range(b.world):
        if load_int64(late_word(address, peer)) != 0:
            store_release(awaited_line(address, b.rank, peer), np.int32(1))
    finish_stores()
    for peer in range(b.world):
        if load_int64(late_word(address, peer)) != 0:
            if not is_late(address, channel, peer, load_int64(wanted + 8 * peer)):
                if exchange(awaited_line(address, b.rank, peer), 0) != 0:
                    add(asleep, -1)
    if not someone_ended(address, channel, wanted):
        sleepers = load_acquire(asleep)
        if sleepers > 0 and sleep_ns > 0:
            sleep_on(asleep, sleepers, sleep_ns)
    for peer in range(b.world):
        if load_int64(late_word(address, peer)) != 0:
            exchange(awaited_line(address, b.rank, peer), 0)
    if count_late(address, channel, wanted) == 0:
        return ARRIVED
    return ENDED if someone_ended(address, channel, wanted) else LATE


@kernel
def end_kernel(address, said):
    """Tells all peers that this rank has given up, or left, and for whom it waited; and wakes them."""
    b = board_at(address)
    for peer in range(b.world):
        line = ended_line(address, peer, b.rank)
        if peer != b.rank:
            store_int32(line + 4, np.int32(load_int64(late_word(address, peer))))
            store_release(line, np.int32(said))
    finish_stores()
    for peer in range(b.world):
        if peer != b.rank:
            add(heap(address, peer), -(1 << 20))  # so that one that is about to sleep does not
            wake_sleeper(heap(address, peer))
