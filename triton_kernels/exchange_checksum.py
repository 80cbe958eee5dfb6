"""The sums of an exchange on GPUs: made of what a program has in its registers, and compared where it is read.

`thinwire.triton_kernels.exchange_layout` says what lies where and what seeds are made of; the bytes are those of
`thinwire.triton_kernels.cpu.exchange_checksum`. All of it is compiled only into kernels of a layout with CHECKSUMS.

*What was found is told once.* Several programs of a launch may find something that does not fit. The one that is first
to set a word of the control block, with an exchange, writes the words of the report, and no other does: they belong
together. It does so before it arrives, so the last program to arrive has them behind it; that one tells the peers,
poisons the memory, and sets the report's status last. Nobody changes the status before all programs of the launch have
arrived, as threads of one program that read it in between would go different ways.
`verification/protocol/corruption.pml` is a model of it.
"""

from __future__ import annotations

from thinwire.triton_kernels.checksum import mix, row_seed
from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.exchange_layout import HEADER_NUMBER, SIGNATURE_WORDS
from thinwire.triton_kernels.signal import (
    agreed,
    arrive,
    peers_words,
    poison,
    publish,
    store_signal_words,
)

_HEADER_NUMBER, _SIGNATURE_WORDS = tl.constexpr(HEADER_NUMBER), tl.constexpr(SIGNATURE_WORDS)


@triton.jit
def slot_seed(epoch, source, number):
    """The seed of what a source puts into a slot in an epoch."""
    return mix(mix(mix(epoch.to(tl.int64)) ^ source) ^ number)


@triton.jit
def sums_offset(offset, number, EXCHANGE: tl.constexpr):
    """Where in a buffer the sums lie of row `number` of the slot that is at `offset`, or has something there."""
    slot = (offset - EXCHANGE.HALVES) // EXCHANGE.SLOT_BYTES  # rings follow halves
    return EXCHANGE.CHECKSUMS + (slot * EXCHANGE.SLOT_ROWS + number) * 16


@triton.jit
def put_sums(
    buffer_ptrs, peer, offset, seed, number, a, b, PEERS: tl.constexpr, EXCHANGE: tl.constexpr
):  # fmt: skip
    """Stores the sums of row `number`, of whose words a and b are, at PEERS ranks from `peer` on."""
    s = row_seed(seed, number)
    place = sums_offset(offset, number, EXCHANGE)
    target = peer
    for _ in range(PEERS):
        sums = (tl.load(buffer_ptrs + target) + place).to(tl.pointer_type(tl.int64))
        tl.store(sums, a + s)
        tl.store(sums + 1, b + mix(s))
        target = tl.where(target == EXCHANGE.WORLD - 1, 0, target + 1)


@triton.jit
def fits(base, offset, seed, number, a, b, EXCHANGE: tl.constexpr):
    """Whether row `number` of a slot of the buffer `base`, of whose words a and b are, fits its sums.

    All threads of the program get the same.
    """
    s = row_seed(seed, number)
    sums = (base + sums_offset(offset, number, EXCHANGE)).to(tl.pointer_type(tl.int64))
    return agreed((tl.load(sums) == a + s) & (tl.load(sums + 1) == b + mix(s)))


@triton.jit
def first_unfit(base, offset, epoch, number, row, a, b, EXCHANGE: tl.constexpr, LAUNCH: tl.constexpr):
    """The first rank whose row `row` does not fit its sums, LAUNCH.BLOCK if all do; and whether all do, for everyone.

    `offset` is that of rank 0's slot of a half, and a and b [BLOCK] are of the ranks' rows.
    """
    sources = tl.arange(0, LAUNCH.BLOCK)
    known = sources < EXCHANGE.WORLD
    s = row_seed(slot_seed(epoch, sources, number), row)
    places = base + sums_offset(offset + sources.to(tl.int64) * EXCHANGE.SLOT_BYTES, row, EXCHANGE)
    sums = places.to(tl.pointer_type(tl.int64))
    wrong = tl.load(sums, mask=known, other=0) != a + s
    wrong = wrong | (tl.load(sums + 1, mask=known, other=0) != b + mix(s))
    first = tl.min(tl.where(wrong & known, sources, LAUNCH.BLOCK))
    return first, agreed(first == LAUNCH.BLOCK)


# ---------------------------------------------------------------------------------------------------------------------
# Headers


