"""How ranks tell each other that something is there, and how they wait: the only synchronisation in the kernels.

Three patterns; `docs/protocol.md` has the whole argument.

*Arrive*. The programs of one launch meet at a counter in their own memory. Each program's stores come before its
barrier, the barrier before one thread's add with acquire and release order; so the last program to arrive has all
stores of all programs behind it, and may announce them. The barrier is not optional: the add orders what its own thread
has seen, and the barrier is what makes that the stores of all threads.

*Publish*. Stores, a barrier, and one vector instruction that writes this rank's flag at every peer with release order
at system scope. One instruction and not a loop: on sm_80 and sm_90 each release is a full fence, and eight peers would
be eight fences in a row. A flag has one writer and holds the epoch that it last published. It is a value, never
cleared: a peer that looks late sees a later epoch and cannot miss it. Epochs are compared by signed difference, so they
may wrap.
The instruction is an exchange, or with STORE a plain atomic store, which Triton has from 3.9 on and which peers across
PCIe without native atomics need.

*Wait*. One program of one warp reads all flags with acquire order at system scope until none is behind. The consumer is
the next kernel on the stream, so no other program ever spins; how whole grids wait, in the collectives, is said in
`thinwire.triton_kernels.collective_wait`. The wait ends: when time is up, or when a peer says that
it is stuck, the rank tells all peers that it is stuck too, gives the others a grace time to signal or to say the same,
and blames those who did neither. A survivor always does one of the two, since it leaves its own wait when it sees
another's report; so all survivors name the same ranks. A plain timeout would blame innocents: a rank that waits for a
dead one is late for everyone else. Whatever ends a wait, the clock or a report, is read before the flags: the other way
round, a rank could give up on peers that signalled in between, one phase before everyone else.

On AMD GPUs this compiles and is unproven: a wavefront's stores need `s_waitcnt vmcnt(0)` before the barrier, and peers'
memory must be fine-grained. Arrivals are at system scope there.
"""

from __future__ import annotations

import os
import time
from functools import lru_cache

import torch

from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.round_layout import (
    COMBINE,
    CONTROL_ARRIVALS,
    CONTROL_EPOCH,
    CONTROL_STATUS,
    DISPATCH,
    MISMATCHED,
    REPORT_EPOCH,
    REPORT_PEERS,
    REPORT_PHASE,
    REPORT_STATUS,
    RUNNING,
    SIGNAL_DTYPE,
    SIGNAL_LINE_BYTES,
    SIGNAL_STUCK_EPOCH,
    SIGNAL_STUCK_ON_YOU,
    SIGNAL_STUCK_PHASE,
    SIGNAL_TOKENS,
    TIMED_OUT,
    Lane,
    RoundLayout,
)

__all__ = [
    "arrive",
    "num_programs_for",
    "platform_of",
    "publish",
    "register_limit",
    "signal_words",
    "store_signal_words",
    "wait",
    "world_block",
]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# What kernels know of where they run, as their PLATFORM.
CUDA, HIP, INTERPRETER = "cuda", "hip", "interpreter"
_CUDA, _HIP = tl.constexpr(CUDA), tl.constexpr(HIP)

_LINE = tl.constexpr(SIGNAL_LINE_BYTES)
_MOST_THREADS = tl.constexpr(1024)  # of a program
_STATUS, _EPOCH, _ARRIVALS = (tl.constexpr(w) for w in (CONTROL_STATUS, CONTROL_EPOCH, CONTROL_ARRIVALS))
_RUNNING, _TIMED_OUT, _MISMATCHED = (tl.constexpr(v) for v in (RUNNING, TIMED_OUT, MISMATCHED))
_STUCK_EPOCH, _STUCK_PHASE = tl.constexpr(SIGNAL_STUCK_EPOCH), tl.constexpr(SIGNAL_STUCK_PHASE)
_STUCK_ON_YOU = tl.constexpr(SIGNAL_STUCK_ON_YOU)
_TOKENS, _DTYPE = tl.constexpr(SIGNAL_TOKENS), tl.constexpr(SIGNAL_DTYPE)
_REPORT_STATUS, _REPORT_EPOCH, _REPORT_PHASE, _REPORT_PEERS = (
    tl.constexpr(w) for w in (REPORT_STATUS, REPORT_EPOCH, REPORT_PHASE, REPORT_PEERS)
)

