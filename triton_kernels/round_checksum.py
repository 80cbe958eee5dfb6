"""The sums of a round: put beside what travels, and compared by who reads it. The CPU's twin is in `cpu/`.

A record and a sum are summed from the values that are stored, and compared from the values that are used. Planes are
compared before they are routed, by a kernel of their own, and lines by every program that reads them.

Many programs may find at once that something does not fit. The first to change the lane's status from RUNNING, by one
atomic exchange in this rank's own memory, is the only one that writes the report and the stuck lines: so what the host
reads is one program's finding, and a line has one writer. `docs/protocol.md` says why what is compared is of one round.
"""

from __future__ import annotations

from thinwire.triton_kernels.checksum import element_terms, mix, row_seed
from thinwire.triton_kernels.checksum_seed import seed_of
from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.round_layout import (
    CHECKED_COMBINE_LINE,
    CHECKED_LINE,
    CHECKED_PLANES,
    CHECKED_RECORD,
    CHECKED_SUM,
    COMBINE,
    DISPATCH,
)
from thinwire.triton_kernels.signal import agreed, poison, publish, signal_words, store_signal_words

LINE, COMBINE_LINE = tl.constexpr(CHECKED_LINE), tl.constexpr(CHECKED_COMBINE_LINE)
PLANES, RECORD, SUM = tl.constexpr(CHECKED_PLANES), tl.constexpr(CHECKED_RECORD), tl.constexpr(CHECKED_SUM)
_KIND_SEEDS = tl.constexpr(tuple(seed_of(kind) for kind in range(CHECKED_SUM + 1)))
DISPATCHED, COMBINED = tl.constexpr(DISPATCH), tl.constexpr(COMBINE)  # phases


# ---------------------------------------------------------------------------------------------------------------------
# Seeds and sums


@triton.jit
def seed_words(KIND: tl.constexpr, epoch, source, number):
    """What a row of one kind, which a rank sends in one round, adds to its sums: s and t, int64."""
    s = row_seed(mix(mix(epoch.to(tl.int64) ^ _KIND_SEEDS[KIND]) ^ source.to(tl.int64)), number.to(tl.int64))
    return s, mix(s)


@triton.jit
def put(sums, a, b, mask=None):
    """Writes rows' two sums, to addresses."""
    pointers = sums.to(tl.pointer_type(tl.int64))
    tl.store(pointers, a, mask=mask)
    tl.store(pointers + 1, b, mask=mask)


@triton.jit
def differ(sums, a, b, there):
    """1 where these are not a row's two sums, else 0, also where there is none; `sums` are addresses."""
    pointers = sums.to(tl.pointer_type(tl.int64))
    other_a = tl.load(pointers, mask=there, other=0)
    other_b = tl.load(pointers + 1, mask=there, other=0)
    return tl.where(there, tl.where(other_a != a, 1, tl.where(other_b != b, 1, 0)), 0)


@triton.jit
def plane_sums(ids, weights, epoch, source, slots, ROUND: tl.constexpr, K_BLOCK: tl.constexpr):
    """Of tokens' ids and weights [tokens, K_BLOCK], 0 past TOP_K, as if the weights' words stood behind the ids' words.

    `slots` [tokens] are those of the tokens at the receiver, `source` their rank, or one of each.
    """
    places = 4 * tl.arange(0, K_BLOCK)[None, :]
    behind: tl.constexpr = (ROUND.TOP_K + 1) // 2 * 8
    words, placed = element_terms(ids.to(tl.int64) & 0xFFFFFFFF, places)
    bits = weights.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    more_words, more_placed = element_terms(bits, behind + places)
    s, t = seed_words(PLANES, epoch, source, slots)
    return tl.sum(words + more_words, axis=1) + s, tl.sum(placed + more_placed, axis=1) + t


@triton.jit
def line_sums(first, second, epoch, source, PHASE: tl.constexpr, ROUND: tl.constexpr):
    """Of the two words that a line publishes."""
    kind: tl.constexpr = LINE if PHASE == DISPATCHED else COMBINE_LINE
    s, t = seed_words(kind, epoch, source, source + PHASE * ROUND.WORLD)
    word = (first.to(tl.int64) & 0xFFFFFFFF) | (second.to(tl.int64) << 32)
    return word + s, word + t


@triton.jit
def put_line_sums(
    buffer_ptrs, first, second, epoch, rank, PHASE: tl.constexpr, ROUND: tl.constexpr, LAUNCH: tl.constexpr
):
    """Writes them beside this rank's line at each peer."""
    peers = tl.arange(0, LAUNCH.BLOCK)
    mask = peers < ROUND.WORLD
    bases = tl.load(buffer_ptrs + peers, mask=mask, other=0)
    a, b = line_sums(first, second, epoch, rank, PHASE, ROUND)
    there = bases + (ROUND.LINE_CHECKSUMS + 16 * (rank + PHASE * ROUND.WORLD).to(tl.int64))
    put(there, a + tl.zeros_like(there), b + tl.zeros_like(there), mask)


# ---------------------------------------------------------------------------------------------------------------------
# Comparing


@triton.jit
def is_running(control_ptr, ROUND: tl.constexpr):
    """Whether the lane may be used.

    With checksums another program of the launch may end it just now. Threads of one must not disagree on it, nor on
    anything else that they branch on, or they wait for each other at different barriers.
    """
    running = tl.load(control_ptr + ROUND.STATUS) == ROUND.RUNNING
    if ROUND.CHECKSUMS:
        running = agreed(running)
    return running


