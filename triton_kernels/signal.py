"""How ranks signal each other, and how they wait: the only synchronisation in the kernels.

`docs/protocol.md` has the argument, under "Signals" and "Waits end". This file also has the layout that all memory with
signals shares: the words of lines, control blocks and reports.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache

import torch

from thinwire.triton_kernels import arrive_scope
from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.put import base_of, put

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

MAX_WORLD = 72

#: A processor's cache line: flags of two peers on one line would bounce between their caches.
SIGNAL_LINE_BYTES = 64

# int32 words of a line. The flag holds the epoch that it last published, and is written last.
SIGNAL_FLAG = 0
SIGNAL_STUCK_EPOCH, SIGNAL_STUCK_PHASE, SIGNAL_STUCK_ON_YOU = 1, 2, 3  # of a stuck line, whose flag is 1 for good
LEFT_FLAG = 2  # in its place, of a rank that has left: it is not there any more, and may be named

# int32 words of a control block, which only this rank's kernels touch. Those behind them each protocol has for itself.
CONTROL_STATUS, CONTROL_EPOCH, CONTROL_ARRIVALS = 0, 1, 2
CONTROL_WORDS = 16

# Values of the status word. Anything but RUNNING is poisoned memory: its kernels send nothing and give NaN.
RUNNING, TIMED_OUT, MISMATCHED = 0, 1, 2

# int32 words of a report, which the host reads without asking the device. Behind them, from REPORT_PEERS, three words a
# peer: whether it is to blame, whether it had not signalled when time was up, and what it said of itself (0: nothing).
REPORT_STATUS, REPORT_EPOCH, REPORT_PHASE = 0, 1, 2
REPORT_PEERS = 8
SAID_STUCK, SAID_STUCK_ON_YOU, SAID_LEFT = 1, 2, 3

# How often a wait looks at the flags between two looks at the clock and the stuck lines.
LOOKS = tl.constexpr(16)


@dataclass(frozen=True, kw_only=True)
class SignalLayout:
    """What kernels know of memory in which ranks signal each other, at compile time: passed whole, as one constexpr.

    The words are fields, since Triton's cache knows a constexpr by its text: where one has another place, kernels are
    compiled anew.
    """

    WORLD: int
    STUCK: int  # byte offset of the stuck lines
    MOST_AHEAD: int = 1  # that a flag can be of what somebody waits for
    LINE_BYTES: int = SIGNAL_LINE_BYTES
    STUCK_EPOCH: int = SIGNAL_STUCK_EPOCH
    STUCK_PHASE: int = SIGNAL_STUCK_PHASE
    STUCK_ON_YOU: int = SIGNAL_STUCK_ON_YOU
    STATUS: int = CONTROL_STATUS
    EPOCH: int = CONTROL_EPOCH
    ARRIVALS: int = CONTROL_ARRIVALS
    RUNNING: int = RUNNING
    TIMED_OUT: int = TIMED_OUT
    MISMATCHED: int = MISMATCHED
    REPORT_STATUS: int = REPORT_STATUS
    REPORT_EPOCH: int = REPORT_EPOCH
    REPORT_PHASE: int = REPORT_PHASE
    REPORT_PEERS: int = REPORT_PEERS

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        # Looked up at every launch. Of ints alone, it is the same in every process.
        return self._hash


@dataclass(frozen=True)
class Launch:
    """What kernels know of how and where they run, at compile time.

    Attributes:
        BLOCK: lanes of a vector that holds something of every rank.
        STORE: Triton can store in release order.
        PLATFORM: which clock and scopes there are: "cuda", "hip" or "interpreter".
        SCOPE: of `arrive`, but on "hip".
    """

    BLOCK: int
    STORE: bool
    PLATFORM: str
    SCOPE: str

    @classmethod
    def of(cls, layout: SignalLayout, device: torch.device) -> Launch:
        """The launch of a kernel over such memory on a device."""
        return _launch(layout.WORLD, device)


@lru_cache
def _launch(world: int, device: torch.device) -> Launch:
    return Launch(1 << max(0, world - 1).bit_length(), hasattr(tl, "atomic_store"), _platform_of(device), _scope())


@lru_cache
def _scope() -> str:
    """`arrive_scope` as it was when it was asked for first."""
    return arrive_scope()


def _platform_of(device: torch.device) -> str:
    return "interpreter" if device.type == "cpu" else "hip" if torch.version.hip else "cuda"


if INTERPRETED:
    # The interpreter runs kernels as Python, where Python's own clock can be read.
    def clock_ns(LAUNCH):
        """Nanoseconds of a clock that only goes forward."""
        return time.monotonic_ns()

    def pause(LAUNCH):
        """Lets other ranks run."""
        time.sleep(100e-6)

else:

    @triton.jit
    def clock_ns(LAUNCH: tl.constexpr):
        """Nanoseconds of a clock that only goes forward; on AMD it ticks at 100 MHz, and only one warp may ask."""
        if LAUNCH.PLATFORM == "hip":
            return tl.extra.hip.memrealtime() * 10
        elif tl.extra.cuda.num_threads() == 32:
            return tl.extra.cuda.globaltimer()
        else:
            # Warps read it at different times, and all threads have to branch alike: the latest counts.
            times = tl.inline_asm_elementwise(
                "mov.u64 $0, %globaltimer; // $1", "=l,r", [tl.arange(0, tl.extra.cuda.num_threads())],
                dtype=tl.int64, is_pure=False, pack=1,
            )  # fmt: skip
            return tl.max(times)

    @triton.jit
    def pause(LAUNCH: tl.constexpr):
        """Nothing: on a GPU others run meanwhile."""


@triton.jit
def signal_words(base, lines, WORD: tl.constexpr, peers, LAYOUT: tl.constexpr):
    """Pointers to a word of the lines that `peers` write, in the row of lines at `lines` of the buffer `base`."""
    return (base + (lines + 4 * WORD) + peers.to(tl.int64) * LAYOUT.LINE_BYTES).to(tl.pointer_type(tl.int32))


@triton.jit
def peers_words(buffer_ptrs, rank, LINES: tl.constexpr, WORD: tl.constexpr, LAYOUT: tl.constexpr, LAUNCH: tl.constexpr):
    """Pointers [BLOCK] to a word of this rank's line at each peer."""
    peers = tl.arange(0, LAUNCH.BLOCK)
    bases = base_of(buffer_ptrs, peers, peers < LAYOUT.WORLD)
    return signal_words(bases, LINES, WORD, rank, LAYOUT)


