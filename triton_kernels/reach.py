"""A first exchange over memory that ranks have just mapped: do stores arrive, whole, and behind their flags?

A driver may say that GPUs reach each other, and map their memory, where stores get lost. Every rank stores words and a
flag at each peer and waits for theirs, as all kernels do. The host compares what came.
"""

from __future__ import annotations

import torch

from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.put import base_of, put
from thinwire.triton_kernels.signal import SIGNAL_LINE_BYTES, Launch, SignalLayout, publish, wait_for_all

_MOST_WORDS = 1024  # int32, for each peer


@triton.jit(do_not_specialize=["rank", "words", "epoch", "timeout_ns"])
def reach_kernel(
    buffer_ptr, buffer_ptrs, rank, words, epoch, timeout_ns: tl.int64, WORDS: tl.constexpr, LAYOUT: tl.constexpr,
    LAUNCH: tl.constexpr,
):  # fmt: skip
    """One program. Of no words and epoch 0 it changes nothing."""
    places = tl.arange(0, WORDS)
    for peer in range(LAYOUT.WORLD):
        first = base_of(buffer_ptrs, peer) + 2 * LAYOUT.WORLD * LAYOUT.LINE_BYTES + 4 * words * rank.to(tl.int64)
        put(first.to(tl.pointer_type(tl.int32)) + places, _word(rank, peer, places), places < words)
    publish(buffer_ptrs, rank, 0, epoch, LAYOUT, LAUNCH)
    wait_for_all(buffer_ptr.to(tl.int64), rank, 0, epoch, timeout_ns, LAYOUT, LAUNCH)


@triton.jit
def _word(rank, peer, places):
    return (rank + 1) * 1048576 + (peer + 1) * 8192 + places + 1


def exchange(rank: int, buffer: torch.Tensor, buffer_ptrs: torch.Tensor, seconds: float) -> None:
    """Stores at all ranks and waits for them; after it `find_lost`.

    Args:
        buffer: uint8 [bytes], this rank's, all zero on every rank. Of too few bytes for a transport nothing is done.
        buffer_ptrs: int64 [world], the address of each rank's buffer in this rank's address space.
        seconds: how long to wait. 0 loads the kernel and stores nothing; every rank does so before any of them stores.
    """
    world = len(buffer_ptrs)
    words = _num_words(buffer, world)
    if words:
        layout = SignalLayout(WORLD=world, STUCK=world * SIGNAL_LINE_BYTES)
        stores, launch = (words, 1) if seconds else (0, 0), Launch.of(layout, buffer.device)
        with torch.cuda.device_of(buffer):
            reach_kernel[(1,)](
                buffer.view(torch.int8), buffer_ptrs, rank, *stores, int(seconds * 1e9), _MOST_WORDS, layout, launch
            )


def find_lost(rank: int, buffer: torch.Tensor, world: int) -> list[int]:
    """Ranks of which not all has arrived; where there are none, the buffer is zero again."""
    words, lines = _num_words(buffer, world), 2 * world * SIGNAL_LINE_BYTES
    if not words:
        return []
    ints = buffer[: lines + 4 * words * world].view(torch.int32)
    came, peers = ints.cpu(), torch.arange(world, device="cpu").unsqueeze(1)
    expected = _word.fn(peers, rank, torch.arange(words, device="cpu"))
    whole = (came[lines // 4 :].view(world, words) == expected).all(1) & (came[: lines // 8].view(world, -1)[:, 0] == 1)
    if whole.all():
        ints.zero_()
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()
    return whole.logical_not().nonzero().flatten().tolist()


def _num_words(buffer: torch.Tensor, world: int) -> int:
    return max(0, min(_MOST_WORDS, (len(buffer) - 2 * world * SIGNAL_LINE_BYTES) // (4 * world)))