@triton.jit
def lines_fit(base, lane, PHASE: tl.constexpr, ROUND: tl.constexpr, LAUNCH: tl.constexpr):
    """Whether the lines of all ranks, of a phase, fit their sums; if not, the lane, as in `end_lane`, has ended."""
    kind: tl.constexpr = LINE if PHASE == DISPATCHED else COMBINE_LINE
    lines: tl.constexpr = ROUND.SIGNALS if PHASE == DISPATCHED else ROUND.COMBINE_SIGNALS
    peers = tl.arange(0, LAUNCH.BLOCK)
    known = peers < ROUND.WORLD
    first = tl.load(signal_words(base, lines, 1, peers, ROUND), mask=known, other=0)
    second = tl.load(signal_words(base, lines, 2, peers, ROUND), mask=known, other=0)
    a, b = line_sums(first, second, tl.load(lane[1] + ROUND.EPOCH), peers, PHASE, ROUND)
    sums = base + (ROUND.LINE_CHECKSUMS + 16 * (peers + PHASE * ROUND.WORLD).to(tl.int64))
    wrong = differ(sums, a, b, known)
    fit = agreed(tl.sum(wrong) == 0)
    if not fit:
        end_lane(lane, kind, tl.min(tl.where(wrong > 0, peers, ROUND.WORLD)), 0, ROUND, LAUNCH)
    return fit


@triton.jit
def planes_differ(base, epoch, slots, there, ROUND: tl.constexpr, K_BLOCK: tl.constexpr):
    """1 for each of `slots` [tokens] that is there and does not fit its plane's sums, else 0."""
    ks = tl.arange(0, K_BLOCK)[None, :]
    offsets = 4 * (slots.to(tl.int64)[:, None] * ROUND.TOP_K + ks)
    mask = tl.where(ks < ROUND.TOP_K, there[:, None], False)
    ids = tl.load((base + ROUND.IDS + offsets).to(tl.pointer_type(tl.int32)), mask=mask, other=0)
    weights = tl.load((base + ROUND.WEIGHTS + offsets).to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    a, b = plane_sums(ids, weights, epoch, slots // ROUND.MAX_TOKENS, slots, ROUND, K_BLOCK)
    return differ(base + (ROUND.PLANE_CHECKSUMS + 16 * slots.to(tl.int64)), a, b, there)


@triton.jit(do_not_specialize=["rank"])
def check_planes_kernel(
    buffer_ptr,
    buffer_ptrs,
    control_ptr,
    report_ptr,
    rank,
    ROUND: tl.constexpr,
    CHUNK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Ends the lane where something that routing reads does not fit. Program (chunk)."""
    base = buffer_ptr.to(tl.int64)
    lane = (buffer_ptrs, control_ptr, report_ptr, rank)
    if is_running(control_ptr, ROUND):
        if lines_fit(base, lane, DISPATCHED, ROUND, LAUNCH):
            slots = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
            source = slots // ROUND.MAX_TOKENS
            known = slots < ROUND.WORLD * ROUND.MAX_TOKENS
            tokens = tl.load(signal_words(base, ROUND.SIGNALS, ROUND.TOKENS, source, ROUND), mask=known, other=0)
            there = tl.where(known, slots % ROUND.MAX_TOKENS < tokens, False)
            wrong = planes_differ(base, tl.load(control_ptr + ROUND.EPOCH), slots, there, ROUND, K_BLOCK)
            if agreed(tl.sum(wrong) > 0):
                slot = tl.min(tl.where(wrong > 0, slots, ROUND.WORLD * ROUND.MAX_TOKENS))
                end_lane(lane, PLANES, slot // ROUND.MAX_TOKENS, slot % ROUND.MAX_TOKENS, ROUND, LAUNCH)


@triton.jit
def end_lane(lane, KIND: tl.constexpr, source, row, ROUND: tl.constexpr, LAUNCH: tl.constexpr):
    """Poisons the lane, and tells the peers that this rank gave up, so that they do not wait for it.

    Any number of programs. `lane`: the pointers `buffer_ptrs`, `control_ptr`, `report_ptr` of a kernel, and the rank.
    """
    buffer_ptrs, control_ptr, report_ptr, rank = lane
    phase: tl.constexpr = COMBINED if KIND == COMBINE_LINE or KIND == SUM else DISPATCHED
    status = control_ptr + ROUND.STATUS
    if tl.atomic_cas(status, ROUND.RUNNING, ROUND.CORRUPTED, sem="relaxed", scope="gpu") == ROUND.RUNNING:
        epoch = tl.load(control_ptr + ROUND.EPOCH)
        store_signal_words(buffer_ptrs, rank, ROUND.STUCK, ROUND.STUCK_EPOCH, epoch, ROUND, LAUNCH)
        store_signal_words(buffer_ptrs, rank, ROUND.STUCK, ROUND.STUCK_PHASE, epoch * 0 + phase, ROUND, LAUNCH)
        store_signal_words(buffer_ptrs, rank, ROUND.STUCK, ROUND.STUCK_ON_YOU, 0, ROUND, LAUNCH)
        publish(buffer_ptrs, rank, ROUND.STUCK, 1, ROUND, LAUNCH)
        tl.store(report_ptr + ROUND.CHECKED, KIND)
        tl.store(report_ptr + ROUND.SOURCE, source)
        tl.store(report_ptr + ROUND.ROW, row)
        poison(control_ptr, report_ptr, ROUND.CORRUPTED, epoch, phase, ROUND, LAUNCH)
