"""Copies of bytes by numba's kernels, at every alignment and around the lengths where their ways change."""

import numpy as np
import pytest

pytest.importorskip("numba")

from thinwire.triton_kernels.cpu.compat import kernel
from thinwire.triton_kernels.cpu.ir.memory import copy_bytes, stream_bytes

_GUARD = 64


@kernel
def _copy_kernel(target, source, count):
    copy_bytes(target, source, count)


@kernel
def _stream_kernel(target, source, count):
    stream_bytes(target, source, count)


@pytest.mark.parametrize("copy", [_copy_kernel, _stream_kernel])
def test_a_copy_writes_its_bytes_and_no_others(copy):
    source = np.random.default_rng(0).integers(1, 256, 20_000, dtype=np.uint8)
    for count in (0, 1, 31, 127, 1023, 1024, 1025, 1055, 1056, 1151, 1152, 4096, 8191, 16_385):
        for at, read in ((0, 0), (1, 0), (31, 17), (32, 5), (33, 64), (63, 63)):
            target = np.zeros(_GUARD + at + count + _GUARD, dtype=np.uint8)
            copy(target.ctypes.data + _GUARD + at, source.ctypes.data + read, count)
            wanted = np.zeros_like(target)
            wanted[_GUARD + at : _GUARD + at + count] = source[read : read + count]
            assert (target == wanted).all(), (count, at, read)