@triton.jit
def header_sums(epoch, source, pieces, count, signature):
    """The two sums of a header's words, with their seeds; any of it may be of many headers."""
    s = row_seed(slot_seed(epoch, source, _HEADER_NUMBER), 0)
    first = pieces.to(tl.int64) & 0xFFFFFFFF
    low, high = count << 32, (count >> 32) & 0xFFFFFFFF
    a, b = first + low + high + s, first + low + 2 * high + mix(s)
    for word in tl.static_range(_SIGNATURE_WORDS):  # each begins in the upper half of a word of the sums
        number = signature[word].to(tl.int64)  # the interpreter passes small ones as int32
        low, high = number << 32, (number >> 32) & 0xFFFFFFFF
        a += low + high
        b += (word + 2) * low + (word + 3) * high
    return a, b


@triton.jit
def put_header_sums(
    buffer_ptrs, line, rank, epoch, pieces, count, signature, EXCHANGE: tl.constexpr, LAUNCH: tl.constexpr
):  # fmt: skip
    """Stores a header's sums behind its words at each peer, before it is published."""
    peers = tl.arange(0, LAUNCH.BLOCK)
    counts = count + tl.zeros_like(peers).to(tl.int64)
    a, b = header_sums(epoch, rank, pieces + tl.zeros_like(peers), counts, signature)
    words = peers_words(buffer_ptrs, line, EXCHANGE.HEADERS, EXCHANGE.HEADER_CHECKSUMS, EXCHANGE, LAUNCH)
    sums = words.to(tl.pointer_type(tl.int64))
    tl.store(sums, a, mask=peers < EXCHANGE.WORLD)
    tl.store(sums + 1, b, mask=peers < EXCHANGE.WORLD)


# ---------------------------------------------------------------------------------------------------------------------
# Once something was found


@triton.jit
def note_corruption(control_ptr, report_ptr, source, first, rows, EXCHANGE: tl.constexpr):
    """Notes rows of a rank that do not fit, unless another program has noted some; none: its header."""
    if tl.atomic_xchg(control_ptr + EXCHANGE.FOUND, 1, sem="relaxed", scope="gpu") == 0:
        tl.store(report_ptr + EXCHANGE.REPORT_SOURCE, source)
        wide_first = first + tl.zeros((), tl.int64)
        tl.store(report_ptr + EXCHANGE.REPORT_FIRST, wide_first.to(tl.int32))
        tl.store(report_ptr + EXCHANGE.REPORT_FIRST + 1, (wide_first >> 32).to(tl.int32))
        wide_rows = rows + tl.zeros((), tl.int64)
        tl.store(report_ptr + EXCHANGE.REPORT_ROWS, wide_rows.to(tl.int32))
        tl.store(report_ptr + EXCHANGE.REPORT_ROWS + 1, (wide_rows >> 32).to(tl.int32))


@triton.jit
def end_exchange(
    buffer_ptrs, control_ptr, report_ptr, rank, epoch, PHASE: tl.constexpr, EXCHANGE: tl.constexpr,
    LAUNCH: tl.constexpr,
):  # fmt: skip
    """Tells the peers that this rank gave up, so that they do not wait for it, and poisons the memory."""
    store_signal_words(buffer_ptrs, rank, EXCHANGE.STUCK, EXCHANGE.STUCK_EPOCH, epoch, EXCHANGE, LAUNCH)
    store_signal_words(buffer_ptrs, rank, EXCHANGE.STUCK, EXCHANGE.STUCK_PHASE, PHASE, EXCHANGE, LAUNCH)
    store_signal_words(buffer_ptrs, rank, EXCHANGE.STUCK, EXCHANGE.STUCK_ON_YOU, 0, EXCHANGE, LAUNCH)
    publish(buffer_ptrs, rank, EXCHANGE.STUCK, 1, EXCHANGE, LAUNCH)
    poison(control_ptr, report_ptr, EXCHANGE.CORRUPTED, epoch, PHASE, EXCHANGE, LAUNCH)


@triton.jit
def arrive_whole(
    buffer_ptrs, control_ptr, report_ptr, rank, PHASE: tl.constexpr, EXCHANGE: tl.constexpr, LAUNCH: tl.constexpr
):  # fmt: skip
    """`arrive`; with CHECKSUMS, if a program has noted something, the last one ends it all, and none is the last."""
    last = arrive(control_ptr, EXCHANGE, LAUNCH)
    if EXCHANGE.CHECKSUMS > 0:
        if last:
            if tl.load(control_ptr + EXCHANGE.FOUND) != 0:
                epoch = tl.load(control_ptr + EXCHANGE.EPOCH)
                end_exchange(buffer_ptrs, control_ptr, report_ptr, rank, epoch, PHASE, EXCHANGE, LAUNCH)
                last = last & False
    return last
