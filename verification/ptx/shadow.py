"""Accesses that a later one may still race with: for each byte of a memory, a list of them.

A list is linked through one pool, so that a byte has as many as there are. Only pages that are accessed take room.
"""

from __future__ import annotations

from typing import Any

import numpy as np

PAGE = 1024  # bytes; no access straddles two
_FIELDS = {
    "next": np.int32,  # the entry behind this one, or -1
    "warp": np.int32,  # the number of its first thread
    "lanes": np.uint32,  # which of the warp's threads have accessed the byte
    "epoch": np.int32,
    "strength": np.int8,
    "write": np.bool_,
    "site": np.int32,
    "value": np.uint8,  # of a weak write
}


class Shadow:
    """The lists of a memory of `size` bytes, whose entries are rows of arrays by the names of `_FIELDS`."""

    next: np.ndarray
    warp: np.ndarray
    lanes: np.ndarray
    epoch: np.ndarray
    strength: np.ndarray
    write: np.ndarray
    site: np.ndarray
    value: np.ndarray

    def __init__(self, size: int = 0) -> None:
        self.head = np.zeros(0, np.int32)  # by cell: the first entry of a byte, or -1
        self.released: dict[int, list[Any]] = {}  # by cell where a word begins: what an acquire of it observes
        self.synchronised = np.zeros(0, np.bool_)  # by cell: whether it is in `released`
        self._pages = np.zeros(0, np.int64)
        self._used_pages = 0
        for name, kind in _FIELDS.items():
            setattr(self, name, np.zeros(0, kind))
        self._free = np.zeros(0, np.int32)
        self.resize(size)

    def resize(self, size: int) -> None:
        """Makes room for a memory that has grown."""
        more = -(-size // PAGE) - len(self._pages)
        if more > 0:
            self._pages = np.append(self._pages, np.full(more, -1, np.int64))

    def cells(self, offsets: np.ndarray, span: int) -> np.ndarray:
        """The places of `span` bytes from each offset on, one access behind the other."""
        pages = offsets // PAGE
        missing = np.unique(pages[self._pages[pages] < 0])
        if missing.size:
            self._pages[missing] = (self._used_pages + np.arange(missing.size)) * PAGE
            self._used_pages += missing.size
            more = max(self._used_pages * PAGE - len(self.head), 0)
            more = more and max(more, len(self.head))
            self.head = np.append(self.head, np.full(more, -1, np.int32))
            self.synchronised = np.append(self.synchronised, np.zeros(more, np.bool_))
        starts = self._pages[pages] + offsets % PAGE
        return (starts[:, None] + np.arange(span)).ravel()

    def remove(self, entries: np.ndarray, before: np.ndarray, cells: np.ndarray) -> None:
        """Takes entries out of the lists of distinct `cells`; `before` are those in front of them, or -1."""
        first = before < 0
        self.head[cells[first]] = self.next[entries[first]]
        self.next[before[~first]] = self.next[entries[~first]]
        self._free = np.append(self._free, entries)

    def add(self, cells: np.ndarray, **fields: np.ndarray | int | bool) -> None:
        """Puts a new entry in front of the list of each of distinct `cells`."""
        count = len(cells)
        if len(self._free) < count:
            size = len(self.next)
            more = max(count, size, 1024)
            for name, kind in _FIELDS.items():
                setattr(self, name, np.append(getattr(self, name), np.zeros(more, kind)))
            self._free = np.append(self._free, np.arange(size, size + more, dtype=np.int32))
        entries, self._free = self._free[-count:], self._free[:-count]
        for name, values in fields.items():
            getattr(self, name)[entries] = values
        self.next[entries] = self.head[cells]
        self.head[cells] = entries