if INTERPRETED:
    # The interpreter runs kernels as Python, where Python's own clock can be read.
    def clock_ns(PLATFORM):
        """Nanoseconds of a clock that only goes forward."""
        return time.monotonic_ns()

    def pause(PLATFORM):
        """Lets other ranks run."""
        time.sleep(100e-6)

else:

    @triton.jit
    def clock_ns(PLATFORM: tl.constexpr):
        """Nanoseconds of a clock that only goes forward; on AMD it ticks at 100 MHz."""
        if PLATFORM == _HIP:
            return tl.extra.hip.memrealtime() * 10
        else:
            return tl.extra.cuda.globaltimer()

    @triton.jit
    def pause(PLATFORM: tl.constexpr):
        """Nothing: a GPU's wait keeps one warp."""


@triton.jit
def agreed(condition):
    """A condition as the program's first thread finds it.

    Warps read a clock one after the other. One might leave a loop that another stays in, and they would wait for each
    other at different barriers. The other threads' votes are not counted, so the sum is made of the first one's.
    """
    threads = tl.arange(0, _MOST_THREADS)
    return tl.sum(tl.where(threads == 0, tl.where(condition, 1, 0), 0)) > 0


@triton.jit
def signal_words(base, lines, WORD: tl.constexpr, peers):
    """Pointers to a word of the lines that `peers` write, in the row of lines at `lines` of the buffer `base`."""
    return (base + (lines + 4 * WORD) + peers.to(tl.int64) * _LINE).to(tl.pointer_type(tl.int32))


@triton.jit
def store_signal_words(
    buffer_ptrs, rank, LINES: tl.constexpr, WORD: tl.constexpr, values, WORLD: tl.constexpr, BLOCK: tl.constexpr
):
    """Stores `values` [BLOCK] (or one value for all) as a word of this rank's line at each peer."""
    peers = tl.arange(0, BLOCK)
    mask = peers < WORLD
    buffer_ptrs = tl.load(buffer_ptrs + peers, mask=mask, other=0)
    words = (buffer_ptrs + (LINES + 4 * WORD) + rank.to(tl.int64) * _LINE).to(tl.pointer_type(tl.int32))
    tl.store(words, values + tl.zeros((BLOCK,), tl.int32), mask=mask)


@triton.jit
def arrive(control_ptr, PLATFORM: tl.constexpr):
    """Whether this program is the last of its launch to come here; it then has all others' stores behind it."""
    tl.debug_barrier()
    if PLATFORM == _HIP:
        arrived = tl.atomic_add(control_ptr + _ARRIVALS, 1, sem="acq_rel", scope="sys")
    else:
        arrived = tl.atomic_add(control_ptr + _ARRIVALS, 1, sem="acq_rel", scope="gpu")
    last = arrived == tl.num_programs(0) - 1
    if last:
        tl.store(control_ptr + _ARRIVALS, 0)  # for the next launch, which the stream orders behind this one
    return last


@triton.jit
def publish(
    buffer_ptrs, rank, LINES: tl.constexpr, epoch, WORLD: tl.constexpr, BLOCK: tl.constexpr, STORE: tl.constexpr
):
    """Sets this rank's flag at every peer, itself included, to `epoch`; all stores before it are then visible."""
    peers = tl.arange(0, BLOCK)
    mask = peers < WORLD
    buffer_ptrs = tl.load(buffer_ptrs + peers, mask=mask, other=0)
    flags = (buffer_ptrs + LINES + rank.to(tl.int64) * _LINE).to(tl.pointer_type(tl.int32))
    values = epoch + tl.zeros((BLOCK,), tl.int32)
    tl.debug_barrier()
    if STORE:
        tl.atomic_store(flags, values, mask=mask, sem="release", scope="sys")
    else:
        tl.atomic_xchg(flags, values, mask=mask, sem="release", scope="sys")


