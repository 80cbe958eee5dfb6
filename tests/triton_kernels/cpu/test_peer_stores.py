"""What is stored at a peer is the same bytes, past the caches or not, and what a look finds holds until the next."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import numpy as np

from thinwire.triton_kernels.cpu.compat import kernel
from thinwire.triton_kernels.cpu.peer_stores import goes_aside, store, store_at

SIZES = (0, 1, 4095, 4096, 4097, 16383, 16384, 16500, 70_001)
NEVER = 1 << 62  # of a time: the next look is then further off than the clock goes


@kernel
def _store(target, source, count, seen):
    return store(target, source, count, seen)


@kernel
def _store_at(place, target, source, count):
    return store_at(place, target, source, count)


@kernel
def _goes_aside(count, seen):
    return goes_aside(count, seen)


@pytest.mark.parametrize("seen", [0, NEVER, NEVER + 1], ids=["a look", "near", "far"])
@pytest.mark.parametrize("offset", [0, 3, 64])
def test_all_bytes_arrive_and_no_others_are_touched(seen: int, offset: int) -> None:
    for size in SIZES:
        source = np.random.default_rng(size).integers(0, 256, size + 8, dtype=np.uint8)
        memory = np.full(size + 256, 0xA5, np.uint8)
        _store(memory.ctypes.data + 64 + offset, source.ctypes.data + 5, size, seen)
        begin = 64 + offset
        assert np.array_equal(memory[begin : begin + size], source[5 : 5 + size]), size
        assert (memory[:begin] == 0xA5).all() and (memory[begin + size :] == 0xA5).all()


def test_a_look_is_taken_when_the_last_one_is_old_and_else_what_it_found_holds() -> None:
    source, target = np.zeros(70_000, np.uint8), np.zeros(70_000, np.uint8)
    at = target.ctypes.data, source.ctypes.data
    assert _goes_aside(4096, 0) and _goes_aside(4096, NEVER + 1) and not _goes_aside(4096, NEVER)
    for seen in (NEVER, NEVER + 1):
        assert _store(*at, 70_000, seen) == seen
    before = time.monotonic_ns()
    for old in (0, 1, 2 * (before - 10**9)):
        assert before <= _store(*at, 70_000, old) >> 1 <= time.monotonic_ns()
    assert _store(*at, 4095, 0) == 0 and not _goes_aside(4095, 0) and not _goes_aside(4095, 1)  # too few to tell


def test_what_a_look_finds_is_kept_where_other_threads_read_it() -> None:
    source, target, seen = np.full(70_000, 7, np.uint8), np.zeros(70_000, np.uint8), np.zeros(1, np.int64)
    for kept in (NEVER, NEVER + 1, 0):
        target[:], seen[0] = 0, kept
        found = _store_at(seen.ctypes.data, target.ctypes.data, source.ctypes.data, 70_000)
        assert (target == 7).all() and found == seen[0] and (found == kept) == (kept != 0)


def test_near_holds_for_less_long_than_far() -> None:
    source, target = np.zeros(16384, np.uint8), np.zeros(16384, np.uint8)
    at = target.ctypes.data, source.ctypes.data
    ago = 2 * (time.monotonic_ns() - 500_000)  # longer than near holds, and, unless this is stopped here, less than far
    assert _store(*at, 16384, ago) != ago
    for _ in range(100):
        ago = 2 * (time.monotonic_ns() - 500_000) + 1
        if _store(*at, 16384, ago) == ago:
            break
    else:
        raise AssertionError("each look at a far peer was old after half a millisecond")


def test_memory_that_only_this_core_uses_is_near() -> None:
    source, target = np.zeros(16384, np.uint8), np.zeros(16384, np.uint8)
    found = [_store(target.ctypes.data, source.ctypes.data, 16384, 0) & 1 for _ in range(100)]
    assert 0 in found  # not of all: a look may be interrupted
