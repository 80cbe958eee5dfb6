"""The sums of rows on the CPU: equal to `thinwire.triton_kernels.checksum`, whose docstring says what they are."""

from __future__ import annotations

import torch

from thinwire.triton_kernels.cpu.compat import FINGERPRINT, device, kernel
from thinwire.triton_kernels.cpu.ir.checksum import mix, sum_words
from thinwire.triton_kernels.cpu.ir.intrinsics import load_int64, stack_buffer, store_int64


@device
def word_sums(address, num_bytes):
    """The two sums of the words at an address, without seeds; the last word is padded with zeros."""
    sums = stack_buffer(16)
    sum_words(address, num_bytes, sums)
    return load_int64(sums), load_int64(sums + 8)


@device
def row_sums(address, num_bytes, seed, number):
    """a and b of a row at an address."""
    s = mix(seed ^ number) | 1
    a, b = word_sums(address, num_bytes)
    return a + s, b + mix(s)


@device
def put(sums, pair):
    """Writes a row's two sums."""
    a, b = pair
    store_int64(sums, a)
    store_int64(sums + 8, b)


@device
def fits(sums, pair):
    """Whether these are a row's two sums."""
    a, b = pair
    return load_int64(sums) == a and load_int64(sums + 8) == b


@kernel
def row_checksums_kernel(data, num_bytes, row_bytes, seed, first, sums, fingerprint=FINGERPRINT):
    """The sums of each row at the address `data`, the last of which may be short, to the address `sums`."""
    for start in range(0, num_bytes, row_bytes):
        row = start // row_bytes
        put(sums + 16 * row, row_sums(data + start, min(row_bytes, num_bytes - start), seed, row + first))


def row_checksums(data: torch.Tensor, row_bytes: int, seed: int, first: int, sums: torch.Tensor) -> None:
    """`thinwire.triton_kernels.checksum.row_checksums` for CPU tensors. Raises TransportUnavailable without numba."""
    row_checksums_kernel(data.data_ptr(), data.numel(), row_bytes, seed, first, sums.data_ptr())
