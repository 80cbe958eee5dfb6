"""What all-to-all-v, all-reduce, reduce-scatter and all-gather do alike: headers, and how a leg is waited for.

`docs/protocol.md`, "Legs", has the argument. The number of the leg lives in device memory and is advanced by the last
program of the kernel that sends it, so that CUDA graphs of a call can be replayed.
"""

from __future__ import annotations

from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.leg_layout import SIGNATURE_WORDS
from thinwire.triton_kernels.put import base_of
from thinwire.triton_kernels.signal import (
    poison,
    publish,
    signal_words,
    store_signal_number,
    wait_beside,
    wait_or_give_up,
)

_SIGNATURE_WORDS = tl.constexpr(SIGNATURE_WORDS)


# ---------------------------------------------------------------------------------------------------------------------
# Memory


@triton.jit
def header_lines(leg, LEGS: tl.constexpr):
    """Byte offset of the headers of a leg's half."""
    return LEGS.HEADERS + (leg & 1).to(tl.int64) * (LEGS.WORLD * LEGS.LINE_BYTES)


@triton.jit
def header_line(leg, rank, LEGS: tl.constexpr):
    """Which of all headers is that of a rank in a leg; the two halves' lie one behind the other."""
    return (leg & 1) * LEGS.WORLD + rank


@triton.jit
def half_offset(leg, source, LEGS: tl.constexpr):
    """Byte offset of what a source stores into the half of a leg."""
    return LEGS.HALVES + ((leg & 1).to(tl.int64) * LEGS.WORLD + source) * LEGS.SLOT_BYTES


@triton.jit
def slot_offset(number, source, LEGS: tl.constexpr):
    """Byte offset of the slot of a source's ring for piece `number`."""
    return LEGS.RINGS + (source.to(tl.int64) * LEGS.SLOTS + number % LEGS.SLOTS) * LEGS.SLOT_BYTES


# ---------------------------------------------------------------------------------------------------------------------
# Headers


@triton.jit
def publish_header(buffer_ptrs, rank, leg, signature, LEGS: tl.constexpr, LAUNCH: tl.constexpr):
    """Tells all ranks that what this rank stores into the half of a leg is there, and what it is doing."""
    line = header_line(leg, rank, LEGS)
    for word in tl.static_range(_SIGNATURE_WORDS):
        place = LEGS.HEADER_SIGNATURE + 2 * word
        store_signal_number(buffer_ptrs, line, LEGS.HEADERS, place, signature[word], LEGS, LAUNCH)
    publish(buffer_ptrs, line, LEGS.HEADERS, leg, LEGS, LAUNCH)


@triton.jit
def load_numbers(base, lines, WORD: tl.constexpr, LEGS: tl.constexpr, LAUNCH: tl.constexpr):
    """An int64 number of all lines in a row: [BLOCK], 0 past the last."""
    peers = tl.arange(0, LAUNCH.BLOCK)
    numbers = signal_words(base, lines, WORD, peers, LEGS).to(tl.pointer_type(tl.int64))
    return tl.load(numbers, mask=peers < LEGS.WORLD, other=0)


@triton.jit
def load_headers(base, lines, LEGS: tl.constexpr, LAUNCH: tl.constexpr):
    """What a row of headers says, each [BLOCK]: pieces that follow, counts, and the four numbers of the signatures."""
    peers = tl.arange(0, LAUNCH.BLOCK)
    pieces = signal_words(base, lines, LEGS.HEADER_PIECES, peers, LEGS)
    return (
        tl.load(pieces, mask=peers < LEGS.WORLD, other=0),
        load_numbers(base, lines, LEGS.HEADER_COUNT, LEGS, LAUNCH),
        load_numbers(base, lines, LEGS.HEADER_SIGNATURE, LEGS, LAUNCH),
        load_numbers(base, lines, LEGS.HEADER_SIGNATURE + 2, LEGS, LAUNCH),
        load_numbers(base, lines, LEGS.HEADER_SIGNATURE + 4, LEGS, LAUNCH),
        load_numbers(base, lines, LEGS.HEADER_SIGNATURE + 6, LEGS, LAUNCH),
    )


@triton.jit
def differing_signatures(headers, signature, LEGS: tl.constexpr, LAUNCH: tl.constexpr):
    """1 for each rank that is doing something else than the signature says, else 0: int32 [BLOCK]."""
    peers = tl.arange(0, LAUNCH.BLOCK)
    wrong = tl.zeros_like(peers)
    for word in tl.static_range(_SIGNATURE_WORDS):
        wrong = tl.where(headers[2 + word] != signature[word], 1, wrong)
    return tl.where(peers < LEGS.WORLD, wrong, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Waits


@triton.jit
def wait_leg(
    buffer_ptrs, control_ptr, report_ptr, rank, leg, signature, timeout_ns, grace_ns,
    LEG: tl.constexpr, TOGETHER: tl.constexpr, LEGS: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Until every rank has signalled a leg, or it is given up. Returns whether the memory is of use still.

    After the first leg of a chunk it compares what the ranks are doing. For one program of one warp; or, TOGETHER, for
    all programs of a launch, which wait for the same flags, and of which the first gives up for all.
    """
    base, lines = base_of(buffer_ptrs, rank), header_lines(leg, LEGS)
    is_first = tl.program_id(0) == 0
    status = tl.full((), LEGS.RUNNING, tl.int32)
    if is_first:
        status = wait_or_give_up(
            base, buffer_ptrs, report_ptr, rank, lines, leg, leg, timeout_ns, grace_ns, LEG, LEGS, LAUNCH
        )
    elif TOGETHER:
        status = wait_beside(base, control_ptr, lines, leg, LEGS, LAUNCH)
    if LEG == LEGS.FIRST_LEG:
        if status == LEGS.RUNNING:
            wrong = differing_signatures(load_headers(base, lines, LEGS, LAUNCH), signature, LEGS, LAUNCH)
            if tl.sum(wrong) > 0:
                peers = tl.arange(0, LAUNCH.BLOCK)
                tl.store(report_ptr + LEGS.REPORT_PEERS + peers, wrong, mask=(peers < LEGS.WORLD) & is_first)
                status = status * 0 + LEGS.MISMATCHED
    if is_first:
        if status != LEGS.RUNNING:
            poison(control_ptr, report_ptr, status, leg, LEG, LEGS, LAUNCH)
    return status == LEGS.RUNNING