@triton.jit
def load_flags(base, lines, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """The flags of all lines in a row, int32 [BLOCK], 0 past the last; what is read afterwards is at least as new."""
    peers = tl.arange(0, BLOCK)
    flags = tl.atomic_add(
        signal_words(base, lines, 0, peers),
        tl.zeros((BLOCK,), tl.int32),
        mask=peers < WORLD,
        sem="acquire",
        scope="sys",
    )
    return tl.where(peers < WORLD, flags, 0)


@triton.jit
def behind(base, lines, targets, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """1 for each peer whose flag has not come to its target, else 0: int32 [BLOCK]. One target may serve all."""
    flags = load_flags(base, lines, WORLD, BLOCK)
    late = tl.where(flags - targets < 0, 1, 0)
    return tl.where(tl.arange(0, BLOCK) < WORLD, late, 0)


@triton.jit
def give_up(
    base,
    buffer_ptrs,
    rank,
    lines,
    STUCK: tl.constexpr,
    targets,
    epoch,
    PHASE: tl.constexpr,
    grace_ns,
    report_ptr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    STORE: tl.constexpr,
    PLATFORM: tl.constexpr,
    WARPS: tl.constexpr = False,
):
    """Reports to the peers, gives them the grace time, and writes down who is to blame.

    WARPS: the program has several.
    """
    peers = tl.arange(0, BLOCK)
    known = peers < WORLD
    missing = behind(base, lines, targets, WORLD, BLOCK)
    store_signal_words(buffer_ptrs, rank, STUCK, _STUCK_EPOCH, epoch, WORLD, BLOCK)
    store_signal_words(buffer_ptrs, rank, STUCK, _STUCK_PHASE, PHASE, WORLD, BLOCK)
    store_signal_words(buffer_ptrs, rank, STUCK, _STUCK_ON_YOU, missing, WORLD, BLOCK)
    publish(buffer_ptrs, rank, STUCK, 1, WORLD, BLOCK, STORE)
    words = report_ptr + _REPORT_PEERS + peers
    tl.store(words + WORLD, missing, mask=known)
    limit = clock_ns(PLATFORM) + grace_ns.to(tl.int64)
    silent = 1
    while silent > 0:
        over = clock_ns(PLATFORM) > limit
        if WARPS:
            over = agreed(over)
        said = load_flags(base, STUCK, WORLD, BLOCK)
        blamed = tl.where(said == 0, behind(base, lines, targets, WORLD, BLOCK), 0)
        silent = tl.sum(blamed)
        if over:
            silent = silent * 0
        tl.store(words, blamed, mask=known)
        on_you = tl.load(signal_words(base, STUCK, _STUCK_ON_YOU, peers), mask=known, other=0)
        on_you = tl.where(peers == rank, 0, on_you)
        tl.store(words + 2 * WORLD, tl.where(said != 0, 1 + on_you, 0), mask=known)
        pause(PLATFORM)


@triton.jit
def wait_for_all(
    base,
    rank,
    lines,
    STUCK: tl.constexpr,
    targets,
    timeout_ns,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    PLATFORM: tl.constexpr,
    WARPS: tl.constexpr = False,
):
    """Waits until no flag is behind its target, time is up, or a peer says that it is stuck. Returns how many are.

    WARPS: the program has several.
    """
    limit = clock_ns(PLATFORM) + timeout_ns.to(tl.int64)
    late = tl.sum(behind(base, lines, targets, WORLD, BLOCK))
    waiting = late
    while waiting > 0:
        over = clock_ns(PLATFORM) > limit
        if WARPS:
            over = agreed(over)
        stuck = load_flags(base, STUCK, WORLD, BLOCK)
        late = tl.sum(behind(base, lines, targets, WORLD, BLOCK))
        waiting = late
        if over:
            waiting = waiting * 0
        if tl.sum(tl.where(tl.arange(0, BLOCK) == rank, 0, stuck)) > 0:
            waiting = waiting * 0
        pause(PLATFORM)
    tl.debug_barrier()
    return late


@triton.jit(do_not_specialize=["rank", "timeout_ns", "grace_ns"])
def wait_kernel(
    buffer_ptr,
    buffer_ptrs,
    control_ptr,
    report_ptr,
    rank,
    timeout_ns,
    grace_ns,
    PHASE: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
    STORE: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """One phase of a round: until every rank has signalled it. One program of one warp."""
    lines: tl.constexpr = ROUND.SIGNALS + PHASE * ROUND.WORLD * _LINE
    if tl.load(control_ptr + _STATUS) == _RUNNING:
        base = buffer_ptr.to(tl.int64)
        epoch = tl.load(control_ptr + _EPOCH)
        limit = clock_ns(PLATFORM) + timeout_ns.to(tl.int64)
        late = wait_for_all(base, rank, lines, ROUND.STUCK, epoch, timeout_ns, ROUND.WORLD, BLOCK, PLATFORM)
        if late > 0:
            # Who leaves early, because of another's report, still gives the others all the time that it had itself: a
            # live rank that is late by less than the timeout is then not named.
            patience = tl.maximum(limit - clock_ns(PLATFORM), 0) + grace_ns.to(tl.int64)
            give_up(
                base, buffer_ptrs, rank, lines, ROUND.STUCK, epoch, epoch, PHASE, patience, report_ptr, ROUND.WORLD,
                BLOCK, STORE, PLATFORM,
            )  # fmt: skip
            poison(control_ptr, report_ptr, _TIMED_OUT, epoch, PHASE)
        elif PHASE == 0:
            peers = tl.arange(0, BLOCK)
            known = peers < ROUND.WORLD
            tokens = tl.load(signal_words(base, lines, _TOKENS, peers), mask=known, other=0)
            dtypes = tl.load(signal_words(base, lines, _DTYPE, peers), mask=known, other=0)
            own = tl.sum(tl.where(peers == rank, dtypes, 0))
            wrong = tl.where(dtypes != own, 1, tl.where(tokens < 0, 1, tl.where(tokens > ROUND.MAX_TOKENS, 1, 0)))
            wrong = tl.where(known, wrong, 0)
            if tl.sum(wrong) > 0:
                tl.store(report_ptr + _REPORT_PEERS + peers, wrong, mask=known)
                poison(control_ptr, report_ptr, _MISMATCHED, epoch, PHASE)


@triton.jit
def poison(control_ptr, report_ptr, status, epoch, PHASE: tl.constexpr):
    """Ends the use of a lane: kernels that find this status send nothing, and give NaN."""
    tl.store(report_ptr + _REPORT_EPOCH, epoch)
    tl.store(report_ptr + _REPORT_PHASE, PHASE)
    tl.store(control_ptr + _STATUS, status)
    tl.debug_barrier()
    # The host reads the report while kernels run: its status goes last.
    tl.atomic_xchg(report_ptr + _REPORT_STATUS, status, sem="release", scope="sys")


# ---------------------------------------------------------------------------------------------------------------------
# Launchers


def platform_of(device: torch.device) -> str:
    """Which clock and scopes kernels on `device` use."""
    return INTERPRETER if device.type == "cpu" else HIP if torch.version.hip else CUDA


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def register_limit(platform: str) -> dict[str, int]:
    """A launch option for kernels that hold a whole tile in registers, of at most 16 warps.

    Left alone, NVIDIA's assembler now and then gives such a kernel 32 or 64 registers a thread, and spills a few bytes.
    With this many, two programs of eight warps still share a multiprocessor.
    """
    return {} if platform == HIP else {"maxnreg": 128}


def num_programs_for(work: int, device: torch.device, num_programs: int | None) -> int:
    """The grid for `work` independent rows: as the caller says, else four programs a multiprocessor, at least one.

    A program takes many rows where there are more rows than programs.
    """
    if num_programs is None:
        # The interpreter runs programs one after the other; a few still show that the grid does not matter.
        num_programs = 4 * _multiprocessors(device) if device.type == "cuda" else 3
    return max(1, min(work, num_programs))


def world_block(layout: RoundLayout) -> int:
    """Lanes of a vector that holds something of every rank."""
    return 1 << max(0, layout.WORLD - 1).bit_length()


def uses_atomic_store() -> bool:
    """Whether flags are stored instead of exchanged."""
    return hasattr(tl, "atomic_store")


def wait(lane: Lane, phase: int, timeout: float, grace: float) -> None:
    """Waits until every rank has signalled a phase of the lane's round.

    Args:
        phase: DISPATCH or COMBINE.
        timeout: seconds until the lane is given up.
        grace: seconds that peers then get to say that they are stuck as well.
    """
    if phase not in (DISPATCH, COMBINE):
        raise ValueError(f"phase is {phase!r}; accepted: {DISPATCH} (dispatch), {COMBINE} (combine)")
    device = lane.buffer.device
    with torch.cuda.device_of(lane.buffer):  # Triton launches on the current device
        wait_kernel[(1,)](
            lane.buffer.view(torch.int8),
            lane.buffer_ptrs,
            lane.control,
            lane.report,
            lane.rank,
            int(timeout * 1e9),
            int(grace * 1e9),
            PHASE=phase,
            ROUND=lane.layout,
            BLOCK=world_block(lane.layout),
            STORE=uses_atomic_store(),
            PLATFORM=platform_of(device),
            num_warps=1,
        )
