"""Memory for results of CPU ranks, reused once nothing refers to the result that had it.

Torch gives a large result's memory back to the system when it dies, so the next one is faulted in page by page, which
takes several times as long as filling it. Here blocks stay, in huge pages where the system has them.

When a block is free. A result is made over a memoryview of its block, and its storage owns the only reference to that
memoryview, for as long as it has the memory. Whatever can reach the memory holds the storage: views, detached tensors,
what a graph has saved, numpy arrays, DLPack. So the block is free once a weak reference to the memoryview is dead, and
not before. That is looked at when a block is wanted; nothing of ours runs when a storage dies, on whatever thread, or
as the interpreter ends. `share_memory_` takes the bytes elsewhere, and gives the block up. What cannot be done is to
resize such a storage, to more or to less, as it did not allocate its memory.

Blocks that are not kept any more belong to their results alone, and are unmapped with them. After a fork the child has
copies of all pages, blocks and references: what either process uses again is its own.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Sequence

import torch

from thinwire.comm.resources import available_bytes

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

    They take at most twice the most that blocks in use took at once, and at most `most_bytes`. The least recently used
    free block is dropped first, then blocks in use.

    Args:
        ranks: that may share this host's memory.
        most_bytes: None means this rank's part of a quarter of the memory available when the first block is made.
        least_bytes: of the smallest result that gets a block.
    """

    _closed = False

    def __init__(self, ranks: int = 1, most_bytes: int | None = None, least_bytes: int = LEAST_BYTES) -> None:
        self._ranks, self._most_bytes, self._least_bytes = ranks, most_bytes, least_bytes
        self._blocks: dict[_Block, bool] = {}  # in the order of their last use
        self._most_in_use = 0

    def new_empty(self, like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """`like.new_empty(shape, dtype=dtype)`, in a block if it is large and on the CPU.

        Raises what `new_empty` raises if there is no memory.
        """
        num_bytes = math.prod(shape) * (dtype or like).itemsize
        if num_bytes < self._least_bytes or type(like) is not torch.Tensor or not like.is_cpu or self._closed:
            # Numbers one by one take half the time.
            return like.new_empty(*shape) if shape and dtype is None else like.new_empty(shape, dtype=dtype)
        dtype = dtype or like.dtype
        try:
            octets = self._take(num_bytes)
        except (OSError, OverflowError) as error:  # no such memory: torch says so in its own way, or finds some
            if isinstance(error, OSError):
                self.clear()
            return like.new_empty(shape, dtype=dtype)
        # Resized and not viewed: a view that was made under no_grad must not be written to where gradients are wanted.
        return torch.frombuffer(octets, dtype=dtype).resize_(shape)

    def _take(self, num_bytes: int) -> memoryview:
        if self._most_bytes is None:
            self._most_bytes = available_bytes() // (4 * self._ranks)
        block = self._claim(num_bytes) or _Block(_rounded(num_bytes))
        octets = block.lend(num_bytes)
        # Back again, as the one used last.
        self._blocks[block] = True
        self._forget_excess()
        return octets

    def _claim(self, num_bytes: int) -> _Block | None:
        """A block of about a size that nothing uses, and no other thread finds now. A lock might be left taken."""
        fitting = [block for block in reversed(list(self._blocks)) if num_bytes <= block.num_bytes <= 2 * num_bytes]
        for block in sorted(fitting, key=lambda block: block.num_bytes):
            if block.in_use or not self._blocks.pop(block, False):
                continue
            if not block.in_use:  # another thread may have had it, and put it back, since that was asked
                return block
            self._blocks[block] = True
        return None

    def _forget_excess(self) -> None:
        blocks = list(self._blocks)
        self._most_in_use = max(self._most_in_use, sum(block.num_bytes for block in blocks if block.in_use))
        excess = sum(block.num_bytes for block in blocks) - min(2 * self._most_in_use, self._most_bytes or 0)
        for block in sorted(blocks, key=lambda block: block.in_use):
            if excess <= 0:
                break
            self._blocks.pop(block, None)
            excess -= block.num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that are kept; results may use some of them."""
        return sum(block.num_bytes for block in list(self._blocks))

    def clear(self) -> None:
        """Keeps no block any more: what is in use by nothing goes back to the system now, the rest with its results."""
        self._blocks.clear()

    def close(self) -> None:
        """The same, for good: later results have torch's own memory."""
        self._closed = True
        self.clear()


def _rounded(num_bytes: int) -> int:
    """Up by an eighth or to whole huge pages, so that blocks serve results of about the same size.

    >>> [_rounded(mebibytes << 20) >> 20 for mebibytes in (3, 100)]
    [4, 104]
    """
    step = max(_HUGE_PAGE, 1 << (num_bytes.bit_length() - 4))
    return -(-num_bytes // step) * step
