"""How the kernels of `thinwire.triton_kernels.collective` begin an epoch, and how they wait inside a grid of programs.

*One program waits for all.* In a kernel that takes a leg in, whichever program comes first waits for the flags of all
ranks, gives up, or compares what the ranks are doing. Then it stores the epoch into a word of the control block, in
release order, and all other programs of its launch, which look at that word in acquire order, go on. So a leg costs no
launch of its own, and hundreds of programs do not ask for every peer's flag.

*It cannot deadlock.* The program that waits needs flags only. A peer's flag comes from a kernel that stands earlier on
the peer's stream than any that waits in the same leg: first flags come from `scatter` or `send_to_all`, which wait for
nobody, and second flags from `reduce`, which waits for first flags. So by induction on the legs every flag comes, or
time is up: the program that waits ends in any case, and with it the others. It never waits for programs of its own
launch. It is the first to come and not program 0, as nothing says that program 0 starts first: if the others filled the
GPU before it, they would spin for a program that has no room.

*Ranks that share a GPU* must not fill it with programs that spin, or the peer's kernel that they wait for finds no
room. Where every rank has a GPU of its own, a grid of any size will do, because its programs wait for other GPUs only.
Otherwise all ranks' waiting programs together must leave some multiprocessor empty: `programs_on_shared_gpu`.

*Memory order.* A peer's stores -> its flag, in release order at system scope -> the first program's read of that flag,
in acquire order at system scope, and a barrier -> its store of the epoch, in release order at the scope of the GPU ->
another program's read of it, in acquire order at that scope, and a barrier -> that program's loads. Both orders are
cumulative and each pair matches at its own scope, so the stores come before the loads. The same chain carries the
status word: it is read behind the barrier, and all programs of a launch find the same.

*No number is mistaken for an old one.* Flags are compared by signed difference, so they must not fall behind by 2**31
epochs. First flags move in every epoch. Second flags move in all-reduces only; so who begins epoch e and has not
published a second flag in e - 1 stores it then, which is true: the rank has finished e - 1. Nobody looks at that flag
meanwhile, as e - 1 had one leg, and peers that are in e want this rank's first flag first. The words of the control
block are compared for equality, and are set to e - 1 too.

The epoch lives in device memory and is advanced by the last program of `scatter` or `send_to_all`, so that CUDA graphs
of a call can be replayed.
"""

from __future__ import annotations

import torch

from thinwire.triton_kernels.collective_layout import (
    CONTROL_FIRST_SEEN,
    CONTROL_FIRST_TAKEN,
    CONTROL_SECOND_SEEN,
    CONTROL_SECOND_TAKEN,
    FIRST_LEG,
    HEADER_SIGNATURE,
    SECOND_LEG,
)
from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.signal import (
    num_multiprocessors,
    num_programs_for,
    poison,
    publish,
    signal_words,
    store_signal_number,
    store_signal_words,
    wait_or_give_up,
)

__all__ = ["await_leg", "begin_epoch", "num_waiting_programs_for", "programs_on_shared_gpu"]

_WHAT = tl.constexpr(HEADER_SIGNATURE)
_FIRST_LEG, _SECOND_LEG = tl.constexpr(FIRST_LEG), tl.constexpr(SECOND_LEG)
# Words of the control block: the epoch whose flags of a leg have been seen, and the one for which a program waits.
_FIRST_SEEN, _SECOND_SEEN = tl.constexpr(CONTROL_FIRST_SEEN), tl.constexpr(CONTROL_SECOND_SEEN)
_FIRST_TAKEN, _SECOND_TAKEN = tl.constexpr(CONTROL_FIRST_TAKEN), tl.constexpr(CONTROL_SECOND_TAKEN)


