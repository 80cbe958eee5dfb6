"""Tensors between pages that nobody may touch: a byte read or written outside of them ends the process."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch

PAGE = mmap.PAGESIZE
_NOTHING = 0  # PROT_NONE
_LIBC = ctypes.CDLL(None, use_errno=True)


def guarded(shape: Sequence[int], dtype: torch.dtype = torch.uint8, fill: int = 0, first: bool = False) -> torch.Tensor:
    """A tensor whose last byte lies before such a page, or with `first` its first byte behind one."""
    size = dtype.itemsize
    for length in shape:
        size *= length
    pages = max(1, -(-size // PAGE))
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    octets = torch.frombuffer(memory, dtype=torch.uint8)  # it keeps the mapping
    octets[PAGE:-PAGE].fill_(fill)
    for page in (octets.data_ptr(), octets.data_ptr() + (pages + 1) * PAGE):
        if _LIBC.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), _NOTHING):
            raise OSError(ctypes.get_errno(), "mprotect")
    start = PAGE if first else PAGE * (pages + 1) - size
    return octets[start : start + size].view(dtype).view(tuple(shape))


def guarded_copy(x: torch.Tensor) -> torch.Tensor:
    """The same values in such a tensor."""
    return guarded(x.shape, x.dtype).copy_(x)