@triton.jit
def store_signal_words(
    buffer_ptrs, rank, LINES: tl.constexpr, WORD: tl.constexpr, values, LAYOUT: tl.constexpr, LAUNCH: tl.constexpr
):
    """Stores `values` [BLOCK] (or one value for all) as a word of this rank's line at each peer."""
    peers = tl.arange(0, LAUNCH.BLOCK)
    words = peers_words(buffer_ptrs, rank, LINES, WORD, LAYOUT, LAUNCH)
    put(words, values + tl.zeros_like(peers), peers < LAYOUT.WORLD)


@triton.jit
def store_signal_number(
    buffer_ptrs, rank, LINES: tl.constexpr, WORD: tl.constexpr, numbers, LAYOUT: tl.constexpr, LAUNCH: tl.constexpr
):
    """Stores int64 `numbers` [BLOCK] (or one for all) as two words of this rank's line at each peer."""
    wide = numbers.to(tl.int64)
    store_signal_words(buffer_ptrs, rank, LINES, WORD, wide.to(tl.int32), LAYOUT, LAUNCH)
    store_signal_words(buffer_ptrs, rank, LINES, WORD + 1, (wide >> 32).to(tl.int32), LAYOUT, LAUNCH)


@triton.jit
def arrive(control_ptr, LAYOUT: tl.constexpr, LAUNCH: tl.constexpr):
    """Whether this program is the last of its launch to come here; it then has all others' stores behind it."""
    tl.debug_barrier()
    if LAUNCH.PLATFORM == "hip":
        arrived = tl.atomic_add(control_ptr + LAYOUT.ARRIVALS, 1, sem="acq_rel", scope="sys")
    else:
        arrived = tl.atomic_add(control_ptr + LAYOUT.ARRIVALS, 1, sem="acq_rel", scope=LAUNCH.SCOPE)
    last = arrived == tl.num_programs(0) - 1
    if last:
        tl.store(control_ptr + LAYOUT.ARRIVALS, 0)  # for the next leg: behind this rank's flag, or in a later launch
    return last


