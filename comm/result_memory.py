"""Memory for results of CPU ranks, used again once nothing refers to the result that had it.

Torch gives a large result's memory back to the system when it dies, so the next one is faulted in page by page, which
takes several times as long as filling it. Here blocks stay, in huge pages where the system has them.

When a block is free. A result is made over a memoryview of its block, and its storage owns the only reference to that
memoryview, for as long as it has the memory. Whatever can reach the memory holds the storage: views, detached tensors,
what a graph has saved, numpy arrays, DLPack. So the block is free once a weak reference to the memoryview is dead, and
not before. That is looked at when a block is wanted; nothing of ours runs when a storage dies, on whatever thread, or
as the interpreter ends. `share_memory_` takes the bytes elsewhere, and gives the block up. What cannot be done is to
resize a storage that did not allocate its memory.

Blocks that are not kept any more belong to their results alone, and are unmapped with them. After a fork the child has
copies of all pages, blocks and references: what either process uses again is its own.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref
from collections.abc import Sequence

import torch

from thinwire.comm.available import available_bytes

#: Bytes of the smallest result that gets a block. Below, torch's allocator has memory that is faulted in already.
LEAST_BYTES = 2 << 20

_HUGE_PAGE = 2 << 20


class _Block:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # of a kernel without huge pages, where usual ones have to do
                mapping.madvise(mmap.MADV_HUGEPAGE)
        start = -torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr() % _HUGE_PAGE
        self._octets = memoryview(mapping)[start : start + num_bytes]
        self._lent: weakref.ref[memoryview] | None = None

    @property
    def in_use(self) -> bool:
        return self._lent is not None and self._lent() is not None

    def lend(self, num_bytes: int) -> memoryview:
        octets = self._octets[:num_bytes]
        self._lent = weakref.ref(octets)
        return octets


class ResultMemory:
    """The blocks that one rank keeps for its results, in use or not.

    They take no more memory than twice what was in use at once, and than `most_bytes`. Of those that are in use by
    nothing the one that was used least recently goes first, then those that are in use.

    Args:
        ranks: that may share this host's memory.
        most_bytes: None: this rank's part of a quarter of what is available when the first block is made.
        least_bytes: of a result that gets a block.
    """

    def __init__(self, ranks: int = 1, most_bytes: int | None = None, least_bytes: int = LEAST_BYTES) -> None:
        self._ranks, self._most_bytes, self._least_bytes = ranks, most_bytes, least_bytes
        self._blocks: list[_Block] = []  # in the order of their last use
        self._most_in_use = 0
        self._turn = threading.Lock()

    def new_empty(self, like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """`like.new_empty(shape, dtype=dtype)`, in a block where that is a large one on the CPU.

        Raises what `new_empty` does, where there is no memory.
        """
        dtype = dtype or like.dtype
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < self._least_bytes or type(like) is not torch.Tensor or not like.is_cpu:
            return like.new_empty(shape, dtype=dtype)
        try:
            octets = self._take(num_bytes)
        except (OSError, OverflowError):  # no such memory: torch says so in its own way, or finds some
            self.clear()
            return like.new_empty(shape, dtype=dtype)
        # Resized and not viewed: a view that was made under no_grad must not be written to where gradients are wanted.
        return torch.frombuffer(octets, dtype=dtype).resize_(shape)

    def _take(self, num_bytes: int) -> memoryview:
        # Nobody waits: in a forked child, a thread that is not there may have had its turn.
        if not self._turn.acquire(blocking=False):
            return _Block(num_bytes).lend(num_bytes)
        try:
            blocks = self._blocks
            fitting = [block for block in blocks if num_bytes <= block.num_bytes <= 2 * num_bytes and not block.in_use]
            if fitting:
                block = min(reversed(fitting), key=lambda block: block.num_bytes)
                blocks.remove(block)
            else:
                block = _Block(_rounded(num_bytes))
            octets = block.lend(num_bytes)
            blocks.append(block)
            self._forget_excess(blocks)
            return octets
        finally:
            self._turn.release()

    def _forget_excess(self, blocks: list[_Block]) -> None:
        if self._most_bytes is None:
            self._most_bytes = available_bytes() // (4 * self._ranks)
        self._most_in_use = max(self._most_in_use, sum(block.num_bytes for block in blocks if block.in_use))
        excess = sum(block.num_bytes for block in blocks) - min(2 * self._most_in_use, self._most_bytes)
        for block in sorted(blocks, key=lambda block: block.in_use):
            if excess <= 0:
                break
            blocks.remove(block)
            excess -= block.num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that are kept; results may use some of them."""
        return sum(block.num_bytes for block in list(self._blocks))

    def clear(self) -> None:
        """Keeps no block any more: what is in use by nothing goes back to the system now, the rest with its results."""
        self._blocks = []


def _rounded(num_bytes: int) -> int:
    """Up by an eighth at most, so that blocks serve results of about the same size; whole huge pages.

    >>> [_rounded(mebibytes << 20) >> 20 for mebibytes in (3, 100)]
    [4, 104]
    """
    step = max(_HUGE_PAGE, 1 << (num_bytes.bit_length() - 4))
    return -(-num_bytes // step) * step
