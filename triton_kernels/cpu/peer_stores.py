"""Storing into a slot of a peer: past the caches, where the peer's core shares none with this one.

The peer has read the slot, so its lines lie in the peer's cache, and an ordinary store fetches each from there only to
overwrite it. Between cores of one cache that is cheap, and the peer finds what it is to read near by. Between caches,
of two sockets or of the parts that a large processor is made of, it takes several times as long as memory does, which
stores past the caches go to. Nobody says reliably which it is: virtual machines tell of one cache where there are two,
and are moved about. So now and then the first bytes of what is stored go the ordinary way, and are timed.

Where a peer was idle for a while its cache may have let go of the slot, and stores are fast whatever lies between:
such a look says near of a far peer. So a peer that is near is looked at again soon, which costs next to nothing there.

What a sender found out is one number for each peer, `seen`: twice the time of its last look, and one more if the peer
is far. Zero means that it has not looked. Either way the same bytes are stored.

Threads of one rank may share the number (`store_at`). Each reads one that some thread wrote, as it is read and written
whole; goes by that until its bytes are stored; and writes what a look of its own found. Of two looks at once one is
lost, which was as good as the other, or an older one stays, and the next comes sooner. A thread on another core, which
is near where the last look was from afar, goes by that look. All this costs time, and changes no byte that is stored.
"""

from __future__ import annotations

from thinwire.triton_kernels.cpu.compat import device
from thinwire.triton_kernels.cpu.ir.atomics import finish_stores, load_relaxed, monotonic_ns, store_relaxed
from thinwire.triton_kernels.cpu.ir.intrinsics import copy_bytes
from thinwire.triton_kernels.cpu.ir.streaming import stream_unfinished

_LEAST_BYTES = 4096  # fewer are not worth a look at the clock
_LOOK_BYTES = 16384
_FAR_LASTS_NS, _NEAR_LASTS_NS = 2_000_000, 100_000  # a look at a far peer costs some microseconds
#: Nanoseconds for so many bytes. Stores to near peers take 10; to far ones 40, or 25 where the peer's first cache has
#: let go of some lines; and past the caches 10, with what it takes the peer to read from there. Taking a near peer for
#: far costs a tenth of a call, and taking a far one for near doubles it.
_FAR_NS, _FAR_BYTES = 15, 100


@device
def is_old(seen, now):
    """Whether it is time for another look."""
    return now - (seen >> 1) > (_FAR_LASTS_NS if seen & 1 else _NEAR_LASTS_NS)


@device
def goes_aside(count, seen):
    """Whether what is made for a peer, `count` bytes at a time, had better be made elsewhere and go through `store`."""
    return count >= _LEAST_BYTES and (seen & 1 != 0 or is_old(seen, monotonic_ns()))


@device
def store_unfinished(target, source, count, seen):
    """Copies `count` bytes to a peer, and returns what is now `seen` of it.

    If that is far, whoever publishes them calls `finish_stores` before, in the same thread: a wait of a quarter of a
    microsecond, which many small copies share.
    """
    if count < _LEAST_BYTES:
        copy_bytes(target, source, count)
        return seen
    begun, done = monotonic_ns(), 0
    if is_old(seen, begun):
        done = min(count, _LOOK_BYTES)
        copy_bytes(target, source, done)
        finish_stores()  # a core has room for some kilobytes that are still to be stored
        ended = monotonic_ns()
        seen = 2 * ended + (1 if (ended - begun) * _FAR_BYTES > done * _FAR_NS else 0)
    if seen & 1:
        stream_unfinished(target + done, source + done, count - done)
    else:
        copy_bytes(target + done, source + done, count - done)
    return seen


@device
def store(target, source, count, seen):
    """The same, and the bytes come before whatever is published next."""
    seen = store_unfinished(target, source, count, seen)
    if seen & 1 != 0 and count >= _LEAST_BYTES:
        finish_stores()
    return seen


@device
def store_at(place, target, source, count):
    """`store_unfinished`, going by the number at the address `place`, which other threads may use, too."""
    before = load_relaxed(place)
    seen = store_unfinished(target, source, count, before)
    if seen != before:  # threads that only read share the line
        store_relaxed(place, seen)
    return seen
