"""Sums of a piece of exact rows are of what was stored, whatever becomes of the rows that it was copied from."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import numpy as np

from thinwire.triton_kernels.cpu import piece_team, pieces
from thinwire.triton_kernels.cpu.compat import FINGERPRINT, kernel
from thinwire.triton_kernels.cpu.exchange_checksum import row_fits, slot_seed

PAGE = mmap.PAGESIZE
EPOCH, RANK, NUMBER, TURNS = 7, 1, 0, 3
_MAP_FIXED = 0x10


@kernel
def _pack(call, peers, number, target, sums, fingerprint=FINGERPRINT):
    piece_team.pack_piece(pieces.call_at(call.ctypes.data), peers, 0, number, target, sums)


@kernel
def _seed(epoch, source, number, fingerprint=FINGERPRINT):
    return slot_seed(epoch, source, number)


@pytest.fixture
def forgetful() -> Iterator[np.ndarray]:
    """Memory of two pages for each turn, which are one: what is stored in the first gives way to the second."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
    size, both = 2 * TURNS * PAGE, mmap.PROT_READ | mmap.PROT_WRITE
    descriptor = os.memfd_create("forgetful")
    os.ftruncate(descriptor, TURNS * PAGE)
    base = libc.mmap(None, size, both, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, -1, 0)
    for page in range(2 * TURNS):
        at, offset = base + page * PAGE, page // 2 * PAGE
        assert libc.mmap(at, PAGE, both, mmap.MAP_SHARED | _MAP_FIXED, descriptor, offset) == at
    os.close(descriptor)
    yield np.frombuffer((ctypes.c_ubyte * size).from_address(base), np.uint8)
    libc.munmap(base, size)


def test_sums_of_exact_rows_are_of_what_lies_in_the_slot(forgetful: np.ndarray) -> None:
    """A source that is written to while it is read has other bytes when it is read again; here the slot has."""
    turn, size = 2 * PAGE, forgetful.size - 100
    source = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    sums = np.zeros(2 * TURNS, np.int64)
    call, peers = np.zeros(len(pieces.SCALARS), np.int64), np.zeros((len(pieces.PEERS), 1), np.int64)
    for name, value in {
        "epoch": EPOCH, "rank": RANK, "x": source.ctypes.data, "x_step": 1, "exact": 1, "counts_per_row": 1,
        "unit_bytes": 1, "units_per_piece": forgetful.size, "units_per_turn": turn,
    }.items():  # fmt: skip
        call[pieces.SCALARS.index(name)] = value
    peers[pieces.P.SEND_COUNT] = size

    def fit(memory: np.ndarray) -> list[bool]:
        seed, starts = _seed(EPOCH, RANK, NUMBER), range(0, size, turn)
        addresses = [(memory.ctypes.data + start, min(turn, size - start)) for start in starts]
        return [row_fits(sums.ctypes.data, *row, seed, number) for number, row in enumerate(addresses)]

    _pack(call, peers, NUMBER, forgetful.ctypes.data, sums.ctypes.data)
    assert fit(forgetful) == [True] * TURNS and fit(source) == [False] * TURNS
