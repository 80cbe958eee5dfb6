"""The memory that kernels reach: tensors of this process, by their addresses."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from verification.ptx.errors import PtxError

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_LOWEST = 4096  # numpy takes no array that begins at address 0


class GlobalMemory:
    """Tensors that may be read and written; anything else is out of bounds.

    Every byte of a tensor has an offset of its own, under which a race detector knows it.
    """

    def __init__(self) -> None:
        everything = (ctypes.c_uint8 * ((1 << 47) - _LOWEST)).from_address(_LOWEST)
        octets = np.frombuffer(everything, np.uint8)
        self._views: dict[int, Any] = {
            width: octets[: len(octets) // width * width].view(kind) for width, kind in UNSIGNED.items()
        }
        self._tensors: list[torch.Tensor] = []  # kept alive: their memory must not become another's
        self._names: list[str] = []
        self._starts = np.zeros(0, np.int64)
        self._ends = np.zeros(0, np.int64)
        self._offsets = np.zeros(0, np.int64)
        self.size = 0

    def add(self, tensor: torch.Tensor, name: str) -> None:
        """Makes a tensor's whole storage reachable; a storage that is known already keeps its name."""
        storage = tensor.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if start == end or ((self._starts <= start) & (end <= self._ends)).any():
            return
        place = int(np.searchsorted(self._starts, start))
        self._starts = np.insert(self._starts, place, start)
        self._ends = np.insert(self._ends, place, end)
        self._offsets = np.insert(self._offsets, place, self.size)
        self._names.insert(place, name)
        self._tensors.append(tensor)
        self.size += -(-(end - start) // 16) * 16

    def offsets(self, addresses: np.ndarray, size: int, what: str) -> np.ndarray:
        """The offset of each access of `size` bytes.

        Raises:
            PtxError: an access that is not aligned, or not within one tensor; the message names the nearest one.
        """
        places = addresses.astype(np.int64)
        regions = np.searchsorted(self._starts, places, "right") - 1
        known = np.maximum(regions, 0)
        if len(self._starts):
            outside = (regions < 0) | (places + size > self._ends[known])
        else:
            outside = np.ones(len(places), bool)
        if outside.any():
            raise PtxError(f"{what} of {size} bytes out of bounds: {self._nearest(int(places[outside][0]))}")
        skewed = places % size != 0
        if skewed.any():
            raise PtxError(f"{what} of {size} bytes misaligned: {self._nearest(int(places[skewed][0]))}")
        return places - self._starts[known] + self._offsets[known]

    def sizes(self, addresses: np.ndarray) -> np.ndarray:
        """Bytes of the tensor in which each address is."""
        regions = np.searchsorted(self._starts, addresses, "right") - 1
        return self._ends[regions] - self._starts[regions]

    def load(self, addresses: np.ndarray, width: int) -> np.ndarray:
        """Unsigned integers of `width` bytes each."""
        return self._views[width][(addresses.astype(np.int64) - _LOWEST) // width]

    def store(self, addresses: np.ndarray, width: int, values: np.ndarray) -> None:
        """Of several values for one address the last one stays."""
        self._views[width][(addresses.astype(np.int64) - _LOWEST) // width] = values

    def name_of(self, offset: int) -> str:
        """The byte at an offset, for messages."""
        for name, first, start, end in zip(self._names, self._offsets, self._starts, self._ends, strict=True):
            if first <= offset < first + end - start:
                return f"{name}+{offset - int(first):#x}"
        return f"offset {offset:#x}"

    def _nearest(self, address: int) -> str:
        if not self._names:
            return f"address {address:#x}, and no tensor is registered"
        gaps = np.maximum(self._starts - address, address - self._ends + 1)
        nearest = int(np.argmin(gaps))
        length = int(self._ends[nearest] - self._starts[nearest])
        return f"{self._names[nearest]}{address - int(self._starts[nearest]):+#x}, which has {length} bytes"


class SharedMemory:
    """What the threads of one program of the grid share; it begins with garbage.

    Its bytes have the offsets from `first_offset` on.
    """

    def __init__(self, size: int, first_offset: int) -> None:
        self.octets = np.full(max(16, -(-size // 16) * 16), 0xA5, np.uint8)
        self._views: dict[int, Any] = {width: self.octets.view(kind) for width, kind in UNSIGNED.items()}
        self._first = first_offset

    def offsets(self, addresses: np.ndarray, size: int, what: str) -> np.ndarray:
        """As of global memory."""
        places = addresses.astype(np.int64)
        outside, skewed = (places < 0) | (places + size > len(self.octets)), places % size != 0
        if outside.any():
            raise PtxError(
                f"{what} of {size} bytes out of bounds: shared memory{int(places[outside][0]):+#x}, "
                f"which has {len(self.octets)} bytes"
            )
        if skewed.any():
            raise PtxError(f"{what} of {size} bytes misaligned: shared memory{int(places[skewed][0]):+#x}")
        return places + self._first

    def load(self, addresses: np.ndarray, width: int) -> np.ndarray:
        """As of global memory."""
        return self._views[width][addresses.astype(np.int64) // width]

    def store(self, addresses: np.ndarray, width: int, values: np.ndarray) -> None:
        """As of global memory."""
        self._views[width][addresses.astype(np.int64) // width] = values
