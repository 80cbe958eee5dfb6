"""Publishing to peers and waiting for them, on the CPU: the patterns of `thinwire.triton_kernels.signal`.

*Publish*: what a flag announces is stored first, the flag last and with release order, so a peer that sees the flag
through an acquire load sees the rest. A flag has one writer, and holds the epoch that it last published: a value, which
a late reader cannot miss, as it would a cleared bit. Epochs are compared by signed difference, so they may wrap.

*Wait*: a rank looks a few hundred times and then gives up the processor between looks, since ranks may outnumber cores.
When time is up, or when a peer says that it is stuck, the rank tells all peers that it is stuck too, waits a grace time
for the others to say so or to signal after all, and blames those who did neither. A survivor always does one of the
two, as it also leaves its wait when it sees another's report: so survivors name the same ranks.

Whatever ends a wait, the clock or a report, is read before the flags. The other way round, a rank that was off its
processor in between would give up on peers that signalled meanwhile: in a wait, it would do so one phase before
everyone else and blame nobody; in the grace time, it would blame ranks that had reported in time.
"""

from __future__ import annotations

from thinwire.triton_kernels.cpu.compat import device, intrinsic, ir, types
from thinwire.triton_kernels.cpu.ir.atomics import load_acquire, monotonic_ns, store_release, yield_processor
from thinwire.triton_kernels.cpu.ir.intrinsics import load_int32, store_int32
from thinwire.triton_kernels.cpu.ir.vectors import constant, load
from thinwire.triton_kernels.signal import (
    REPORT_PEERS,
    SIGNAL_LINE_BYTES,
    SIGNAL_STUCK_EPOCH,
    SIGNAL_STUCK_ON_YOU,
    SIGNAL_STUCK_PHASE,
)

__all__ = [
    "ARRIVED",
    "GAVE_UP",
    "PAUSED",
    "give_up",
    "publish",
    "signal_line",
    "signalled",
    "someone_is_stuck",
    "wait_for_all",
]

#: How `wait_for_all` ends: all flags came, it is time to give up, or neither within a slice of time.
ARRIVED, GAVE_UP, PAUSED = 0, 1, 2

_FLAG_BYTES = 4
_SPINS = 200  # looks before the first yield
_SLICE_NS = 100_000_000  # so long may a pending Ctrl-C wait for Python


# Intrinsics, as they are called in many places: numba takes a hundredth of a second to inline a function into another.


@intrinsic
def signal_line(typing_context, buffer_ptrs, peer, lines, source):
    """Address of the line that `source` writes at `peer`, in the row of lines that begins at offset `lines`."""

    def codegen(context, builder, signature, args):
        buffer_ptrs, peer, lines, source = args
        word = ir.IntType(64)
        base = load(builder, builder.add(buffer_ptrs, builder.mul(peer, constant(8))), word, 8)
        return builder.add(base, builder.add(lines, builder.mul(source, constant(SIGNAL_LINE_BYTES))))

    return types.int64(*[types.int64] * 4), codegen


@intrinsic
def signalled(typing_context, line, epoch):
    """Whether the flag of a line has come to `epoch`, across the wrap of 32 bits too."""

    def codegen(context, builder, signature, args):
        flag = builder.load_atomic(builder.inttoptr(args[0], ir.IntType(32).as_pointer()), "acquire", _FLAG_BYTES)
        ahead = builder.sub(flag, builder.trunc(args[1], ir.IntType(32)))  # wraps
        return builder.icmp_signed(">=", ahead, ir.Constant(ahead.type, 0))

    return types.boolean(types.int64, types.int64), codegen


@device
def publish(buffer_ptrs, world, rank, lines, epoch):
    """Sets this rank's flag at every peer, itself included, to `epoch`; what was stored before it is then visible."""
    for step in range(1, world + 1):
        # The right-hand neighbour first, so that not everyone's first store goes to rank 0.
        store_release(signal_line(buffer_ptrs, (rank + step) % world, lines, rank), epoch)


@device
def someone_is_stuck(buffer_ptrs, world, rank, stuck):
    """Whether a peer reported that it gave up."""
    for peer in range(world):
        if peer != rank and load_acquire(signal_line(buffer_ptrs, rank, stuck, peer)) != 0:
            return True
    return False


@device
def wait_for_all(buffer_ptrs, world, rank, lines, stuck, epoch, deadline):
    """Waits until every peer's flag has come to `epoch`, and says how that ended.

    `lines` and `stuck` are offsets in the symmetric buffer, `deadline` is a reading of `monotonic_ns`. After `GAVE_UP`
    the caller gives up; after `PAUSED` it comes back with the same deadline.
    """
    pause = monotonic_ns() + _SLICE_NS
    peer = 0
    looks = 0
    ended = ARRIVED
    while True:
        if looks >= _SPINS:
            now = monotonic_ns()
            if now > deadline or someone_is_stuck(buffer_ptrs, world, rank, stuck):
                ended = GAVE_UP
            elif now > pause:
                ended = PAUSED
        while peer < world and signalled(signal_line(buffer_ptrs, rank, lines, peer), epoch):
            peer += 1
        if peer == world:
            return ARRIVED
        if ended != ARRIVED:
            return ended
        looks += 1
        if looks > _SPINS:
            yield_processor()


@device
def give_up(buffer_ptrs, world, rank, lines, stuck, epoch, phase, grace, report):
    """Tells the peers that this rank is stuck, gives them the grace time, and writes down who is to blame.

    `grace` is in nanoseconds; `report` is the address of a lane's report, whose peer words this fills.
    """
    words = report + 4 * REPORT_PEERS
    for peer in range(world):
        missing = 0 if signalled(signal_line(buffer_ptrs, rank, lines, peer), epoch) else 1
        store_int32(words + 4 * (world + peer), missing)
        line = signal_line(buffer_ptrs, peer, stuck, rank)
        store_int32(line + 4 * SIGNAL_STUCK_EPOCH, epoch)
        store_int32(line + 4 * SIGNAL_STUCK_PHASE, phase)
        store_int32(line + 4 * SIGNAL_STUCK_ON_YOU, missing)
        store_release(line, 1)
    limit = monotonic_ns() + grace
    while True:
        over = monotonic_ns() > limit
        silent = 0
        for peer in range(world):
            line = signal_line(buffer_ptrs, rank, stuck, peer)
            said = 0
            if load_acquire(line) != 0:
                said = 2 if load_int32(line + 4 * SIGNAL_STUCK_ON_YOU) != 0 else 1
            blamed = 0 if said > 0 or signalled(signal_line(buffer_ptrs, rank, lines, peer), epoch) else 1
            store_int32(words + 4 * peer, blamed)
            store_int32(words + 4 * (2 * world + peer), said)
            silent += blamed
        if silent == 0 or over:
            return
        yield_processor()
