"""The direct all-to-all-v on GPUs: rows straight into the peers' memory, whole or in pieces.

Memory is that of `thinwire.triton_kernels.leg_layout`; ranks with these kernels and ranks with the CPU's can share
a group. A rank's own rows take the way of all others, through its own memory.

*A call is steps*, each of them kernels on one stream; `docs/protocol.md`, "The ring", has them, and says why no step
waits for itself. A GPU's kernels cannot take turns as the CPU's one thread does: a program that spins may keep another
from ever starting. So each wait is a kernel of one program of one warp, and the next kernel does what it waited for.

*Everything that advances lies in device memory*: the epoch, how many pieces each ring has ever held, the status. What a
call brings from the host comes as kernel arguments. So a CUDA graph of a call can be replayed.

A rank that has given up, or that found an unexpected header, is poisoned: its kernels store nothing to peers and fill
    the rows that they should have taken with bytes 0xFF, which as a float are NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.launch import Launcher, kept, launcher_of
from thinwire.triton_kernels.leg_layout import SIGNATURE_WORDS, Endpoint
from thinwire.triton_kernels.legs import differing_signatures, header_lines, load_headers
from thinwire.triton_kernels.pieces import (
    EXPECTED,
    RECEIVED,
    RECV_COUNT,
    RECV_DISPL,
    RECV_PIECES,
    SEND_COUNT,
    SEND_DISPL,
    SEND_PIECES,
    SENT,
    load_signature,
    recv_bytes_kernel,
    recv_rows_kernel,
    send_bytes_kernel,
    send_rows_kernel,
)
from thinwire.triton_kernels.put import base_of
from thinwire.triton_kernels.record import RecordLayout
from thinwire.triton_kernels.signal import (
    give_up,
    num_programs_for,
    poison,
    publish,
    store_signal_words,
    wait_for_all,
)

#: What a wait is for: every peer's header, room in the rings of those that get a piece, a piece of those that send one.
HEADERS, ROOM, PIECES = 0, 1, 2
#: Exact rows are copied in chunks of this many bytes, one a program at a time.
CHUNK_BYTES = 16384
_COPY_WARPS = 4
_NOTED_PEERS = 8  # that one launch of `note` tells of

_HEADERS, _ROOM, _SIGNATURE_WORDS = tl.constexpr(HEADERS), tl.constexpr(ROOM), tl.constexpr(SIGNATURE_WORDS)


@triton.jit
def note_peer(table_ptr, peer, send_count, send_displ, recv_count, recv_displ, unit, per_piece, WORLD: tl.constexpr):
    """Writes one peer's column of the table."""
    if peer < WORLD:
        sent, received = send_count.to(tl.int64), recv_count.to(tl.int64)
        dropped = received < 0  # so many pieces are to come, and none of them is kept
        kept = tl.where(dropped, 0, received)
        send_pieces = tl.maximum((sent * unit + (per_piece - 1)) // per_piece, 1)
        recv_pieces = tl.maximum((kept * unit + (per_piece - 1)) // per_piece, 1)
        column = table_ptr + peer
        tl.store(column + SEND_COUNT * WORLD, sent)
        tl.store(column + SEND_DISPL * WORLD, send_displ.to(tl.int64))
        tl.store(column + SEND_PIECES * WORLD, send_pieces)
        tl.store(column + RECV_COUNT * WORLD, kept)
        tl.store(column + RECV_DISPL * WORLD, recv_displ.to(tl.int64))
        tl.store(column + RECV_PIECES * WORLD, tl.where(dropped, 0 - received, recv_pieces))


_NUMBERS = [f"{letter}{peer}" for peer in range(_NOTED_PEERS) for letter in "abcd"]


@triton.jit(do_not_specialize=["first", "unit", "per_piece", *_NUMBERS])
def note_kernel(
    first,
    unit: tl.int64,
    per_piece: tl.int64,
    # Of eight peers: rows to send, the first of them, rows to receive, where the first of them goes. With a type, as
    # without one each number past 2**31 would be a kernel of its own.
    a0: tl.int64, b0: tl.int64, c0: tl.int64, d0: tl.int64,
    a1: tl.int64, b1: tl.int64, c1: tl.int64, d1: tl.int64,
    a2: tl.int64, b2: tl.int64, c2: tl.int64, d2: tl.int64,
    a3: tl.int64, b3: tl.int64, c3: tl.int64, d3: tl.int64,
    a4: tl.int64, b4: tl.int64, c4: tl.int64, d4: tl.int64,
    a5: tl.int64, b5: tl.int64, c5: tl.int64, d5: tl.int64,
    a6: tl.int64, b6: tl.int64, c6: tl.int64, d6: tl.int64,
    a7: tl.int64, b7: tl.int64, c7: tl.int64, d7: tl.int64,
    table_ptr,
    control_ptr,
    LEGS: tl.constexpr,
):  # fmt: skip
    """Writes eight peers' columns of the table. One program.

    The numbers are arguments, since a copy from the host would need memory there that lasts for as long as a graph.
    """
    # What made the rank give up is left to be read.
    if tl.load(control_ptr + LEGS.STATUS) == LEGS.RUNNING:
        wide_unit, wide_piece = unit.to(tl.int64), per_piece.to(tl.int64)
        note_peer(table_ptr, first, a0, b0, c0, d0, wide_unit, wide_piece, LEGS.WORLD)
        note_peer(table_ptr, first + 1, a1, b1, c1, d1, wide_unit, wide_piece, LEGS.WORLD)
        note_peer(table_ptr, first + 2, a2, b2, c2, d2, wide_unit, wide_piece, LEGS.WORLD)
        note_peer(table_ptr, first + 3, a3, b3, c3, d3, wide_unit, wide_piece, LEGS.WORLD)
        note_peer(table_ptr, first + 4, a4, b4, c4, d4, wide_unit, wide_piece, LEGS.WORLD)
        note_peer(table_ptr, first + 5, a5, b5, c5, d5, wide_unit, wide_piece, LEGS.WORLD)
        note_peer(table_ptr, first + 6, a6, b6, c6, d6, wide_unit, wide_piece, LEGS.WORLD)
        note_peer(table_ptr, first + 7, a7, b7, c7, d7, wide_unit, wide_piece, LEGS.WORLD)


@triton.jit(do_not_specialize=["rank", "number", "timeout_ns", "grace_ns"])
def wait_kernel(
    signature_ptr,
    number,
    buffer_ptrs,
    control_ptr,
    counters_ptr,
    table_ptr,
    report_ptr,
    rank,
    timeout_ns: tl.int64,
    grace_ns: tl.int64,
    FOR: tl.constexpr,
    CHECK: tl.constexpr,
    LEGS: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Until every peer has done what this rank needs for step `number`. One program of one warp."""
    world: tl.constexpr = LEGS.WORLD
    phase: tl.constexpr = 0 if FOR == _HEADERS else 1
    if tl.load(control_ptr + LEGS.STATUS) == LEGS.RUNNING:
        base = base_of(buffer_ptrs, rank)
        epoch = tl.load(control_ptr + LEGS.EPOCH)
        peers = tl.arange(0, LAUNCH.BLOCK)
        known = peers < world
        # Of peers that nothing is missing from the flag is never behind its target.
        if FOR == _HEADERS:
            lines = header_lines(epoch, LEGS)
            targets = epoch + tl.zeros_like(peers)
        elif FOR == _ROOM:
            lines = tl.full((), LEGS.HEADS, tl.int64)
            more = tl.load(table_ptr + SEND_PIECES * world + peers, mask=known, other=0) > number
            sent = tl.load(counters_ptr + SENT * world + peers, mask=known, other=0)
            targets = (sent - LEGS.SLOTS + tl.where(more, 1, 0)).to(tl.int32)
        else:
            lines = tl.full((), LEGS.TAILS, tl.int64)
            more = tl.load(table_ptr + RECV_PIECES * world + peers, mask=known, other=0) > number
            received = tl.load(counters_ptr + RECEIVED * world + peers, mask=known, other=0)
            targets = (received + tl.where(more, 1, 0)).to(tl.int32)
        late, _ = wait_for_all(base, rank, lines, targets, timeout_ns, LEGS, LAUNCH)
        if late > 0:
            give_up(base, buffer_ptrs, report_ptr, rank, lines, targets, epoch, grace_ns, phase, LEGS, LAUNCH)
            poison(control_ptr, report_ptr, LEGS.TIMED_OUT, epoch, phase, LEGS, LAUNCH)
        elif CHECK:
            headers, signature = load_headers(base, lines, LEGS, LAUNCH), load_signature(signature_ptr)
            wrong = differing_signatures(headers, signature, LEGS, LAUNCH)
            expected = tl.load(table_ptr + RECV_COUNT * world + peers, mask=known, other=0)
            wrong = tl.where(headers[1] != expected, 1, wrong)
            expected = tl.load(table_ptr + RECV_PIECES * world + peers, mask=known, other=1)
            wrong = tl.where(headers[0] + 1 != expected, 1, wrong)
            if tl.sum(wrong) > 0:
                tl.store(report_ptr + LEGS.REPORT_PEERS + peers, wrong, mask=known)
                for word in tl.static_range(_SIGNATURE_WORDS):
                    tl.store(table_ptr + EXPECTED * world + word, signature[word])
                # This rank takes part no more; nobody shall wait for it until time is up.
                store_signal_words(buffer_ptrs, rank, LEGS.STUCK, LEGS.STUCK_EPOCH, epoch, LEGS, LAUNCH)
                publish(buffer_ptrs, rank, LEGS.STUCK, 1, LEGS, LAUNCH)
                poison(control_ptr, report_ptr, LEGS.MISMATCHED, epoch, phase, LEGS, LAUNCH)


# ---------------------------------------------------------------------------------------------------------------------
# Launchers


def note(
    end: Endpoint,
    sends: tuple[Sequence[int], Sequence[int]],
    receives: tuple[Sequence[int], Sequence[int]],
    unit: int,
    per_piece: int,
) -> None:
    """Tells the following kernels how many rows pass between this rank and each peer.

    Args:
        sends, receives: counts and displacements for each rank. A receive count of -n means n pieces, including the
            first, and keeps none of them.
        unit, per_piece: a count has `count * unit / per_piece` pieces, rounded up, and at least one.
    """
    world = end.layout.WORLD
    columns = [*zip(*sends, *receives, strict=True)]
    for first in range(0, world, _NOTED_PEERS):
        chosen = columns[first : first + _NOTED_PEERS]
        numbers = [number for column in chosen for number in column] + [0] * (4 * (_NOTED_PEERS - len(chosen)))
        kept(end, _noting)(1, 1, (), (), (first, unit, per_piece, *numbers))


def _noting(end: Endpoint) -> Launcher:
    return launcher_of(end, note_kernel, {}, counts=("first", "unit", "per_piece", *_NUMBERS), num_warps=1)


def _moving(end: Endpoint, sends: bool, layout: RecordLayout | None, flat: bool, first: bool) -> Launcher:
    tensors = ("x_ptr", "signature_ptr") if sends else ("out_ptr",)
    constants: dict[str, Any] = {"FIRST": first, "CHUNK": CHUNK_BYTES}
    if layout is None:
        kernel = send_bytes_kernel if sends else recv_bytes_kernel
        return launcher_of(end, kernel, constants, tensors, (), ("step", "number", "items"), num_warps=_COPY_WARPS)
    kernel = send_rows_kernel if sends else recv_rows_kernel
    constants |= {"LAYOUT": layout, "FLAT": flat}
    return launcher_of(
        end, kernel, constants, tensors, ("step",), ("number", "items"), num_warps=layout.num_warps,
        enable_fp_fusion=False,
    )  # fmt: skip


def _move(
    end: Endpoint, tensors: tuple[torch.Tensor, ...], step: int, layout: RecordLayout | None, flat: bool, number: int,
    items: int, num_programs: int | None,
) -> None:  # fmt: skip
    programs = num_programs_for(items * end.layout.WORLD, end.buffer_ptrs.device, num_programs)
    changing = ((), (step, number, items)) if layout is None else ((step,), (number, items))
    kept(end, _moving, len(tensors) > 1, layout, flat, number == 0)(programs, 1, tensors, *changing)


def send(
    end: Endpoint,
    x: torch.Tensor,
    step: int,
    layout: RecordLayout | None,
    flat: bool,
    signature: torch.Tensor,
    number: int,
    items: int,
    num_programs: int | None = None,
) -> None:
    """Stores piece `number` of what goes to each peer, and tells the peers.

    Args:
        x: exact rows as one row of uint8; otherwise the rows to quantise, each contiguous.
        step: from one row to the next: in bytes for exact rows, else in elements.
        layout: of the rows' records; None for exact rows.
        flat: quantise elements of a 1-D tensor in rows of `layout.HIDDEN`.
        signature: int64 [SIGNATURE_WORDS] on the device, what a row is.
        number: 0 opens a new epoch.
        items: most rows, or chunks of CHUNK_BYTES, of a piece.
        num_programs: programs of the launch at most; None means enough to fill the GPU.
    """
    _move(end, (x, signature), step, layout, flat, number, items, num_programs)


def wait(
    end: Endpoint, reason: int, number: int, signature: torch.Tensor, check: bool, timeout: float, grace: float
) -> None:
    """Waits until all peers have done what step `number` needs.

    Args:
        reason: HEADERS, ROOM or PIECES.
        signature: see `send`.
        check: compare headers with `note`'s counts, and poison the memory if they differ.
        timeout: seconds until the memory is given up.
        grace: seconds that peers then get to report that they are stuck too.
    """
    if reason not in (HEADERS, ROOM, PIECES):
        raise ValueError(f"reason is {reason!r}; accepted: {HEADERS} (headers), {ROOM} (room), {PIECES} (pieces)")
    launch = kept(end, _waiting, reason, check and reason == HEADERS, timeout, grace)
    launch(1, 1, (signature,), (), (number,))


def _waiting(end: Endpoint, reason: int, check: bool, timeout: float, grace: float) -> Launcher:
    constants = {"timeout_ns": int(timeout * 1e9), "grace_ns": int(grace * 1e9), "FOR": reason, "CHECK": check}
    return launcher_of(end, wait_kernel, constants, ("signature_ptr",), counts=("number",), num_warps=1)


def recv(
    end: Endpoint, out: torch.Tensor, step: int, layout: RecordLayout | None, flat: bool, number: int, items: int,
    num_programs: int | None = None,
) -> None:  # fmt: skip
    """Puts piece `number` of what each peer sent into its rows of the output, and gives the ring's slots back.

    Args:
        out: exact rows as one row of uint8; else rows or elements, contiguous. Poisoned memory gives bytes 0xFF.
        step, layout, flat, number, items, num_programs: see `send`.
    """
    _move(end, (out,), step, layout, flat, number, items, num_programs)