@triton.jit
def begin_epoch(
    buffer_ptrs, control_ptr, rank, epoch, signature, COLLECTIVE: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Tells all ranks that the rows of the first leg are there, and what this rank does. The last program to arrive."""
    world: tl.constexpr = COLLECTIVE.WORLD
    tl.store(control_ptr + COLLECTIVE.EPOCH, epoch)
    tl.store(control_ptr + _FIRST_SEEN, epoch - 1)
    tl.store(control_ptr + _SECOND_SEEN, epoch - 1)
    tl.store(control_ptr + _FIRST_TAKEN, epoch - 1)
    tl.store(control_ptr + _SECOND_TAKEN, epoch - 1)
    own = tl.load(signal_words(tl.load(buffer_ptrs + rank), COLLECTIVE.SECOND, 0, rank, COLLECTIVE))
    if own != epoch - 1:
        store_signal_words(buffer_ptrs, rank, COLLECTIVE.SECOND, 0, epoch - 1, COLLECTIVE, LAUNCH)
    line = (epoch & 1) * world + rank  # the two halves' lines lie one behind the other
    store_signal_number(buffer_ptrs, line, COLLECTIVE.FIRST, _WHAT, signature[0], COLLECTIVE, LAUNCH)
    store_signal_number(buffer_ptrs, line, COLLECTIVE.FIRST, _WHAT + 2, signature[1], COLLECTIVE, LAUNCH)
    store_signal_number(buffer_ptrs, line, COLLECTIVE.FIRST, _WHAT + 4, signature[2], COLLECTIVE, LAUNCH)
    store_signal_number(buffer_ptrs, line, COLLECTIVE.FIRST, _WHAT + 6, signature[3], COLLECTIVE, LAUNCH)
    publish(buffer_ptrs, line, COLLECTIVE.FIRST, epoch, COLLECTIVE, LAUNCH)


@triton.jit
def differs(base, lines, WORD: tl.constexpr, number, COLLECTIVE: tl.constexpr, LAUNCH: tl.constexpr):
    """1 for each rank whose line has another int64 number than this one's, else 0: int32 [BLOCK]."""
    peers = tl.arange(0, LAUNCH.BLOCK)
    known = peers < COLLECTIVE.WORLD
    wide = number.to(tl.int64)
    low = tl.load(signal_words(base, lines, WORD, peers, COLLECTIVE), mask=known, other=0)
    high = tl.load(signal_words(base, lines, WORD + 1, peers, COLLECTIVE), mask=known, other=0)
    same = tl.where(low == wide.to(tl.int32), 1, 0) * tl.where(high == (wide >> 32).to(tl.int32), 1, 0)
    return tl.where(known, 1 - same, 0)


@triton.jit
def wait_alone(
    base, buffer_ptrs, control_ptr, report_ptr, rank, epoch, signature, timeout_ns, grace_ns,
    LEG: tl.constexpr, CHECK: tl.constexpr, COLLECTIVE: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Until every rank has signalled a leg; CHECK compares what the ranks are doing. One program."""
    world: tl.constexpr = COLLECTIVE.WORLD
    if LEG == _FIRST_LEG:
        lines = COLLECTIVE.FIRST + (epoch & 1).to(tl.int64) * (world * COLLECTIVE.LINE_BYTES)
    else:
        lines = COLLECTIVE.SECOND + (epoch & 0).to(tl.int64)
    status = wait_or_give_up(
        base, buffer_ptrs, report_ptr, rank, lines, epoch, epoch, timeout_ns, grace_ns, LEG, COLLECTIVE, LAUNCH, True
    )
    if CHECK:
        if status == COLLECTIVE.RUNNING:
            wrong = differs(base, lines, _WHAT, signature[0], COLLECTIVE, LAUNCH)
            wrong = tl.maximum(wrong, differs(base, lines, _WHAT + 2, signature[1], COLLECTIVE, LAUNCH))
            wrong = tl.maximum(wrong, differs(base, lines, _WHAT + 4, signature[2], COLLECTIVE, LAUNCH))
            wrong = tl.maximum(wrong, differs(base, lines, _WHAT + 6, signature[3], COLLECTIVE, LAUNCH))
            if tl.sum(wrong) > 0:
                peers = tl.arange(0, LAUNCH.BLOCK)
                tl.store(report_ptr + COLLECTIVE.REPORT_PEERS + peers, wrong, mask=peers < world)
                status = status * 0 + COLLECTIVE.MISMATCHED
    if status != COLLECTIVE.RUNNING:
        poison(control_ptr, report_ptr, status, epoch, LEG, COLLECTIVE)


@triton.jit
def await_leg(
    buffer_ptr, buffer_ptrs, control_ptr, report_ptr, rank, signature, timeout_ns, grace_ns,
    LEG: tl.constexpr, CHECK: tl.constexpr, COLLECTIVE: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Until every rank has signalled a leg of the open epoch, or the lane is given up. Returns whether it runs.

    Every program calls it, and all get the same. On a lane that does not run it returns at once.
    """
    epoch = tl.load(control_ptr + COLLECTIVE.EPOCH)
    taken = tl.atomic_xchg(control_ptr + _FIRST_TAKEN + LEG, epoch, sem="relaxed", scope="gpu")
    seen_ptr = control_ptr + _FIRST_SEEN + LEG
    if taken != epoch:
        # Nobody else changes the status meanwhile, and nobody else reads it: threads of a program that found different
        # values would go different ways, and wait for each other at different barriers.
        if tl.load(control_ptr + COLLECTIVE.STATUS) == COLLECTIVE.RUNNING:
            wait_alone(
                buffer_ptr.to(tl.int64), buffer_ptrs, control_ptr, report_ptr, rank, epoch, signature, timeout_ns,
                grace_ns, LEG, CHECK, COLLECTIVE, LAUNCH,
            )  # fmt: skip
        tl.debug_barrier()
        if LAUNCH.PLATFORM == "hip":
            tl.atomic_xchg(seen_ptr, epoch, sem="release", scope="sys")
        else:
            tl.atomic_xchg(seen_ptr, epoch, sem="release", scope="gpu")
    else:
        seen = epoch - 1
        while seen != epoch:
            if LAUNCH.PLATFORM == "hip":
                seen = tl.atomic_add(seen_ptr, 0, sem="acquire", scope="sys")
            else:
                seen = tl.atomic_add(seen_ptr, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()
    return tl.load(control_ptr + COLLECTIVE.STATUS) == COLLECTIVE.RUNNING


# ---------------------------------------------------------------------------------------------------------------------
# Grids


def programs_on_shared_gpu(device: torch.device, ranks: int) -> int:
    """The most programs of a kernel that waits, where `ranks` ranks of the group have kernels on one GPU.

    All ranks' together are at most half as many as there are multiprocessors. A program fits on a multiprocessor, so
    they leave half of them to the kernels that are waited for.
    """
    return max(1, num_multiprocessors(device) // (2 * ranks))


def num_waiting_programs_for(work: int, device: torch.device, num_programs: int | None) -> int:
    """The grid for `work` independent rows of a kernel that waits: as the caller says, else two a multiprocessor."""
    if num_programs is None and device.type == "cuda":
        num_programs = 2 * num_multiprocessors(device)  # what waits should leave room for the user's own kernels
    return num_programs_for(work, device, num_programs)