@triton.jit
def thread_rows(LAUNCH: tl.constexpr):
    """Numbers of rows, int32 [rows, 1]: in so many of BLOCK elements each thread has one of its own.

    Assembly is executed by every thread that has an element.
    """
    threads: tl.constexpr = tl.extra.cuda.num_threads()
    rows: tl.constexpr = (threads + LAUNCH.BLOCK - 1) // LAUNCH.BLOCK
    return tl.arange(0, triton.next_power_of_2(rows))[:, None]


@triton.jit
def store_released(words, values, mask, LAUNCH: tl.constexpr):
    """Stores int32 `values` [BLOCK], which nobody else writes, in release order at system scope.

    On NVIDIA's GPUs never by an atomic exchange: over PCIe peers' memory, and the host's, may know none.
    """
    if LAUNCH.STORE:
        tl.atomic_store(words, values, mask=mask, sem="release", scope="sys")
    elif LAUNCH.PLATFORM == "cuda":
        row = thread_rows(LAUNCH)
        tl.inline_asm_elementwise(
            """{
            .reg .pred %stored;
            setp.ne.b32 %stored, $3, 0;
            @%stored st.release.sys.global.b32 [$1], $2;
            mov.b32 $0, 0;
            }""",
            "=r,l,r,r",
            [words.to(tl.int64)[None, :], values[None, :], tl.where(row == 0, mask[None, :], False).to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_xchg(words, values, mask=mask, sem="release", scope="sys")


@triton.jit
def advance(words, steps, mask=None):
    """Adds to words of this rank's own memory that no other program touches meanwhile; all threads get the sums.

    Every thread loads a word and one stores it. Without the barrier a late warp would load what was just stored, and
    publish one too many.
    """
    advanced = tl.load(words, mask=mask) + steps
    tl.debug_barrier()
    tl.store(words, advanced, mask=mask)
    return advanced


@triton.jit
def publish(buffer_ptrs, rank, LINES: tl.constexpr, epoch, LAYOUT: tl.constexpr, LAUNCH: tl.constexpr):
    """Sets this rank's flag at every peer, itself included, to `epoch`; all stores before it are then visible."""
    peers = tl.arange(0, LAUNCH.BLOCK)
    mask = peers < LAYOUT.WORLD
    flags = peers_words(buffer_ptrs, rank, LINES, 0, LAYOUT, LAUNCH)
    values = epoch + tl.zeros_like(peers)
    tl.debug_barrier()
    store_released(flags, values, mask, LAUNCH)


@triton.jit
def load_flags(base, lines, LAYOUT: tl.constexpr, LAUNCH: tl.constexpr):
    """The flags of all lines in a row, int32 [BLOCK], 0 past the last; behind a barrier, reads are as new.

    On NVIDIA's GPUs by acquire loads, which take a sixth of an atomic's time. Each is morally strong with the release
    of the flag, so one that reads it is ordered behind all that was stored before; and it goes past the first cache, so
    one of the looks finds it. The order with the store itself, which only a read-modify-write would add, nobody needs:
    a flag that is missed is looked at again.
    """
    peers = tl.arange(0, LAUNCH.BLOCK)
    words, mask = signal_words(base, lines, 0, peers, LAYOUT), peers < LAYOUT.WORLD
    if LAUNCH.PLATFORM == "cuda":
        # One thread loads each, and all get what it found: two that looked might find different flags.
        row = thread_rows(LAUNCH)
        found = tl.inline_asm_elementwise(
            """{
            .reg .pred %loaded;
            setp.ne.b32 %loaded, $2, 0;
            mov.b32 $0, 0;
            @%loaded ld.acquire.sys.global.b32 $0, [$1];
            }""",
            "=&r,l,r",
            [words.to(tl.int64)[None, :], tl.where(row == 0, mask[None, :], False).to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        return tl.sum(found, axis=0)
    else:
        flags = tl.atomic_add(words, tl.zeros_like(peers), mask=mask, sem="acquire", scope="sys")
        return tl.where(mask, flags, 0)


@triton.jit
def behind(base, lines, targets, LAYOUT: tl.constexpr, LAUNCH: tl.constexpr):
    """1 for each peer whose flag has not come to its target, else 0: int32 [BLOCK]. One target may serve all.

    A flag that is further ahead than any peer can be was not written by the protocol, and says nothing.
    """
    ahead = load_flags(base, lines, LAYOUT, LAUNCH) - targets
    late = tl.where(ahead < 0, 1, tl.where(ahead > LAYOUT.MOST_AHEAD, 1, 0))
    return tl.where(tl.arange(0, LAUNCH.BLOCK) < LAYOUT.WORLD, late, 0)


@triton.jit
def give_up(
    base, buffer_ptrs, report_ptr, rank, lines, targets, epoch, grace_ns,
    PHASE: tl.constexpr, LAYOUT: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Reports to the peers, gives them the grace time, and writes down who is to blame."""
    peers = tl.arange(0, LAUNCH.BLOCK)
    known = peers < LAYOUT.WORLD
    missing = behind(base, lines, targets, LAYOUT, LAUNCH)
    store_signal_words(buffer_ptrs, rank, LAYOUT.STUCK, LAYOUT.STUCK_EPOCH, epoch, LAYOUT, LAUNCH)
    store_signal_words(buffer_ptrs, rank, LAYOUT.STUCK, LAYOUT.STUCK_PHASE, PHASE, LAYOUT, LAUNCH)
    store_signal_words(buffer_ptrs, rank, LAYOUT.STUCK, LAYOUT.STUCK_ON_YOU, missing, LAYOUT, LAUNCH)
    publish(buffer_ptrs, rank, LAYOUT.STUCK, 1, LAYOUT, LAUNCH)
    words = report_ptr + LAYOUT.REPORT_PEERS + peers
    tl.store(words + LAYOUT.WORLD, missing, mask=known)
    limit = clock_ns(LAUNCH) + grace_ns.to(tl.int64)
    silent = 1
    while silent > 0:
        over = clock_ns(LAUNCH) > limit
        said = load_flags(base, LAYOUT.STUCK, LAYOUT, LAUNCH)
        blamed = tl.where(said == 0, behind(base, lines, targets, LAYOUT, LAUNCH), 0)
        silent = tl.sum(blamed)
        if over:
            silent = silent * 0
        tl.store(words, blamed, mask=known)
        # Of a peer that has not said anything the word may be under way. Other threads load it than saw the flag.
        tl.debug_barrier()
        words_on_you = signal_words(base, LAYOUT.STUCK, LAYOUT.STUCK_ON_YOU, peers, LAYOUT)
        on_you = tl.load(words_on_you, mask=said != 0, other=0)
        on_you = tl.where(peers == rank, 0, tl.where(on_you != 0, 1, 0))
        tl.store(words + 2 * LAYOUT.WORLD, tl.where(said != 0, 1 + on_you, 0), mask=known)
        pause(LAUNCH)


@triton.jit
def status_of(control_ptr, LAYOUT: tl.constexpr):
    """The status, which other programs of the launch may be setting; all threads get the same."""
    return tl.atomic_add(control_ptr + LAYOUT.STATUS, 0, sem="relaxed", scope="gpu")


@triton.jit
def wait_for_all(base, rank, lines, targets, timeout_ns, LAYOUT: tl.constexpr, LAUNCH: tl.constexpr):
    """Waits until no flag is behind its target, time is up, or a peer says that it is stuck. One program of a launch.

    While this rank's own flag is behind, only twice the time ends it: programs of the launch may not have arrived yet.

    Returns:
        How many flags are behind; and, if any are, the reading of the clock at which time is up.
    """
    late = tl.sum(behind(base, lines, targets, LAYOUT, LAUNCH))
    waiting, looks, limit = late, late * 0, tl.zeros((), tl.int64)
    while waiting > 0:
        looks += 1
        # Whatever ends the wait, the clock or a report, is read before the flags: see `docs/protocol.md`, "Waits end".
        ended = looks * 0
        if looks % LOOKS == 0:
            stuck = load_flags(base, LAYOUT.STUCK, LAYOUT, LAUNCH)
            ended = tl.sum(tl.where(tl.arange(0, LAUNCH.BLOCK) == rank, 0, stuck))
            now = clock_ns(LAUNCH)
            limit = tl.where(limit == 0, now + timeout_ns, limit)
            missing = behind(base, lines, targets, LAYOUT, LAUNCH)
            if tl.sum(tl.where(tl.arange(0, LAUNCH.BLOCK) == rank, missing, 0)) > 0:
                ended, now = ended * 0, now - timeout_ns
            ended = tl.where(now > limit, 1, ended)
        late = tl.sum(behind(base, lines, targets, LAYOUT, LAUNCH))
        waiting = tl.where(ended > 0, 0, late)
        pause(LAUNCH)
    tl.debug_barrier()
    return late, limit


@triton.jit
def wait_or_give_up(
    base, buffer_ptrs, report_ptr, rank, lines, targets, epoch, timeout_ns, grace_ns,
    PHASE: tl.constexpr, LAYOUT: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Waits for all, and gives up on those that are missing then. Returns the status of it, RUNNING or TIMED_OUT."""
    late, limit = wait_for_all(base, rank, lines, targets, timeout_ns, LAYOUT, LAUNCH)
    if late > 0:
        # Who leaves early, because of another's report, still gives the others all the time that it had itself: a live
        # rank that is late by less than the timeout is then not named.
        patience = tl.maximum(limit - clock_ns(LAUNCH), 0) + grace_ns.to(tl.int64)
        give_up(base, buffer_ptrs, report_ptr, rank, lines, targets, epoch, patience, PHASE, LAYOUT, LAUNCH)
    return tl.where(late > 0, LAYOUT.TIMED_OUT, LAYOUT.RUNNING)


@triton.jit
def wait_beside(base, control_ptr, lines, targets, LAYOUT: tl.constexpr, LAUNCH: tl.constexpr):
    """Waits for all, or until the launch's first program, which alone has a clock, has given up.

    Returns what `wait_or_give_up` does, the same to all threads.
    """
    late = tl.sum(behind(base, lines, targets, LAYOUT, LAUNCH))
    waiting = late
    while waiting > 0:
        status = status_of(control_ptr, LAYOUT)
        late = tl.sum(behind(base, lines, targets, LAYOUT, LAUNCH))
        waiting = tl.where(status == LAYOUT.RUNNING, late, 0)
    tl.debug_barrier()
    return tl.where(late > 0, LAYOUT.TIMED_OUT, LAYOUT.RUNNING)


@triton.jit
def poison(
    control_ptr, report_ptr, status, epoch, PHASE: tl.constexpr, LAYOUT: tl.constexpr, LAUNCH: tl.constexpr
):  # fmt: skip
    """Ends the use of the memory: kernels that find this status send nothing, and give NaN."""
    tl.store(report_ptr + LAYOUT.REPORT_EPOCH, epoch)
    tl.store(report_ptr + LAYOUT.REPORT_PHASE, PHASE)
    tl.atomic_xchg(control_ptr + LAYOUT.STATUS, status, sem="relaxed", scope="gpu")  # others may be looking at it
    tl.debug_barrier()
    # The host reads the report while kernels run: its status goes last.
    lanes = tl.arange(0, LAUNCH.BLOCK)
    store_released(report_ptr + LAYOUT.REPORT_STATUS + lanes, status + tl.zeros_like(lanes), lanes == 0, LAUNCH)


# ---------------------------------------------------------------------------------------------------------------------
# Launches


def grace_of(timeout: float) -> float:
    """Seconds that a rank whose wait has timed out leaves its peers to signal or to say that they are stuck as well."""
    return min(1.0, timeout)


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def register_limit(device: torch.device, num_warps: int = 16, programs: int = 2, least: int = 128) -> dict[str, int]:
    """A launch option for kernels that hold a whole tile in registers, of at most 16 warps.

    Left alone, NVIDIA's assembler now and then gives such a kernel 32 or 64 registers a thread, and spills a few bytes.
    With what it gets here so many programs of so many warps still share a multiprocessor, if the `least` it must have
    lets them.
    """
    limit = min(255, max(least, 65536 // (32 * num_warps * programs)))
    return {} if _platform_of(device) == "hip" else {"maxnreg": limit}


def num_programs_for(work: int, device: torch.device, num_programs: int | None) -> int:
    """The grid for `work` independent rows: `most_programs`, or fewer, but at least one.

    A program takes many rows where there are more rows than programs.
    """
    return max(1, min(work, most_programs(device, num_programs)))


def most_programs(device: torch.device, num_programs: int | None = None) -> int:
    """Programs of a launch at most: as the caller says, else four a multiprocessor, which fill a GPU."""
    if num_programs is not None:
        return num_programs
    # The interpreter runs programs one after the other; a few still show that the grid does not matter.
    return 4 * num_multiprocessors(device) if device.type == "cuda" else 3
